"""What went wrong on one rank while gradients were on their way, told to all ranks, so that all raise the same.

A rank that raised alone would leave the others waiting for it. So a fault is written down where it is found, all
collectives of the step are made nevertheless, and at the end of the step every rank learns of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from xrank.errors import GradientError
from xrank.gradients.wires.wire import Handle, Wire
from xrank.words import first_lines

__all__ = ["Fault", "FaultFlag", "raise_faults"]

_MAX_TOLD = 8
"""Faults that one rank tells of: a mistake in the loop is one for every parameter."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a `GradientError` is made of."""

    message: str
    """It names the parameter and the rank."""
    rank: int
    tensor: str | None = None
    got: str | None = None
    want: str | None = None
    next_step: str | None = None

    def error(self) -> GradientError:
        """Return it as an error."""
        return GradientError(
            self.message,
            tensor=self.tensor,
            rank=self.rank,
            got=self.got,
            want=self.want,
            next_step=self.next_step,
        )


class FaultFlag:
    """Whether any of the ranks has a fault: one number, under way while gradients are."""

    def __init__(self, faults: Sequence[Fault], wire: Wire, ranks: tuple[int, ...]) -> None:
        self._faults, self._wire, self._ranks = faults, wire, ranks
        self._flag = torch.tensor([len(faults)], dtype=torch.int64, device=wire.device)
        self._handle: Handle = wire.all_reduce(self._flag, ranks, "max")

    def raise_if_any(self) -> None:
        """Raise on all ranks what any of them found; the first fault of the lowest rank, others as notes.

        Raises:
            GradientError: there was a fault.
        """
        self._handle.wait()
        if not int(self._flag):
            return
        told = json.dumps([asdict(fault) for fault in self._faults[:_MAX_TOLD]])
        texts = self._wire.exchange(told, self._ranks)
        raise_faults({rank: [Fault(**fault) for fault in json.loads(text)] for rank, text in texts.items()})


def raise_faults(found: Mapping[int, Sequence[Fault]]) -> None:
    """Raise the first fault, with the others as notes; return if there is none.

    Args:
        found: by the rank that found them.

    Raises:
        GradientError: there is a fault.
    """
    faults = [fault for rank in sorted(found) for fault in found[rank]]
    if not faults:
        return
    error = faults[0].error()
    others = [fault.message for fault in faults[1:] if fault.message != faults[0].message]
    for line in first_lines([f"also: {message}" for message in others], _MAX_TOLD):
        error.add_note(line)
    raise error
