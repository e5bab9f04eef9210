"""A trainer rank's own tensors: lent in place, copied aside for each step, or lent in another form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xrank.lending.copied_part import copy_part
from xrank.lending.local_bytes import LocalBytes, local_bytes
from xrank.refit.held_memory import count_versions
from xrank.teams.team import Team

if TYPE_CHECKING:
    import torch

    from xrank.refit.prepared_part import PreparedPart


class OwnPart:
    """The tensors of this rank, from `view` on.

    Args:
        is_snapshot: whether copies of the tensors are lent.
        team: the trainer's ranks.
    """

    def __init__(self, is_snapshot: bool, team: Team) -> None:
        self.is_snapshot = is_snapshot
        self.prepared: PreparedPart | None = None
        """The tensors in another form, which are lent in place of these."""
        self._team = team
        self.tensors: Sequence[torch.Tensor] = ()
        self._copies: Sequence[LocalBytes] = ()

    def view(self, tensors: Sequence[torch.Tensor]) -> Sequence[LocalBytes]:
        """Return the bytes to lend of these tensors, which it keeps."""
        self.tensors = tensors
        if not self.is_snapshot:
            return [local_bytes(tensor) for tensor in tensors]
        self._copies = copy_part(tensors, rank=self._team.rank, num_here=self._team.num_here, room_nbytes=None)
        return self._copies

    def refill(self) -> None:
        """Copy the present values over those of the last snapshot."""
        for tensor, copy in zip(self.tensors, self._copies, strict=True):
            source = local_bytes(tensor)
            row = copy.find_row(0, copy.nbytes) if copy.nbytes else None
            if row is not None:
                source.read_into(0, row)

    def synchronize(self) -> None:
        """Wait for the work that is queued on the tensors' devices."""
        import torch

        for device in {tensor.device for tensor in self.tensors if tensor.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def count_versions(self) -> list[int]:
        """Return torch's counts of changes of the tensors; none of a plain snapshot, which nothing changes."""
        return [] if self.is_snapshot and self.prepared is None else count_versions(self.tensors)
