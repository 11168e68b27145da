# SPDX-License-Identifier: Apache-2.0
"""Memory and time of `ds_hybridep export` for a model of 48 layers, and what a kill leaves.

    python -m benchmarks export --folder FOLDER --out benchmarks/results/export.jsonl

Writes two checkpoints as DeepSpeed lays them out, without training: of the whole model under ZeRO 1 (fp32 masters on
four ranks, experts over all of them, without Adam's moments, which an export does not read), and of adapters of
attention and experts under ZeRO 0.  Then runs the command in a process of its own for each: the whole model, adapters
merged into it, adapters alone.  At last it kills an export in the middle with SIGKILL and tries to load what is left.
`peak_bytes` is the largest resident set of the process.
"""

import argparse
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Record, Records, table
from ds_hybridep.export.base import Skeleton, without_weights

RANKS = 4
LORA_RANK = 8
PREFIX = "base_model.model."


@dataclass
class Address:
    """A parameter's part of a rank's partition, as DeepSpeed records it."""

    start: int
    numel: int


def model_config(args: argparse.Namespace) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=32000, hidden_size=args.hidden, moe_intermediate_size=args.ffn, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64, num_key_value_heads=args.hidden // 64, head_dim=64,
        num_experts=args.experts, num_experts_per_tok=4, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # fmt: skip


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers that no two tensors share, made fast: one random block, again and again, and a shift."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(min(numel, 1 << 20), generator=generator) * 0.02
    whole = torch.empty(numel, dtype=dtype)
    for start in range(0, numel, len(block)):
        part = whole[start : start + len(block)]
        part.copy_(block[: len(part)])
    return whole


