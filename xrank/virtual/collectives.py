"""Collectives as data: what each member of a group gives and gets, in order, by each algorithm.

A member keeps numbered *slots*, each of which holds an array or nothing. Its `Course` says how the slots are filled
from what the member brings, which of them it gives to whom and in which it puts what it gets, and what the result is
made of. A device executes courses, a plan counts them, and a link model times them; nothing here touches an array.

*Push*: whoever has something that another needs sends it there itself, g-1 copies where all need it.
*Ring*: everyone sends to the next member of the group alone, and passes on what it got; what the whole group must see
travels once around, in pieces. Broadcast, gather and scatter go along the same ring, from or to the root.
`ALWAYS_PUSH` names the collectives that have no ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from xrank.errors import UsageError
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import num_elements, split_lengths, with_length

__all__ = [
    "ALGORITHMS",
    "ALWAYS_PUSH",
    "COLLECTIVES",
    "REDUCTIONS",
    "ROOTED",
    "Course",
    "Get",
    "Give",
    "check_algorithm",
    "course",
    "output_spec",
    "step_specs",
]

ALGORITHMS = ("push", "ring")

COLLECTIVES = (
    "all_scatter",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
)

ALWAYS_PUSH = frozenset(("all_scatter", "all_to_all"))

REDUCTIONS = ("sum", "mean", "max", "min", "prod")

ROOTED = frozenset(("broadcast", "gather", "scatter"))


@dataclass(frozen=True, slots=True)
class Give:
    """Send what a slot holds to a member, named by its place in the group."""

    member: int
    slot: int


@dataclass(frozen=True, slots=True)
class Get:
    """Put what a member sends into a slot; folded with what the slot holds, if so."""

    member: int
    slot: int
    fold: bool = False


Step: TypeAlias = Give | Get


@dataclass(frozen=True, slots=True)
class Course:
    """What one member does in a collective."""

    start: Literal["whole", "flat", "parts", "nothing"]
    """What is in the slots at first: all that the member brings, in the slot of its own number; that cut into as many
    flat pieces as there are members; its parts, one for each member; or nothing."""
    steps: tuple[Step, ...]
    finish: Literal["all", "reduce", "flat", "one", "nothing"]
    """What the result is: what all slots hold, in order; that reduced to one; the flat pieces put together again; what
    one slot holds; or nothing."""
    slot: int = 0
    """The one slot of the result."""


def check_algorithm(algorithm: str) -> str:
    """Return the name of an algorithm.

    Raises:
        UsageError: there is none of that name.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(f"no algorithm is called {algorithm!r}", got=repr(algorithm), want='"push" or "ring"')
    return algorithm


@lru_cache(maxsize=65536)
def course(collective: str, algorithm: str, size: int, member: int, root: int = 0) -> Course:
    """Return what a member does.

    Args:
        collective: one of `COLLECTIVES`.
        algorithm: one of `ALGORITHMS`; without effect for `ALWAYS_PUSH`.
        size: the number of members.
        member: its place in the group.
        root: the place of the root, for `ROOTED`.
    """
    ring = algorithm == "ring" and collective not in ALWAYS_PUSH
    others = _others(size, member)
    match collective:
        case "all_scatter" | "all_gather":
            steps = _around(size, member, member) if ring else _all_to_all_of(others, lambda _: member)
            return Course("whole", steps, "all")
        case "all_reduce":
            if ring:
                steps = (*_reducing_around(size, member), *_around(size, member, member))
                return Course("flat", steps, "flat")
            return Course("whole", _all_to_all_of(others, lambda _: member), "reduce")
        case "reduce_scatter":
            if ring:
                return Course("parts", _reducing_around(size, member), "one", member)
            return Course("parts", _all_to_all_of(others, lambda other: other), "reduce")
        case "all_to_all":
            return Course("parts", _all_to_all_of(others, lambda other: other), "all")
        case "broadcast":
            steps = _down_chain(size, member, root, broadcast=True) if ring else _from_root(size, member, root, root)
            return Course("whole" if member == root else "nothing", steps, "one", root)
        case "scatter":
            steps = _down_chain(size, member, root) if ring else _from_root(size, member, root, None)
            return Course("parts" if member == root else "nothing", steps, "one", member)
        case "gather":
            steps = _up_chain(size, member, root) if ring else _to_root(size, member, root)
            return Course("whole", steps, "all" if member == root else "nothing")
        case _:
            raise UsageError(
                f"no collective is called {collective!r}", got=repr(collective), want=f"one of {list(COLLECTIVES)}"
            )


