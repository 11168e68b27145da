# SPDX-License-Identifier: Apache-2.0
"""What the test of health runs: four forked ranks in two datacentres, of which rank 3 breaks, without any model.

    health_script.py FAULT FOLDER

FAULT may also be what is none: one of HEALTHY, after which all ranks end with status 0.

Prints seconds until each rank ended, from when rank 3 broke, and exit statuses, as JSON.
"""

import atexit
import bdb
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":  # and not in the process of the tests, which import this file
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch
import torch.distributed as dist

from ds_hybridep.plan.cluster import Cluster, Level
from ds_hybridep.transport import health
from ds_hybridep.transport.sockets import TCP_RTO_MAX_MS

LIMIT_S = 25.0
TIMEOUT_S = 2.0


WORK_S = 7.0  # more than the watch would wait for a rank that does nothing
# Seconds until rank 3 comes; the others may wait for 6 s of a rank that does nothing.
SLOW_COLLECTIVE = {"comes late to a slow collective": WORK_S, "comes in time to a slow collective": 5.0}
HEALTHY = ("evaluates", *SLOW_COLLECTIVE, "computes", "debugs", "handles SIGTERM", "ends at once")


class Owner:
    def num_steps(self):
        return 7

    def last_transfer(self):
        return "rows of layer 0"


def load_next_sample():
    time.sleep(1000)


def work(kind, seconds=WORK_S):
    """What a healthy rank may do while others wait for it."""
    until = time.time() + seconds
    if kind in ("evaluates", *SLOW_COLLECTIVE):
        value = torch.eye(64)
        while time.time() < until:
            value = value @ value
    elif kind == "computes":  # for long at one place
        value = torch.rand(1500, 1500)
        list(iter(lambda: value @ value is None or time.time() > until, True))
    elif kind == "debugs":
        bdb.Bdb().runcall(time.sleep, seconds)
    elif kind == "handles SIGTERM":
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2.0)
        assert heard


def retransmission_bounds():
    """Of all TCP connections of this process, in ms; [0] where the system has no such bound."""
    found = [0]
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as opened:
            opened.getpeername()
            found.append(opened.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS))
    return found[1:] or found


def train(rank, port, fault, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    health.start(Cluster((Level("dc", 2), Level("gpu", 2))), 2 * TIMEOUT_S if fault in HEALTHY else TIMEOUT_S, Owner())
    value = torch.zeros(4)
    pair = dist.new_group([2, 3])
    for _ in range(3):
        dist.all_reduce(value)
    if rank == 3:
        folder.joinpath("broken").write_text(str(time.time()))
        if fault.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "exception":
            raise ValueError("a bad sample")
        elif fault == "hang":
            load_next_sample()
        elif fault == "ends at once":
            os._exit(0)
        else:
            work(fault, SLOW_COLLECTIVE.get(fault, WORK_S))
    if fault in SLOW_COLLECTIVE:  # rank 3 waits too, as long as a large transfer may take
        if rank == 2:
            threading.Timer(SLOW_COLLECTIVE[fault] + 3.0, lambda: dist.send(value.clone(), 3, group=pair)).start()
        elif rank == 3:
            dist.recv(value.clone(), 2, group=pair)
    if fault in ("ends at once", "kill, then SIGTERM"):
        work("evaluates")
    else:
        dist.all_reduce(value)
    if fault == "evaluates" and rank != 3:
        print("shortest retransmission bound", min(retransmission_bounds()), file=sys.stderr, flush=True)
    health.stop(health._owners[0])


def main(fault, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin, pids, ended = time.time(), {}, {}
    for rank in range(4):
        pid = os.fork()
        if pid == 0:
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 2)
            status = 0
            try:
                train(rank, port, fault, folder)
            except ValueError as error:
                sys.excepthook(type(error), error, error.__traceback__)
                atexit._run_exitfuncs()  # as at any interpreter's end
                status = 1
            except RuntimeError as error:
                sys.excepthook(type(error), error, error.__traceback__)
                status = health.EXIT_STATUS
            os._exit(status)
        pids[rank] = pid
    while len(ended) < 4 and time.time() - begin < LIMIT_S:
        for rank, pid in pids.items():
            if rank not in ended and (status := os.waitpid(pid, os.WNOHANG))[0]:
                ended[rank] = time.time(), os.waitstatus_to_exitcode(status[1])
                if rank == 3 and fault == "kill, then SIGTERM":  # as launchers do
                    for other in pids.keys() - ended.keys():
                        os.kill(pids[other], signal.SIGTERM)
        time.sleep(0.02)
    for rank, pid in pids.items():
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)
            ended[rank] = time.time(), None
    broken = float(folder.joinpath("broken").read_text())
    print(json.dumps([[ended[rank][0] - broken, ended[rank][1]] for rank in range(4)]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
