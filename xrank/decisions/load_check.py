"""The check of a load before any rank touches a tensor: all ranks see one source, and together have all its names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from xrank.decisions.load_plan import Load
from xrank.errors import AGAIN, ContradictionError, UsageError, option
from xrank.plan.source import StoredModel
from xrank.words import list_text

_MAX_MISSING = 20
"""Maximum number of names missing in the source that a rank describes."""


def describe_load(source: StoredModel, load: Load) -> dict[str, Any]:
    """Describe a load for the first rank's check: the source, a bit for each tensor held, missing names."""
    held = set(load.names)
    bits = np.packbits([shard.name in held for shard in source.shards])
    return {"source": _digest(source), "held": bits.tobytes().hex(), "missing": list(load.missing[:_MAX_MISSING])}


def check_loads(source: StoredModel, ranks: Sequence[int], loads: Sequence[dict[str, Any]]) -> None:
    """Check that ranks see one source, and together hold all of its names and no others.

    Args:
        source: the source as the first rank sees it.
        ranks: the ranks' numbers.
        loads: the results of `describe_load` on these ranks.

    Raises:
        UsageError: names of the module and the source differ.
        ContradictionError: ranks see different sources.
    """
    _check_sources(ranks, [load["source"] for load in loads])
    _check_names(source, loads)


def _check_names(source: StoredModel, loads: Sequence[dict[str, Any]]) -> None:
    """Refuse names that ranks have and the source lacks, and names that no rank has."""
    missing = list(dict.fromkeys(name for load in loads for name in load["missing"]))
    held = np.zeros(-(-len(source.shards) // 8), np.uint8)
    for load in loads:
        held |= np.frombuffer(bytes.fromhex(load["held"]), np.uint8)
    bits = np.unpackbits(held, count=len(source.shards))
    unexpected = [shard.name for shard, bit in zip(source.shards, bits.tolist(), strict=True) if not bit]
    if not missing and not unexpected:
        return
    first = (*missing, *unexpected)[0]
    wrong = [f"{list_text(missing)} in the module alone"] if missing else []
    wrong += [f"{list_text(unexpected)} in the source alone"] if unexpected else []
    raise UsageError(
        f"{first}: {'the source has no such tensor' if missing else 'no rank has such a tensor'}",
        tensor=first,
        file=source.path,
        got="; ".join(wrong),
        want="the same names on both sides",
        next_step="make the module with the source's config.json, and tie what to_empty took apart; where one side "
        f"has a trainer's names, give {option('recipe')}",
    )


def _check_sources(ranks: Sequence[int], digests: Sequence[str]) -> None:
    for rank, digest in zip(ranks, digests, strict=True):
        if digest != digests[0]:
            raise ContradictionError(
                f"rank {rank} sees another source than rank {ranks[0]}, or its call differs",
                rank=rank,
                got=f"source {digest}",
                want=f"source {digests[0]}, as on rank {ranks[0]}: the same names, sizes and times of change",
                next_step="let all ranks see one file system; where its clients cache what they saw, wait a minute; "
                f"then let all ranks {AGAIN}",
            )


def _digest(source: StoredModel) -> str:
    """Return a digest of the source as this rank sees it."""
    state = xxhash.xxh3_128()
    for file in source.files:
        state.update(repr(file.identity).encode())
    for shard in source.shards:
        state.update(repr((shard.name, shard.dtype, shard.shape)).encode())
    return state.hexdigest()
