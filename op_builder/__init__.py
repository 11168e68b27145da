# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels in csrc/.  Installed as `ds_hybridep.op_builder`, never under its own name.

DeepSpeed imports a top-level `op_builder` to find out whether it runs from its own source checkout, and looks there
for a marker that this module must never define.
"""

from ds_hybridep.op_builder.hybridep import HybridEPBuilder

__all__ = ["HybridEPBuilder"]
