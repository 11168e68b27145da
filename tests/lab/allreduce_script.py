# SPDX-License-Identifier: Apache-2.0
"""What the launcher's tests run on each rank: one all-reduce over gloo, then as the argument says.

    allreduce_script.py NUM_FLOATS [fail RANK CODE]

Prints "rank R of W: SUM" with the sum of all ranks + 1. "fail" ends RANK with CODE while the others wait for it.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist


def main():
    num_floats, *fault = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((int(num_floats),), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.min() == tensor.max()
    print(f"rank {rank} of {world_size}: {tensor[0].item():g}", flush=True)
    if fault:
        if rank == int(fault[1]):
            print(f"leaving with code {fault[2]}", flush=True)
            os._exit(int(fault[2]))
        signal.pause()  # and not in a collective: that ends too, and may be seen first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
