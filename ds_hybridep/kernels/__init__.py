# SPDX-License-Identifier: Apache-2.0
"""Local operations of token routing (which rows to send, gather them, sum them back) and of codecs.  No communication.

    reference.py  what each operation computes, and its definition in plain PyTorch, for every device and dtype
    compiled.py   the same from csrc/, for the CPU, and the checks of arguments
    cuda.py       the same from csrc/, for CUDA devices
    codecs.py     kernels of codecs; their definition is in ds_hybridep.codecs
    build.py      load_kernels, load_codec_kernels: which of them a process gets, and why

Legend: T tokens, K top_k, D hidden, R rows, N destinations, E experts.
"""

from ds_hybridep.kernels.build import Kernels, Mode, load_codec_kernels, load_kernels
from ds_hybridep.kernels.codecs import CompiledCodecs, Source
from ds_hybridep.kernels.compiled import RoutePlan

__all__ = ["CompiledCodecs", "Kernels", "Mode", "RoutePlan", "Source", "load_codec_kernels", "load_kernels"]
