# SPDX-License-Identifier: Apache-2.0
"""Sizes of well-known models."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ds_hybridep.config import parser_of
from ds_hybridep.errors import PlanError

CONFIG = "config.json"


def model_name(name_or_path: str) -> str:
    """What to call a model: a ready name, the folder of a config.json, or a file without its ending."""
    by_name = {name.lower(): name for name in ready_names()}
    path = Path(name_or_path)
    if name_or_path.lower() in by_name:
        return by_name[name_or_path.lower()]
    if path.name == CONFIG:
        return path.resolve().parent.name
    return path.name if path.is_dir() else path.stem


def ready_names() -> tuple[str, ...]:
    """Names of the models that come with the package."""
    names = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def read_model_file(name_or_path: str) -> dict[str, Any]:
    """Read a ready model, a JSON or YAML file, or the config.json of a folder; see `model_from_mapping`.

    Raises PlanError if it cannot be read.
    """
    by_name = {name.lower(): name for name in ready_names()}
    if Path(name_or_path).is_dir():
        name_or_path = str(Path(name_or_path) / CONFIG)
    parse = parser_of(name_or_path, f"--model: {name_or_path}")
    try:
        if name_or_path.lower() in by_name:
            text = files(__name__).joinpath(f"{by_name[name_or_path.lower()]}.yaml").read_text(encoding="utf-8")
        else:
            text = Path(name_or_path).read_text(encoding="utf-8")
        content = parse(text)
    except OSError as error:
        what = f"{name_or_path} is no ready model and cannot be read as a file ({error.strerror})"
        raise PlanError(f"--model: {what}; ready are {', '.join(ready_names())}") from error
    except ValueError as error:
        raise PlanError(f"--model: {name_or_path} cannot be parsed; correct its syntax: {error}") from error
    if not isinstance(content, Mapping):
        raise PlanError(f"--model: {name_or_path} holds a {type(content).__name__}, wanted an object with keys")
    return dict(content)
