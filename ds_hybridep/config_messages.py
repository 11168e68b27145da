# SPDX-License-Identifier: Apache-2.0
"""Says in one sentence what pydantic found wrong with a "hybridep" block."""

import difflib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

MAX_SHOWN_CHARACTERS = 80  # of a wrong value
MINIMAL_BLOCK = '"hybridep": {"levels": [{"name": "dc", "size": 2}, {"name": "gpu", "size": 4}]}'

EXPERT_CODECS = ("identity", "int8", "int4", "int2", "low_rank")
WEIGHT_CODECS = (*EXPERT_CODECS, "patch")
KNOWN_CODECS = (*WEIGHT_CODECS, "auto", "fp8")


class Says(NamedTuple):
    """What a message says about a field: the values it allows, and what to do.  Stands beside its annotation."""

    allowed: str
    advice: str


def explain(error: ValidationError, given: object, where: str, models: Mapping[int | str, type[BaseModel]]) -> str:
    """What is wrong with `given`, in one sentence that begins with the path of the wrong key; `where` is given's path.

    Of several errors it takes the first. An unknown codec goes before all others, since its options are unknown too.
    Next is an unknown key, since a typo in it may be why another key is missing.

    models: by the keys and the codec types that pydantic's locations contain; the whole block is "hybridep".
    """
    found = min(error.errors(include_url=False), key=_order)
    kind, location, value, parent = found["type"], found["loc"], given, given
    for key in location:  # a location also names the union members that were tried, which `given` does not have
        if isinstance(value, Mapping) and key in value:
            where, parent, value = where + "." + shown(key).strip('"'), value, value[key]
        elif isinstance(value, list | tuple) and isinstance(key, int):
            where, parent, value = f"{where}[{key}]", value, value[key]
    last = location[-1] if location else ""
    inner = location[:-1] if _is_unknown_key(found) else location
    top = models["hybridep"]
    model = next((models[key] for key in reversed(inner) if key in models), top)
    fields = top.model_fields | model.model_fields
    name = next((str(key) for key in reversed(location) if key in fields), "")

    if _is_unknown_key(found):
        return _about_unknown_key(where, last, value, parent, model, top)
    if kind == "value_error" and last not in fields:  # a check of a whole model, whose message begins with the key
        return f"{where}.{found['ctx']['error']}"
    if kind == "missing" and last != "type":
        example = f", as in {MINIMAL_BLOCK}" if "levels" in location else ""
        return f"{where}.{last} is missing; every entry needs it{example}"
    if kind == "union_tag_invalid" or (last == "type" and kind != "missing"):
        return _about_unknown_codec(
            where, value, _choices(found, fields.get("type")), is_option="low_rank" in location
        )
    says = _words(found, value, model, name, fields.get(name))
    return f"{where} is {shown(value)}, but must be {says.allowed}; {says.advice}"


def _words(
    found: Mapping[str, Any], value: object, model: type[BaseModel], name: str, field: FieldInfo | None
) -> Says:
    """Which values the field `name` allows in place of `value`, and what to do."""
    if found["type"] == "model_type" and "type" not in model.model_fields:
        return Says("an object with keys", f"known keys: {', '.join(model.model_fields)}")
    if found["type"] in ("model_type", "model_attributes_type", "union_tag_not_found", "missing"):
        types = WEIGHT_CODECS if name.endswith("weight_codec") else EXPERT_CODECS
        return Says('a codec name or an object such as {"type": "identity"}', f"types: {quoted(types)}")
    says = next((words for words in field.metadata if isinstance(words, Says)), None) if field else None
    choices = _choices(found, field)
    if says is None and choices:
        return Says(f"one of {quoted(choices)}", nearest(value, choices) or "choose one of these")
    return says or Says("valid", cut(found["msg"]))  # errors without our words are rare, such as half a character


def _choices(found: Mapping[str, Any], field: FieldInfo | None) -> tuple[str, ...]:
    """The values that a field or the type of a codec may have; empty if it is not a choice."""
    if "expected_tags" in found.get("ctx", {}):
        return tuple(re.findall(r"'(\w+)'", found["ctx"]["expected_tags"]))
    members = [] if field is None else [field.annotation, *get_args(field.annotation)]  # of a union such as X | None
    return next((get_args(one) for one in members if get_origin(one) is Literal), ())


def _order(found: Mapping[str, Any]) -> int:
    is_unknown_codec = found["type"] == "literal_error" and found["loc"][-1] == "type"
    return 0 if is_unknown_codec else 1 if _is_unknown_key(found) else 2


def _is_unknown_key(found: Mapping[str, Any]) -> bool:
    return found["type"] in ("extra_forbidden", "invalid_key")


def _about_unknown_key(
    where: str, key: object, value: object, parent: object, model: type[BaseModel], top: type[BaseModel]
) -> str:
    advanced = getattr(top.model_fields["advanced"].annotation, "model_fields", {}) if model is top else {}
    if key in advanced:
        return f'{where} moved to hybridep.advanced.{key}; write "advanced": {shown({key: value})}'
    names = [name for name in model.model_fields if name != "type"]
    noun, known = "key", f"known keys: {', '.join(names)}"
    if "type" in model.model_fields and isinstance(parent, Mapping):
        codec = shown(parent.get("type"))
        noun, known = "option", f"options of {codec}: {', '.join(names)}" if names else f"it has none, write {codec}"
    return f"{where} is not a known {noun}; {nearest(key, (*names, *advanced)) or 'remove it'} ({known})"


def _about_unknown_codec(where: str, value: object, choices: Sequence[str], *, is_option: bool) -> str:
    if isinstance(value, Mapping) and not where.endswith(".type"):
        where, value = f"{where}.type", value["type"]
    if value == "patch" and not is_option:
        return (
            f'{where} is "patch", which is for weights only: it sends what has changed since the step before, and '
            f"all else differs wholly from step to step; choose one of {quoted(choices)}"
        )
    if isinstance(value, str) and value in KNOWN_CODECS and not is_option:
        return f"{where} is {shown(value)}, which is not available yet; choose one of {quoted(choices)}"
    advice = nearest(value, choices if is_option else (*choices, *KNOWN_CODECS)) or "choose one of these"
    return f"{where} is {shown(value)}, but must be one of {quoted(choices)}; {advice}"


def shown(value: object) -> str:
    """`value` as the user wrote it in JSON, cut if it is long."""
    try:
        # Encode no more than is shown: a value may be huge, or contain itself.
        return cut("".join(itertools.islice(json.JSONEncoder().iterencode(value), MAX_SHOWN_CHARACTERS)))
    except (TypeError, ValueError):
        pass
    try:
        return cut(repr(value))
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        return f"of type {type(value).__name__}"


def cut(text: str) -> str:
    """`text`, shortened if it is too long for a message."""
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def quoted(choices: Iterable[str]) -> str:
    """The choices of a setting as the user writes them."""
    return ", ".join(f'"{choice}"' for choice in choices)


def nearest(value: object, choices: Iterable[str]) -> str | None:
    """A question that offers the nearest spelling, if one is near."""
    matches = difflib.get_close_matches(cut(value).lower(), list(choices), n=1) if isinstance(value, str) else []
    return f'did you mean "{matches[0]}"?' if matches else None
