# SPDX-License-Identifier: Apache-2.0
"""What replicas of experts take, in bytes per replicated parameter: counted, estimated, and measured as a whole.

    torchrun --nproc_per_node 2 benchmarks/memory.py --out benchmarks/results/memory.jsonl
    python benchmarks/memory.py --report benchmarks/results/memory.jsonl

Two ranks train in bf16, each with replicas of all the other's experts, in layers of DeepSpeed's MoE or of AutoEP:

    between     held between steps, counted
    most        the most that is held in a step, counted whenever weights or gradients are asked for, and in the step
    estimate    what `estimate_hybridep_mem_needs_all_live` says of it
    peak        the most that torch has allocated in a step, over that of the same job without replicas: packets and
                whatever else comes and goes is in it, and what that job needs more for tokens on their way is not
    host        held in host memory, with "state": "host"; on a CPU it is in "peak" too

Gradients of so small layers would all be on their way at a time; here they are as those of large ones are, of
`prefetch_depth` + 1 layers of twelve.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bench

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

LOW_RANK = {"weight_codec": "low_rank", "gradient_codec": "low_rank"}
INT8 = {"weight_codec": "int8", "gradient_codec": "int8"}
ROWS: dict[str, dict[str, Any]] = {
    "no replicas": {"domain_size": 1},
    "exact": {},
    "patch, exact gradients": {"weight_codec": "patch"},
    "recommended": {"codecs": "recommended"},
    "recommended, on the host": {"codecs": "recommended", "state": "host"},
    "int8, int8 gradients": INT8,
    "low rank, low rank gradients": LOW_RANK,
}
ACCUMULATIONS = (1, 4)
LAYERS = ("MoE", "AutoEP")
SIZES = {
    "hidden": 128, "layers": 12, "experts": 8, "top_k": 2, "seq_len": 32, "rows": 1, "capacity_factor": 1.25,
    "ep_size": 2,
}  # fmt: skip


def block_of(row: str) -> dict[str, Any]:
    settings = dict(ROWS[row])
    state = {"state": settings.pop("state")} if "state" in settings else {}
    levels = [{"name": "dc", "size": 2, "domain_size": 2, **settings}]
    return {"levels": levels, "dense_sync": "deepspeed", "report_interval": 0, **state}


def model_of(layers: str) -> tuple[Any, dict[str, Any]]:
    """The model, and the settings of DeepSpeed that make its layers."""
    import torch

    args = argparse.Namespace(**SIZES)
    torch.manual_seed(0)
    if layers == "AutoEP":
        import hf_model

        return hf_model.build(args, ""), {"expert_parallel": hf_model.autoep_block(args.ep_size)}
    import train_lm

    return train_lm.ByteModel(args), {}


@contextlib.contextmanager
def engine_of(layers: str, block: Mapping[str, Any], accumulation: int) -> Iterator[Any]:
    import deepspeed

    model, settings = model_of(layers)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "steps_per_print": 1_000_000_000,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
            "hybridep": block,
            **settings,
        },
    )
    yield engine
    engine.destroy()


def estimate(model: Any, block: Mapping[str, Any], accumulation: int, settings: Mapping[str, Any]) -> Any:
    """Estimate for two ranks that hold each other's experts."""
    import torch

    import ds_hybridep

    with contextlib.redirect_stdout(io.StringIO()):
        return ds_hybridep.estimate_hybridep_mem_needs_all_live(
            model, block, 2, dtype=torch.bfloat16, accumulation=accumulation, **settings
        )[2,]


def most_allocated(profile: Any) -> int:
    """The most bytes at once of what was allocated while a profile was taken."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(layers: str, row: str, accumulation: int) -> dict[str, int]:
    """Bytes measured on one of two ranks."""
    import torch
    import train_lm
    from deepspeed import comm as dist

    import ds_hybridep

    corpus, block, held = train_lm.read_corpus()[0], block_of(row), [0]
    with engine_of(layers, block, accumulation) as engine:
        migration = engine.__dict__["_hybridep_attachment"].runtime.migration

        def train(step: int) -> None:
            for micro_step in range(accumulation):
                place = (0, step, micro_step, dist.get_rank())
                loss, _ = engine(*train_lm.batch_at(corpus, place, rows=SIZES["rows"], seq_len=SIZES["seq_len"]))
                engine.backward(loss)
                engine.step()

        train(0)
        train(1)
        if migration is not None:
            migration.finish_shipments()
            progress, remember_sent = migration.progress, migration.remember_sent
            migration.progress = lambda: (held.append(migration.replica_bytes), progress())
            migration.remember_sent = lambda: (remember_sent(), held.append(migration.replica_bytes))
        between = ds_hybridep.stats(engine)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            train(2)
        need = estimate(engine.module, block, accumulation, {})
        return {
            "replicated": sum(p.numel() for name, p in engine.module.named_parameters() if _is_of_expert(name)),
            "between": between["replica_bytes"],
            "host": between.get("host_bytes", 0),
            "most": max(held),
            "estimate": need.total,
            "estimate_host": need.host,
            "allocated": most_allocated(profile),
        }


def _is_of_expert(name: str) -> bool:
    return ".deepspeed_experts." in name or ".mlp.experts." in name


def run(out: Path) -> None:
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from ds_hybridep.plan import depth

    depth.RETURNING_BYTES = 0
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for layers in LAYERS:
        measure(layers, "no replicas", 1)  # what is made once
        for accumulation in ACCUMULATIONS:
            for row in ROWS:
                found = measure(layers, row, accumulation)
                if dist.get_rank() == 0:
                    params = {"kind": layers, "row": row, "accumulation": accumulation, "dtype": "bf16", **SIZES}
                    record = {"params": params, **found, "versions": bench.versions()}
                    with out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
                    print(layers, row, accumulation, found, flush=True)


def report(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    columns = ("between", "most", "estimate", "peak", "host")
    print("Bytes per replicated parameter.\n")
    print(f"| layers | micro-steps | codecs | {' | '.join(columns)} |\n" + "|---" * (3 + len(columns)) + "|")
    for record in records:
        about = record["params"]
        if about["row"] == "no replicas":
            continue
        alone = next(one for one in records if one["params"] == {**about, "row": "no replicas"})
        record["peak"] = record["between"] + record["host"] + record["allocated"] - alone["allocated"]
        numbers = " | ".join(f"{record[name] / record['replicated']:.1f}" for name in columns)
        print(f"| {about['kind']} | {about['accumulation']} | {about['row']} | {numbers} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("memory.jsonl"))
    parser.add_argument("--report", type=Path, help="print the table of these records")
    args = parser.parse_args()
    if args.report is not None:
        report(args.report)
    else:
        run(args.out)


if __name__ == "__main__":
    main()
