"""Parts of a tensor with their claimed layouts: what the ranks hold is compared with what they claim."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from xrank.errors import AGAIN, IncompleteError, LayoutError
from xrank.layout.local_part import LocalPart
from xrank.readers.claims import Claim, find_local_name
from xrank.readers.held_tensor import HeldTensor
from xrank.words import ranks_text

Claimed: TypeAlias = tuple[HeldTensor, Claim]
"""A rank's part, and how its tensor is cut."""


def check_part(name: str, held: HeldTensor, claim: Claim, part: LocalPart | None, shape: tuple[int, ...]) -> LocalPart:
    """Return the part that the layout gives a rank, after checking that the rank holds it."""
    check = "check that the layout and mesh are those of the run that wrote the state"
    if part is None:
        raise held.contradiction(
            name,
            f"rank {held.rank} holds a part, but its layout leaves this rank out",
            got=f"a part of shape {list(held.shape)}",
            want=f"no part, by {claim} on {claim.mesh.grid}",
            next_step=check,
        )
    if part.sums:
        raise LayoutError(
            f"{name}: its ranks hold addends of a sum over {', '.join(part.sums)}, not values",
            tensor=name,
            rank=held.rank,
            file=held.file,
            got=str(claim),
            want="parts or replicas",
            next_step="reduce the tensor before it is saved",
        )
    if part.shape != held.shape:
        raise held.contradiction(
            name,
            f"rank {held.rank}'s part has another shape than its layout gives it",
            got=str(list(held.shape)),
            want=f"{list(part.shape)}, by {claim} of {list(shape)} on {claim.mesh.grid}",
            next_step=check,
        )
    return part


def check_meshes(name: str, claimed: Sequence[Claimed]) -> None:
    """Check that meshes are equal or disjoint, that each mesh has one layout, and that all its ranks are present."""
    holders = {h.rank: h for h, _ in claimed}
    if len(holders) < len(claimed):
        twice = next(h for h, _ in claimed if holders[h.rank] is not h)
        raise twice.contradiction(
            name,
            f"rank {twice.rank} holds it under two names",
            got="two parts",
            want="one part on each rank",
            next_step="check the layout's name with dims",
        )
    seen: dict[int, Claimed] = {}
    for h, claim in claimed:
        # The first rank of a mesh claims all its ranks; later ranks of the mesh check only their own entry.
        for rank in claim.mesh.ranks if h.rank not in seen else (h.rank,):
            other, others = seen.setdefault(rank, (h, claim))
            if other is not h and (others.mesh, others.layout) != (claim.mesh, claim.layout):
                raise h.contradiction(
                    name,
                    f"ranks {other.rank} and {h.rank} disagree about its layout or mesh",
                    got=f"{claim} on {claim.mesh.grid}, {_format_ranks(claim.mesh.ranks)}",
                    want=f"{others} on {others.mesh.grid}, {_format_ranks(others.mesh.ranks)}",
                    next_step="all ranks must come from one run; write the states again",
                )
            if rank not in holders and find_local_name(claim, name, rank) is not None:
                raise IncompleteError(
                    f"{name}: rank {rank} of its mesh holds no part of it",
                    tensor=name,
                    rank=rank,
                    got=f"parts on {ranks_text(holders)}",
                    want=f"parts on {ranks_text(claim.mesh.ranks)}",
                    next_step=f"let rank {rank} write its state again, then {AGAIN}",
                )


def _format_ranks(ranks: Sequence[int]) -> str:
    rising = all(a < b for a, b in pairwise(ranks))
    return ranks_text(ranks) if rising else f"ranks {', '.join(map(str, ranks))}"
