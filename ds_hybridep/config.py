"""The "hybridep" block of a DeepSpeed config, checked by pydantic and kept in frozen models.

A field's annotation says what the field accepts, and `Says` beside it has the words for people.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from ds_hybridep.config_messages import MINIMAL_BLOCK, Says, cut, explain, shown
from ds_hybridep.errors import ConfigError
from ds_hybridep.plan.cluster import Cluster, Level, Link, divisors
from ds_hybridep.plan.models import parser_of
from ds_hybridep.plan.row_format import RowFormat

AUTO = "auto"

BITS_PER_BYTE = 8
BITS_PER_GBIT = 1e9
MS_PER_S = 1e3

BLOCKS = tuple(2**power for power in range(3, 11))  # elements of a blockwise codec that may share a scale
MAX_CHILDREN = 1_000_000  # of a parent: more is a mistake, and finding their divisors would take long


# ---- what a field accepts, and the words for it ----


def _integer(allowed: str, example: int) -> Says:
    return Says(f"an integer {allowed}", f"write it without quotes and without a fraction, for example {example}")


def _is_block(block: int) -> int:
    if block not in BLOCKS:
        raise ValueError
    return block


def _named(codec: object) -> object:
    """A codec given by its name alone, as an object."""
    return {"type": codec} if isinstance(codec, str) else codec


def _tuple(entries: object) -> object:
    return tuple(entries) if isinstance(entries, list) else entries


_CODECS = Says("a list of codecs", 'for example ["int8"]')
_LEVELS = Says("a list of at least one level, or the path of a cluster file", f"for example {MINIMAL_BLOCK}")
_NAME = Says("a string that is not empty", 'give each level its own name, for example "dc"')
_PATH = Says("a string that is not empty", "give the path of a file, or leave the key out")
_BANDWIDTH = Says("a finite number > 0", "give Gbit/s (bits, not bytes) of one child's uplink, or leave the key out")
_LATENCY = Says("a finite number >= 0", "give milliseconds one way, or leave the key out")
_TIMEOUT = Says("a finite number > 0 and at most 1e9", "give the longest wait in seconds, for example 600")

Switch = Annotated[bool, Says("true or false", "write it without quotes")]
Count = Annotated[int, Field(ge=0), _integer(">= 0", 2)]
OptionalPath = Annotated[str | None, Field(pattern=r"\S"), _PATH]
Block = Annotated[int, AfterValidator(_is_block), Says(f"one of {', '.join(map(str, BLOCKS))}", "choose one of these")]
Rank = Annotated[int, Field(ge=1, le=1024), _integer("from 1 to 1024", 4)]
OptionalRank = Annotated[int | None, Field(ge=1, le=1024), _integer("from 1 to 1024", 16)]
Steps = Annotated[int, Field(ge=1, le=10**9), _integer("from 1 to 1000000000", 64)]
OptionalSteps = Annotated[int | None, Field(ge=1, le=10**9), _integer("from 1 to 1000000000", 20)]


class Settings(BaseModel):
    """Settings that know their keys and types and never change.  `model_copy(update={...})` makes other ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# ---- codecs ----


class CodecConfig(Settings):
    """How one kind of payload is encoded on the links of a level."""

    type: str

    @property
    def spec(self) -> dict[str, Any]:
        """The settings as JSON values, without those at their default."""
        return self.model_dump(mode="json", exclude_defaults=True)


class IdentityConfig(CodecConfig):
    """Nothing is left out, except by rounding to `dtype`."""

    type: Literal["identity"]
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


class BlockwiseConfig(CodecConfig):
    """Small integers, with a scale for each `block` elements."""

    type: Literal["int8", "int4", "int2"]
    block: Block = 128


PlainCodec = Annotated[IdentityConfig | BlockwiseConfig, Field(discriminator="type"), BeforeValidator(_named)]


class LowRankConfig(CodecConfig):
    """Two thin factors for each matrix; `codecs.low_rank` says what the options do."""

    type: Literal["low_rank"]
    rank: Rank = 4
    factors: Literal["fp32", "bf16", "int8", "int4", "int2", "log4"] = "int8"
    weighting: Literal["none", "rms"] = "none"
    iterations: Annotated[int, Field(ge=1, le=8), _integer("from 1 to 8", 1)] = 1
    refresh_interval: Steps = 64
    fallback: PlainCodec = BlockwiseConfig(type="int4")
    rest: Annotated[BlockwiseConfig | None, BeforeValidator(_named)] = None
    first_rank: OptionalRank = None
    first_steps: OptionalSteps = None

    @model_validator(mode="after")
    def _check(self) -> "LowRankConfig":
        if (self.first_rank is None) != (self.first_steps is None):
            key, other = ("first_steps", "first_rank") if self.first_steps is None else ("first_rank", "first_steps")
            raise ValueError(
                f"{key} is missing, but {other} is {getattr(self, other)}; set both, the rank of the first packets "
                f"and their number, or neither"
            )
        return self


class AutoConfig(CodecConfig):
    """Chosen by a job that plans itself."""

    type: Literal["auto"]


