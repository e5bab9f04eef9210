"""Statistics of a run, measured or planned: calls, messages, bytes and flops, per device and collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.errors import UsageError
from xrank.virtual.arrays import ArraySpec, num_elements, split_lengths, with_length


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls, messages and bytes of one kind of exchange."""

    calls: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    sent_nbytes: int = 0
    """Bytes of the arrays' elements; headers and shapes are not counted."""
    received_nbytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.calls + other.calls,
            self.sent_messages + other.sent_messages,
            self.received_messages + other.received_messages,
            self.sent_nbytes + other.sent_nbytes,
            self.received_nbytes + other.received_nbytes,
        )


_NOTHING: Mapping[str, Traffic] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Statistics of one device."""

    collectives: Mapping[str, Traffic] = field(default_factory=lambda: _NOTHING)
    """Traffic between devices by collective name, including ``"send"`` and ``"receive"``."""
    from_host: Traffic = Traffic()
    to_host: Traffic = Traffic()
    flops: int = 0
    peak_nbytes: int | None = None
    """Largest number of bytes in registers at once; None for a function that never reported it."""

    @property
    def traffic(self) -> Traffic:
        """Traffic with other devices, over all collectives."""
        return sum(self.collectives.values(), Traffic())


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of all devices, in mesh order."""

    devices: tuple[DeviceStatistics, ...]

    @property
    def flops(self) -> int:
        """Number of floating-point operations of all devices."""
        return sum(device.flops for device in self.devices)

    @property
    def traffic(self) -> Traffic:
        """Traffic between all devices."""
        return sum((device.traffic for device in self.devices), Traffic())

    @property
    def messages(self) -> int:
        """Number of messages sent between devices."""
        return self.traffic.sent_messages

    @property
    def nbytes(self) -> int:
        """Number of bytes sent between devices."""
        return self.traffic.sent_nbytes

    def by_collective(self) -> dict[str, Traffic]:
        """Return the traffic of all devices, summed by collective name."""
        return merge_traffic(device.collectives for device in self.devices)


def merge_traffic(many: Iterable[Mapping[str, Traffic]]) -> dict[str, Traffic]:
    """Sum traffic by collective name."""
    total: dict[str, Traffic] = {}
    for one in many:
        for name, traffic in one.items():
            total[name] = total.get(name, Traffic()) + traffic
    return total


IntArray: TypeAlias = npt.NDArray[np.int64]

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
class SendSlot:
    """Send a slot to a member, given by its place in the group."""

    member: int
    slot: int


@dataclass(frozen=True, slots=True)
class ReceiveSlot:
    """Receive from a member into a slot; `fold` reduces the received array with the slot's array."""

    member: int
    slot: int
    fold: bool = False


