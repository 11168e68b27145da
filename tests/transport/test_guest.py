# SPDX-License-Identifier: Apache-2.0
"""Scripts of users run beside the watch as they run without it: same output, same exit status, same files."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scripts import free_port

pytestmark = pytest.mark.dist

LIMIT_S = 400.0
TIMEOUT_S = 2.0  # of the watch
ENGINE_TIMEOUT_S = 8.0  # the start-up of an engine has this limit, too
IMPORTS = """
import atexit, http.server, json, os, signal, threading, time, urllib.request, weakref
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
def note(name): Path(f"{name}{rank}").write_text("written")
class Slow(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(20)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"0.5")
    def log_message(self, *_): pass
def evaluate_over_http():
    server = http.server.HTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return float(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}").read())
atexit.register(note, "handler_made_before_the_watch")
"""
BEGIN = f"""{IMPORTS}
dist.init_process_group("gloo", timeout=timedelta(seconds=90))
if os.environ["WATCHED"]:
    from ds_hybridep.geometry.cluster import Cluster, Level
    from ds_hybridep.transport import watch
    from ds_hybridep.transport.job_link import LinkSettings
    dist.barrier()
    owner = lambda: (7, "rows of layer 0")
    watch.start(Cluster((Level("dc", 2),)), LinkSettings({TIMEOUT_S}), owner)
def write_slowly():
    time.sleep(10)
    note("written_by_a_thread")
def fail_while_threads_write():
    atexit.register(note, "handler_made_after_the_watch")
    threading.Thread(target=write_slowly).start()
    raise ValueError("a bad sample")
value = torch.zeros(4)
dist.all_reduce(value)
"""
PATIENT = BEGIN.replace(f"LinkSettings({TIMEOUT_S})", "LinkSettings(100.0)")  # where nobody is to be silent
BEGIN_WITH_ENGINE = f"""{IMPORTS}
import deepspeed
from deepspeed.moe.layer import MoE
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a minute to build
deepspeed.init_distributed("gloo")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=2)
    def forward(self, rows):
        output, aux_loss, _ = self.moe(rows)
        return output.square().mean() + aux_loss
torch.manual_seed(0)
model = Model()
config = {{
    "train_micro_batch_size_per_gpu": 1, "steps_per_print": 1_000_000,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3, "torch_adam": True}}}},
}}
engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
if os.environ["WATCHED"]:
    import ds_hybridep
    dist.barrier()
    levels = [{{"name": "dc", "size": 2, "domain_size": 1}}]
    advanced = {{"kernels": "reference"}}
    ds_hybridep.attach(engine, {{"levels": levels, "timeout_s": {ENGINE_TIMEOUT_S}, "advanced": advanced}})
def train():
    engine.backward(engine(torch.ones(1, 4, 8)))
    engine.step()
train()
"""


class Ended(NamedTuple):
    """What became of the two ranks of a script."""

    statuses: list[int | None]
    files: dict[str, str]
    printed: list[str]
    said: list[str]  # on standard error


def run_script(
    script: str, folder: Path, *, is_watched: bool = False, interrupt: tuple[str, signal.Signals] | None = None
) -> Ended:
    """Run a script on two ranks in a folder of its own.

    interrupt: the name of a file and a signal, which both ranks get once each has written that file.
    """
    folder.mkdir()
    (folder / "script.py").write_text(script)
    ranks, logs = [], [[folder / f"{name}.{rank}.log" for name in ("out", "err")] for rank in range(2)]
    port = str(free_port())
    for rank, (out, err) in enumerate(logs):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "WATCHED": "1" if is_watched else "",
        }  # fmt: skip
        with out.open("w") as stdout, err.open("w") as stderr:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "script.py"], cwd=folder, env=environment, stdout=stdout, stderr=stderr
                )
            )
    try:
        deadline = time.monotonic() + LIMIT_S
        if interrupt is not None:
            name, number = interrupt
            while not all((folder / f"{name}{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
                time.sleep(0.05)
            for process in ranks:
                process.send_signal(number)
        statuses = [process.wait(max(deadline - time.monotonic(), 1.0)) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait(300)
    printed, said = ([logs[rank][index].read_text() for rank in range(2)] for index in range(2))
    left = {one.name: one.read_text() for one in folder.iterdir() if one.suffix != ".log" and one.name != "script.py"}
    return Ended(statuses, left, printed, said)


def run_both(script: str, folder: Path, **how: tuple[str, signal.Signals]) -> tuple[Ended, Ended]:
    """The ends of a script without the watch and with it."""
    with ThreadPoolExecutor(2) as at_once:
        plain = at_once.submit(run_plain, script, folder / "plain", **how)
        watched = at_once.submit(run_script, script, folder / "watched", is_watched=True, **how)
        return plain.result(), watched.result()


def run_plain(script: str, folder: Path, **how: Any) -> Ended:
    """Run a script without the watch, again twice at most if torch aborts: seldom, as gloo's threads still run."""
    for _ in range(2):
        if -signal.SIGABRT not in (ended := run_script(script, folder, **how)).statuses:
            return ended
        shutil.rmtree(folder)
    return run_script(script, folder, **how)


# -- scripts that go well ---------------------------------------------------------------------------------------

