"""The "hybridep" block of a DeepSpeed config, read once into frozen settings.

Each field below carries its own reader, so that the place where a setting is declared says what it accepts. A reader
takes the value and its key path, and returns the value in its final type or raises ConfigError.
"""

import difflib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ds_hybridep.errors import ConfigError
from ds_hybridep.plan.cluster import Cluster, Level, Link, divisors
from ds_hybridep.plan.row_format import RowFormat

Reader = Callable[[object, str], object]

EXPERT_CODECS = ("identity", "int8", "int4", "int2", "low_rank")
TOKEN_CODECS = ("identity", *get_args(RowFormat))
FUTURE_CODECS = ("fp8",)
AUTO = "auto"

BITS_PER_BYTE = 8
BITS_PER_GBIT = 1e9
MS_PER_S = 1e3

MINIMAL_BLOCK = '"hybridep": {"levels": [{"name": "dc", "size": 2}, {"name": "gpu", "size": 4}]}'
MAX_SHOWN_CHARACTERS = 80  # of a wrong value in an error message


# ---- readers of one value ----


def _read_bool(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise refused(where, value, "true or false", "write it without quotes")
    return value


def _integer(*, at_least: int, example: int) -> Reader:
    def read(value: object, where: str) -> int:
        # bool is an int to Python, but nobody who writes true means 1.
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            advice = f"write it without quotes and without a fraction, for example {example}"
            raise refused(where, value, f"an integer >= {at_least}", advice)
        return value

    return read


def _zero_or_one(value: object, where: str) -> int:
    # True == 1 to Python, but nobody who writes true means 1.
    if isinstance(value, bool) or value not in (0, 1):
        raise refused(where, value, "0 or 1", "0 keeps replicas as new as their owners")
    return int(value == 1)


def _number(*, allowed: str, accepts: Callable[[float], bool], advice: str) -> Reader:
    def read(value: object, where: str) -> float:
        number = _as_float(value)
        if not (math.isfinite(number) and accepts(number)):
            raise refused(where, value, f"a finite number {allowed}", advice)
        return number

    return read


def _as_float(value: object) -> float:
    """`value` as a float; nan where it is no number, or one beyond the range of floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _text(*, advice: str) -> Reader:
    def read(value: object, where: str) -> str:
        if not isinstance(value, str) or not value.strip():
            raise refused(where, value, "a string that is not empty", advice)
        return value

    return read


def _choice(*choices: str) -> Reader:
    def read(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise refused(where, value, f"one of {quoted(choices)}", nearest(value, choices) or "choose one of these")
        return value

    return read


def _optional(reader: Reader) -> Reader:
    return lambda value, where: None if value is None else reader(value, where)


def _codec(available: Sequence[str]) -> Reader:
    """Reader of a codec whose type is one of `available`; its options are checked where the codec is made."""
    known = (*EXPERT_CODECS, *FUTURE_CODECS, AUTO)

    def read(value: object, where: str) -> "CodecConfig":
        if isinstance(value, str):
            value, where_type = {"type": value}, where
        elif isinstance(value, Mapping) and "type" in value:
            where_type = f"{where}.type"
        else:
            advice = f"available: {quoted(available)}"
            raise refused(where, value, 'a codec name or an object such as {"type": "identity"}', advice)
        name = value["type"]
        if isinstance(name, str) and name not in available and name in known:
            raise ConfigError(
                f"{where_type} is {shown(name)}, which is not available yet; choose one of {quoted(available)}"
            )
        if not isinstance(name, str) or name not in available:
            advice = nearest(name, (*available, *known)) or "choose one of these"
            raise refused(where_type, name, f"one of {quoted(available)}", advice)
        options = {key: option for key, option in value.items() if key != "type"}
        try:
            return CodecConfig(type=name, options=json.dumps(options, sort_keys=True))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where} is {shown(value)}, but must be JSON: {error}; use plain values") from error

    return read


def _token_codec(value: object, where: str) -> "CodecConfig":
    codec: CodecConfig = _codec(TOKEN_CODECS)(value, where)  # type: ignore[assignment]
    options = json.loads(codec.options)
    if options:
        raise ConfigError(
            f"{where}.{next(iter(options))} is not a known option; token codecs have none, write {shown(codec.type)}"
        )
    return codec


def _codec_list(value: object, where: str) -> tuple["CodecConfig", ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise refused(where, value, "a list of codecs", 'for example ["int8"]')
    read = _codec(EXPERT_CODECS)
    return tuple(read(entry, f"{where}[{index}]") for index, entry in enumerate(value))  # type: ignore[misc]


def _read_domain_size(value: object, where: str) -> object:
    return value if value == AUTO else _integer(at_least=1, example=1)(value, where)


# ---- the settings ----


def _read_by(reader: Reader) -> dict[str, Reader]:
    """Metadata that attaches a reader to a field."""
    return {"reader": reader}


_BANDWIDTH = _number(
    allowed="> 0",
    accepts=lambda gbps: gbps > 0 and math.isfinite(gbps * BITS_PER_GBIT),
    advice="give Gbit/s (bits, not bytes) of one child's uplink, or leave the key out",
)
_LATENCY = _number(
    allowed=">= 0", accepts=lambda ms: ms >= 0, advice="give milliseconds one way, or leave the key out"
)
_THRESHOLD = _number(
    allowed=">= 0 and below 1",
    accepts=lambda share: 0 <= share < 1,
    advice="give the share of a step that another plan must save, for example 0.03",
)
_TIMEOUT = _number(
    allowed="> 0 and at most 1e9",
    accepts=lambda seconds: 0 < seconds <= 1e9,
    advice="give the longest wait in seconds, for example 600",
)


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """How one kind of payload is encoded on the links of a level.

    type: name of the codec.
    options: of that type, as JSON.
    """

    type: str
    options: str = "{}"

    @property
    def spec(self) -> dict[str, Any]:
        """As `codecs.make_codec` reads it."""
        return {"type": self.type, **json.loads(self.options)}


IDENTITY = CodecConfig(type="identity")
AUTO_CODEC = CodecConfig(type=AUTO)


@dataclass(frozen=True, kw_only=True)
class LevelConfig:
    """One entry of `levels`, as the user wrote it.

    name: unique among the levels.
    size: children of each parent at this level.
    bandwidth_gbps: Gbit/s of one child's uplink in each direction, shared by the ranks below; None: not known yet.
    latency_ms: milliseconds one way; None: not known yet.
    domain_size: neighbouring children that form one domain; divides `size`. "auto": planned while the job runs.
    weight_codec, gradient_codec: encoding of what crosses this level; "auto" is planned.
    token_codec: encoding of token rows that cross this level on their way to experts.
    backend: over what tensors of a GPU cross this level: "auto" is what the job has, "gloo" goes through host memory.
    """

    name: str = field(metadata=_read_by(_text(advice='give each level its own name, for example "dc"')))
    size: int = field(metadata=_read_by(_integer(at_least=1, example=2)))
    bandwidth_gbps: float | None = field(default=None, metadata=_read_by(_optional(_BANDWIDTH)))
    latency_ms: float | None = field(default=None, metadata=_read_by(_optional(_LATENCY)))
    domain_size: int | Literal["auto"] = field(default=1, metadata=_read_by(_read_domain_size))
    weight_codec: CodecConfig = field(default=IDENTITY, metadata=_read_by(_codec((*EXPERT_CODECS, AUTO))))
    gradient_codec: CodecConfig = field(default=IDENTITY, metadata=_read_by(_codec((*EXPERT_CODECS, AUTO))))
    token_codec: CodecConfig = field(default=IDENTITY, metadata=_read_by(_token_codec))
    backend: Literal["auto", "gloo", "nccl"] = field(default="auto", metadata=_read_by(_choice(AUTO, "gloo", "nccl")))

    @property
    def row_format(self) -> RowFormat | None:
        """Of token rows on their way to experts across this level; None: as they are."""
        return next((name for name in get_args(RowFormat) if name == self.token_codec.type), None)

    def link(self) -> Link:
        """The level's link in bytes per second and seconds."""
        bandwidth_bytes_per_s = latency_s = None
        if self.bandwidth_gbps is not None:
            bandwidth_bytes_per_s = self.bandwidth_gbps * BITS_PER_GBIT / BITS_PER_BYTE
        if self.latency_ms is not None:
            latency_s = self.latency_ms / MS_PER_S
        return Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)


