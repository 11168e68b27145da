# SPDX-License-Identifier: Apache-2.0
"""Where ranks, experts and slices of parameters lie, what goes where, and how many bytes it has.

All that a running job and the planner compute alike: pure functions of integers, in SI base units, without torch.

    cluster        the machines as a tree of levels, and the place of each rank
    partition      an expert-parallel group cut into domains, and who owns which expert
    token_route    the exchanges by which a token row reaches its experts
    slots          how a data-parallel group shares a flat buffer
    packets        bytes of encoded messages, and how many of them are under way
    row_format     bytes of an encoded token row
    hot            which experts of a layer are hot
"""
