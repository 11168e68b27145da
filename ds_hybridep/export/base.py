# SPDX-License-Identifier: Apache-2.0
"""The model that was trained: its class, names, shapes and dtypes, and what its folder has beside the weights."""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.errors import ConfigError, ExportError
from ds_hybridep.export.stored import Parameter, whole

_NO_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")  # what a tokenizer consists of
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Skeleton:
    """A model of transformers without weights: the names and shapes that it has, and those of its files."""

    def __init__(self, model: Any) -> None:
        self.model = model
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self.tied: dict[str, str] = dict(tied) if isinstance(tied, Mapping) else {}
        self.shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in self.tied}

    def fresh(self) -> Any:
        """Return another model of the same kind, for what changes it."""
        return without_weights(type(self.model), self.model.config)

    def hub(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors, by name, that stand for a parameter in the files that `save_pretrained` writes."""
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.model, {name: tensor}))

    @cached_property
    def hub_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Names and shapes in the files, by name of the parameter."""
        return {
            name: {key: tuple(part.shape) for key, part in self.hub(name, torch.empty(shape, device="meta")).items()}
            for name, shape in self.shapes.items()
        }


class Base:
    """The folder or the name on the hub that `from_pretrained` was called with."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Path(name) if Path(name).is_dir() else _download(name, _NO_WEIGHTS)
        from transformers import AutoConfig

        try:
            self.config = AutoConfig.from_pretrained(self.folder)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"--model {name}: transformers finds no model there: {error}") from error

    def skeletons(self) -> Iterator[Skeleton]:
        """Return what the training may have made of the model, first the class that its config names."""
        import transformers

        seen = set()
        for architecture in getattr(self.config, "architectures", None) or ():
            if (kind := getattr(transformers, architecture, None)) is not None:
                seen.add(kind)
                yield Skeleton(without_weights(kind, self.config))
        for make in (transformers.AutoModelForCausalLM, transformers.AutoModel):  # the last one has no head
            with suppress(ValueError):
                model = without_weights(make.from_config, self.config)
                if type(model) not in seen:
                    yield Skeleton(model)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in its files, by name in these files; empty if it has none."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file  # maps the file

        found: dict[str, Tensor] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                found.update(load_file(path))
            except (OSError, SafetensorError) as error:
                raise ExportError(f"{path} is no file of safetensors, or cut short: {error}") from error
        return found

    def dtype_of(self, hub_name: str) -> torch.dtype:
        """Return the dtype of a tensor in its files, else the one that its config says."""
        stored = self.tensors.get(hub_name)
        if stored is not None and stored.dtype in _FLOATS:
            return stored.dtype
        config = getattr(self.config, "text_config", self.config)
        dtype = getattr(self.config, "dtype", None) or getattr(config, "dtype", None) or torch.float32
        return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."))

    def weight(self, hub_name: str) -> Parameter:
        """Return a tensor of its files."""
        if not self.tensors and not Path(self.name).is_dir():
            self.folder = _download(self.name, (*_NO_WEIGHTS, "*.safetensors"))
            del self.tensors
        if hub_name not in self.tensors:
            raise ExportError(
                f"{hub_name} is neither in the checkpoint nor in a safetensors file of --model {self.name}; the whole "
                f"model needs it"
            )
        return whole(self.tensors[hub_name])

    def copy_files(self, folder: Path) -> None:
        """Copy tokenizer, generation config and the like; not weights and not the config of the model."""
        for pattern in _NO_WEIGHTS:
            for path in sorted(self.folder.glob(pattern)):
                is_of_weights = path.name.endswith(".index.json") or path.name.startswith("adapter_")
                if not is_of_weights and path.name != "config.json":
                    shutil.copyfile(path, folder / path.name)


def without_weights(make: Any, config: Any) -> Any:
    """Return the model of a configuration on torch's meta device."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(config)


def _download(name: str, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise ConfigError(
            f"--model {name} is neither a folder nor a model on the hub that can be read: {error}"
        ) from error
