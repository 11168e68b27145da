# SPDX-License-Identifier: Apache-2.0
"""All sites together read each sample once."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ds_hybridep
from ds_hybridep.errors import ConfigError
from ds_hybridep.sites.data import Site, SiteSampler

BLOCK = {"hybridep": {"sites": {"names": ["a", "b"], "meeting_point": "host:1", "secret_file": "secret"}}}


@given(st.integers(1, 3), st.integers(1, 3), st.integers(9, 60), st.booleans(), st.integers(0, 3))
def test_each_sample_is_read_once(num_sites: int, ranks: int, size: int, shuffle: bool, epoch: int) -> None:
    read = []
    for index in range(num_sites):
        for rank in range(ranks):
            sampler = SiteSampler(range(size), Site("x", index, num_sites), rank, ranks, shuffle=shuffle)
            sampler.set_epoch(epoch)
            share = list(sampler)
            assert len(share) == len(sampler)
            read += share
    assert len(set(read)) == len(read) == size // (num_sites * ranks) * num_sites * ranks


def test_a_site_that_comes_back_goes_on_where_it_would_be() -> None:
    site = Site("b", 1, 2)
    whole = SiteSampler(range(40), site, 0, 2, seed=3)
    order = [*whole, *whole, *whole]
    assert len(order) == 30
    later = SiteSampler(range(40), site, 0, 2, seed=3, start=17)
    assert [*later, *later] == order[17:]


@pytest.mark.parametrize("batches", [3, 4, 9])
def test_batches_that_are_not_full_are_left_out_and_a_resumed_run_reads_the_same(batches: int) -> None:
    """With `drop_last` of the loader, a resumed run once read another epoch's order."""
    site = Site("a", 0, 2)

    def read(start: int) -> list[int]:
        sampler = SiteSampler(range(30), site, 0, 2, seed=1, batch_size=2, start=start)
        loader = torch.utils.data.DataLoader(range(30), 2, sampler=sampler)
        return [one for _ in range(5) for batch in loader for one in batch.tolist()]

    whole = read(0)
    assert len(whole) == 5 * 6, "7 samples of an epoch are 3 batches of 2"
    assert read(2 * batches)[:8] == whole[2 * batches : 2 * batches + 8]


def test_the_site_is_found_before_there_is_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDEP_SITE", "b")
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BLOCK))
    for source in (BLOCK, path, str(path)):
        assert ds_hybridep.site(source) == Site("b", 1, 2)
    monkeypatch.setenv("HYBRIDEP_SITE", "c")
    with pytest.raises(ConfigError, match="HYBRIDEP_SITE"):
        ds_hybridep.site(BLOCK)
    with pytest.raises(ConfigError, match="no engine"):
        ds_hybridep.site()
    with pytest.raises(ConfigError, match='has no "sites"'):
        ds_hybridep.site({})


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than 4 ranks"):
        SiteSampler(range(3), Site("a", 0, 2), 0, 2)
    with pytest.raises(ConfigError, match="do not fill a batch of 3"):
        SiteSampler(range(9), Site("a", 0, 2), 0, 2, batch_size=3)
