# SPDX-License-Identifier: Apache-2.0
"""Makes codec objects from their settings."""

from typing import Any

from ds_hybridep.codecs.blockwise import Blockwise
from ds_hybridep.codecs.interface import Codec
from ds_hybridep.codecs.low_rank import LowRank
from ds_hybridep.codecs.patch import Patch
from ds_hybridep.config_codecs import PATCH, CodecConfig, LowRankConfig
from ds_hybridep.kernels import Mode


def make_codec(config: CodecConfig, *, kernels: Mode = "auto") -> Codec:
    """Make the codec of these settings.

    kernels: "compiled" and "reference" insist on one implementation, "auto" prefers the compiled one.
    """
    kind: Any = LowRank if isinstance(config, LowRankConfig) else Blockwise
    made: Codec = kind(config=config, kernels=kernels)
    return made


def make_weight_codec(config: CodecConfig, *, kernels: Mode = "auto") -> Codec | Patch:
    """Like `make_codec`, but the codec may be a patch."""
    return Patch(kernels=kernels) if config == PATCH else make_codec(config, kernels=kernels)
