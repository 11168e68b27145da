# SPDX-License-Identifier: Apache-2.0
"""The "hybridep" block of a DeepSpeed config, checked by pydantic and kept in frozen models."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, ValidationInfo, model_validator

from ds_hybridep.config_codecs import (
    AUTO_CODEC,
    IDENTITY,
    PATCH,
    CodecSet,
    GradientCodec,
    OpenGradientCodec,
    OpenWeightCodec,
    Settings,
    TokenCodec,
    TokenCodecConfig,
    WeightCodec,
    recommended_codecs,
)
from ds_hybridep.config_messages import MINIMAL_BLOCK, cut, explain, shown
from ds_hybridep.errors import ConfigError
from ds_hybridep.geometry.cluster import BITS_PER_BYTE, MS_PER_S, Cluster, Level, LinkSpeed, divisors
from ds_hybridep.geometry.row_format import RowFormat

AUTO = "auto"

BITS_PER_GBIT = 1e9

MAX_CHILDREN = 1_000_000  # of a parent: more is a mistake, and finding their divisors would take long

Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
SiteName = Annotated[str, Field(pattern=r"^[\w.-]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
AsList = Field(strict=False)  # a list will do for a tuple


class LevelConfig(Settings):
    """One entry of `levels`; docs/config.md says what each key means."""

    name: Text
    size: Annotated[int, Field(ge=1, le=MAX_CHILDREN)]
    bandwidth_gbps: Annotated[float | None, Field(gt=0, lt=1e299)] = None  # so bits/s are finite too
    latency_ms: Annotated[float | None, Field(ge=0)] = None
    domain_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    hot_experts: Count | Literal["auto"] = 0
    hot_memory_gb: Annotated[float | None, Field(gt=0)] = None
    codecs: Literal["recommended"] | None = None
    weight_codec: OpenWeightCodec = IDENTITY
    gradient_codec: OpenGradientCodec = IDENTITY
    dense_weight_codec: WeightCodec | None = None
    dense_gradient_codec: GradientCodec | None = None
    token_codec: TokenCodec = TokenCodecConfig(type="identity")
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    connections: Annotated[int, Field(ge=1, le=16)] = 1
    congestion_control: Literal["bbr", "cubic"] | None = None

    @model_validator(mode="after")
    def _check_domain_size(self) -> "LevelConfig":
        if self.domain_size != "auto" and self.size % self.domain_size:
            raise ValueError(
                f"domain_size is {shown(self.domain_size)}, which does not divide the level's size {self.size}; "
                f'choose one of {cut(", ".join(map(str, divisors(self.size))))}, or "auto"'
            )
        return self

    @model_validator(mode="after")
    def _check_hot_experts(self) -> "LevelConfig":
        if self.hot_experts == 0:
            if self.hot_memory_gb is not None:
                raise ValueError('hot_memory_gb stands beside hot_experts 0; set that to "auto" or to a number')
            return self
        if self.domain_size not in (1, "auto"):
            raise ValueError(
                f"hot_experts is {shown(self.hot_experts)} beside domain_size {shown(self.domain_size)}, but copies "
                f"of hot experts go to ranks outside the domain; set hot_experts to 0, or domain_size to 1"
            )
        for key, codec in (("codecs", self.codecs), ("weight_codec", self.weight_codec.type)):
            if codec not in (None, "identity"):
                raise ValueError(
                    f"hot_experts is {shown(self.hot_experts)} beside {key} {shown(codec)}, but their weights travel "
                    f"as they are; leave out one of them (a gradient_codec and codecs of slower levels may stay)"
                )
        return self

    @model_validator(mode="after")
    def _check_codecs(self) -> "LevelConfig":
        for key in ("weight_codec", "gradient_codec"):
            if self.codecs is not None and key in self.model_fields_set:
                raise ValueError(
                    f'{key} stands beside codecs, which is "recommended" and has one already; leave out one of them '
                    f"(dense_{key} may stand beside codecs)"
                )
        self.check_backend()
        return self

    def check_backend(self) -> None:
        """Raises ValueError if the backend cannot carry the codecs."""
        if self.backend == "nccl" and PATCH in (self.weight_codec, self.dense_weight_codec):
            raise ValueError(
                'backend is "nccl", which cannot carry "patch", because patches are messages of varying length; set '
                'backend to "gloo", or write other codecs'
            )

    @property
    def all_codecs(self) -> CodecSet:
        """The codecs of this level, dense ones included.  "recommended" has no effect before `with_dtype`."""
        weight, gradient = self.weight_codec, self.gradient_codec
        return CodecSet(weight, gradient, self.dense_weight_codec or weight, self.dense_gradient_codec or gradient)

    @property
    def row_format(self) -> RowFormat | None:
        """Format of token rows on their way to experts across this level; None if they travel unchanged."""
        return None if self.token_codec.type == "identity" else self.token_codec.type

    def described(self) -> Level:
        """The level in the units of `geometry`."""
        bytes_per_s = None if self.bandwidth_gbps is None else self.bandwidth_gbps * BITS_PER_GBIT / BITS_PER_BYTE
        latency_s = None if self.latency_ms is None else self.latency_ms / MS_PER_S
        return Level(
            self.name, self.size, LinkSpeed(bytes_per_s, latency_s, self.connections, self.congestion_control)
        )


class TLSConfig(Settings):
    """Files of this host for connections between ranks; docs/config.md says what each key means."""

    certificate: Text
    key: Text
    authority: Text


class LinkConfig(Settings):
    """How ranks connect with each other; docs/config.md says what each key means."""

    ports: Annotated[tuple[Port, Port] | None, AsList] = None
    secret_file: Text | None = None
    tls: TLSConfig | None = None

    @model_validator(mode="after")
    def _check_ports(self) -> "LinkConfig":
        if self.ports is not None and self.ports[0] > self.ports[1]:
            raise ValueError(f"ports is {list(self.ports)}, but the first port of a range must not be above the last")
        return self


class SitesConfig(Settings):
    """Other sites that train the same model, each in a job of its own; docs/sites.md says what each key means."""

    names: Annotated[tuple[SiteName, ...], Field(min_length=2, strict=False)]
    meeting_point: Annotated[str, Field(pattern=r"^([^\s:\[\]]+|\[[0-9a-fA-F:.]+\]):\d+$")]  # HOST:PORT
    secret_file: Text
    name: SiteName | None = None
    host: Text | None = None
    every: Annotated[int, Field(ge=1)] = 1
    codecs: Literal["recommended"] | None = None

    @model_validator(mode="after")
    def _check_names(self) -> "SitesConfig":
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"names has a name twice: {shown(list(self.names))}; give each site its own name")
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the meeting point."""
        host, _, port = self.meeting_point.rpartition(":")
        return host.strip("[]"), int(port)


