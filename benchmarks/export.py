# SPDX-License-Identifier: Apache-2.0
"""Memory and time of `ds_hybridep export`, and what a kill leaves.

    python -m benchmarks export --layers 48 --hidden 1024 --out benchmarks/results/export.jsonl

Four ranks train a random Qwen3-MoE through AutoEP for a step and save a checkpoint under ZeRO 1: of the whole model,
and of adapters of attention and experts.  Then the command runs in a process of its own for each: the whole model,
adapters merged into it, adapters alone, and those by expert.  An export of the whole model is killed in the middle
with SIGKILL; what is left must not load.  `peak_bytes` is the largest resident set of the process.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Record, Records, run_job, table
from benchmarks.training import Job, Plan, add_model_arguments, build, train_lm

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

ADAPTERS = {"whole": "", "adapters": "attention and experts"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="for checkpoints; needs five times the model in fp32")
    parser.add_argument("--kill-at", type=float, default=0.4, help="share of the bytes")
    add_model_arguments(parser)
    parser.set_defaults(model="qwen3_moe", dtype="bf16", layers=12, hidden=256, experts=28)


def rank(args: argparse.Namespace, job: Job) -> None:
    corpus, _ = train_lm.read_corpus()
    for name, adapters in ADAPTERS.items():
        run = build(args, Plan(name, 4, (1, 1), adapters=adapters), 1, (2, 2))
        run.train(corpus, args, 1, 1)
        run.engine.save_checkpoint(str(args.folder / name))
        if job.rank == 0:
            config = run.engine.module.config
            config.architectures = ["Qwen3MoeForCausalLM"]
            config.save_pretrained(args.folder / "base")
        run.engine.destroy()
    job.end()


def run(args: argparse.Namespace, records: Records) -> None:
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        run_job("2x2", None, records, "--folder", scratch)
        sizes = {name: getattr(args, name) for name in ("layers", "hidden", "experts")}
        for name, *options in (("whole",), ("adapters", "--merged"), ("adapters",), ("adapters", "--per-expert")):
            records.add({"export": " ".join([name, *options]), **sizes}, **measure(folder, name, *options))
        killed = kill_in_the_middle(folder, int(args.kill_at * records.rows[0]["written_bytes"]))
        records.add({"export": "killed", **sizes}, **killed)


def start(folder: Path, name: str, target: Path, *options: str) -> "subprocess.Popen[bytes]":
    program = [sys.executable, "-m", "ds_hybridep.commands.main", "export", str(folder / name)]
    where = ["--model", str(folder / "base"), "--out", str(target)]
    return subprocess.Popen([*program, *where, "--max-shard-size", "1GB", *options])


def measure(folder: Path, name: str, *options: str) -> Record:
    """Run the command once and remove what it wrote."""
    target, peak_bytes, begin = folder / "out", 0, time.perf_counter()
    process = start(folder, name, target, *options)
    while process.poll() is None:
        peak_bytes = max(peak_bytes, high_water_bytes(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    assert process.returncode == 0, f"the export of {name} {options} failed"
    sizes = {"checkpoint_bytes": size_of(folder / name), "written_bytes": size_of(target), "peak_bytes": peak_bytes}
    shutil.rmtree(target)
    return {**sizes, "seconds": round(seconds, 1)}


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


def kill_in_the_middle(folder: Path, num_bytes: int) -> Record:
    """Kill an export when so many bytes are there, and try to load what is left."""
    import transformers

    target = folder / "killed"
    process = start(folder, "whole", target)
    partial = target.with_name(f"{target.name}.partial-{process.pid}")
    while process.poll() is None and allocated(partial) < num_bytes:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left, loaded = allocated(partial), []
    for path in (target, partial):
        try:
            transformers.AutoModelForCausalLM.from_pretrained(path)
        except (OSError, ValueError):
            continue
        loaded.append(path.name)
    return {"target_exists": target.exists(), "left_bytes": left, "loaded": loaded}


def allocated(folder: Path) -> int:
    paths = list(folder.iterdir()) if folder.is_dir() else []
    return sum(path.stat().st_blocks * 512 for path in paths)


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = []
    for record in records:
        sizes = [f"{record.get(name, 0) / 1e9:.2f}" for name in ("checkpoint_bytes", "written_bytes", "peak_bytes")]
        said = f"left {record['left_bytes'] / 1e9:.2f} GB, {len(record['loaded'])} load" if "loaded" in record else ""
        rows.append([record["params"]["export"], *sizes, said or record["seconds"]])
    return table(("export", "checkpoint, GB", "written, GB", "largest resident set, GB", "seconds"), rows)
