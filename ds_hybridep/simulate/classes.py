# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a cluster are so alike that one can stand for all of them.

Ranks are merged by the coarsest *equitable partition*: two ranks of one class have equal attributes, and as many peers
of every class in every pattern of communication and at every distance; two uplinks of one class have as many ranks of
every class below them. Fair shares are unique, so flows between the same two classes get the same rate, and the merged
simulation is the full one, not an approximation of it. Identical datacentres become one class, whatever their number.

Source: colour refinement (Weisfeiler and Leman), on ranks and the nodes of the tree above them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.simulate.flows import Floats, Ints


def nodes_at(cluster: Cluster, depth: int) -> Ints:
    """[num_ranks] the node above each rank that shares its first `depth` coordinates; depth 0 is the whole cluster."""
    below = int(np.prod(cluster.sizes[depth:], dtype=np.int64))
    return np.arange(cluster.num_ranks, dtype=np.int64) // below


@dataclass(frozen=True)
class RankClasses:
    """Classes of ranks, and of the children whose uplinks they share.

    class_of: [num_ranks] class of each rank; C classes.
    examples: [C] a rank of each.
    sizes: [C] ranks of each.
    child_class_of: per level, [children there] class of each child.
    child_of: per level, [C] class of the child above a rank of each class.
    ranks_below: per level, [child classes, C] ranks of each class below one child.
    peers: per pattern and level, [C, C] peers of each class that a rank of a class has at that distance.
    """

    class_of: Ints
    examples: Ints
    sizes: Ints
    child_class_of: tuple[Ints, ...]
    child_of: tuple[Ints, ...]
    ranks_below: tuple[Ints, ...]
    peers: Mapping[str, tuple[Ints, ...]]

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.sizes)


def merge_ranks(
    cluster: Cluster,
    patterns: Mapping[str, Ints],
    attributes: Sequence[Floats],
    *,
    is_reduced: bool = True,
    max_classes: int | None = None,
) -> RankClasses | None:
    """The coarsest equitable partition; None where it has more than `max_classes`.

    Args:
        cluster: the tree of ranks.
        patterns: by name, [num_ranks] a number for each rank: all ranks with the same number talk to each other.
        attributes: [num_ranks] each; ranks of one class agree in all of them.
        is_reduced: False leaves every rank a class of its own: the full simulation.
        max_classes: to be had; None: not limited.
    """
    depths = range(len(cluster.sizes) + 1)
    nodes = [nodes_at(cluster, depth) for depth in depths]
    everywhere = np.zeros(cluster.num_ranks, dtype=np.int64)
    # Ranks of one pattern's group below one node; the whole cluster counts as a pattern, for the uplinks.
    cells = {
        name: [_ids(np.stack([group, nodes[depth]], axis=1)) for depth in depths]
        for name, group in {**patterns, "": everywhere}.items()
    }
    class_of = np.arange(cluster.num_ranks, dtype=np.int64)
    if is_reduced:
        class_of = _ids(np.stack([everywhere.astype(np.float64), *attributes], axis=1))
        while True:
            columns = [class_of]
            for cell_of in (cell for by_depth in cells.values() for cell in by_depth):
                columns.append(_ids(_histograms(cell_of, class_of))[cell_of])
            finer = _ids(np.stack(columns, axis=1))
            if max_classes is not None and finer.max() >= max_classes:
                return None
            if finer.max() == class_of.max():
                break
            class_of = finer
    return _describe(cluster, class_of, cells)


def _describe(cluster: Cluster, class_of: Ints, cells: Mapping[str, Sequence[Ints]]) -> RankClasses:
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
    """[R] numbers of the distinct rows, 0, 1, 2 ..."""
    _, inverse = np.unique(rows, axis=0, return_inverse=True)
    result: Ints = inverse.reshape(-1).astype(np.int64)
    return result


def _histograms(cell_of: Ints, class_of: Ints) -> Ints:
    """[cells, classes] ranks of each class in each cell."""
    num_cells, num_classes = int(cell_of.max()) + 1, int(class_of.max()) + 1
    counts: Ints = np.bincount(cell_of * num_classes + class_of, minlength=num_cells * num_classes)
    result: Ints = counts.reshape(num_cells, num_classes)
    return result