class AdvancedConfig(Settings):
    """Settings that are rarely needed; docs/config.md says what each key means."""

    prefetch_depth: Count = 2
    kernels: Literal["auto", "compiled", "reference"] = "auto"
    verify_interval: Count = 100
    dispatch_sms: Annotated[int | None, Field(ge=1)] = None
    replan: bool = True


class HybridEPConfig(Settings):
    """The whole "hybridep" block, made by `parse_config`; docs/config.md says what each key means."""

    levels: Annotated[tuple[LevelConfig, ...], AsList] = ()
    enabled: bool = True
    state: Literal["device", "host"] = "device"
    token_exchange: Literal["auto", "direct", "hierarchical", "deepspeed"] = "auto"
    dense_sync: Literal["deepspeed", "hierarchical"] | None = None
    auto_codecs: Annotated[tuple[GradientCodec, ...], AsList] = ()
    timeout_s: Annotated[float, Field(gt=0, le=1e9)] = 600.0
    report_interval: Count = 10
    report_file: Text | None = None
    link: LinkConfig = LinkConfig()
    sites: SitesConfig | None = None
    advanced: AdvancedConfig = AdvancedConfig()

    @property
    def domain_sizes(self) -> tuple[int, ...]:
        """Domain size of each level; 1 if it is not planned yet."""
        return tuple(1 if level.domain_size == "auto" else level.domain_size for level in self.levels)

    @property
    def is_planned(self) -> bool:
        """True if a domain size or a codec is "auto".  `token_exchange` does not count: it needs no measurement."""
        return any(
            level.domain_size == AUTO or AUTO_CODEC in (level.weight_codec, level.gradient_codec)
            for level in self.levels
        )

    def with_dtype(self, itemsize: int) -> "HybridEPConfig":
        """The settings with codecs in place of "recommended", for parameters of `itemsize` bytes an element.

        Codecs given for dense parameters stay.
        Raises ConfigError if a level's backend cannot carry the codecs.
        """
        recommended = recommended_codecs(itemsize)
        levels = []
        for index, level in enumerate(self.levels):
            if level.codecs is not None:
                level = level.model_copy(
                    update={
                        "codecs": None,
                        "weight_codec": recommended.weight,
                        "gradient_codec": recommended.gradient,
                        "dense_weight_codec": level.dense_weight_codec or recommended.dense_weight,
                        "dense_gradient_codec": level.dense_gradient_codec or recommended.dense_gradient,
                    }
                )
                try:
                    level.check_backend()
                except ValueError as error:
                    raise ConfigError(f"hybridep.levels[{index}].{error}") from None
            levels.append(level)
        return self.model_copy(update={"levels": tuple(levels)})

    def describe_codecs(self) -> tuple[str, ...]:
        """A line for each kind of payload and level that is encoded, for the log."""
        # If DeepSpeed sums dense parameters, only traffic of domains and hot experts is encoded on a level.
        return tuple(
            f"{kind.replace('_', ' ')}s {codec.name} over {level.name}"
            for kind in CodecSet._fields
            for level in self.levels
            if (codec := getattr(level.all_codecs, kind)) != IDENTITY
            and (
                self.dense_sync != "deepspeed"
                or ((level.domain_size != 1 or level.hot_experts != 0) and not kind.startswith("dense"))
            )
        )

    def cluster(self) -> Cluster:
        """The levels in the units of `geometry`: bytes per second and seconds."""
        return Cluster(tuple(level.described() for level in self.levels))

    def canonical(self) -> dict[str, Any]:
        """What all ranks must agree on, as JSON values; `report_file`, and what is of one machine, may differ."""
        return self.model_dump(
            mode="json", exclude={"report_file": True, "link": True, "sites": {"name", "secret_file", "host"}}
        )

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

    @property
    def hot_level(self) -> int | None:
        """Index of the level inside which hot experts get replicas."""
        return next((index for index, level in enumerate(self.levels) if level.hot_experts != 0), None)

    @model_validator(mode="after")
    def _check_hot_level(self) -> "HybridEPConfig":
        for index, level in enumerate(self.levels):
            if level.hot_experts != 0 and index != self.hot_level:
                raise ValueError(
                    f"levels[{index}].hot_experts is {shown(level.hot_experts)}, but hybridep."
                    f"levels[{self.hot_level}] has hot experts already; keep one of them, usually of the fastest"
                )
            if self.hot_level is not None and index > self.hot_level and level.domain_size != 1:
                for key, codec in (("codecs", level.codecs), ("weight_codec", level.weight_codec.type)):
                    if codec not in (None, "identity"):
                        raise ValueError(
                            f"levels[{index}].{key} is {shown(codec)} inside a domain, but weights of hot experts of "
                            f"hybridep.levels[{self.hot_level}], a slower level, travel there as they are; leave out "
                            f"one of them (a gradient_codec may stay)"
                        )
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> "HybridEPConfig":
        for index, level in enumerate(self.levels if self.enabled else ()):
            for key in ("dense_weight_codec", "dense_gradient_codec"):
                if self.dense_sync == "deepspeed" and getattr(level, key) not in (None, IDENTITY):
                    raise ValueError(
                        f"levels[{index}].{key} is {shown(getattr(level, key).type)}, but hybridep.dense_sync is "
                        f'"deepspeed", and DeepSpeed sends dense parameters as they are; leave out one of them'
                    )
            for key, value, known, kind in (
                ("token_codec", level.token_codec.type, "identity", "codecs"),
                ("domain_size", level.domain_size, 1, "domains"),
                ("hot_experts", level.hot_experts, 0, "hot experts"),
            ):
                if self.token_exchange == "deepspeed" and value != known:
                    raise ValueError(
                        f'token_exchange is "deepspeed", but hybridep.levels[{index}].{key} is {shown(value)}: '
                        f"DeepSpeed's own all-to-alls know no {kind}; set the {key} to {shown(known)}, or "
                        f'token_exchange to "auto"'
                    )
        return self