@dataclass(frozen=True, kw_only=True)
class HybridEPConfig:
    """The whole "hybridep" block.  Made by `parse_config`, which checks it.

    levels: the whole job, slowest link first; the product of their sizes is the world size.
    enabled: False leaves DeepSpeed as it is.
    prefetch_depth: layers between the start of a gradient's return in the backward and the wait for it.
    max_staleness: optimizer steps by which replicas may be older than their owners: 0, or 1, which gives weights until
        the end of the next step to arrive.
    replicas: "persistent" ones are held all the time, "transient" ones around their use: those of the layer that
        computes and of `prefetch_depth` layers that follow it.
    verify_interval: optimizer steps between two checks, by checksum, that replicas equal their owners; 0: never.
    kernels: "compiled" and "reference" insist on one kind, "auto" prefers compiled ones.
    timeout_s: longest wait for any other rank.
    report_interval: optimizer steps between two reports; 0: never.
    report_file: JSON record of the run, written by rank 0; None: no file.
    token_exchange: how tokens travel between domains, see `plan.token_route`; "auto" takes the cheaper way of the two,
        "deepspeed" leaves tokens to DeepSpeed's own all-to-alls, which know no domains.
    dense_sync: how gradients and parameters of everything but the experts travel, see `sync.collectives`.
    auto_codecs: lossy codecs that a codec "auto" may become.
    replan_interval: optimizer steps between two looks at the plan, where something is "auto"; 0: planned once.
    replan_threshold: share of a step that another plan must save.
    probe_cache: JSON file that rank 0 keeps the measured links in; None: measured at every start.
    """

    levels: tuple[LevelConfig, ...]
    enabled: bool = field(default=True, metadata=_read_by(_read_bool))
    prefetch_depth: int = field(default=2, metadata=_read_by(_integer(at_least=0, example=2)))
    max_staleness: Literal[0, 1] = field(default=0, metadata=_read_by(_zero_or_one))
    replicas: Literal["persistent", "transient"] = field(
        default="persistent", metadata=_read_by(_choice("persistent", "transient"))
    )
    verify_interval: int = field(default=100, metadata=_read_by(_integer(at_least=0, example=100)))
    kernels: Literal["auto", "compiled", "reference"] = field(
        default="auto", metadata=_read_by(_choice("auto", "compiled", "reference"))
    )
    timeout_s: float = field(default=600.0, metadata=_read_by(_TIMEOUT))
    report_interval: int = field(default=10, metadata=_read_by(_integer(at_least=0, example=10)))
    report_file: str | None = field(
        default=None, metadata=_read_by(_optional(_text(advice="give the path of a file, or leave the key out")))
    )
    token_exchange: Literal["auto", "direct", "hierarchical", "deepspeed"] = field(
        default="auto", metadata=_read_by(_choice("auto", "direct", "hierarchical", "deepspeed"))
    )
    dense_sync: Literal["deepspeed", "hierarchical", "auto"] = field(
        default="deepspeed", metadata=_read_by(_choice("deepspeed", "hierarchical", AUTO))
    )
    auto_codecs: tuple[CodecConfig, ...] = field(default=(), metadata=_read_by(_codec_list))
    replan_interval: int = field(default=5, metadata=_read_by(_integer(at_least=0, example=5)))
    replan_threshold: float = field(default=0.03, metadata=_read_by(_THRESHOLD))
    probe_cache: str | None = field(
        default=None, metadata=_read_by(_optional(_text(advice="give the path of a file, or leave the key out")))
    )

    @property
    def domain_sizes(self) -> tuple[int, ...]:
        """Domain size of each level; 1 where it is not planned yet."""
        return tuple(1 if level.domain_size == "auto" else level.domain_size for level in self.levels)

    @property
    def is_planned(self) -> bool:
        """True where a domain size, a codec or the way of dense parameters is "auto".

        `token_exchange` alone is not: "auto" is its default, and the cheaper way is known without measuring.
        """
        return self.dense_sync == AUTO or any(
            level.domain_size == AUTO or AUTO_CODEC in (level.weight_codec, level.gradient_codec)
            for level in self.levels
        )

    def cluster(self) -> Cluster:
        """The levels in the units of `plan`: bytes per second and seconds."""
        return Cluster(tuple(Level(level.name, level.size, level.link()) for level in self.levels))

    def canonical(self) -> dict[str, Any]:
        """What all ranks must agree on, as JSON values; equal settings give equal results however they were written.

        `report_file` and `probe_cache` are left out: they concern rank 0 alone.
        """
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del settings["report_file"], settings["probe_cache"]
        return settings


