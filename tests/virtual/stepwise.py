"""Collectives message by message: what the library counts and times for all members of a group at once."""

import numpy as np

from xrank.virtual.arrays import ArraySpec
from xrank.virtual.programs import ALWAYS_PUSH, ROOTED, Send, Take, course


def step_nbytes(collective, algorithm, given, member, *, dim=0, root=0):
    """Return [(is sent, other member, bytes)] of a member's steps."""
    ring = algorithm == "ring" and collective not in ALWAYS_PUSH

    def part(spec, number):
        return np.array_split(np.empty(spec.shape, np.uint8), len(given), dim)[number].size * spec.nbytes // _size(spec)

    def nbytes(step):
        if collective == "scatter":
            return part(given[root], step.slot)
        if collective == "all_reduce" and ring:
            width = given[0].nbytes // _size(given[0])
            return len(np.array_split(np.empty(_size(given[0])), len(given))[step.slot]) * width
        if collective == "reduce_scatter" and ring:
            return part(given[0], step.slot)
        if collective in ("reduce_scatter", "all_to_all"):
            return part(given[member], step.member) if step.does == "send" else part(given[step.member], member)
        return given[step.slot].nbytes

    steps = course(collective, algorithm, len(given), member, root).steps
    return [(step.does == "send", step.member, nbytes(step)) for step in steps]


def _size(spec):
    return int(np.prod(spec.shape)) or 1


def as_messages(call, device, algorithm):
    """Return the sends and receives of a device in a collective, as instructions."""
    member = call.group.index(device)
    root = call.group.index(call.root) if call.collective in ROOTED else 0
    return [
        Send("x", call.group[other], ArraySpec((nbytes,), "U8"))
        if is_sent
        else Take("y", call.group[other], ArraySpec((nbytes,), "U8"))
        for is_sent, other, nbytes in step_nbytes(
            call.collective, algorithm, call.given, member, dim=call.dim or 0, root=root
        )
    ]
