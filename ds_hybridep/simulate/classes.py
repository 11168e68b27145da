# SPDX-License-Identifier: Apache-2.0
"""Classes of ranks that are so alike that one rank can stand for all of its class.

The classes are the coarsest *equitable partition*. Two ranks of one class have equal attributes; in every pattern of
communication, they have equally many peers of every class at every distance. Two uplinks of one class have equally
many ranks of every class below them. Fair shares are unique, so flows between the same two classes get the same rate,
and the merged simulation is exact. Identical datacentres become one class, no matter how many there are.

Source: colour refinement (Weisfeiler and Leman), on ranks and the nodes of the tree above them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.program import Peers
from ds_hybridep.simulate.flows import Floats, Ints


def nodes_at(cluster: Cluster, depth: int) -> Ints:
    """[num_ranks] the node above each rank that shares its first `depth` coordinates; depth 0 is the whole cluster."""
    below = int(np.prod(cluster.sizes[depth:], dtype=np.int64))
    return np.arange(cluster.num_ranks, dtype=np.int64) // below


@dataclass(frozen=True)
class RankClasses:
    """C classes of ranks, and classes of the children whose uplinks they share.

    class_of: [num_ranks] class of each rank.
    examples: [C] one rank of each class.
    sizes: [C] number of ranks in each class.
    child_class_of: per level, [children there] class of each child.
    child_of: per level, [C] class of the child above a rank of each class.
    ranks_below: per level, [child classes, C] number of ranks of each class below one child.
    peers: per pattern and level, [C, C] number of peers of each class (column) at that distance from a rank (row).
    """

    class_of: Ints
    examples: Ints
    sizes: Ints
    child_class_of: tuple[Ints, ...]
    child_of: tuple[Ints, ...]
    ranks_below: tuple[Ints, ...]
    peers: Mapping[Peers, tuple[Ints, ...]]

    @property
    def num_classes(self) -> int:
        """Number C of classes."""
        return len(self.sizes)


def merge_ranks(
    cluster: Cluster, patterns: Mapping[Peers, Ints], attributes: Sequence[Floats], *, max_classes: int | None = None
) -> RankClasses | None:
    """The coarsest equitable partition; None if it has more than `max_classes` classes.

    Args:
        cluster: the tree of ranks.
        patterns: by `Peers`, [num_ranks] a number for each rank: all ranks with the same number talk to each other.
        attributes: [num_ranks] each; ranks of one class agree in all of them.
        max_classes: largest number of classes; None: not limited.
    """
    depths = range(len(cluster.sizes) + 1)
    nodes = [nodes_at(cluster, depth) for depth in depths]
    everywhere = np.zeros(cluster.num_ranks, dtype=np.int64)
    everybody = Peers(("group", "domain", "offset"), tuple(range(len(cluster.sizes))))
    # A cell is the ranks of one pattern's group below one node.  The whole cluster is a pattern too, for the uplinks.
    cells = {
        name: [_ids(np.stack([group, nodes[depth]], axis=1)) for depth in depths]
        for name, group in {everybody: everywhere, **patterns}.items()
    }
    class_of = _ids(np.stack([everywhere.astype(np.float64), *attributes], axis=1))
    while True:
        columns = [class_of]
        for cell_of in (cell for by_depth in cells.values() for cell in by_depth):
            columns.append(_ids(_histograms(cell_of, class_of))[cell_of])
        finer = _ids(np.stack(columns, axis=1))
        if max_classes is not None and finer.max() >= max_classes:
            return None
        if finer.max() == class_of.max():
            return _describe(cluster, class_of, cells)
        class_of = finer


def _describe(cluster: Cluster, class_of: Ints, cells: Mapping[Peers, Sequence[Ints]]) -> RankClasses:
    _, examples, sizes = np.unique(class_of, return_index=True, return_counts=True)
    child_class_of, child_of, ranks_below = [], [], []
    for level in range(len(cluster.sizes)):
        nodes = nodes_at(cluster, level + 1)
        histograms = _histograms(nodes, class_of)
        classes = _ids(histograms)
        child_class_of.append(classes)
        child_of.append(classes[nodes[examples]])
        _, first = np.unique(classes, return_index=True)
        ranks_below.append(histograms[first])
    peers = {}
    for name, by_depth in cells.items():
        counts = [_histograms(cell, class_of)[cell[examples]] for cell in by_depth]
        peers[name] = tuple(counts[level] - counts[level + 1] for level in range(len(cluster.sizes)))
    return RankClasses(
        class_of=class_of,
        examples=examples,
        sizes=sizes,
        child_class_of=tuple(child_class_of),
        child_of=tuple(child_of),
        ranks_below=tuple(ranks_below),
        peers=peers,
    )


def _ids(rows: NDArray[np.generic]) -> Ints:
    """[R] number of each row, 0, 1, 2 ...; equal rows have equal numbers."""
    _, inverse = np.unique(rows, axis=0, return_inverse=True)
    result: Ints = inverse.reshape(-1).astype(np.int64)
    return result


def _histograms(cell_of: Ints, class_of: Ints) -> Ints:
    """[cells, classes] number of ranks of each class in each cell."""
    num_cells, num_classes = int(cell_of.max()) + 1, int(class_of.max()) + 1
    counts: Ints = np.bincount(cell_of * num_classes + class_of, minlength=num_cells * num_classes)
    result: Ints = counts.reshape(num_cells, num_classes)
    return result
