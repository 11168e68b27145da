# SPDX-License-Identifier: Apache-2.0
"""Settings of codecs in the "hybridep" block, and the set that it recommends."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ds_hybridep.config_messages import nearest, shown
from ds_hybridep.geometry.packets import LARGEST_RANK

DEFAULT_RATIO = 50.0  # of low rank: fp32 bytes over bytes sent


def _named(codec: object) -> object:
    """Turns a codec that is given by its name alone into an object."""
    return {"type": codec} if isinstance(codec, str) else codec


class Settings(BaseModel):
    """Immutable settings with fixed keys and types.  `model_copy(update={...})` makes changed ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    GONE: ClassVar[Mapping[str, str]] = {}  # keys of earlier versions, and what is there instead

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: Any) -> Any:
        """Goes before all other checks: a typo may be why another key is missing."""
        for key in given if isinstance(given, Mapping) else ():
            if key in cls.GONE:
                raise ValueError(f"{key} is no longer a key: {cls.GONE[key]}; remove it")
            if key not in cls.model_fields:
                raise ValueError(
                    f"{shown(key).strip(chr(34))} is not a known key; {nearest(key, cls.model_fields) or 'remove it'} "
                    f"(known keys: {', '.join(cls.model_fields)})"
                )
        return given


class CodecConfig(Settings):
    """How one kind of payload is encoded on the links of a level."""

    type: str

    @property
    def name(self) -> str:
        """The codec with its options, for people; different for different settings."""
        words = [self.type]
        for key in sorted(self.spec.keys() - {"type"}):
            value = getattr(self, key)
            if isinstance(value, CodecConfig):
                value = value.name
            words.append(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
        return " ".join(words)

    @property
    def spec(self) -> dict[str, Any]:
        """The settings as JSON values, without those at their default."""
        return self.model_dump(mode="json", exclude_defaults=True)


class IdentityConfig(CodecConfig):
    """No codec: every element is sent as it is."""

    type: Literal["identity"]


class BlockwiseConfig(CodecConfig):
    """Small integers, with a scale for each `block` elements."""

    type: Literal["int8", "int4", "int2"]
    block: Literal[8, 16, 32, 64, 128, 256, 512, 1024] = 128


class LowRankConfig(CodecConfig):
    """Two thin factors for each matrix; `codecs.low_rank` says what the options do."""

    GONE = {"factors": "factors are integers of 4 bits, which leave less at the same bytes"}
    type: Literal["low_rank"]
    ratio: Annotated[float | None, Field(gt=1, le=1e6)] = None  # becomes DEFAULT_RATIO if no rank is given
    rank: Annotated[int | None, Field(ge=1, le=LARGEST_RANK)] = None
    weighting: Literal["none", "rms"] = "none"
    rest: Annotated[BlockwiseConfig | None, BeforeValidator(_named)] = None

    @model_validator(mode="before")
    @classmethod
    def _by_ratio(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("ratio") is given.get("rank") is None:
            return {**given, "ratio": DEFAULT_RATIO}
        return given

    @model_validator(mode="after")
    def _check(self) -> "LowRankConfig":
        if self.ratio is not None and self.rank is not None:
            raise ValueError(f"rank is {self.rank}, but ratio is {self.ratio:g}; leave out one of them")
        return self


class PatchConfig(CodecConfig):
    """Sends weights exactly, as entropy-coded changes of their 16-bit values; `codecs.patch` says how."""

    type: Literal["patch"]


class AutoConfig(CodecConfig):
    """Leaves the choice of a codec to a job that plans itself."""

    type: Literal["auto"]


class TokenCodecConfig(CodecConfig):
    """How token rows travel to experts."""

    type: Literal["identity", "int8", "fp8"]


_Gradient = IdentityConfig | BlockwiseConfig | LowRankConfig
AnyCodec = _Gradient | PatchConfig
GradientCodec = Annotated[_Gradient, Field(discriminator="type"), BeforeValidator(_named)]
WeightCodec = Annotated[AnyCodec, Field(discriminator="type"), BeforeValidator(_named)]
OpenGradientCodec = Annotated[_Gradient | AutoConfig, Field(discriminator="type"), BeforeValidator(_named)]
OpenWeightCodec = Annotated[AnyCodec | AutoConfig, Field(discriminator="type"), BeforeValidator(_named)]
TokenCodec = Annotated[TokenCodecConfig, BeforeValidator(_named)]

IDENTITY = IdentityConfig(type="identity")
AUTO_CODEC = AutoConfig(type="auto")
PATCH = PatchConfig(type="patch")


class CodecSet(NamedTuple):
    """The codecs of the four kinds of parameter payloads that cross a level."""

    weight: CodecConfig
    gradient: CodecConfig
    dense_weight: CodecConfig
    dense_gradient: CodecConfig


def recommended_codecs(itemsize: int) -> CodecSet:
    """What `"codecs": "recommended"` stands for, by the bytes of a parameter; docs/codecs.md has its costs."""
    low_rank = LowRankConfig(type="low_rank", ratio=50.0)
    balanced = LowRankConfig(type="low_rank", ratio=50.0, weighting="rms")
    # Low rank alone leaves out too much of embeddings.
    rest = {"rest": BlockwiseConfig(type="int2", block=64)}
    dense, dense_balanced = low_rank.model_copy(update=rest), balanced.model_copy(update=rest)
    is_16_bit = itemsize == 2
    return CodecSet(PATCH if is_16_bit else low_rank, balanced, PATCH if is_16_bit else dense, dense_balanced)
