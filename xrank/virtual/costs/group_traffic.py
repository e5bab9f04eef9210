"""Messages and bytes of each member in a collective, in closed form, for groups of thousands of members.

The sums are those of the steps in `xrank.virtual.collectives`. A group of g members has g(g-1) steps, but a plan needs
only the sums of each member.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import num_elements, split_lengths
from xrank.virtual.collectives import ALWAYS_PUSH, course
from xrank.virtual.statistics import Traffic


def group_traffic(
    collective: str, algorithm: str, given: Sequence[ArraySpec], *, dim: int | None = None, root: int = 0
) -> tuple[Traffic, ...]:
    """Return each member's counts for one call, in the group's order; arguments as for `collectives.step_specs`.

    Raises:
        UsageError: the collective is unknown.
    """
    size = len(given)
    course(collective, algorithm, 1, 0)  # Raises for an unknown collective.
    ring = algorithm == "ring" and collective not in ALWAYS_PUSH
    nbytes = [spec.nbytes for spec in given]
    others = size - 1
    match collective:
        case "all_scatter" | "all_gather" | "all_reduce" if not ring:
            total = sum(nbytes)
            return tuple(Traffic(1, others, others, others * own, total - own) for own in nbytes)
        case "all_gather":
            return _count_ring(nbytes)
        case "all_reduce":
            pieces = flat_nbytes(given[0], size)
            rounds = zip(_count_reduce_ring(pieces), _count_ring(pieces), strict=True)
            return tuple(Traffic(1, 2 * others, 2 * others, *_sums(reducing, whole)) for reducing, whole in rounds)
        case "reduce_scatter" if ring:
            return _count_reduce_ring(part_nbytes(given[0], size, dim))
        case "reduce_scatter" | "all_to_all":
            return _count_all_to_all(given, dim)
        case "broadcast":
            gives = [1] * others + [0] if ring else [others] + [0] * others
            return tuple(
                Traffic(
                    1,
                    gives[distance],
                    min(1, distance),
                    gives[distance] * nbytes[root],
                    min(1, distance) * nbytes[root],
                )
                for distance in ((member - root) % size for member in range(size))
            )
        case "scatter":
            return _count_from_root(part_nbytes(given[root], size, dim), root, ring)
        case _:
            return tuple(map(_reverse, _count_from_root(nbytes, root, ring)))


def _count_ring(slots: Sequence[int]) -> tuple[Traffic, ...]:
    """Each slot once around: a member sends all but the next member's, and receives all but its own."""
    size, total = len(slots), sum(slots)
    return tuple(
        Traffic(1, size - 1, size - 1, total - slots[(member + 1) % size], total - slots[member])
        for member in range(size)
    )


def _count_reduce_ring(slots: Sequence[int]) -> tuple[Traffic, ...]:
    """Each slot reduced around: a member sends all but its own, and receives all but the previous member's."""
    size, total = len(slots), sum(slots)
    return tuple(
        Traffic(1, size - 1, size - 1, total - slots[member], total - slots[member - 1]) for member in range(size)
    )


def _count_all_to_all(given: Sequence[ArraySpec], dim: int | None) -> tuple[Traffic, ...]:
    """Each member sends part j of its array to member j."""
    size = len(given)
    where = dim or 0
    shorts = 0
    # By receiver, as differences that `accumulate` sums: one step for each sender instead of one for each pair.
    longer_nbytes = [0] * (size + 1)
    own_parts = []
    for member, spec in enumerate(given):
        short, num_longer = divmod(spec.shape[where], size)
        each = spec.nbytes // (spec.shape[where] or 1)
        # The parts before `num_longer` have one element of the dim more than the others.
        shorts += short * each
        longer_nbytes[0] += each
        longer_nbytes[num_longer] -= each
        own_parts.append((short + (member < num_longer)) * each)
    longer = list(accumulate(longer_nbytes))
    return tuple(
        Traffic(1, size - 1, size - 1, spec.nbytes - own, shorts + longer[member] - own)
        for member, (spec, own) in enumerate(zip(given, own_parts, strict=True))
    )


def _count_from_root(slots: Sequence[int], root: int, ring: bool) -> tuple[Traffic, ...]:
    """The root sends each member its slot, directly or along the ring."""
    size = len(slots)
    # Without a ring, only the root sends; with one, each member forwards the slots of all farther members.
    if not ring:
        leaving = Traffic(1, size - 1, 0, sum(slots) - slots[root], 0)
        return tuple(leaving if member == root else Traffic(1, 0, 1, 0, own) for member, own in enumerate(slots))
    traffic = []
    farther = sum(slots)
    for distance in range(size):
        own = slots[(root + distance) % size]
        farther -= own
        messages = size - 1 - distance
        taken = (messages + 1, farther + own) if distance else (0, 0)
        traffic.append(Traffic(1, messages, taken[0], farther, taken[1]))
    return tuple(traffic[(member - root) % size] for member in range(size))


def _reverse(one: Traffic) -> Traffic:
    """Swap sent and received: a gather receives what a scatter sends."""
    return Traffic(one.calls, one.received_messages, one.sent_messages, one.received_nbytes, one.sent_nbytes)


def _sums(left: Traffic, right: Traffic) -> tuple[int, int]:
    return left.sent_nbytes + right.sent_nbytes, left.received_nbytes + right.received_nbytes


def flat_nbytes(spec: ArraySpec, size: int) -> list[int]:
    """Return the bytes of each member's flat piece of an array."""
    each = spec.nbytes // (num_elements(spec) or 1)
    return [length * each for length in split_lengths(num_elements(spec), size)]


def part_nbytes(spec: ArraySpec, size: int, dim: int | None) -> list[int]:
    """Return the bytes of each member's part of an array along a dim."""
    length = spec.shape[dim or 0]
    each = spec.nbytes // (length or 1)
    return [part * each for part in split_lengths(length, size)]
