# SPDX-License-Identifier: Apache-2.0
"""Programs that measure: `python -m benchmarks` lists them."""

import importlib.util
from pathlib import Path

import ds_hybridep

# In a checkout, the package hides one that was installed from a wheel, and the sources of kernels lie beside it.
if importlib.util.find_spec("ds_hybridep.op_builder") is None:
    ds_hybridep.__path__.append(str(Path(__file__).resolve().parents[1]))
