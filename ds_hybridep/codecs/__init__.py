# SPDX-License-Identifier: Apache-2.0
"""Smaller forms of expert weights and gradients, for slow links.  No communication.

The owner's side and a replica's side of one weight:

    packets = codec.encode_update(weights, mirror, state)
                                                            order.check(packets)
                                                            codec.decode_add(packets, replica)
                                                            order.advance()

Legend: n tensors of one shape [rows, cols]; L = rows * cols elements.
"""

from typing import Any

from ds_hybridep.codecs.blockwise import Blockwise
from ds_hybridep.codecs.interface import Codec, CodecState, PacketOrder
from ds_hybridep.codecs.low_rank import LowRank
from ds_hybridep.codecs.patch import PatchCodec
from ds_hybridep.config_codecs import PATCH, CodecConfig, LowRankConfig
from ds_hybridep.kernels import Mode, Source

__all__ = ["Codec", "CodecState", "PacketOrder", "PatchCodec", "Source", "make_codec", "make_weight_codec"]


def make_codec(config: CodecConfig, *, kernels: Mode = "auto") -> Codec:
    """Make the codec of these settings.

    kernels: "compiled" and "reference" insist on one implementation, "auto" prefers the compiled one.
    """
    kind: Any = LowRank if isinstance(config, LowRankConfig) else Blockwise
    made: Codec = kind(config=config, kernels=kernels)
    return made


def make_weight_codec(config: CodecConfig, *, kernels: Mode = "auto") -> Codec | PatchCodec:
    """Like `make_codec`, but the codec may be a patch."""
    return PatchCodec(kernels=kernels) if config == PATCH else make_codec(config, kernels=kernels)
