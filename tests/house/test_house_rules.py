# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for the whole repository and that no linter knows."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import get_args

import pytest

from ds_hybridep.config import (
    AdvancedConfig,
    HybridEPConfig,
    LevelConfig,
    LinkConfig,
    SitesConfig,
    TLSConfig,
    parse_config,
)
from ds_hybridep.config_codecs import BlockwiseConfig, CodecConfig, LowRankConfig, PatchConfig, Settings

REPOSITORY = Path(__file__).resolve().parents[2]
DS_CONFIGS = sorted((REPOSITORY / "ds_configs").glob("*.json"))
TEXT_SUFFIXES = {"", ".py", ".md", ".json", ".toml", ".yaml", ".yml", ".cpp", ".cu", ".h", ".txt", ".sh"}
NOT_OURS = {"build", "dist", "runs", "__pycache__"}  # nor any hidden folder but .ci


def test_importing_loads_neither_torch_nor_deepspeed():
    """Nor does geometry or plan: test_plan_imports.py."""
    modules = "ds_hybridep.config, ds_hybridep.commands.show"
    program = f"import sys, {modules}; print(*({{'torch', 'deepspeed'}} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=True
    )
    assert run.stdout.strip() == ""


def test_public_names_are_found_and_others_are_not():
    import ds_hybridep

    for name in ds_hybridep.__all__:
        assert getattr(ds_hybridep, name) is not None
    assert dir(ds_hybridep) == sorted(ds_hybridep.__all__)
    with pytest.raises(AttributeError, match="'attatch'.*public names are .*attach"):
        ds_hybridep.attatch  # noqa: B018


def test_ds_configs_has_both_kinds():
    blocks = ["hybridep" in json.loads(path.read_text()) for path in DS_CONFIGS]
    assert {True, False} <= set(blocks)


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.name)
def test_every_block_in_ds_configs_parses_and_is_in_the_table(path):
    block = json.loads(path.read_text()).get("hybridep")
    if block is not None:
        world_size = math.prod(level["size"] for level in block["levels"])
        config = parse_config(block, world_size=world_size, base_dir=path.parent)
        assert config.report_file is None  # running an example must not leave files about
    assert f"`{path.name}`" in (REPOSITORY / "ds_configs" / "README.md").read_text()


@pytest.mark.parametrize("kind", [HybridEPConfig, LevelConfig, LinkConfig, TLSConfig, SitesConfig, AdvancedConfig])
def test_every_field_of_the_config_is_in_its_table(kind):
    text = (REPOSITORY / "docs" / "config.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", section_of(text, kind.__name__), re.MULTILINE))
    assert list(documented) == list(kind.model_fields)
    for name, field in kind.model_fields.items():
        default = documented[name].strip()
        if field.is_required() or name == "levels":  # which may be left out where the block is off
            assert default == "required"
        elif isinstance(field.default, CodecConfig):
            assert json.loads(default.strip("`")) == field.default.type
        elif isinstance(field.default, Settings):
            assert json.loads(default.strip("`")) == field.default.model_dump(exclude_defaults=True)
        elif isinstance(field.default, tuple):
            assert json.loads(default.strip("`")) == list(field.default)
        else:
            assert json.loads(default.strip("`")) == field.default


@pytest.mark.parametrize("kind", [BlockwiseConfig, LowRankConfig, PatchConfig])
def test_every_option_of_a_codec_is_in_its_table(kind):
    text = (REPOSITORY / "docs" / "codecs.md").read_text()
    for name in get_args(kind.model_fields["type"].annotation):
        row = re.search(rf"^\| `{name}` \| ([^|]+) \|", text, re.MULTILINE)
        assert row is not None, name
        if row[1] != "as above":
            assert set(kind.model_fields) - {"type"} <= set(re.findall(r"`(\w+)`", row[1]))


def section_of(text, name):
    """The part of docs/config.md that stands under the heading marked with the class's name."""
    return text.split(f"<!-- {name} -->")[1].split("<!--")[0]


def test_sources_of_the_kernels_are_found_inside_the_package():
    sources = {entry.name for entry in files("ds_hybridep.csrc").iterdir()}
    assert {"include", "cpu"} <= sources
    assert files("ds_hybridep.op_builder").joinpath("__init__.py").is_file()


def test_no_top_level_op_builder_that_deepspeed_could_mistake_for_its_own():
    for path in (REPOSITORY / "op_builder").rglob("*.py"):
        assert "__deepspeed__" not in path.read_text(), path


def test_no_file_names_a_path_of_one_machine():
    roots = "|".join(["work", "root", "home/[a-z]", "Users/[a-z]"])
    absolute = re.compile(rf"(?<![\w./}}])/({roots})\w*/")
    found = []
    for path in text_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(REPOSITORY)}: {match[0]}" for match in absolute.finditer(text)]
    assert found == []


def test_no_file_names_a_host_that_packages_come_from():
    """Where pip looks is the reader's choice; a mirror must do."""
    hosts = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|index-url http")
    named = {path.name for path in text_files() if hosts.search(path.read_text(encoding="utf-8", errors="replace"))}
    assert named == set()


@functools.cache
def text_files() -> list[Path]:
    """Files of the checkout that people write."""
    found = []
    for folder, folders, names in os.walk(REPOSITORY):
        folders[:] = [
            name
            for name in folders
            if name not in NOT_OURS and not name.endswith(".egg-info") and (not name.startswith(".") or name == ".ci")
        ]
        found += [Path(folder, name) for name in names if name != ".git" and Path(name).suffix in TEXT_SUFFIXES]
    return sorted(path for path in found if path.is_file() and path != Path(__file__).resolve())


def test_no_test_file_imports_another():
    """What several tests share is in tests/support, so that each file can be changed alone."""
    paths = sorted((REPOSITORY / "tests").rglob("*.py"))
    imports = re.compile(r"^\s*(?:from|import) (?:\w+\.)*test_\w+", re.MULTILINE)
    assert {path.name: found for path in paths if (found := imports.findall(path.read_text()))} == {}