Step: TypeAlias = SendSlot | ReceiveSlot


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of one member in a collective."""

    start: Literal["whole", "flat", "parts", "nothing"]
    """Initial slots: "whole" puts the input into the member's own slot; "flat" cuts the flattened input into one piece
    per member; "parts" has one part of the input per member; "nothing" leaves all slots empty."""
    steps: tuple[Step, ...]
    finish: Literal["all", "reduce", "flat", "one", "nothing"]
    """The result: all slots in order; all slots reduced to one array; the flat pieces joined and reshaped; one slot;
    or nothing."""
    slot: int = 0
    """The slot of the result, for finish "one"."""


def check_algorithm(algorithm: str) -> str:
    """Return the name of an algorithm."""
    if algorithm not in ALGORITHMS:
        raise UsageError(f"unknown algorithm {algorithm!r}", got=repr(algorithm), want='"push" or "ring"')
    return algorithm


@lru_cache(maxsize=65536)
def course(collective: str, algorithm: str, size: int, member: int, root: int = 0) -> Course:
    """Return the steps of one member.

    Args:
        collective: one of `COLLECTIVES`.
        algorithm: one of `ALGORITHMS`; ignored for `ALWAYS_PUSH`.
        size: number of members.
        member: place of the member in the group.
        root: place of the root in the group, for `ROOTED`.

    >>> course("broadcast", "ring", size=3, member=1).steps
    (ReceiveSlot(member=0, slot=0, fold=False), SendSlot(member=2, slot=0))
    """
    ring = algorithm == "ring" and collective not in ALWAYS_PUSH
    others = _list_others(size, member)
    match collective:
        case "all_scatter" | "all_gather":
            steps = _pass_around(size, member, member) if ring else _exchange_directly(others, lambda _: member)
            return Course("whole", steps, "all")
        case "all_reduce":
            if ring:
                # The first half leaves each member with its own piece reduced; the second passes these around.
                steps = (*_reduce_around(size, member), *_pass_around(size, member, member))
                return Course("flat", steps, "flat")
            return Course("whole", _exchange_directly(others, lambda _: member), "reduce")
        case "reduce_scatter":
            if ring:
                return Course("parts", _reduce_around(size, member), "one", member)
            return Course("parts", _exchange_directly(others, lambda other: other), "reduce")
        case "all_to_all":
            return Course("parts", _exchange_directly(others, lambda other: other), "all")
        case "broadcast":
            steps = (
                _send_along_ring(size, member, root, broadcast=True) if ring else _from_root(size, member, root, root)
            )
            return Course("whole" if member == root else "nothing", steps, "one", root)
        case "scatter":
            steps = _send_along_ring(size, member, root) if ring else _from_root(size, member, root, None)
            return Course("parts" if member == root else "nothing", steps, "one", member)
        case "gather":
            steps = _collect_along_ring(size, member, root) if ring else _to_root(size, member, root)
            return Course("whole", steps, "all" if member == root else "nothing")
        case _:
            raise UsageError(
                f"unknown collective {collective!r}", got=repr(collective), want=f"one of {list(COLLECTIVES)}"
            )


def iterate_steps(
    collective: str, algorithm: str, given: Sequence[ArraySpec], dim: int | None = None
) -> Iterator[tuple[Step, IntArray]]:
    """Yield the steps of member 0 of a collective without a root, each with the bytes that every member sends in it.

    Every other member does the same steps at places that are as much further on in the group as itself. A receive has
    no bytes of its own: it takes what a send before it has sent.

    Args:
        collective: one of `COLLECTIVES`, none of `ROOTED`.
        algorithm: one of `ALGORITHMS`.
        given: the input of each member, as in `programs.Communicate`.
        dim: the dim along which parts are cut.
    """
    size, where = len(given), dim or 0
    ring = algorithm == "ring" and collective not in ALWAYS_PUSH
    members, none = np.arange(size), np.zeros(0, np.int64)
    slots = np.array([spec.nbytes for spec in given])
    each = none
    if collective == "all_reduce" and ring:
        flat = ArraySpec((num_elements(given[0]),), given[0].dtype)
        slots = np.array([piece.nbytes for piece in _cut_spec(flat, size, 0)])
    elif collective == "reduce_scatter" and ring:
        slots = np.array([part.nbytes for part in _cut_spec(given[0], size, where)])
    elif collective in ("reduce_scatter", "all_to_all"):
        lengths = np.array([spec.shape[where] for spec in given])
        shorts, longer = np.divmod(lengths, size)
        each = slots // np.maximum(lengths, 1)
    for step in course(collective, algorithm, size, 0).steps:
        if isinstance(step, ReceiveSlot):
            yield step, none
        elif len(each):
            # As numpy.array_split cuts: the first `longer` parts have one element of the dim more.
            yield step, (shorts + ((members + step.member) % size < longer)) * each
        else:
            yield step, np.roll(slots, -step.slot)


def rooted_steps(
    collective: str, algorithm: str, given: Sequence[ArraySpec], member: int, *, dim: int | None = None, root: int = 0
) -> Iterator[tuple[Step, int]]:
    """Yield the steps of a member of a collective of `ROOTED`, each with its bytes."""
    slots = _cut_spec(given[root], len(given), dim or 0) if collective == "scatter" else given
    # Without the cache: on a ring, the members of a large group have millions of steps together.
    for step in course.__wrapped__(collective, algorithm, len(given), member, root).steps:
        yield step, slots[step.slot].nbytes


def count_traffic(
    collective: str, algorithm: str, given: Sequence[ArraySpec], *, dim: int | None = None, root: int = 0
) -> tuple[Traffic, ...]:
    """Count what each member sends and receives in one call, in the group's order."""
    size = len(given)
    if collective in ROOTED:
        return tuple(
            sum(
                (
                    Traffic(0, 1, 0, nbytes, 0) if isinstance(step, SendSlot) else Traffic(0, 0, 1, 0, nbytes)
                    for step, nbytes in rooted_steps(collective, algorithm, given, member, dim=dim, root=root)
                ),
                Traffic(1),
            )
            for member in range(size)
        )
    sent, received, messages = np.zeros(size, np.int64), np.zeros(size, np.int64), 0
    for step, nbytes in iterate_steps(collective, algorithm, given, dim):
        if isinstance(step, SendSlot):
            sent += nbytes
            received += np.roll(nbytes, step.member)
            messages += 1
    return tuple(Traffic(1, messages, messages, *both) for both in zip(sent.tolist(), received.tolist(), strict=True))


