# SPDX-License-Identifier: Apache-2.0
"""Datacentres on one Linux machine: one network namespace per host, slow shaped links between groups of them.

    ds_hybridep lab --dcs 2x2 --wan 200mbit --delay 10ms -- python examples/train_lm.py --deepspeed_config ...

runs an unmodified training script with one rank per emulated host. From Python:

    topology, links = Topology.parse("2x2"), LinkSpec(wan_bits_per_s=200e6, wan_delay_s=0.010)
    with EmulatedNetwork(topology, links) as network:
        result = run_ranks(network, [sys.executable, "train.py"], log_dir=Path("logs"))

topology.py   names, addresses and settings; pure
namespaces.py the tools that make namespaces, and the processes inside
network.py    EmulatedNetwork: namespaces, bridges, rates, cut links, counted bytes
delay.py      compiles and starts delay_line.c, which holds back every frame for a fixed time
launcher.py   one process per host, logs, time limit, failures -> LabResult
modelled.py   for machines that do not permit namespaces: seconds that the bytes of a run would take

The lab uses the standard library only, and changes nothing outside the namespaces that it makes.
"""
