# SPDX-License-Identifier: Apache-2.0
"""What the test of the watch runs: four forked ranks in two datacentres, of which rank 3 breaks, without any model.

    watch_script.py FAULT FOLDER

FAULT may also be what is none: one of HEALTHY, after which all ranks end with status 0.

Prints the exit statuses of the ranks as JSON; null for one that had not ended after LIMIT_S.
"""

import atexit
import bdb
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # and not in the process of the tests, which import this file
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch
import torch.distributed as dist

from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.kernels import load_kernels
from ds_hybridep.lab.ports import hold_port
from ds_hybridep.transport import watch
from ds_hybridep.transport.job_link import LinkSettings

LIMIT_S = 400.0
TIMEOUTS_S = {"kill": 100.0, "exception": 100.0}  # 2 s for all others: what they wait for is in WORK_S
WORK_S = 14.0  # more than the watch would wait for a rank that is silent
HEALTHY = ("computes", "sleeps", "debugs", "keeps the lock", "handles SIGTERM", "ends at once")


def work(kind):
    """What a healthy rank may do while others wait for it."""
    until = time.time() + WORK_S
    if kind == "computes":
        value = torch.eye(64)
        while time.time() < until:
            value = value @ value
    elif kind == "sleeps":
        time.sleep(WORK_S)
    elif kind == "keeps the lock" and load_kernels("auto").name == "compiled":
        time.sleep(1.5)  # until the compiled thread says that this process lives
        ctypes.PyDLL(None).usleep(round(WORK_S * 1e6))
    elif kind == "debugs":
        bdb.Bdb().runcall(time.sleep, WORK_S)
    elif kind == "handles SIGTERM":
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2.0)
        assert heard


def train(rank, port, fault, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    watch.start(
        Cluster((Level("dc", 2), Level("gpu", 2))),
        LinkSettings(TIMEOUTS_S.get(fault, 2.0)),
        lambda: (7, "rows of layer 0"),
    )
    value = torch.zeros(4)
    for _ in range(3):
        dist.all_reduce(value)
    if rank == 3:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "exception":
            raise ValueError("a bad sample")
        elif fault == "ends at once":
            os._exit(0)
        else:
            work(fault)
    if fault == "ends at once":
        work("sleeps")
    else:
        dist.all_reduce(value)
    watch.stop(watch._owners[0])


def main(fault, folder):
    holder = hold_port()  # until this process ends
    port = holder.getsockname()[1]
    begin, pids, statuses = time.time(), {}, {}
    for rank in range(4):
        pid = os.fork()
        if pid == 0:
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 2)
            status = 0
            try:
                train(rank, port, fault, folder)
            except (ValueError, RuntimeError) as error:  # as at any interpreter's end
                status, sys.last_value = 1, error
                sys.excepthook(type(error), error, error.__traceback__)
                atexit._run_exitfuncs()
            os._exit(status)
        pids[rank] = pid
    while len(statuses) < 4 - (fault == "stop") and time.time() - begin < LIMIT_S:
        for rank, pid in pids.items():
            if rank not in statuses and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[rank] = os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.02)
    for rank, pid in pids.items():
        if rank not in statuses:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(json.dumps([statuses.get(rank) for rank in range(4)]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
