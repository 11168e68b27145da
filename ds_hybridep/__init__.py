# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-Experts training with DeepSpeed over slow links: experts travel where that is cheaper than tokens.

The public names below are looked up on first use.  Importing this package loads neither torch nor deepspeed, because
the entry point in `_autoload` runs in every process that imports torch.

    attach(engine_or_model, config=None)   take over the MoE layers; not needed when ds_config has a "hybridep" block
    detach(engine)                         give the layers back to DeepSpeed
    stats(engine)                          what was moved so far, as a dict
    refresh(engine)                        resync working copies after parameters were changed by hand
    trace(engine, path)                    Chrome/Perfetto trace of the steps inside a with block
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_hybridep.version import __version__

if TYPE_CHECKING:
    from ds_hybridep.engine import attach, detach, refresh, stats, trace

__all__ = ["__version__", "attach", "detach", "refresh", "stats", "trace"]


def __getattr__(name: str) -> Any:
    """The public name `name`, from `ds_hybridep.engine`.  Raises AttributeError for any other name."""
    if name not in __all__:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__all__)}"
        )
    return getattr(import_module("ds_hybridep.engine"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