def parse_config(block: Mapping[str, Any], *, world_size: int, base_dir: str | Path = ".") -> HybridEPConfig:
    """The checked settings of a "hybridep" block for a job of `world_size` ranks; `levels` may be the path of a file.

    A relative path is looked up in `base_dir` first, then in the working directory.
    Raises ConfigError that names the key path, the value found, what is allowed and what to do.
    """
    given, source = dict(block) if isinstance(block, Mapping) else block, ""
    if isinstance(block, Mapping) and isinstance(block.get("levels"), str):
        path, content = read_cluster_file(block["levels"], base_dir)
        given, source = {**block, "levels": content["levels"]}, f"cluster file {path}: "
    elif isinstance(block, Mapping) and block.get("sites") is not None and "levels" not in block:
        # Inside a site DeepSpeed does everything, as without this package.
        inside = [{"name": "rank", "size": world_size}]
        given = {"levels": inside, "token_exchange": "deepspeed", "dense_sync": "deepspeed", **block}
    try:
        return HybridEPConfig.model_validate(given, context={"world_size": world_size})
    except ValidationError as error:
        message = explain(error, given, "hybridep")
    raise ConfigError(source + message if message.startswith("hybridep.levels") else message)


def read_cluster_file(name: str, base_dir: str | Path = ".") -> tuple[Path, Mapping[str, Any]]:
    """The path of a cluster file and its keys, `levels` and perhaps `device`, not checked yet.

    Raises ConfigError that names the file.
    """
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
        if key not in ("levels", "device"):
            raise ConfigError(
                f"cluster file {path}: {shown(key)} is not a known key; it may hold levels and device only, so move "
                f"other settings to the hybridep block"
            )
    return path, content


def parser_of(name: str, what: str) -> Callable[[str], object]:
    """The parser of a file's text, JSON if its name ends in .json, else YAML.  It raises ValueError for bad syntax."""
    if name.endswith(".json"):
        return json.loads
    try:
        import yaml  # only users of YAML files need the package
    except ImportError as error:
        raise ConfigError(f"{what} needs PyYAML; install it, or write the file as JSON") from error

    def parse(text: str) -> object:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error

    return parse