def step_specs(
    collective: str, algorithm: str, given: Sequence[ArraySpec], member: int, *, dim: int | None = None, root: int = 0
) -> tuple[ArraySpec, ...]:
    """Return what each step of a member's course moves.

    Args:
        collective: one of `COLLECTIVES`.
        algorithm: one of `ALGORITHMS`.
        given: what each member brings, as in `program.Communicate`.
        member: the place of the one in question.
        dim: where parts are cut.
        root: the place of the root.
    """
    size = len(given)
    steps = course(collective, algorithm, size, member, root).steps
    if collective in ("all_scatter", "all_gather", "gather", "broadcast"):
        return tuple(given[step.slot] for step in steps)
    if collective == "all_reduce":
        if algorithm == "push":
            return tuple(given[step.slot] for step in steps)
        lengths = split_lengths(num_elements(given[0]), size)
        return tuple(ArraySpec((lengths[step.slot],), given[0].dtype) for step in steps)
    if collective == "scatter":
        return tuple(_part(given[root], size, step.slot, dim) for step in steps)
    if collective == "reduce_scatter" and algorithm == "ring":
        return tuple(_part(given[0], size, step.slot, dim) for step in steps)
    return tuple(
        _part(given[member], size, step.member, dim)
        if isinstance(step, Give)
        else _part(given[step.member], size, member, dim)
        for step in steps
    )


def output_spec(
    collective: str, given: Sequence[ArraySpec], member: int, *, dim: int | None = None, root: int = 0
) -> ArraySpec | None:
    """Return what a member gets, joined at the dim where there are several; None where it gets nothing."""
    size = len(given)
    match collective:
        case "all_reduce":
            return given[member]
        case "broadcast":
            return given[root]
        case "reduce_scatter":
            return _part(given[member], size, member, dim)
        case "scatter":
            return _part(given[root], size, member, dim)
        case "gather" if member != root:
            return None
        case "all_to_all":
            return _joined([_part(one, size, member, dim) for one in given], dim)
        case _:
            return _joined(given, dim)


def _part(spec: ArraySpec, size: int, number: int, dim: int | None) -> ArraySpec:
    where = 0 if dim is None else dim
    return with_length(spec, where, split_lengths(spec.shape[where], size)[number])


def _joined(specs: Sequence[ArraySpec], dim: int | None) -> ArraySpec:
    where = 0 if dim is None else dim
    return with_length(specs[0], where, sum(spec.shape[where] for spec in specs))


def _others(size: int, member: int) -> tuple[int, ...]:
    """Return the other members, the next one first: where all give at once, no one is the first target of all."""
    return tuple((member + distance) % size for distance in range(1, size))


def _all_to_all_of(others: tuple[int, ...], slot_for: Callable[[int], int]) -> tuple[Step, ...]:
    """Return the steps of giving a slot to each other member, then getting from each into the slot of its number."""
    gives = tuple(Give(other, slot_for(other)) for other in others)
    return (*gives, *(Get(other, other) for other in reversed(others)))


def _around(size: int, member: int, first: int) -> tuple[Step, ...]:
    """Return the steps by which each slot travels once around; at first a member has slot `first`, of its number."""
    after, before = (member + 1) % size, (member - 1) % size
    steps: list[Step] = []
    for turn in range(size - 1):
        steps += (Give(after, (first - turn) % size), Get(before, (first - turn - 1) % size))
    return tuple(steps)


def _reducing_around(size: int, member: int) -> tuple[Step, ...]:
    """Return the steps after which the slot of a member's number is reduced over all, from the next member on."""
    after, before = (member + 1) % size, (member - 1) % size
    steps: list[Step] = []
    for turn in range(size - 1):
        steps += (Give(after, (member - turn - 1) % size), Get(before, (member - turn - 2) % size, fold=True))
    return tuple(steps)


def _from_root(size: int, member: int, root: int, slot: int | None) -> tuple[Step, ...]:
    """Return the steps of a root that gives everyone a slot, or to each that of its number where it is None."""
    if member == root:
        return tuple(Give(other, other if slot is None else slot) for other in _others(size, root))
    return (Get(root, member if slot is None else slot),)


def _to_root(size: int, member: int, root: int) -> tuple[Step, ...]:
    if member == root:
        return tuple(Get(other, other) for other in _others(size, root))
    return (Give(root, member),)


def _down_chain(size: int, member: int, root: int, *, broadcast: bool = False) -> tuple[Step, ...]:
    """Return the steps by which slots leave the root along the ring, those for the farthest member first."""
    after, before = (member + 1) % size, (member - 1) % size
    distance = (member - root) % size
    steps: list[Step] = []
    if broadcast:
        if distance:
            steps.append(Get(before, root))
        if distance < size - 1:
            steps.append(Give(after, root))
        return tuple(steps)
    for farther in range(size - 1, distance, -1):
        slot = (root + farther) % size
        steps += (Get(before, slot), Give(after, slot)) if distance else (Give(after, slot),)
    if distance:
        steps.append(Get(before, member))
    return tuple(steps)


def _up_chain(size: int, member: int, root: int) -> tuple[Step, ...]:
    """Return the steps by which slots reach the root along the ring, against its direction, the nearest first."""
    after, before = (member + 1) % size, (member - 1) % size
    distance = (member - root) % size
    steps: list[Step] = [Give(before, member)] if distance else []
    for farther in range(distance + 1, size):
        slot = (root + farther) % size
        steps += (Get(after, slot), Give(before, slot)) if distance else (Get(after, slot),)
    return tuple(steps)