class TokenCodecConfig(CodecConfig):
    """How token rows travel to experts."""

    type: Literal["identity", "int8", "fp8"]


_Expert = IdentityConfig | BlockwiseConfig | LowRankConfig
ExpertCodec = Annotated[_Expert, Field(discriminator="type"), BeforeValidator(_named)]
OpenCodec = Annotated[_Expert | AutoConfig, Field(discriminator="type"), BeforeValidator(_named)]
TokenCodec = Annotated[TokenCodecConfig, BeforeValidator(_named)]

IDENTITY = IdentityConfig(type="identity")
AUTO_CODEC = AutoConfig(type="auto")


# ---- the block ----


class LevelConfig(Settings):
    """One entry of `levels`; docs/config.md says what each key means."""

    name: Annotated[str, Field(pattern=r"\S"), _NAME]
    size: Annotated[int, Field(ge=1, le=MAX_CHILDREN), _integer(f">= 1 and at most {MAX_CHILDREN}", 2)]
    bandwidth_gbps: Annotated[float | None, Field(gt=0, lt=1e299), _BANDWIDTH] = None  # finite in bits too
    latency_ms: Annotated[float | None, Field(ge=0), _LATENCY] = None
    domain_size: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], _integer('>= 1, or "auto"', 1)] = 1
    weight_codec: OpenCodec = IDENTITY
    gradient_codec: OpenCodec = IDENTITY
    token_codec: TokenCodec = TokenCodecConfig(type="identity")
    backend: Literal["auto", "gloo", "nccl"] = "auto"

    @model_validator(mode="after")
    def _check_domain_size(self) -> "LevelConfig":
        if self.domain_size != "auto" and self.size % self.domain_size:
            raise ValueError(
                f"domain_size is {shown(self.domain_size)}, which does not divide the level's size {self.size}; "
                f'choose one of {cut(", ".join(map(str, divisors(self.size))))}, or "auto"'
            )
        return self

    @property
    def row_format(self) -> RowFormat | None:
        """Of token rows on their way to experts across this level; None: as they are."""
        return None if self.token_codec.type == "identity" else self.token_codec.type

    def described(self) -> Level:
        """The level in the units of `plan`."""
        bytes_per_s = None if self.bandwidth_gbps is None else self.bandwidth_gbps * BITS_PER_GBIT / BITS_PER_BYTE
        latency_s = None if self.latency_ms is None else self.latency_ms / MS_PER_S
        return Level(self.name, self.size, Link(bytes_per_s, latency_s))


class AdvancedConfig(Settings):
    """What hardly anybody sets; docs/config.md says what each key means."""

    prefetch_depth: Count = 2
    kernels: Literal["auto", "compiled", "reference"] = "auto"
    verify_interval: Count = 100
    dispatch_sms: Annotated[int | None, Field(ge=1), _integer(">= 1", 16)] = None
    replan: Switch = True


class HybridEPConfig(Settings):
    """The whole "hybridep" block, made by `parse_config`; docs/config.md says what each key means."""

    levels: Annotated[tuple[LevelConfig, ...], Field(min_length=1), BeforeValidator(_tuple), _LEVELS] = ()
    enabled: Switch = True
    replicas: Literal["persistent", "transient"] = "persistent"
    token_exchange: Literal["auto", "direct", "hierarchical", "deepspeed"] = "auto"
    dense_sync: Literal["deepspeed", "hierarchical", "auto"] = "deepspeed"
    auto_codecs: Annotated[tuple[ExpertCodec, ...], BeforeValidator(_tuple), _CODECS] = ()
    timeout_s: Annotated[float, Field(gt=0, le=1e9), _TIMEOUT] = 600.0
    report_interval: Count = 10
    report_file: OptionalPath = None
    advanced: AdvancedConfig = AdvancedConfig()

    @property
    def domain_sizes(self) -> tuple[int, ...]:
        """Domain size of each level; 1 where it is not planned yet."""
        return tuple(1 if level.domain_size == "auto" else level.domain_size for level in self.levels)

    @property
    def is_planned(self) -> bool:
        """True where a domain size, a codec or `dense_sync` is "auto"; `token_exchange` is known without measuring."""
        return self.dense_sync == AUTO or any(
            level.domain_size == AUTO or AUTO_CODEC in (level.weight_codec, level.gradient_codec)
            for level in self.levels
        )

    def cluster(self) -> Cluster:
        """The levels in the units of `plan`: bytes per second and seconds."""
        return Cluster(tuple(level.described() for level in self.levels))

    def canonical(self) -> dict[str, Any]:
        """What all ranks must agree on, as JSON values; `report_file` concerns rank 0 alone."""
        return self.model_dump(mode="json", exclude={"report_file"})

    # Messages of these checks begin with the key.

    @model_validator(mode="after")
    def _check_levels(self, info: ValidationInfo) -> "HybridEPConfig":
        first_of: dict[str, int] = {}
        for index, level in enumerate(self.levels):
            if first_of.setdefault(level.name, index) != index:
                raise ValueError(
                    f"levels[{index}].name is {shown(level.name)}, which hybridep.levels[{first_of[level.name]}] has "
                    f"already; give each level its own name"
                )
        if not self.enabled:
            return self
        if not self.levels:
            raise ValueError(
                f"levels is missing; describe the job from the slowest link to the fastest, for example "
                f"{MINIMAL_BLOCK}"
            )
        world_size, product = (info.context or {}).get("world_size"), math.prod(level.size for level in self.levels)
        if world_size is not None and product != world_size:
            sizes = cut(" x ".join(f"{level.name} ({level.size})" for level in self.levels))
            raise ValueError(
                f"levels: the sizes {sizes} make {shown(product)} ranks, but the job has {world_size}; set the sizes "
                f"so that their product is {world_size}, or launch {shown(product)} ranks"
            )
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> "HybridEPConfig":
        for index, level in enumerate(self.levels if self.enabled else ()):
            for key, value, known, kind in (
                ("token_codec", level.token_codec.type, "identity", "codecs"),
                ("domain_size", level.domain_size, 1, "domains"),
            ):
                if self.token_exchange == "deepspeed" and value != known:
                    raise ValueError(
                        f'token_exchange is "deepspeed", but hybridep.levels[{index}].{key} is {shown(value)}: '
                        f"DeepSpeed's own all-to-alls know no {kind}; set the {key} to {shown(known)}, or "
                        f'token_exchange to "auto"'
                    )
            # Transient replicas are gathered as they are: there is nothing that a change could be added to.
            if self.replicas == "transient" and level.weight_codec != IDENTITY:
                raise ValueError(
                    f"levels[{index}].weight_codec is {shown(level.weight_codec.type)}, but hybridep.replicas is "
                    f'"transient": a lossy codec sends changes, and replicas that are not kept have nothing to add '
                    f'them to; set weight_codec to "identity" (gradient_codec is free), or replicas to "persistent"'
                )
        return self


