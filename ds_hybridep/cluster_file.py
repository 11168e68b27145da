"""The levels of a job in a file of their own, which several configs may name."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ds_hybridep.config_messages import shown
from ds_hybridep.errors import ConfigError


def find_cluster_file(name: str, base_dir: str | Path) -> Path:
    """Path of the cluster file `name`, beside the config or else in the working directory.

    Raises:
        ConfigError: there is none.
    """
    for path in (Path(base_dir) / name, Path(name)):
        if os.path.isfile(path):  # unlike Path.is_file, False for names that no file can have
            return path
    raise ConfigError(
        f"hybridep.levels is the path {shown(name)}, but there is no such file in {base_dir} or in the working "
        f"directory; correct the path, or write the levels as a list"
    )


def load_cluster_file(path: Path) -> object:
    """The `levels` of a JSON file (suffix .json) or of a YAML file (any other), not checked.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    parse = json.loads if path.suffix == ".json" else _yaml_parser(path)
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cluster file {path} cannot be read ({error.strerror}); correct hybridep.levels") from error
    except (ValueError, RecursionError) as error:  # syntax, encoding, or a date that does not exist
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


def _yaml_parser(path: Path) -> Callable[[str], object]:
    """A parser that raises ValueError for bad syntax, as the JSON parser does."""
    try:
        import yaml  # only those who use such a file need the package
    except ImportError as error:
        raise ConfigError(f"cluster file {path} needs PyYAML; install it, or write the file as JSON") from error

    def parse(text: str) -> object:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error

    return parse
