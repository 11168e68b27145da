# SPDX-License-Identifier: Apache-2.0
"""What the test of dense traffic runs on each of 2x2 hosts: sums of one vector, ours or torch's.

    dense_script.py (levels | torch) NUM_FLOATS NUM_SUMS

Prints "sent DENSE_BYTES_OVER_THE_SLOW_LEVEL".
"""

import sys

import torch
import torch.distributed as dist

from ds_hybridep.plan.cluster import Cluster, Level
from ds_hybridep.sync.dense import GroupSync
from ds_hybridep.sync.feedback import Encoding
from ds_hybridep.sync.gradients import StepChanges
from ds_hybridep.transport.agreement import agree
from ds_hybridep.transport.channels import Transport


def main():
    way, num_floats, num_sums = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    transport = Transport(Cluster((Level("dc", 2), Level("gpu", 2))), 60.0, agree({}, 60.0))
    collectives = GroupSync(
        transport, range(4), "test", Encoding((None, None), (None, None)), StepChanges(), torch.device("cpu")
    )
    tensor = torch.full((num_floats,), float(dist.get_rank() + 1))
    for _ in range(num_sums):
        if way == "levels":
            collectives.all_reduce(tensor)
        else:
            dist.all_reduce(tensor)
    assert tensor.min() == tensor.max() == 10 * 4 ** (num_sums - 1)
    print(f"sent {transport.traffic.sent_bytes[0, 'dense']}")
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
