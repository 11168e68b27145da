# SPDX-License-Identifier: Apache-2.0
"""Which share of the data a site reads."""

import json
import os
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

from ds_hybridep.errors import ConfigError


@dataclass(frozen=True)
class Site:
    """This site among all sites."""

    name: str
    """One of `sites.names`."""
    index: int
    """Its place in `sites.names`."""
    number: int
    """How many sites there are."""
    present: tuple[str, ...] = ()
    """Names of those that train now; empty before the start."""


def site_of(names: list[str], name: str | None, present: tuple[str, ...] = ()) -> Site:
    """Return the site that this process belongs to.  name: used if HYBRIDEP_SITE is not set."""
    name = os.environ.get("HYBRIDEP_SITE") or name
    if name not in names:
        raise ConfigError(
            f"hybridep.sites.names is {names}, and this site is {name!r}; set the environment variable HYBRIDEP_SITE "
            f"to one of the names on all ranks of this site"
        )
    return Site(name, names.index(name), len(names), present)


def read_site(ds_config: str | Path | Mapping[str, Any]) -> Site:
    """Return the site of a ds_config, or of its file, before an engine is made."""
    config = ds_config if isinstance(ds_config, Mapping) else json.loads(Path(ds_config).read_text())
    sites = (config.get("hybridep") or {}).get("sites")
    if not sites:
        raise ConfigError('ds_config has no "sites" in its "hybridep" block; docs/sites.md shows one')
    return site_of(list(sites["names"]), sites.get("name"))


class SiteSampler(torch.utils.data.Sampler[int]):
    """Yields the samples of one rank of one site; all ranks of all sites together read each sample once per epoch.

    The order depends on `seed` and the epoch alone.  The last samples are left out if they do not fill all shares.

    Args:
        dataset: anything with a length.
        site: from `ds_hybridep.site`.
        rank, world_size: of this process in its site.
        shuffle: draw another order in each epoch; otherwise that of the dataset.
        seed: the same on all ranks of all sites.
        batch_size: samples that this rank reads at a time, if the last ones of an epoch that do not fill a batch are
            to be left out: give it in place of `drop_last` of the loader, which would shift the next epochs.
        start: samples that this rank has read already, for a run that is resumed or a site that has come back:
            `engine.global_samples // engine.world_size`.

    Raises:
        ConfigError: there are fewer samples than ranks of all sites.
    """

    def __init__(
        self, dataset: Sized, site: Site, rank: int, world_size: int, *, shuffle: bool = True, seed: int = 0,
        batch_size: int = 1, start: int = 0,
    ) -> None:  # fmt: skip
        self._size, self._shuffle, self._seed = len(dataset), shuffle, seed
        self._share, self._num_shares = site.index * world_size + rank, site.number * world_size
        if self._size < self._num_shares:
            raise ConfigError(
                f"SiteSampler: {self._size} samples are fewer than {self._num_shares} ranks of all sites"
            )
        self._batch_size = batch_size
        if not len(self):
            raise ConfigError(
                f"SiteSampler: {self._size} samples do not fill a batch of {batch_size} on {self._num_shares} ranks "
                f"of all sites"
            )
        self.epoch, self._skip = divmod(start, len(self))

    def __len__(self) -> int:
        """Return how many samples this rank reads in an epoch."""
        share = self._size // self._num_shares
        return share - share % self._batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose another order; the next iteration begins at its start."""
        if epoch != self.epoch:
            self.epoch, self._skip = epoch, 0

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank's samples in the rest of the epoch; then the next epoch begins."""
        order = list(range(self._size))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._size, generator=generator).tolist()
        mine = order[self._share : len(self) * self._num_shares : self._num_shares]
        skip, self._skip = self._skip, 0
        yield from mine[skip:]
        self.epoch += 1