def parse_config(block: Mapping[str, Any], *, world_size: int, base_dir: str | Path = ".") -> HybridEPConfig:
    """The checked settings of a "hybridep" block.

    block: the value of the "hybridep" key. Its `levels` may be the path of a YAML or JSON file that holds them.
    world_size: ranks of the job, which the levels must account for.
    base_dir: folder where a relative path is looked for first; the working directory is second.

    With `"enabled": false` the levels may be left out and need not fit the world size; spelling and types are
    checked all the same.

    Raises:
        ConfigError: names the key path, the value found, what is allowed and what to do.
    """
    settings = _read_fields(HybridEPConfig, block, "hybridep")
    enabled = settings.get("enabled", True)
    if "levels" not in block:
        if enabled:
            raise ConfigError(
                f"hybridep.levels is missing; describe the job from the slowest link to the fastest, for example "
                f"{MINIMAL_BLOCK}"
            )
        return HybridEPConfig(levels=(), **settings)
    entries, where = block["levels"], "hybridep.levels"
    if isinstance(entries, str):
        path = _find_cluster_file(entries, base_dir)
        entries, where = _load_cluster_file(path), f"cluster file {path}: {where}"
    levels = _read_levels(entries, where)
    if enabled:
        _check_world_size(levels, where, world_size)
        _check_token_exchange(settings.get("token_exchange"), levels)
        _check_replicas(settings, levels, where)
    return HybridEPConfig(levels=levels, **settings)