ORDINARY = """
class Value:
    pass
def use_a_value():
    value = Value()
    time.sleep(0.7)
    return weakref.ref(value)
print("freed", [use_a_value()() is None for _ in range(4)])
print("signals", signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1))
time.sleep(1.5)
json.dump(list(range(50_000)), open(f"record{rank}.json", "w"))
"""

LEAVES_EARLY = """
if rank == 1:
    os._exit(0)
time.sleep(9.0)
note("written_alone")
"""

EVALUATES_OVER_HTTP = """
if rank == 0:
    value += evaluate_over_http()
dist.all_reduce(value)
print(value.tolist())
"""

TRAINS_AND_EVALUATES = """
if rank == 0:
    print(evaluate_over_http())
train()  # the other rank waits in its forward meanwhile
class Value:
    pass
def use_a_value():
    value = Value()
    time.sleep(0.7)
    return weakref.ref(value)
print("freed", [use_a_value()() is None for _ in range(4)])
train()
json.dump(list(range(50_000)), open(f"record{rank}.json", "w"))
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            PATIENT + ORDINARY,
            id="objects are freed, signals are untouched, a file that is left open is whole",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            BEGIN + LEAVES_EARLY,
            id="a rank goes on alone after another one has called os._exit",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            BEGIN + EVALUATES_OVER_HTTP,
            id="a rank evaluates over HTTP for ten times timeout_s while another one waits in a collective",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            BEGIN_WITH_ENGINE + TRAINS_AND_EVALUATES,
            id="a rank evaluates over HTTP for longer than timeout_s while another one waits in a forward",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_ends_as_without_the_watch(tmp_path: Path, script: str) -> None:
    plain, watched = run_both(script, tmp_path)
    assert plain.statuses == [0, 0]
    said = [[line for line in one.splitlines() if "hybridep: 1 MoE layers, " not in line] for one in watched.said]
    assert watched._replace(said=said) == plain._replace(said=[[], []])


# -- scripts that fail ------------------------------------------------------------------------------------------

FAILS_ALONE = """
if rank == 1:
    fail_while_threads_write()
dist.all_reduce(value)
"""

IS_INTERRUPTED = """
atexit.register(note, "handler_made_after_the_watch")
threading.Thread(target=write_slowly).start()
note("ready")
time.sleep(60)
"""

ENDS_ITS_WATCH_IN_A_THREAD = """
if os.environ["WATCHED"]:
    thread = threading.Thread(target=watch.stop, args=(owner,))
    thread.start()
    thread.join()
note("ready")
time.sleep(60)
"""

# The other rank waits for its end first: else the watch may end the wait before the collective fails.
FAILS_AT_ONCE = """
place = Path("pid.log")
if rank == 1:
    place.write_text(f"{os.getpid()} ")
    raise ValueError("a bad sample")
while not place.exists() or not place.read_text().endswith(" "):
    time.sleep(0.02)
state = Path(f"/proc/{int(place.read_text())}/stat")
while state.exists() and state.read_text().split()[2] != "Z":
    time.sleep(0.02)
dist.all_reduce(value)
"""


@pytest.mark.slow
def test_after_an_exception_threads_and_exit_handlers_of_its_rank_have_all_the_time_they_need(tmp_path: Path) -> None:
    plain, watched = run_both(BEGIN + FAILS_ALONE, tmp_path)
    assert plain.statuses == [1, 1]
    assert watched.statuses == [75, 1]  # nothing else would end the wait
    assert watched.said[1].replace("/watched/", "/plain/") == plain.said[1]
    for name in ("written_by_a_thread", "handler_made_before_the_watch", "handler_made_after_the_watch"):
        assert watched.files[f"{name}1"] == plain.files[f"{name}1"] == "written"
    assert watched.said[0].startswith("hybridep: rank 1 failed: ValueError: a bad sample")


@pytest.mark.slow
def test_after_control_c_threads_and_exit_handlers_have_all_the_time_they_need(tmp_path: Path) -> None:
    plain, watched = run_both(BEGIN + IS_INTERRUPTED, tmp_path, interrupt=("ready", signal.SIGINT))
    assert plain.statuses == [-signal.SIGINT] * 2
    assert watched.statuses == plain.statuses
    assert watched.files == plain.files
    assert "written_by_a_thread0" in plain.files


@pytest.mark.slow
def test_sigterm_ends_a_process_whose_watch_was_ended_in_another_thread(tmp_path: Path) -> None:
    plain, watched = run_both(BEGIN + ENDS_ITS_WATCH_IN_A_THREAD, tmp_path, interrupt=("ready", signal.SIGTERM))
    assert plain.statuses == [-signal.SIGTERM] * 2
    assert watched == plain


@pytest.mark.slow
def test_a_rank_whose_collective_fails_runs_its_exit_handlers(tmp_path: Path) -> None:
    """Before it, objects are freed and signals untouched; a file that is left open is whole."""
    plain, watched = run_both(PATIENT + ORDINARY + FAILS_AT_ONCE, tmp_path)
    assert plain.statuses == [1, 1]
    assert watched.statuses == plain.statuses
    assert watched.files == plain.files
    assert watched.printed == plain.printed
    assert all("freed [True, True, True, True]" in printed for printed in plain.printed)
    assert "hybridep: rank 1 failed: ValueError: a bad sample" in watched.said[0]
