# SPDX-License-Identifier: Apache-2.0
"""Makes codec objects from their settings."""

from collections.abc import Mapping
from typing import Any

from ds_hybridep.codecs.blockwise import Blockwise
from ds_hybridep.codecs.identity import Identity
from ds_hybridep.codecs.interface import Codec
from ds_hybridep.codecs.low_rank import LowRank
from ds_hybridep.codecs.patch import Patch
from ds_hybridep.config import parse_codec
from ds_hybridep.config_codecs import BlockwiseConfig, CodecConfig, IdentityConfig, LowRankConfig, PatchConfig
from ds_hybridep.kernels import Mode

BITS = {"int8": 8, "int4": 4, "int2": 2}


def make_codec(spec: str | Mapping[str, Any] | CodecConfig, *, where: str = "codec", kernels: Mode = "auto") -> Codec:
    """Make the codec that `spec` describes: a name, an object with "type" and that type's options, or its settings.

    where: key path of `spec`, for a ConfigError.
    kernels: "compiled" and "reference" insist on one implementation, "auto" prefers the compiled one.
    """
    settings = spec if isinstance(spec, CodecConfig) else parse_codec(spec, where=where)
    if isinstance(settings, IdentityConfig):
        return Identity(dtype=settings.dtype, kernels=kernels)
    if isinstance(settings, BlockwiseConfig):
        return Blockwise(bits=BITS[settings.type], block=settings.block, kernels=kernels)
    assert isinstance(settings, LowRankConfig), f"{where}: {settings.type} is no codec for experts"
    return LowRank(
        wanted_ratio=settings.ratio,
        rank=settings.rank,
        factors=settings.factors,
        weighting=settings.weighting,
        iterations=settings.iterations,
        refresh_interval=settings.refresh_interval,
        fallback=make_codec(settings.fallback, kernels=kernels),
        rest=None if settings.rest is None else make_codec(settings.rest, kernels=kernels),
        kernels=kernels,
    )


def make_weight_codec(settings: CodecConfig, *, kernels: Mode = "auto") -> Codec | Patch:
    """Like `make_codec`, but the codec may be a patch."""
    return Patch(kernels=kernels) if isinstance(settings, PatchConfig) else make_codec(settings, kernels=kernels)