# ---- objects and lists of settings ----


def _read_fields(kind: type[Any], block: object, where: str) -> dict[str, Any]:
    """The settings that `block` gives, by field name of the dataclass `kind`; fields without a reader are left out."""
    if not isinstance(block, Mapping):
        raise refused(where, block, "an object with keys", f"known keys: {', '.join(_names(kind))}")
    for key in block:
        if key not in _names(kind):
            advice = nearest(key, _names(kind)) or "remove it"
            raise ConfigError(f"{where}.{key} is not a known key; {advice} (known keys: {', '.join(_names(kind))})")
    readers = {item.name: item.metadata["reader"] for item in fields(kind) if "reader" in item.metadata}
    for item in fields(kind):
        if item.name in readers and item.default is MISSING and item.name not in block:
            raise ConfigError(f"{where}.{item.name} is missing; every entry needs it, as in {MINIMAL_BLOCK}")
    return {name: reader(block[name], f"{where}.{name}") for name, reader in readers.items() if name in block}


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


def _read_levels(entries: object, where: str) -> tuple[LevelConfig, ...]:
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes) or not entries:
        advice = f"for example {MINIMAL_BLOCK}"
        raise refused(where, entries, "a list of at least one level, or the path of a cluster file", advice)
    levels = []
    for index, entry in enumerate(entries):
        settings = _read_fields(LevelConfig, entry, f"{where}[{index}]")
        _check_domain_size(settings.get("domain_size", 1), settings["size"], where=f"{where}[{index}].domain_size")
        levels.append(LevelConfig(**settings))
    names = [level.name for level in levels]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(
                f"{where}[{index}].name is {shown(name)}, which hybridep.levels[{names.index(name)}] has already; "
                f"give each level its own name"
            )
    return tuple(levels)


def _check_domain_size(domain_size: object, size: int, *, where: str) -> None:
    allowed = ", ".join(map(str, divisors(size)))
    if domain_size == AUTO:
        return
    if not isinstance(domain_size, int) or size % domain_size:
        raise ConfigError(
            f"{where} is {domain_size}, which does not divide the level's size {size}; choose one of {allowed}, or "
            f'"auto"'
        )


def _check_world_size(levels: Sequence[LevelConfig], where: str, world_size: int) -> None:
    product = math.prod(level.size for level in levels)
    if product != world_size:
        sizes = " x ".join(f"{level.name} ({level.size})" for level in levels)
        raise ConfigError(
            f"{where}: the sizes {sizes} make {product} ranks, but the job has {world_size}; set the sizes so that "
            f"their product is {world_size}, or launch {product} ranks"
        )


