"""Matches the tensors of two models: under the same name, or tied to it, cast or left out as recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from xrank.decisions.ties import find_config_ties
from xrank.errors import ContradictionError, option
from xrank.plan.source import StoredModel, StoredShard
from xrank.words import list_text
from xrank.writers.manifest import MANIFEST_NAME

NOT_COPIES = "find out which of the two is the right one"
OR_CONFIG = f"{NOT_COPIES}; if the gather was given {option('adapter_config')}, give the same here"


@dataclass(frozen=True, eq=False)
class Compared:
    """One of two models in a comparison."""

    path: str
    """Path of the model as the user named it."""
    model: StoredModel
    """The model under the names of the comparison, with a shard and an alias for each name that its manifest ties."""
    manifest: Mapping[str, Any]
    """The model's manifest; empty without one."""
    config: Mapping[str, Any] | None

    @cached_property
    def shards(self) -> dict[str, StoredShard]:
        """Shards by name."""
        return {shard.name: shard for shard in self.model.shards}


@dataclass(frozen=True, slots=True)
class TiedName:
    """A name on one side alone, whose tensor must equal `target`, which both sides have."""

    side: int
    name: str
    target: str


@dataclass(frozen=True, slots=True)
class Correspondence:
    """How the tensors of two models belong together."""

    names: tuple[str, ...]
    """Names on both sides whose tensors are compared: one is the other's copy."""
    cast: Mapping[str, str]
    """Name -> the element type in which both are compared, where a manifest records that one was cast to it."""
    tied: tuple[TiedName, ...]
    aliases: frozenset[str]
    """Those of `names` that are, on some side, another name of one of `names`."""
    notes: tuple[tuple[str, str], ...]


def correspond(sides: tuple[Compared, Compared], updates: Collection[str] = ()) -> Correspondence:
    """Match the tensors of two models.

    A name on one side alone is not a difference where it is tied, by that side's storage, a manifest or a
    config.json, to a tensor that both have; nor where the other side's manifest records that it was left out as asked.

    Args:
        sides: the two models.
        updates: names to which the first side's adapter is added before the comparison.

    Raises:
        ContradictionError: a tensor is on one side alone, or has another element type or shape there.
    """
    ties = _ties(sides)
    left_out: tuple[list[str], list[str]] = ([], [])
    tied = []
    for name in sorted(set(sides[0].shards) ^ set(sides[1].shards)):
        side = 0 if name in sides[0].shards else 1
        if name in sides[1 - side].manifest.get("excluded", ()):
            left_out[1 - side].append(name)
            continue
        # No record decides whether a merge into one of two tied tensors should also change the other.
        may_be = [to for to in ties.get(name, ()) if _is_on_both(to, sides) and (side == 1 or to not in updates)]
        if not may_be:
            raise ContradictionError(
                f"{name} is in {sides[side].path} alone",
                tensor=name,
                got=f"{len(sides[0].shards)} tensors against {len(sides[1].shards)}",
                want="the same names",
                next_step=NOT_COPIES,
            )
        tied.append(TiedName(side, name, may_be[0]))
    names = _drop_repeats([name for name in sides[0].shards if _is_on_both(name, sides)], sides, ties, updates)
    casts = {name: found for name in names if (found := _cast(name, sides, ties)) is not None}
    notes = [
        (
            "tied",
            f"{one.name} is in {sides[one.side].path} alone, and is {one.target} there, with which it was compared",
        )
        for one in tied
    ]
    for side in (0, 1):
        made = Counter(text for number, text in casts.values() if number == side)
        notes += [
            ("cast", f"{count} tensors were compared after the cast {text} that {_manifest(sides[side])} says")
            for text, count in made.items()
        ]
        if left_out[side]:
            notes.append(
                ("excluded", f"not compared, as {_manifest(sides[side])} says left out: {list_text(left_out[side])}")
            )
    aliases = {name for name in names if any(side.model.aliases.get(name) in names for side in sides)}
    # One storage under both names cannot differ.
    tied = [one for one in tied if not _is_one(*(sides[one.side].shards[name] for name in (one.name, one.target)))]
    dtypes = {name: sides[side].shards[name].dtype for name, (side, _) in casts.items()}
    return Correspondence(tuple(names), dtypes, tuple(tied), frozenset(aliases), tuple(notes))


def _is_on_both(name: str, sides: Sequence[Compared]) -> bool:
    return all(name in side.shards for side in sides)


def _manifest(side: Compared) -> str:
    return f"{side.path}/{MANIFEST_NAME}"


def _ties(sides: Sequence[Compared]) -> dict[str, list[str]]:
    """Return name -> the other names of the same tensor, as either side records them."""
    pairs = [pair for side in sides for pair in side.model.aliases.items()]
    for side in sides:
        pairs += find_config_ties({name: None for each in sides for name in each.shards}, side.config).items()
    groups: dict[str, list[str]] = {}
    for name, target in pairs:
        joined = list(dict.fromkeys([*groups.get(target, [target]), *groups.get(name, [name])]))
        groups.update(dict.fromkeys(joined, joined))
    return {name: [other for other in group if other != name] for name, group in groups.items()}


def _drop_repeats(
    names: Sequence[str], sides: Sequence[Compared], ties: Mapping[str, Sequence[str]], updates: Collection[str]
) -> list[str]:
    """Return the names without those that are on both sides only another name of a tensor among them."""
    aliases = {alias for side in sides for alias in side.model.aliases}
    kept: set[str] = set()
    for name in sorted(names, key=aliases.__contains__):
        others = [other for other in ties.get(name, ()) if other in kept and other not in updates]
        if not any(all(_is_one(side.shards[name], side.shards[other]) for side in sides) for other in others):
            kept.add(name)
    return [name for name in names if name in kept]


def _is_one(a: StoredShard, b: StoredShard) -> bool:
    """Return whether two tensors are the same bytes."""
    arrays = [(shard.record, shard.nests.x, shard.nests.y, shard.nests.loops) for shard in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(map(np.array_equal, *arrays))


def _cast(name: str, sides: Sequence[Compared], ties: Mapping[str, Sequence[str]]) -> tuple[int, str] | None:
    """Return which side is a cast of the other, and "from -> to"; None where both have the same element type.

    Raises:
        ContradictionError: the types differ, and no manifest records a cast between them.
    """
    shards = [side.shards[name] for side in sides]
    if (shards[0].dtype, shards[0].shape) == (shards[1].dtype, shards[1].shape):
        return None
    for side in (0, 1):
        text = f"{shards[1 - side].dtype} -> {shards[side].dtype}"
        told = sides[side].manifest.get("cast", {})
        # A tied name that was not written was cast with the tensor that stands for it.
        casts = [told[known] for known in (name, *ties.get(name, ())) if known in told]
        if casts[:1] == [text] and shards[0].shape == shards[1].shape:
            return side, text
    raise ContradictionError(
        f"{name} differs in kind",
        tensor=name,
        got=f"{shards[0].dtype} {list(shards[0].shape)} in {sides[0].path}",
        want=f"{shards[1].dtype} {list(shards[1].shape)}, as in {sides[1].path}",
        next_step=NOT_COPIES,
    )
