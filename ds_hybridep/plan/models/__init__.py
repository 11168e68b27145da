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
    path, ready = Path(name_or_path), _ready_name(name_or_path)
    if ready is not None:
        return ready
    if path.name == CONFIG:
        return path.resolve().parent.name
    return path.name if path.is_dir() else path.stem


def ready_names() -> tuple[str, ...]:
    """Names of the models that come with the package."""
    names = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def _ready_name(name_or_path: str) -> str | None:
    """The ready model that is meant, also by its name on the hub, such as Qwen/Qwen3-30B-A3B; None: a file."""
    names = {name.lower(): name for name in ready_names()}
    if "/" in name_or_path and not Path(name_or_path).exists():
        name_or_path = name_or_path.rpartition("/")[2]
    return names.get(name_or_path.lower())


def read_model_file(name_or_path: str) -> dict[str, Any]:
    """Read a ready model, a JSON or YAML file, or the config.json of a folder; see `model_from_mapping`.

    Raises PlanError if it cannot be read.
    """
    ready = _ready_name(name_or_path)
    if ready is None and Path(name_or_path).is_dir():
        name_or_path = str(Path(name_or_path) / CONFIG)
    parse = parser_of(name_or_path, f"--model: {name_or_path}")
    try:
        place = Path(name_or_path) if ready is None else files(__name__).joinpath(f"{ready}.yaml")
        content = parse(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"--model: {name_or_path} is no ready model and no file that can be read ({error.strerror}). Nothing is "
            f"downloaded: get the config.json of a Mixture-of-Experts model with 'hf download ORG/NAME config.json "
            f"--local-dir NAME', then give --model NAME. Ready are {', '.join(ready_names())}"
        ) from error
    except ValueError as error:
        raise PlanError(f"--model: {name_or_path} cannot be parsed; correct its syntax: {error}") from error
    if not isinstance(content, Mapping):
        raise PlanError(f"--model: {name_or_path} holds a {type(content).__name__}, wanted an object with keys")
    return dict(content)
