# SPDX-License-Identifier: Apache-2.0
"""What the launcher's tests run on each rank: one all-reduce over gloo, then as the argument says.

    allreduce_script.py NUM_FLOATS [fail RANK CODE | sleep RANK | signal RANK]

Prints "rank R of W: SUM" with the sum of all ranks + 1. "fail" ends RANK with CODE while the others wait for it,
"sleep" never ends on RANK, "signal" has RANK kill itself.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def main():
    num_floats, what, chosen, code = (sys.argv[1:] + ["", "-1", "0"][len(sys.argv) - 2 :])[:4]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((int(num_floats),), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.min() == tensor.max()
    print(f"rank {rank} of {world_size}: {tensor[0].item():g}")
    if what:
        if rank == int(chosen):
            end_as(what, int(code))
        dist.barrier()  # the others are still here
    dist.destroy_process_group()


def end_as(what, code):
    if what == "fail":
        print(f"leaving with code {code}")
        sys.stdout.flush()
        os._exit(code)
    if what == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    while what == "sleep":
        time.sleep(60)


if __name__ == "__main__":
    main()