def _check_token_exchange(token_exchange: object, levels: Sequence[LevelConfig]) -> None:
    for index, level in enumerate(levels):
        if token_exchange == "deepspeed" and level.row_format is not None:
            raise ConfigError(
                f'hybridep.token_exchange is "deepspeed", but hybridep.levels[{index}].token_codec is '
                f"{shown(level.token_codec.type)}: DeepSpeed's own all-to-alls know no codecs; set the token_codec to "
                f'"identity", or token_exchange to "auto"'
            )
        if token_exchange == "deepspeed" and level.domain_size != 1:
            raise ConfigError(
                f'hybridep.token_exchange is "deepspeed", but hybridep.levels[{index}].domain_size is '
                f"{shown(level.domain_size)}: DeepSpeed's own all-to-alls know no domains; set the domain_size to 1, "
                f'or token_exchange to "auto"'
            )


def _check_replicas(settings: Mapping[str, Any], levels: Sequence[LevelConfig], where: str) -> None:
    """Transient replicas are gathered as they are: there is nothing that a delta could be added to."""
    if settings.get("replicas") != "transient":
        return
    if settings.get("max_staleness"):
        raise ConfigError(
            'hybridep.max_staleness is 1, but hybridep.replicas is "transient": replicas that are not kept cannot be '
            'old; set max_staleness to 0, or replicas to "persistent"'
        )
    for index, level in enumerate(levels):
        if level.weight_codec != IDENTITY:
            raise ConfigError(
                f"{where}[{index}].weight_codec is {shown(level.weight_codec.type)}, but hybridep.replicas is "
                f'"transient": a lossy codec sends changes, and replicas that are not kept have nothing to add them '
                f'to; set weight_codec to "identity" (gradient_codec is free), or replicas to "persistent"'
            )


# ---- cluster files ----


def _find_cluster_file(name: str, base_dir: str | Path) -> Path:
    """Path of the cluster file `name`, beside the config or else in the working directory."""
    candidates = list(dict.fromkeys([Path(base_dir) / name, Path(name)]))
    for path in candidates:
        if os.path.isfile(path):  # unlike Path.is_file, False for names that no file can have
            return path
    tried = " and ".join(str(path) for path in candidates)
    raise ConfigError(
        f"hybridep.levels is the path {shown(name)}, but there is no such file (tried {tried}); correct the path, "
        f"or write the levels as a list"
    )


def _load_cluster_file(path: Path) -> object:
    """The `levels` of a JSON file (suffix .json) or of a YAML file (any other)."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else _load_yaml(text, path)
    except OSError as error:
        raise ConfigError(f"cluster file {path} cannot be read ({error.strerror}); correct hybridep.levels") from error
    except ValueError as error:  # syntax, encoding, or a date that does not exist
        raise ConfigError(f"cluster file {path} cannot be parsed; correct its syntax: {error}") from error
    if not isinstance(content, Mapping) or "levels" not in content:
        raise ConfigError(f"cluster file {path} has no key levels at its top; move the list of levels under it")
    unknown = [key for key in content if key != "levels"]
    if unknown:
        raise ConfigError(
            f"cluster file {path}: {shown(unknown[0])} is not a known key; it may hold levels only, so move other "
            f"settings to the hybridep block"
        )
    return content["levels"]


def _load_yaml(text: str, path: Path) -> object:
    """Content of a YAML text.  Raises ValueError for bad syntax, as the JSON parser does."""
    try:
        import yaml  # only those who use such a file need the package
    except ImportError as error:
        raise ConfigError(f"cluster file {path} needs PyYAML; install it, or write the file as JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


# ---- parts of messages ----


def refused(where: str, value: object, allowed: str, advice: str) -> ConfigError:
    """The error for a value that cannot be used."""
    return ConfigError(f"{where} is {shown(value)}, but must be {allowed}; {advice}")


def shown(value: object) -> str:
    """`value` as the user wrote it in JSON, cut where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def quoted(choices: Iterable[str]) -> str:
    """The choices of a setting, as they are written."""
    return ", ".join(f'"{choice}"' for choice in choices)


def nearest(value: object, choices: Iterable[object]) -> str | None:
    """A question that offers the nearest spelling, if one is near."""
    matches = difflib.get_close_matches(str(value).lower(), [str(choice) for choice in choices], n=1)
    return f'did you mean "{matches[0]}"?' if matches else None