def _cut_spec(spec: ArraySpec, size: int, dim: int) -> list[ArraySpec]:
    return [with_length(spec, dim, length) for length in split_lengths(spec.shape[dim], size)]


def _list_others(size: int, member: int) -> tuple[int, ...]:
    """Return the other members, the next one first, so that simultaneous sends have distinct first targets."""
    return tuple((member + distance) % size for distance in range(1, size))


def _exchange_directly(others: tuple[int, ...], slot_for: Callable[[int], int]) -> tuple[Step, ...]:
    """Return the sends of a slot to every other member, then the receives, each into the slot of its sender."""
    # Receives in the order of arrival: the previous member sends to this one first, the next one last.
    sends = tuple(SendSlot(other, slot_for(other)) for other in others)
    return (*sends, *(ReceiveSlot(other, other) for other in reversed(others)))


def _pass_around(size: int, member: int, first: int) -> tuple[Step, ...]:
    """Return the steps that pass every slot once around the ring; the member starts with slot `first`."""
    after, before = (member + 1) % size, (member - 1) % size
    steps: list[Step] = []
    for turn in range(size - 1):
        # Each turn sends on the slot that the last turn brought.
        steps += (SendSlot(after, (first - turn) % size), ReceiveSlot(before, (first - turn - 1) % size))
    return tuple(steps)


def _reduce_around(size: int, member: int) -> tuple[Step, ...]:
    """Return the steps that reduce each slot around the ring; a member ends with the reduced slot of its own place."""
    after, before = (member + 1) % size, (member - 1) % size
    steps: list[Step] = []
    # A slot's reduction begins at the member after its owner and ends at the owner, so every member computes the same
    # order of additions in each run: results are reproducible bit by bit.
    for turn in range(size - 1):
        steps += (
            SendSlot(after, (member - turn - 1) % size),
            ReceiveSlot(before, (member - turn - 2) % size, fold=True),
        )
    return tuple(steps)


def _from_root(size: int, member: int, root: int, slot: int | None) -> tuple[Step, ...]:
    """Return the sends of the root: one slot to all members, or, if `slot` is None, each member's own slot."""
    if member == root:
        return tuple(SendSlot(other, other if slot is None else slot) for other in _list_others(size, root))
    return (ReceiveSlot(root, member if slot is None else slot),)


def _to_root(size: int, member: int, root: int) -> tuple[Step, ...]:
    if member == root:
        return tuple(ReceiveSlot(other, other) for other in _list_others(size, root))
    return (SendSlot(root, member),)


def _send_along_ring(size: int, member: int, root: int, *, broadcast: bool = False) -> tuple[Step, ...]:
    """Return the steps that move slots from the root along the ring, the farthest member's slot first."""
    after, before = (member + 1) % size, (member - 1) % size
    distance = (member - root) % size
    steps: list[Step] = []
    if broadcast:
        if distance:
            steps.append(ReceiveSlot(before, root))
        if distance < size - 1:
            steps.append(SendSlot(after, root))
        return tuple(steps)
    # With the farthest slot first, members forward while the root still sends.
    for farther in range(size - 1, distance, -1):
        slot = (root + farther) % size
        steps += (ReceiveSlot(before, slot), SendSlot(after, slot)) if distance else (SendSlot(after, slot),)
    if distance:
        steps.append(ReceiveSlot(before, member))
    return tuple(steps)


def _collect_along_ring(size: int, member: int, root: int) -> tuple[Step, ...]:
    """Return the steps that move slots to the root against the ring's direction, the nearest member's slot first."""
    after, before = (member + 1) % size, (member - 1) % size
    distance = (member - root) % size
    steps: list[Step] = [SendSlot(before, member)] if distance else []
    for farther in range(distance + 1, size):
        slot = (root + farther) % size
        steps += (ReceiveSlot(after, slot), SendSlot(before, slot)) if distance else (ReceiveSlot(after, slot),)
    return tuple(steps)
