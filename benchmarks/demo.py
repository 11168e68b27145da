# SPDX-License-Identifier: Apache-2.0
"""Trains the same model twice on one machine, plain and with expert domains, and says what travelled.

    make demo

Both runs start `examples/train_lm.py`, unchanged, on 4 ranks under the `deepspeed` launcher; only the ds_config
differs.  Four CPU processes on one machine have no slow link, so what is shown is bytes, not speed.
"""

import argparse
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from ds_hybridep.commands.show import format_run_record

REPOSITORY = Path(__file__).resolve().parents[1]
PLAIN = REPOSITORY / "ds_configs" / "plain_ep.json"
DOMAINS = REPOSITORY / "ds_configs" / "two_dcs_2x2.json"
NUM_RANKS = 4
SHOWN = ("step", "done:")  # beginnings of the lines of a run that are shown as it goes

BUILD_PROGRAM = """
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
if builder is not None:
    builder.load(verbose=False)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run")
    parser.add_argument("--keep", type=Path, help="folder for logs and records; by default they are removed")
    args = parser.parse_args()
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": os.environ.get(
            "TORCH_EXTENSIONS_DIR", str(REPOSITORY / ".cache" / "torch_extensions")
        ),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
    }
    folder = args.keep or Path(tempfile.mkdtemp(prefix="ds_hybridep_demo_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        build_communication_op(environment)
        return compare(folder, args.steps, environment)
    finally:
        if args.keep is None:
            shutil.rmtree(folder)


def compare(folder: Path, steps: int, environment: dict[str, str]) -> int:
    record_path = folder / "run_record.json"
    ds_config = json.loads(DOMAINS.read_text())
    # A report at every tenth of the run and one at its end, which is the one that stays.
    ds_config["hybridep"].update(report_file=str(record_path), report_interval=max(1, steps // 10))
    configured = folder / DOMAINS.name
    configured.write_text(json.dumps(ds_config, indent=2))

    runs = []
    for title, config in (("plain EP: DeepSpeed alone", PLAIN), ("the same with expert domains", configured)):
        print(f"\n{title} ({config.name}), {NUM_RANKS} ranks, {steps} steps", flush=True)
        result = train(config, folder / f"{config.stem}_result.json", steps, environment)
        if result is None:
            return 1
        runs.append((title, result))
    print_results(runs)
    if not record_path.is_file():
        print("no run record was written, so the domains were not active: is the package installed in this Python?")
        return 1
    print(format_run_record(json.loads(record_path.read_text())))
    print(
        '\n"plain EP" is computed from the routing of this run, with the padding that DeepSpeed sends; the '
        "other columns\nwere counted while sending, evaluation included. Model and batch are sized so that tokens "
        "outweigh experts: with large\nexperts and few tokens the domains send more than plain EP."
    )
    return 0


def build_communication_op(environment: dict[str, str]) -> None:
    """Build the shared-memory op that DeepSpeed uses on CPUs, before ranks wait for each other over it.

    The build is guarded by a lock file that a killed process leaves behind, and that is then waited for for ever.
    Only one demo at a time holds `demo.lock`, which goes away with its process, so a lock file found here is stale (or
    of a test run that builds at this very moment: then both build, and the later one wins).
    """
    folder = Path(environment["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "demo.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for stale in folder.glob("deepspeed_shm_comm*/lock"):
            stale.unlink()
        if list(folder.glob("deepspeed_shm_comm*/*.so")):
            return
        print("building DeepSpeed's shared-memory op, once (one to two minutes)", flush=True)
        start_s = time.perf_counter()
        built = subprocess.run([sys.executable, "-c", BUILD_PROGRAM], env=environment, capture_output=True, text=True)
        if built.returncode != 0:
            raise SystemExit(f"DeepSpeed's shared-memory op could not be built:\n{built.stderr[-4000:]}")
        print(f"built in {time.perf_counter() - start_s:.0f} s", flush=True)


def train(config: Path, result_path: Path, steps: int, environment: dict[str, str]) -> dict[str, Any] | None:
    """The final record of one run, with its progress shown; None where it failed, with the end of its output shown."""
    port = free_port()
    command = ["deepspeed", "--num_gpus", str(NUM_RANKS), "--master_port", str(port)]
    command += [str(REPOSITORY / "examples" / "train_lm.py"), "--deepspeed_config", str(config)]
    command += ["--steps", str(steps), "--json-file", str(result_path)]
    log_path = result_path.with_suffix(".log")
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    try:
        with open(log_path, "w", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                if line.startswith(SHOWN):
                    print(f"  {line.rstrip()}", flush=True)
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            buffer.unlink(missing_ok=True)  # 66 MB for each rank, which DeepSpeed leaves
    if process.returncode != 0 or not result_path.is_file():
        tail = log_path.read_text(encoding="utf-8").splitlines()[-40:]
        print("\n".join(["", f"the run failed with status {process.returncode}; the end of its output:", *tail]))
        return None
    return json.loads(result_path.read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def print_results(runs: list[tuple[str, dict[str, Any]]]) -> None:
    width = max(len(title) for title, _ in runs)
    print(f"\n{'':{width}}   final loss   validation loss   median step")
    for title, result in runs:
        loss, valid_loss, step_s = result["loss"], result["valid_loss"], result["median_step_s"]
        print(f"{title:{width}}   {loss:10.4f}   {valid_loss:15.4f}   {step_s:9.3f} s")
    print(
        "\nOn one machine there is no slow link: all bytes went through memory and all ranks shared its cores, so the "
        "step\ntimes say little. What the links would have carried is this, for the run with expert domains:\n"
    )


if __name__ == "__main__":
    sys.exit(main())
