# SPDX-License-Identifier: Apache-2.0
"""Codec objects from what a config says: a name, or an object such as {"type": "low_rank", "rank": 4}."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds_hybridep.codecs.blockwise import Blockwise
from ds_hybridep.codecs.composed import Sum, WarmUp
from ds_hybridep.codecs.identity import Identity
from ds_hybridep.codecs.interface import Codec
from ds_hybridep.codecs.low_rank import LowRank
from ds_hybridep.codecs.top_k import TopK
from ds_hybridep.config import nearest, quoted, refused
from ds_hybridep.errors import ConfigError
from ds_hybridep.kernels import Mode

LARGEST_BLOCK = 1024
BLOCKS = tuple(2**power for power in range(3, 11))

Reader = Callable[[object, str, Mode], object]


def make_codec(spec: str | Mapping[str, Any], *, where: str = "codec", kernels: Mode = "auto") -> Codec:
    """The codec that `spec` describes: a name, or an object with "type" and that type's options.

    where: key path of `spec`, for messages.
    kernels: "compiled" and "reference" insist on one implementation, "auto" prefers the compiled one.

    Raises:
        ConfigError: names the key path, the value found, what is allowed and what to do.
    """
    if isinstance(spec, str):
        spec, where_type = {"type": spec}, where
    elif isinstance(spec, Mapping) and "type" in spec:
        where_type = f"{where}.type"
    else:
        raise refused(where, spec, 'a codec name or an object such as {"type": "int8"}', f"types: {quoted(TYPES)}")
    name = spec["type"]
    if not isinstance(name, str) or name not in TYPES:
        raise refused(where_type, name, f"one of {quoted(TYPES)}", nearest(name, TYPES) or "choose one of these")
    make, readers = TYPES[name]
    options = {}
    for key, value in spec.items():
        if key == "type":
            continue
        if key not in readers:
            advice = nearest(key, readers) or "remove it"
            known = f'options of "{name}": {", ".join(readers)}' if readers else f'"{name}" has no options'
            raise ConfigError(f"{where}.{key} is not a known option; {advice} ({known})")
        options[key] = readers[key](value, f"{where}.{key}", kernels)
    codec = make(where, options, kernels)
    return codec


# ---- readers of one option ----


def _integer(low: int, high: int) -> Reader:
    def read(value: object, where: str, kernels: Mode) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            advice = f"write it without quotes and without a fraction, for example {low}"
            raise refused(where, value, f"an integer from {low} to {high}", advice)
        return value

    return read


def _choice(*choices: str | int) -> Reader:
    def read(value: object, where: str, kernels: Mode) -> object:
        if isinstance(value, bool) or value not in choices:
            allowed = ", ".join(json.dumps(choice) for choice in choices)
            raise refused(where, value, f"one of {allowed}", nearest(value, choices) or "choose one of these")
        return value

    return read


def _codec(value: object, where: str, kernels: Mode) -> Codec:
    codec = make_codec(value, where=where, kernels=kernels)  # type: ignore[arg-type]  # it checks
    if isinstance(codec, WarmUp):
        raise refused(where, value, "a codec other than warm_up", "put warm_up outermost")
    return codec


def _plain_codec(value: object, where: str, kernels: Mode) -> Codec:
    codec = _codec(value, where, kernels)
    if not isinstance(codec, Identity | Blockwise):
        raise refused(where, value, 'one of "identity", "int8", "int4", "int2", "sign"', "small tensors need no more")
    return codec


def _codecs(value: object, where: str, kernels: Mode) -> tuple[Codec, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) < 2:
        raise refused(where, value, "a list of at least two codecs", 'for example ["low_rank", "top_k"]')
    return tuple(_codec(part, f"{where}[{index}]", kernels) for index, part in enumerate(value))


# ---- types: what makes the codec, and its options ----

Make = Callable[[str, dict[str, Any], Mode], Codec]


def _plain(kind: type[Codec], **fixed: Any) -> Make:
    return lambda where, options, kernels: kind(**fixed, **options, kernels=kernels)


def _make_low_rank(where: str, options: dict[str, Any], kernels: Mode) -> Codec:
    return LowRank(**{"fallback": Blockwise(bits=4, kernels=kernels), **options}, kernels=kernels)


def _make_top_k(where: str, options: dict[str, Any], kernels: Mode) -> Codec:
    codec = TopK(**options, kernels=kernels)
    if codec.k > codec.block // 2:
        raise refused(f"{where}.k", codec.k, f"at most half of block {codec.block}", "take fewer, or int4 instead")
    return codec


def _make_warm_up(where: str, options: dict[str, Any], kernels: Mode) -> Codec:
    for key in ("steps", "then"):
        if key not in options:
            raise ConfigError(
                f'{where}.{key} is missing; a warm-up is written {{"type": "warm_up", "steps": 20, "first": "int4", '
                '"then": "low_rank"}'
            )
    return WarmUp(**{"first": Blockwise(bits=4, kernels=kernels), **options}, kernels=kernels)


def _make_sum(where: str, options: dict[str, Any], kernels: Mode) -> Codec:
    if "parts" not in options:
        raise ConfigError(
            f'{where}.parts is missing; a sum is written {{"type": "sum", "parts": ["low_rank", "top_k"]}}'
        )
    return Sum(**options, kernels=kernels)


_BLOCK: dict[str, Reader] = {"block": _choice(*BLOCKS)}

TYPES: dict[str, tuple[Make, dict[str, Reader]]] = {
    "identity": (_plain(Identity), {"dtype": _choice("fp32", "bf16", "fp16")}),
    "int8": (_plain(Blockwise, bits=8), _BLOCK),
    "int4": (_plain(Blockwise, bits=4), _BLOCK),
    "int2": (_plain(Blockwise, bits=2), _BLOCK),
    "sign": (_plain(Blockwise, bits=1), _BLOCK),
    "top_k": (
        _make_top_k,
        {**_BLOCK, "k": _integer(1, LARGEST_BLOCK // 2), "value_bits": _choice(1, 2, 4, 16)},
    ),
    "low_rank": (
        _make_low_rank,
        {
            "rank": _integer(1, 1024),
            "factors": _choice("fp32", "bf16", "int8", "int4", "int2", "log4"),
            "weighting": _choice("none", "rms"),
            "iterations": _integer(1, 8),
            "refresh_interval": _integer(1, 10**9),
            "fallback": _plain_codec,
        },
    ),
    "sum": (_make_sum, {"parts": _codecs}),
    "warm_up": (_make_warm_up, {"steps": _integer(1, 10**9), "first": _codec, "then": _codec}),
}
