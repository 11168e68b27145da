# SPDX-License-Identifier: Apache-2.0
"""Says in one sentence what pydantic found wrong with a "hybridep" block."""

import difflib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

MAX_SHOWN_CHARACTERS = 80  # of a wrong value
MINIMAL_BLOCK = '"hybridep": {"levels": [{"name": "dc", "size": 2}, {"name": "gpu", "size": 4}]}'


def explain(error: ValidationError, given: object, where: str) -> str:
    """What is wrong first with `given`, in one sentence that begins with the key path; `where` is given's path."""
    errors = error.errors(include_url=False)
    found = errors[0]
    path, value = _place(found["loc"], given, where)
    if found["type"] == "value_error":  # a check of a whole model, whose message begins with the key
        return f"{path}.{found['ctx']['error']}"
    if found["type"] == "missing" and isinstance(value, Mapping):
        example = f", as in {MINIMAL_BLOCK}" if "levels" in found["loc"] else ""
        return f"{path}.{found['loc'][-1]} is missing; every entry needs it{example}"
    here = [one for one in errors if _place(one["loc"], given, where)[0] == path]  # one for each member of a union
    wanted = " or ".join(dict.fromkeys(_wanted(one) for one in here))
    choices = [choice for one in here for choice in re.findall(r"'(\w+)'", _wanted(one))]
    hint = nearest(value.get("type") if isinstance(value, Mapping) else value, choices)
    return f"{path} is {shown(value)}, but must be {wanted}" + (f"; {hint}" if hint else "")


def _place(location: Sequence[int | str], given: object, where: str) -> tuple[str, Any]:
    """The path of a key, and what stands there; pydantic also names union members, which `given` does not have."""
    value: Any = given
    for key in location:
        if isinstance(value, Mapping) and key in value:
            where, value = where + "." + shown(key).strip('"'), value[key]
        elif isinstance(value, list | tuple) and isinstance(key, int) and key < len(value):
            where, value = f"{where}[{key}]", value[key]
    return where, value


def _wanted(found: Mapping[str, Any]) -> str:
    """What a value must be, from pydantic's "Input should be ..."."""
    if found["type"] == "union_tag_invalid":
        return f"one of {found['ctx']['expected_tags']}"
    if found["type"] in ("model_type", "model_attributes_type"):
        return "an object with keys"
    if found["type"] == "missing":
        return "longer"
    if found["type"] == "union_tag_not_found":
        return 'an object with a "type"'
    words = re.sub(r"^Input should be ", "", found["msg"]).replace("valid tuple", "list")
    return cut(re.sub(r"^\w+ should have", "something with", words))


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


def nearest(value: object, choices: Iterable[str]) -> str | None:
    """A question that offers the nearest spelling, if one is near."""
    matches = difflib.get_close_matches(cut(value).lower(), list(choices), n=1) if isinstance(value, str) else []
    return f'did you mean "{matches[0]}"?' if matches else None
