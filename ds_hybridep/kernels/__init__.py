# SPDX-License-Identifier: Apache-2.0
"""Local operations of token routing (which rows to send, gather them, sum them back) and of codecs.  No communication.

reference.py says what each operation computes.  C++ and CUDA give the same bits, except for dot products of the gate's
gradient and what low rank encodes.
Legend: T tokens, K top_k, D hidden, R rows, N destinations, E experts.
"""

from ds_hybridep.kernels.build import Kernels, Mode, load_codec_kernels, load_kernels
from ds_hybridep.kernels.codecs import CompiledCodecs, Source, require_dense_rows
from ds_hybridep.kernels.compiled import Routes

__all__ = [
    "CompiledCodecs",
    "Kernels",
    "Mode",
    "Routes",
    "Source",
    "load_codec_kernels",
    "load_kernels",
    "require_dense_rows",
]
