"""Tensors of a name with dims, such as ``layers.{8}.w``, as one tensor for each name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np

from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest, restrict, swap
from xrank.layout.tensor_name import has_groups, parse_name
from xrank.plan.source import StoredModel, StoredShard


def expand_names(stored: StoredModel) -> StoredModel:
    """Return a model whose tensors have the names of a checkpoint, each a part of its tensor of a name with dims."""
    shards: list[StoredShard] = []
    for shard in stored.shards:
        shards.extend(_expand(shard) if has_groups(shard.name) else [shard])
    return replace(stored, shards=tuple(shards))


def _expand(shard: StoredShard) -> Iterator[StoredShard]:
    name = parse_name(shard.name)
    counts, shape = shard.shape[: len(name.dims)], shard.shape[len(name.dims) :]
    size = prod(shape)
    rows: Mapping[int, list[tuple[int, Nest]]] = {number: [] for number in range(prod(counts))}
    for row in range(len(shard.record)):
        turned = swap(shard.nests[row])
        last = turned.x + sum((n - 1) * x for n, x, _ in turned.loops)
        for number in range(turned.x // size, last // size + 1):
            for part in restrict(turned, number * size, (number + 1) * size):
                rows[number].append((row, swap(part._replace(x=part.x - number * size))))
    for indices, its in zip(product(*map(range, counts)), rows.values(), strict=True):
        picked = np.array([row for row, _ in its], np.int64)
        nests = NestTable.from_nests([nest for _, nest in its])
        yield replace(
            shard,
            name=name.with_indices(*indices),
            shape=shape,
            rank=shard.rank[picked],
            record=shard.record[picked],
            nests=nests,
        )
