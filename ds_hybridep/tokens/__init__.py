# SPDX-License-Identifier: Apache-2.0
"""The path of a token: dispatch, experts, combine.

Legend of shapes, used by every docstring of this package:

    T  tokens of this rank in one call        K  top_k, experts per token
    D  hidden size                            F  hidden size inside an expert
    E  experts of the layer                   e  experts owned by one rank (E / G)
    R  rows after an exchange or permutation  G  ranks of the expert-parallel group
    N  destinations of one exchange           M  ranks of an expert domain
"""
