# SPDX-License-Identifier: Apache-2.0
"""Smaller forms of expert weights and gradients, for slow links.  No communication.

The owner's side and a replica's side of one weight:

    packets = codec.encode_update(weights, mirror, state)
                                                            order.check(packets)
                                                            codec.decode_add(packets, replica)
                                                            order.advance()

Legend: n tensors of one shape [rows, cols]; L = rows * cols elements.
"""

from ds_hybridep.codecs.interface import Codec, CodecState, PacketOrder
from ds_hybridep.codecs.patch import Patch
from ds_hybridep.codecs.registry import make_codec, make_weight_codec

__all__ = ["Codec", "CodecState", "PacketOrder", "Patch", "make_codec", "make_weight_codec"]
