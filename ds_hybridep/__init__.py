# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-Experts training with DeepSpeed over slow links: experts travel where that is cheaper than tokens.

The public names below are looked up on first use.  Importing this package loads neither torch nor deepspeed, because
the entry point in `_autoload` runs in every process that imports torch.

    attach(engine, config=None)            take over the MoE layers; not needed when ds_config has a "hybridep" block
    detach(engine)                         give the layers back to DeepSpeed
    stats(engine)                          what was moved so far, as a dict
    replan(engine, config)                 change domain sizes, codecs and the token exchange
    refresh(engine)                        resync working copies after parameters were changed by hand
    save_pretrained(engine, folder)        write the model as transformers or peft do, with the experts of all ranks
    trace(engine, path)                    Chrome/Perfetto trace of the steps inside a with block
    site(source=None)                      which of the sites this process belongs to, a `Site`
    weigh(engine, weight)                  how much this site's next step counts in the mean over sites
    SiteSampler(dataset, site, ...)        the samples of one rank of one site
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_hybridep.version import __version__

if TYPE_CHECKING:
    from ds_hybridep.deepspeed.api import detach, refresh, replan, site, stats, trace, weigh
    from ds_hybridep.deepspeed.saving import save_pretrained
    from ds_hybridep.deepspeed.start import attach
    from ds_hybridep.sites.data import Site, SiteSampler

__all__ = [
    "Site", "SiteSampler", "__version__", "attach", "detach", "refresh", "replan", "save_pretrained", "site", "stats",
    "trace", "weigh",
]  # fmt: skip
_MODULES = {
    "Site": "sites.data",
    "SiteSampler": "sites.data",
    "attach": "deepspeed.start",
    "save_pretrained": "deepspeed.saving",
}


def __getattr__(name: str) -> Any:
    """The public name `name`, from where it is defined.  Raises AttributeError for any other name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no {name!r}; its public names are {', '.join(__all__)}")
    return getattr(import_module(f"ds_hybridep.{_MODULES.get(name, 'deepspeed.api')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
