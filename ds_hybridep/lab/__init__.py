# SPDX-License-Identifier: Apache-2.0
"""Datacentres on one Linux machine: one network namespace per host, slow shaped links between groups of them.

    ds_hybridep lab --dcs 2x2 --wan 200mbit --delay 10ms -- python examples/train_lm.py --deepspeed_config ...

runs an unmodified training script with one rank per emulated host. From Python:

    with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=200e6, wan_delay_s=0.010)) as network:
        result = run_ranks(network, [sys.executable, "train.py"], log_dir=Path("logs"))

The lab uses the standard library only, and changes nothing outside the namespaces that it makes.
"""
