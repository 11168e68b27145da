# SPDX-License-Identifier: Apache-2.0
"""The `export` subcommand: turns a DeepSpeed checkpoint into a folder that transformers or peft loads."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hybridep.errors import ConfigError, ExportError

if TYPE_CHECKING:
    from ds_hybridep.export.writing import WritePlan

HELP = "turn a checkpoint into a folder that from_pretrained loads"
FORMS = {
    "adapters": "a folder of peft (default where the checkpoint has adapters)",
    "merged": "the whole model with its adapters added",
    "per-expert": "adapters in the layout that vLLM reads",
}
# What hybridep writes into a checkpoint, and what the Trainer writes beside one.
ADAPTER_CONFIGS = ("hybridep_adapter_config.json", "adapter_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="what save_checkpoint wrote, or a tag in it")
    add("--model", metavar="BASE", help="the folder, or name on the hub, that the training began from")
    add("--out", type=Path, required=True, metavar="DIR", help="the folder to write; must not exist yet")
    add("--dtype", help="float32, float16 or bfloat16; default that of BASE")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights; default 5GB")
    forms = parser.add_mutually_exclusive_group()
    for form, what in FORMS.items():
        forms.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=what)


def run(args: argparse.Namespace) -> int:
    # torch and transformers take seconds to import, which other subcommands do not need.
    from ds_hybridep.export import writing
    from ds_hybridep.export.checkpoint import open_checkpoint

    options = writing.WriteOptions(args.form, writing.dtype_of(args.dtype, "--dtype"), args.max_shard_size)
    folder = tag_folder(args.checkpoint)
    checkpoint = open_checkpoint(folder)
    if checkpoint.is_classic:
        plan = writing.plan_state_dict(checkpoint.parameters, options)
    elif args.model is None:
        raise ConfigError("--model is missing: give the folder, or name on the hub, that the training began from")
    else:
        from ds_hybridep.export.base import Base

        find_config = partial(_adapter_config, folder)
        base = Base(args.model)
        plan = writing.plan_model(checkpoint.parameters, checkpoint.moe_paths, base, find_config, options=options)
    _write(plan, args.out, options.max_shard_size)
    return 0


def tag_folder(path: Path) -> Path:
    """Return the folder of one checkpoint: `path`, or the newest whole one in it."""
    from ds_hybridep.runtime import whole_checkpoints

    if not path.is_dir():
        raise ExportError(f"{path} is no folder; give what save_checkpoint wrote")
    if not any(path.glob("*_model_states.pt")):
        tag, skipped = whole_checkpoints.newest(path)
        if tag is None:
            why = f"the checkpoints {skipped} in it are incomplete" if skipped else "it has no file `latest`"
            raise ExportError(f"{path} holds no checkpoint: {why}; give what save_checkpoint wrote, or a tag in it")
        path /= tag
    if why_not := whole_checkpoints.why_not(path):
        raise ExportError(why_not)
    return path


def _adapter_config(folder: Path) -> Any:
    from ds_hybridep.export.adapters import read_config

    places = [place / name for place in (folder, folder.parent) for name in ADAPTER_CONFIGS]
    for path in places:
        if path.exists():
            return read_config(path)
    raise ExportError(
        f"{folder} has adapters, but no config of peft; copy the adapter_config.json of the training there, which "
        f"model.peft_config['default'].save_pretrained({str(folder)!r}) writes"
    )


def _write(plan: "WritePlan", target: Path, max_shard_size: str) -> None:
    from tqdm import tqdm

    from ds_hybridep.export.folder import whole_folder
    from ds_hybridep.export.writing import write_files

    num_bytes, is_shown = sum(one.nbytes for one in plan.planned.values()), sys.stderr.isatty()
    with (
        tqdm(total=num_bytes, unit="B", unit_scale=True, desc=target.name, disable=not is_shown, leave=False) as bar,
        whole_folder(target) as folder,
    ):
        write_files(plan, folder, max_shard_size, bar.update)
    print(f"{target}: {len(plan.planned)} tensors, {num_bytes / 1e9:.2f} GB")
    if plan.left_out:
        print(f"left out, since the model has no such parameters: {', '.join(plan.left_out)}")
