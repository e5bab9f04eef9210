"""What the ranks of a load agree on before any of them touches a tensor: one source, and every name of it held."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash

from xrank.errors import ContradictionError, UsageError
from xrank.plan.source import StoredModel
from xrank.teams.agreement import agreed

if TYPE_CHECKING:
    from xrank.decisions.load_plan import Load
    from xrank.teams.team import Team

__all__ = ["agreed_load", "check_names"]

Made = TypeVar("Made")

_MAX_TOLD = 20
"""Names that a rank tells of those that the source has not."""


def agreed_load(team: Team, make: Callable[[], Made], parts: Callable[[Made], tuple[StoredModel, Load]]) -> Made:
    """Make a plan on every rank and return it if all could, for one source, and have all of its names between them.

    Args:
        team: the ranks; each of them calls this.
        make: plans.
        parts: gives a plan's source, and what it loads.

    Raises:
        UsageError: names of the module and the source differ: on every rank.
        ContradictionError: ranks see different sources: on every rank.
        XrankError: what `make` raised here; RankFailedError where it raised elsewhere only.
    """

    def tell(made: Made) -> dict[str, Any]:
        source, load = parts(made)
        return {"source": _digest(source), **_told(source, load)}

    def check(made: Made, told: Sequence[dict[str, Any]]) -> None:
        _check_sources(team.ranks, [one["source"] for one in told])
        _check_names(parts(made)[0], told)

    return agreed(team, "the plan", make, tell, check)


def check_names(source: StoredModel, load: Load) -> None:
    """Check that one process alone has all names of the source, and no others.

    Raises:
        UsageError: it has not.
    """
    _check_names(source, [_told(source, load)])


def _told(source: StoredModel, load: Load) -> dict[str, Any]:
    """Return which of the source's tensors a rank has, a bit for each, and names that the source has not."""
    held = set(load.names)
    bits = np.packbits([shard.name in held for shard in source.shards])
    return {"held": bits.tobytes().hex(), "missing": list(load.missing[:_MAX_TOLD])}


def _check_names(source: StoredModel, told: Sequence[dict[str, Any]]) -> None:
    """Refuse names that ranks have and the source has not, and those that no rank has."""
    missing = list(dict.fromkeys(name for one in told for name in one["missing"]))
    held = np.zeros(-(-len(source.shards) // 8), np.uint8)
    for one in told:
        held |= np.frombuffer(bytes.fromhex(one["held"]), np.uint8)
    bits = np.unpackbits(held, count=len(source.shards))
    unexpected = [shard.name for shard, bit in zip(source.shards, bits.tolist(), strict=True) if not bit]
    if not missing and not unexpected:
        return
    first = (*missing, *unexpected)[0]
    wrong = [f"{_some(missing)} in the module alone"] if missing else []
    wrong += [f"{_some(unexpected)} in the source alone"] if unexpected else []
    raise UsageError(
        f"{first}: {'the source has no such tensor' if missing else 'no rank has such a tensor'}",
        tensor=first,
        file=source.path,
        got="; ".join(wrong),
        want="the same names on both sides",
        next_step="make the module with the source's config.json, and tie what to_empty took apart; where one side "
        "has a trainer's names, give recipe=",
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _check_sources(ranks: Sequence[int], digests: Sequence[str]) -> None:
    for rank, digest in zip(ranks, digests, strict=True):
        if digest != digests[0]:
            raise ContradictionError(
                f"rank {rank} sees another source than rank {ranks[0]}, or was told otherwise",
                rank=rank,
                got=f"source {digest}",
                want=f"source {digests[0]}, as on rank {ranks[0]}: the same names, sizes and times of change",
                next_step="make the same call on all ranks, and let them see one file system; where its clients keep "
                "what they saw for a while, wait a minute",
            )


def _digest(source: StoredModel) -> str:
    """Return a digest of what the source is, as this rank sees it."""
    state = xxhash.xxh3_128()
    for file in source.files:
        state.update(repr((os.path.basename(file.path), file.nbytes, file.inode, file.mtime_ns)).encode())
    for shard in source.shards:
        state.update(repr((shard.name, shard.dtype, shard.shape)).encode())
    return state.hexdigest()
