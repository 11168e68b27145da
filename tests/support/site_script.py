# SPDX-License-Identifier: Apache-2.0
"""A user's script that trains the toy model; the same in a site and in one job over all ranks.

Environment: RANK, WORLD_SIZE, MASTER_PORT as a launcher sets them, and HYBRIDEP_SITE in a site.
Argument: a JSON object, see `DEFAULTS`.  Each rank writes its losses and a hash of its weights to `out`.
"""

import atexit
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from hf_models import build_hf_model, hf_loss, let_plain_autoep_work
from toy_model import ToyConfig, batch, build_model

import ds_hybridep

DEFAULTS = {
    "out": "", "steps": 6, "first_rank": 0, "zero": 1, "dtype": "fp32", "accumulation": 1, "clip": 0.0, "block": None,
    "ep_size": 2, "overflow_at": -1, "pause_s": 0.0, "lr": 1e-2, "tell": "", "grad_accum_dtype": None, "family": None,
    "until": "", "seed": 1, "bucket": 500_000_000, "dies_at": -1, "dies_in": "backward", "grows_at": -1, "reads": None,
    "weight": None, "dump": "", "checkpoints": "", "save_at": -1, "drifts_at": -1, "drifts_by": 1.0,
}  # fmt: skip
options = {**DEFAULTS, **json.loads(sys.argv[1])}
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

torch.set_num_threads(1)
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
deepspeed.init_distributed("gloo")
# Also where an error ends the script: torch aborts some processes that end with their groups.
atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
family = options["family"]  # of Hugging Face models, for AutoEP; None: native layers
toy = ToyConfig(ep_size=options["ep_size"], **({"hidden": 32, "ffn": 16} if family else {}))
if family:
    model = build_hf_model(family, toy, seed=options["seed"])
else:
    model = build_model(toy, rank=rank, world_size=world, data_before_expert=False, seed=options["seed"])
ds_config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": options["accumulation"],
    "gradient_clipping": options["clip"],
    "optimizer": {"type": "Adam", "params": {"lr": options["lr"], "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": options["lr"]}},
    # Else everything of a toy stays whole under ZeRO 3.
    "zero_optimization": {
        "stage": options["zero"],
        "stage3_param_persistence_threshold": 100,
        "reduce_bucket_size": options["bucket"],
    },
    "steps_per_print": 10**9,
}
if options["dtype"] != "fp32":
    ds_config[options["dtype"]] = {"enabled": True}
if options["grad_accum_dtype"]:
    ds_config["data_types"] = {"grad_accum_dtype": options["grad_accum_dtype"]}
if family:
    let_plain_autoep_work()
    ds_config["expert_parallel"] = {"enabled": True, "autoep_size": options["ep_size"]}
if options["block"]:
    ds_config["hybridep"] = options["block"]
parameters = list(model.parameters())
if not family:
    parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=ds_config)
if options["checkpoints"] and Path(options["checkpoints"], "latest").exists():
    engine.load_checkpoint(options["checkpoints"])
losses: dict[int, float] = {}
first_bytes = [  # of parameters at the start, if they have so many
    flat[:16].numpy().tobytes().hex()
    for flat in (parameter.detach().reshape(-1) for parameter in model.parameters())
    if flat.dtype == torch.float32 and len(flat) >= 16 and flat.unique().numel() > 16
]
started_at = engine.global_steps


early_before = 0  # bytes that had left early before the backward


def early_bytes() -> int:
    sites = vars(engine)["_hybridep_attachment"].sites
    return sum(one.early_bytes for one in sites.epochs.counters.values())


def die(*_: object) -> None:
    """The end of the machine, once what was sent has left."""
    if engine.global_steps == options["dies_at"] and engine.is_gradient_accumulation_boundary():
        Path(f"{options['out']}-left").write_text(str(early_bytes() - early_before))
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)


if options["dies_in"] == "backward":
    next(model.parameters()).register_hook(die)  # its gradient is the last one


def last_step() -> int:
    """`steps`, or what the file `until` says once it is there."""
    until = Path(options["until"])
    return int(until.read_text()) if until.is_file() else options["steps"]


while engine.global_steps < last_step():
    step = engine.global_steps
    total = 0.0
    for micro_step in range(options["accumulation"]):
        # reads: whose share of the data each micro-step reads, by rank of one job over all of them.
        place = (
            (micro_step, options["first_rank"] + rank) if not options["reads"] else (0, options["reads"][micro_step])
        )
        inputs = batch(toy, seed=1, step=step, micro_step=place[0], rank=place[1], num_sequences=2)
        loss = hf_loss(engine, *inputs) if family else engine(*inputs)
        total += loss.item()
        if options["dies_at"] >= 0:
            early_before = early_bytes()
        if options["dies_in"] == "forward":
            die()
        scale = float("inf") if step == options["overflow_at"] else 1.0
        if options["weight"] is not None:
            ds_hybridep.weigh(engine, options["weight"])
        engine.backward(loss * scale)
        if step == options["grows_at"] and engine.is_gradient_accumulation_boundary():
            for gradient in (one for group in engine.optimizer.averaged_gradients.values() for one in group):
                gradient.mul_(2.0)
        engine.step()
    if engine.global_steps == options["drifts_at"]:  # as a processor that rounds in another way does over time
        engine.optimizer.single_partition_of_fp32_groups[0].data[:100] *= options["drifts_by"]
    if engine.global_steps == options["save_at"]:
        engine.save_checkpoint(options["checkpoints"])
    losses[step] = total / options["accumulation"]
    if options["tell"] and rank == 0:
        told = Path(f"{options['tell']}.partial")
        told.write_text(str(engine.global_steps))
        told.replace(options["tell"])  # who reads it finds the old number or the new one
    time.sleep(options["pause_s"])
if options["dump"]:
    held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.save(held, f"{options['dump']}-{rank}.pt")
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(getattr(parameter, "ds_tensor", parameter).detach().float().numpy().tobytes())
attachment = vars(engine).get("_hybridep_attachment")
local = attachment.sites.local if attachment is not None and attachment.sites is not None else None
common = hashlib.sha256(b"".join(one.numpy().tobytes() for one in local.common())).hexdigest() if local else ""
stats = ds_hybridep.stats(engine) if attachment is not None else {"sites": None, "levels": []}
record = {
    "common": common,
    "sites": stats["sites"],
    "weight_bytes": sum(level["sent_bytes"]["expert_weights"] for level in stats["levels"]),  # inside the site
    "losses": losses,
    "weights": digest.hexdigest(),
    "started_at": started_at,
    "first_bytes": first_bytes,
    "skipped": engine.skipped_steps,
    "master_bytes": sum(one.nbytes for one in getattr(engine.optimizer, "single_partition_of_fp32_groups", ())),
}
Path(f"{options['out']}-{rank}.json").write_text(json.dumps(record))
engine.destroy()
