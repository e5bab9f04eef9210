"""The errors of a tensor that is not covered exactly once, each with range, ranks and files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.errors import AGAIN, ContradictionError, IncompleteError, XrankError, option
from xrank.plan.coverage import CoverageFault, contains, range_text
from xrank.plan.source import StoredModel, StoredShard
from xrank.words import ranks_text

if TYPE_CHECKING:
    from xrank.plan.planner import Copies

_CHECK_LAYOUT = f"check the layout that the ranks recorded, or the one given by {option('layouts')}"


def coverage_error(
    shard: StoredShard, copies: Copies, fault: CoverageFault, num_elements: int, source: StoredModel
) -> XrankError:
    """Return the error that names a fault's tensor, range, ranks and files."""
    table = [copies.nests[i] for i in range(len(copies))]
    if fault.kind == "gap":
        # The gap ends where the next piece begins, which is exact for whole missing shards.
        later = [nest.y for nest in table if nest.y > fault.address]
        where = range_text(shard.shape, fault.address, min(later, default=num_elements) - 1)
        return IncompleteError(
            f"{shard.name}, {where}: no rank left these elements",
            tensor=shard.name,
            index_range=where,
            got=f"pieces of {ranks_text(shard.rank.tolist())}" if len(shard.rank) else "no piece at all",
            want="every element exactly once",
            next_step=f"let the missing rank write again, then {AGAIN}; nothing was written",
        )
    holders = [
        (int(copies.rank[i]), source.files[int(source.records.file[copies.record[i]])].path)
        for i, nest in enumerate(table)
        if contains(nest, fault.address)
    ]
    if fault.kind == "outside":
        return ContradictionError(
            f"{shard.name}: a rank holds elements outside the tensor",
            tensor=shard.name,
            rank=holders[0][0] if holders else None,
            file=holders[0][1] if holders else None,
            got=f"address {fault.address:,}",
            want=f"less than {num_elements:,}, the size of {list(shard.shape)}",
            next_step=_CHECK_LAYOUT,
        )
    where = range_text(shard.shape, fault.address, fault.address)
    return ContradictionError(
        f"{shard.name}, from {where} on: held twice, by {ranks_text(rank for rank, _ in holders)}, cut differently",
        tensor=shard.name,
        rank=holders[-1][0] if holders else None,
        file=holders[-1][1] if holders else None,
        index_range=where,
        got=", ".join(f"rank {rank} in {path}" for rank, path in holders),
        want="every element exactly once, or equal pieces as replicas",
        next_step=_CHECK_LAYOUT,
    )
