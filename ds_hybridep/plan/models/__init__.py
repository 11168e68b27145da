# SPDX-License-Identifier: Apache-2.0
"""Sizes of well-known models, and the reader of model files."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ds_hybridep.errors import PlanError


def ready_names() -> tuple[str, ...]:
    """Names of the models that come with the package."""
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in files(__name__).iterdir() if _is_model(entry)))


def read_model_file(name_or_path: str) -> dict[str, Any]:
    """Content of a ready model, or of a JSON file (suffix .json) or YAML file (any other); see `model_from_mapping`.

    Raises PlanError where there is neither, or the file cannot be read.
    """
    by_name = {name.lower(): name for name in ready_names()}
    try:
        if name_or_path.lower() in by_name:
            text = files(__name__).joinpath(f"{by_name[name_or_path.lower()]}.yaml").read_text(encoding="utf-8")
        else:
            text = Path(name_or_path).read_text(encoding="utf-8")
        content = json.loads(text) if name_or_path.endswith(".json") else _load_yaml(text, name_or_path)
    except OSError as error:
        raise PlanError(
            f"--model: {name_or_path} is no ready model and cannot be read as a file ({error.strerror}); ready are "
            f"{', '.join(ready_names())}"
        ) from error
    except ValueError as error:
        raise PlanError(f"--model: {name_or_path} cannot be parsed; correct its syntax: {error}") from error
    if not isinstance(content, Mapping):
        raise PlanError(f"--model: {name_or_path} holds a {type(content).__name__}, wanted an object with keys")
    return dict(content)


def _is_model(entry: Any) -> bool:
    return bool(entry.name.endswith(".yaml"))


def _load_yaml(text: str, where: str) -> object:
    """Content of a YAML text.  Raises ValueError for bad syntax, as the JSON parser does."""
    try:
        import yaml  # only those who use such a file need the package
    except ImportError as error:
        raise PlanError(f"--model: {where} needs PyYAML; install it, or write the file as JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
