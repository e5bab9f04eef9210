"""The exchanges after that of replicas: gradients of which ranks along tp, or other stages, have a part, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.plans.plan import LaterReduction
from xrank.gradients.reductions import Reduction
from xrank.gradients.wires.faults import Fault
from xrank.gradients.wires.wire import Handle, Wire

__all__ = ["LaterSync"]

_KINDS = ("conditional", "tensor", "word", "position")
_TABLES = ("word", "position")
"""Large, and one or two of them: each is sent from where it lies."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The elements of one gradient that this rank exchanges: all, or those that it owns."""

    chunk: int
    name: str
    inner_name: str
    """Without the chunk's number."""
    gradient: torch.Tensor
    """Flat; a view of the buffer."""
    later: LaterReduction
    wire: Wire


class LaterSync:
    """The later reductions of one step of one rank.

    Args:
        chunks: the rank's.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._num_chunks = len(chunks)
        self._parts = [part for number, chunk in enumerate(chunks) for part in _parts(number, chunk)]
        self.faults: list[Fault] = []
        """What all ranks have to hear of before `run`."""
        self._copies: dict[str, list[_Part]] = {}
        for part in self._parts:
            if part.later.kind == "conditional":
                self._copies.setdefault(part.inner_name, []).append(part)
        for first, *others in self._copies.values():
            self.faults += (
                _shape_fault(first, other, chunks[0].plan.rank)
                for other in others
                if other.gradient.shape != first.gradient.shape
            )

    def shown(self, chunk: int, names: Iterable[str]) -> tuple[str, ...]:
        """Return names as a `Reduction` has them."""
        return tuple(f"{chunk}.{name}" for name in names) if self._num_chunks > 1 else tuple(names)

    def run(self) -> list[Reduction]:
        """Reduce, on all ranks alike, and return what was done."""
        done: list[Reduction] = []
        for kind in _KINDS:
            parts = [part for part in self._parts if part.later.kind == kind]
            if kind == "conditional":
                done += self._run_conditional()
            elif parts:
                done += self._reduce(parts)
        return done

    def _run_conditional(self) -> list[Reduction]:
        """Reduce embedders that all chunks of all stages have: the chunks of this rank are added up first."""
        for first, *others in self._copies.values():
            for other in others:
                first.gradient.add_(other.gradient)
        done = self._reduce([first for first, *_ in self._copies.values()])
        for first, *others in self._copies.values():
            for other in others:
                other.gradient.copy_(first.gradient)
        return done

    def _reduce(self, parts: Sequence[_Part]) -> list[Reduction]:
        """Reduce what ranks exchange in the same way as one flat tensor; tables one by one."""
        groups: dict[tuple[object, ...], list[_Part]] = {}
        for number, part in enumerate(parts):
            later = part.later
            alone = number if later.kind in _TABLES else -1
            # Sums before averages, then by ranks: one order on all ranks, so that no two wait for each other.
            key = later.operation != "sum", later.ranks, later.axes, str(part.gradient.dtype), alone
            groups.setdefault(key, []).append(part)
        sent: list[tuple[Handle, torch.Tensor, list[_Part]]] = []
        done = []
        for _, members in sorted(groups.items()):
            members = [member for member in members if member.gradient.numel()]
            if not members:
                continue  # this rank's shards have nothing of these, and so have those of the ranks that it meets
            later = members[0].later
            whole = members[0].gradient if len(members) == 1 else torch.cat([one.gradient for one in members])
            wanted = torch.view_as_real(whole).view(-1) if whole.is_complex() else whole
            sent.append((members[0].wire.all_reduce(wanted, later.ranks, later.operation), whole, members))
            names = tuple(name for one in members for name in self.shown(one.chunk, [one.name]))
            done.append(Reduction(later.kind, later.operation, later.axes, later.ranks, names, whole.numel()))
        for handle, whole, members in sent:
            handle.wait()
            if len(members) > 1:
                sizes = [one.gradient.numel() for one in members]
                for one, reduced in zip(members, torch.split(whole, sizes), strict=True):
                    one.gradient.copy_(reduced)
        return done


def _parts(number: int, chunk: DistributedDataParallel) -> Iterator[_Part]:
    is_several = isinstance(chunk.module, torch.nn.ModuleList)
    for planned in chunk.plan.parameters:
        if not planned.later:
            continue
        gradient = chunk.main_grad(planned.name).view(-1)[slice(*planned.owned)]
        inner_name = planned.name.partition(".")[2] if is_several else planned.name
        for later in planned.later:
            yield _Part(number, planned.name, inner_name, gradient, later, chunk.wire)


def _shape_fault(first: _Part, other: _Part, rank: int) -> Fault:
    return Fault(
        f"{other.name}: chunk {other.chunk} of rank {rank} holds it otherwise than chunk {first.chunk}",
        rank,
        other.name,
        got=f"{other.gradient.numel()} elements",
        want=f"the {first.gradient.numel()} of {first.name}, whose copy it is",
        next_step="give parameters that are no copies other names, or do not mark them over_pp",
    )