def training_shapes(skeleton: Skeleton) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of what all ranks share, and of all experts, by AutoEP's names."""
    dense, experts = {}, {}
    for name, shape in skeleton.shapes.items():
        if name.endswith("experts.gate_up_proj"):
            for weight in ("w1", "w3"):
                experts[name.replace("gate_up_proj", weight)] = (shape[0], shape[1] // 2, shape[2])
        elif name.endswith("experts.down_proj"):
            experts[name.replace("down_proj", "w2")] = shape
        else:
            dense[name.replace(".mlp.gate.", ".mlp.router.gate.")] = shape
    return dense, experts


def layer_records(args: argparse.Namespace, ep_size: int, prefix: str = "") -> list[dict[str, Any]]:
    sizes = {"num_experts": args.experts, "num_local_experts": args.experts // ep_size, "ep_size": ep_size}
    return [
        {"moe_layer_id": layer, "module_path": f"{prefix}model.layers.{layer}.mlp", **sizes}
        for layer in range(args.layers)
    ]


def addresses(shapes: dict[str, tuple[int, ...]], begin: int, end: int) -> dict[str, Address]:
    """Where parameters lie in the part from `begin` to `end` of all of them in a row."""
    found, offset = {}, 0
    for name, shape in shapes.items():
        first, last = max(offset, begin), min(offset + math.prod(shape), end)
        if first < last:
            found[name] = Address(first - begin, last - first)
        offset += math.prod(shape)
    return found


def write_zero1(args: argparse.Namespace, skeleton: Skeleton, folder: Path) -> None:
    """Masters in the partitions of four ranks, experts over all of them."""
    folder.mkdir(parents=True)
    dense, experts = training_shapes(skeleton)
    local = {name: (shape[0] // RANKS, *shape[1:]) for name, shape in experts.items()}
    num_dense, num_local = (sum(map(math.prod, shapes.values())) for shapes in (dense, local))
    share = -(-num_dense // RANKS)
    for rank in range(RANKS):
        mappings = [addresses(dense, rank * share, (rank + 1) * share), addresses(local, 0, num_local)]
        own = sum(address.numel for address in mappings[0].values())
        masters = [values(own, torch.float32, rank), values(num_local, torch.float32, RANKS + rank)]
        state = {
            "single_partition_of_fp32_groups": masters, "partition_count": [RANKS, 1],
            "param_slice_mappings": mappings, "base_optimizer_state": {"state": {0: {"step": torch.tensor(2.0)}}},
        }  # fmt: skip
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    module = {name: values(math.prod(shape), torch.bfloat16, 99).view(shape) for name, shape in dense.items()}
    model_state = {
        "module": module, "param_shapes": [dense, local], "dp_world_size": RANKS, "global_steps": 2,
        "ds_config": {"zero_optimization": {"stage": 1}}, "ds_autoep_layers": layer_records(args, RANKS),
    }  # fmt: skip
    torch.save(model_state, folder / "mp_rank_00_model_states.pt")


def write_adapters(args: argparse.Namespace, skeleton: Skeleton, folder: Path) -> None:
    """A frozen model in bf16, a file for each expert, and factors of attention and experts."""
    import peft

    folder.mkdir(parents=True)
    dense, experts = training_shapes(skeleton)
    module, factors, layers = {}, {}, layer_records(args, 1, PREFIX)
    for name, shape in dense.items():
        weight, path = values(math.prod(shape), torch.bfloat16, 1).view(shape), PREFIX + name.removesuffix(".weight")
        if name.endswith("q_proj.weight"):
            module[f"{path}.base_layer.weight"] = weight
            module[f"{path}.lora_A.default.weight"] = torch.randn(LORA_RANK, shape[1])
            module[f"{path}.lora_B.default.weight"] = torch.randn(shape[0], LORA_RANK)
        else:
            module[PREFIX + name] = weight
    for layer in layers:
        path, index = layer["module_path"], layer["moe_layer_id"]
        shapes = {one: experts[f"{path.removeprefix(PREFIX)}.experts.{one}"][1:] for one in ("w1", "w2", "w3")}
        for expert in range(args.experts):
            tensors = {
                f"{path}.experts.{one}.{expert}": values(math.prod(shape), torch.bfloat16, expert).view(shape)
                for one, shape in shapes.items()
            }
            torch.save(tensors, folder / f"layer_{index}_expert_{expert}_mp_rank_00_model_states.pt")
        of_layer = {}
        for name, rows, cols in (("gate_up_proj", 2 * args.ffn, args.hidden), ("down_proj", args.hidden, args.ffn)):
            of_layer[f"{name}_lora_A"] = torch.randn(args.experts, LORA_RANK, cols)
            of_layer[f"{name}_lora_B"] = torch.randn(args.experts, rows, LORA_RANK)
        factors[path] = {"experts": list(range(args.experts)), "factors": of_layer, "step": 2}
    torch.save(factors, folder / "hybridep_expert_adapters_00000.pt")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    peft.LoraConfig(r=LORA_RANK, target_modules=["q_proj"], target_parameters=targets).save_pretrained(str(folder))
    state = {"module": module, "dp_world_size": 1, "ds_autoep_layers": layers, "global_steps": 2}
    torch.save(state, folder / "mp_rank_00_model_states.pt")


def command(args: argparse.Namespace, checkpoint: Path, target: Path, *options: str) -> list[str]:
    program = [sys.executable, "-m", "ds_hybridep.commands.main", "export", str(checkpoint)]
    return [*program, "--model", str(args.folder / "base"), "--out", str(target), "--max-shard-size", "1GB", *options]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def high_water_bytes(pid: int) -> int:
    """Largest resident set of a process since its program began; 0 when it has ended.

    Not from wait4, whose number also counts what the parent held when it started the process.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def measure(args: argparse.Namespace, checkpoint: Path, *options: str) -> Record:
    """Run the command once and remove what it wrote."""
    target, peak_bytes = args.folder / "out", 0
    begin = time.perf_counter()
    process = subprocess.Popen(command(args, checkpoint, target, *options))
    while process.poll() is None:
        peak_bytes = max(peak_bytes, high_water_bytes(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    assert process.returncode == 0, f"{options} failed"
    sizes = {"checkpoint_bytes": size_of(checkpoint), "written_bytes": size_of(target), "peak_bytes": peak_bytes}
    shutil.rmtree(target)
    return {**sizes, "seconds": round(seconds, 1)}


def kill_in_the_middle(args: argparse.Namespace, checkpoint: Path) -> Record:
    """Kill an export when half of its bytes are there, and try to load what is left."""
    import transformers

    target = args.folder / "killed"
    process = subprocess.Popen(command(args, checkpoint, target))
    partial = target.with_name(f"{target.name}.partial-{process.pid}")
    while process.poll() is None and allocated(partial) < args.kill_at_bytes:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = allocated(partial)
    loaded = []
    for folder in (target, partial):
        try:
            transformers.AutoModelForCausalLM.from_pretrained(folder)
        except (OSError, ValueError):
            continue
        loaded.append(folder.name)
    shutil.rmtree(partial, ignore_errors=True)
    return {"target_exists": target.exists(), "left_bytes": left, "loaded": loaded}


def allocated(folder: Path) -> int:
    paths = list(folder.iterdir()) if folder.is_dir() else []
    return sum(path.stat().st_blocks * 512 for path in paths)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="for checkpoints; needs three times the model in fp32")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--experts", type=int, default=28)
    parser.add_argument("--kill-at-bytes", type=int, default=2 * 10**9)


def run(args: argparse.Namespace, records: Records) -> None:
    from transformers import Qwen3MoeForCausalLM

    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        args.folder = Path(scratch)
        config = model_config(args)
        config.save_pretrained(args.folder / "base")
        skeleton = Skeleton(without_weights(Qwen3MoeForCausalLM, config))
        whole, adapters = args.folder / "whole", args.folder / "adapters"
        sizes = {"layers": args.layers, "experts": args.experts}
        write_zero1(args, skeleton, whole)
        records.add({"export": "whole, ZeRO 1", **sizes}, **measure(args, whole))
        records.add({"export": "killed", **sizes}, **kill_in_the_middle(args, whole))
        shutil.rmtree(whole)
        write_adapters(args, skeleton, adapters)
        for options in (("--merged",), (), ("--per-expert",)):
            found = measure(args, adapters, *options)
            records.add({"export": " ".join(["adapters", *options]), **sizes}, **found)


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = []
    for record in records:
        sizes = [f"{record.get(name, 0) / 1e9:.2f}" for name in ("checkpoint_bytes", "written_bytes", "peak_bytes")]
        said = f"left {record['left_bytes'] / 1e9:.2f} GB, {len(record['loaded'])} load" if "loaded" in record else ""
        rows.append([record["params"]["export"], *sizes, said or record["seconds"]])
    return table(("export", "checkpoint, GB", "written, GB", "largest resident set, GB", "seconds"), rows)
