# SPDX-License-Identifier: Apache-2.0
"""Codec objects from what a config says: a name, or an object such as {"type": "low_rank", "rank": 4}."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from ds_hybridep.codecs.blockwise import Blockwise
from ds_hybridep.codecs.identity import Identity
from ds_hybridep.codecs.interface import Codec
from ds_hybridep.codecs.low_rank import LowRank
from ds_hybridep.config import nearest, quoted, refused
from ds_hybridep.errors import ConfigError
from ds_hybridep.kernels import Mode

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
    return make(where, options, kernels)


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


def _inner(kinds: tuple[type[Codec], ...], allowed: str, advice: str) -> Reader:
    def read(value: object, where: str, kernels: Mode) -> Codec:
        codec = make_codec(value, where=where, kernels=kernels)  # type: ignore[arg-type]  # it checks
        if not isinstance(codec, kinds):
            raise refused(where, value, allowed, advice)
        return codec

    return read


def _or_null(read: Reader) -> Reader:
    return lambda value, where, kernels: None if value is None else read(value, where, kernels)


# ---- types: what makes the codec, and its options ----

Make = Callable[[str, dict[str, Any], Mode], Codec]


def _plain(kind: type[Codec], **fixed: Any) -> Make:
    return lambda where, options, kernels: kind(**fixed, **options, kernels=kernels)


def _make_low_rank(where: str, options: dict[str, Any], kernels: Mode) -> Codec:
    for key, other in (("first_rank", "first_steps"), ("first_steps", "first_rank")):
        if key in options and other not in options:
            raise ConfigError(
                f"{where}.{other} is missing; {where}.{key} is {options[key]}: "
                "set both, the rank of the first packets and their number, or neither"
            )
    return LowRank(**{"fallback": Blockwise(bits=4, kernels=kernels), **options}, kernels=kernels)


_BLOCK: dict[str, Reader] = {"block": _choice(*BLOCKS)}

TYPES: dict[str, tuple[Make, dict[str, Reader]]] = {
    "identity": (_plain(Identity), {"dtype": _choice("fp32", "bf16", "fp16")}),
    "int8": (_plain(Blockwise, bits=8), _BLOCK),
    "int4": (_plain(Blockwise, bits=4), _BLOCK),
    "int2": (_plain(Blockwise, bits=2), _BLOCK),
    "low_rank": (
        _make_low_rank,
        {
            "rank": _integer(1, 1024),
            "factors": _choice("fp32", "bf16", "int8", "int4", "int2", "log4"),
            "weighting": _choice("none", "rms"),
            "iterations": _integer(1, 8),
            "refresh_interval": _integer(1, 10**9),
            "fallback": _inner(
                (Identity, Blockwise), 'one of "identity", "int8", "int4", "int2"', "small tensors need no more"
            ),
            "rest": _or_null(_inner((Blockwise,), 'null or one of "int8", "int4", "int2"', 'for example "int2"')),
            "first_rank": _integer(1, 1024),
            "first_steps": _integer(1, 10**9),
        },
    ),
}