def parse_config(block: Mapping[str, Any], *, world_size: int, base_dir: str | Path = ".") -> HybridEPConfig:
    """The checked settings of a "hybridep" block, for a job of `world_size` ranks; `levels` may be a path of a file.

    A relative path is looked for in `base_dir` first, then in the working directory.
    Raises ConfigError that names the key path, the value found, what is allowed and what to do.
    """
    given, source = dict(block) if isinstance(block, Mapping) else block, ""
    if isinstance(block, Mapping) and isinstance(block.get("levels"), str):
        path, levels = _read_cluster_file(block["levels"], base_dir)
        given, source = {**block, "levels": levels}, f"cluster file {path}: "
    try:
        return HybridEPConfig.model_validate(given, context={"world_size": world_size})
    except ValidationError as error:
        message = explain(error, given, "hybridep", _MODELS)
    raise ConfigError(source + message if message.startswith("hybridep.levels") else message)


def _read_cluster_file(name: str, base_dir: str | Path) -> tuple[Path, object]:
    """The path of a cluster file, and its levels, not checked.  Raises ConfigError that names the file."""
    # Unlike Path.is_file, os.path.isfile is False for names that no file can have.
    path = next((path for path in (Path(base_dir) / name, Path(name)) if os.path.isfile(path)), None)
    if path is None:
        raise ConfigError(
            f"hybridep.levels is the path {shown(name)}, but there is no such file in {base_dir} or in the working "
            f"directory; correct the path, or write the levels as a list"
        )
    parse = parser_of(path.name, f"cluster file {path}")
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cluster file {path} cannot be read ({error.strerror}); correct hybridep.levels") from error
    except (ValueError, RecursionError) as error:  # syntax, encoding, or a date that does not exist
        raise ConfigError(f"cluster file {path} cannot be parsed; correct its syntax: {error}") from error
    if not isinstance(content, Mapping) or "levels" not in content:
        raise ConfigError(f"cluster file {path} has no key levels at its top; move the list of levels under it")
    for key in content:
        if key != "levels":
            raise ConfigError(
                f"cluster file {path}: {shown(key)} is not a known key; it may hold levels only, so move other "
                f"settings to the hybridep block"
            )
    return path, content["levels"]


def parse_codec(spec: object, *, where: str) -> CodecConfig:
    """The checked settings of a codec for experts.  Raises ConfigError whose key path begins with `where`."""
    try:
        return _EXPERT_CODEC.validate_python(spec)
    except ValidationError as error:
        message = explain(error, spec, where, _MODELS)
    raise ConfigError(message)


_EXPERT_CODEC: TypeAdapter[_Expert] = TypeAdapter(ExpertCodec)
_MODELS: dict[int | str, type[Settings]] = {  # by the keys and the types of codecs that stand in pydantic's locations
    "hybridep": HybridEPConfig,
    "levels": LevelConfig,
    "advanced": AdvancedConfig,
    "token_codec": TokenCodecConfig,
    "identity": IdentityConfig,
    **dict.fromkeys(("int8", "int4", "int2", "rest"), BlockwiseConfig),
    "low_rank": LowRankConfig,
    "auto": AutoConfig,
}
