"""Faults of one rank that all ranks raise at the end of the step.

A rank that raised alone would leave the others waiting. So a rank records a fault, still runs all collectives of the
step, and at the end of the step every rank receives the faults of all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from xrank.errors import GradientError
from xrank.gradients.wires.wire import GradientWire, Handle, finish
from xrank.words import first_lines

_MAX_SENT = 8
"""Faults that one rank sends: a mistake in the loop makes one for every parameter."""


@dataclass(frozen=True, slots=True)
class GradientFault:
    """The parts of a `GradientError`."""

    message: str
    """Text that names the parameter and the rank."""
    rank: int
    tensor: str | None = None
    got: str | None = None
    want: str | None = None
    next_step: str | None = None

    def make_error(self) -> GradientError:
        """Return the fault as an error."""
        return GradientError(
            self.message,
            tensor=self.tensor,
            rank=self.rank,
            got=self.got,
            want=self.want,
            next_step=self.next_step,
        )


class FaultFlag:
    """One number that flags a fault on any rank, reduced while gradients are under way."""

    def __init__(self, faults: Sequence[GradientFault], wire: GradientWire, ranks: tuple[int, ...]) -> None:
        self._faults, self._wire, self._ranks = faults, wire, ranks
        # One int64 per step: ranks send the texts of faults only after a flag was raised.
        self._flag = torch.tensor([len(faults)], dtype=torch.int64, device=wire.device)
        self._handle: Handle = wire.all_reduce(self._flag, ranks, "max")

    def raise_if_any(self) -> None:
        """Raise the first fault of the lowest rank on all ranks, with the other faults as notes.

        Raises:
            GradientError: a rank has a fault.
            RankFailedError: a rank has ended.
        """
        finish(self._handle)
        if not int(self._flag):
            return
        text = json.dumps([asdict(fault) for fault in self._faults[:_MAX_SENT]])
        texts = self._wire.exchange(text, self._ranks)
        raise_faults({rank: [GradientFault(**fault) for fault in json.loads(text)] for rank, text in texts.items()})


def raise_faults(found: Mapping[int, Sequence[GradientFault]]) -> None:
    """Raise the first fault, with the others as notes; return without faults.

    Args:
        found: faults by the rank that found them.

    Raises:
        GradientError: there is a fault.
    """
    # In the order of ranks, so that all ranks raise the same fault first.
    faults = [fault for rank in sorted(found) for fault in found[rank]]
    if not faults:
        return
    error = faults[0].make_error()
    others = [fault.message for fault in faults[1:] if fault.message != faults[0].message]
    for line in first_lines([f"also: {message}" for message in others], _MAX_SENT):
        error.add_note(line)
    raise error
