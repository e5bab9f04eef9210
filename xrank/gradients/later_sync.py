"""The exchanges after the sum over replicas: gradients of which ranks along tp, or other stages, also have a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.plan import LATER_KINDS, LaterReduction
from xrank.gradients.reductions import Reduction
from xrank.gradients.wire import GradientFault, GradientWire, Handle

_TABLES = ("word", "position")
"""Tables are large and few: each is sent from its buffer without a copy."""


@dataclass(frozen=True, slots=True)
class _LaterPart:
    """The elements of one gradient that this rank exchanges: all of them, or the owned ones."""

    chunk: int
    name: str
    inner_name: str
    """Name without the chunk's number."""
    gradient: torch.Tensor
    """A flat view of the buffer."""
    later: LaterReduction
    wire: GradientWire


class LaterSync:
    """The later reductions of one step on one rank.

    Args:
        chunks: the rank's wrapped models.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._num_chunks = len(chunks)
        self._parts = [part for number, chunk in enumerate(chunks) for part in _parts(number, chunk)]
        self.faults: list[GradientFault] = []
        """Faults that all ranks must receive before `run`."""
        self._copies: dict[str, list[_LaterPart]] = {}
        for part in self._parts:
            if part.later.kind == "conditional":
                self._copies.setdefault(part.inner_name, []).append(part)
        for first, *others in self._copies.values():
            self.faults += (
                _shape_fault(first, other, chunks[0].plan.rank)
                for other in others
                if other.gradient.shape != first.gradient.shape
            )

    def number(self, chunk: int, names: Iterable[str]) -> tuple[str, ...]:
        """Return names as a `Reduction` contains them: several chunks put the chunk's number before."""
        return tuple(f"{chunk}.{name}" for name in names) if self._num_chunks > 1 else tuple(names)

    def run(self) -> list[Reduction]:
        """Run the reductions, on all ranks alike, and return them."""
        done: list[Reduction] = []
        for kind in LATER_KINDS:
            # In Megatron's order: sums that are nested otherwise round otherwise.
            parts = [part for part in self._parts if part.later.kind == kind]
            if kind == "conditional":
                done += self._run_conditional()
            elif parts:
                done += self._reduce(parts)
        return done

    def _run_conditional(self) -> list[Reduction]:
        """Reduce embedders that all chunks of all stages have. The chunks of this rank are added up first."""
        # Every chunk of this rank has a part of the gradient: one sum over all stages then serves all copies.
        for first, *others in self._copies.values():
            for other in others:
                first.gradient.add_(other.gradient)
        done = self._reduce([first for first, *_ in self._copies.values()])
        for first, *others in self._copies.values():
            for other in others:
                other.gradient.copy_(first.gradient)
        return done

    def _reduce(self, parts: Sequence[_LaterPart]) -> list[Reduction]:
        """Reduce parts with the same operation and ranks as one flat tensor; reduce tables one by one."""
        groups: dict[tuple[object, ...], list[_LaterPart]] = {}
        for number, part in enumerate(parts):
            later = part.later
            alone = number if later.kind in _TABLES else -1  # tables get a collective of their own
            # Sums before averages, then by ranks: all ranks use one order, so that no two wait for each other.
            key = later.operation != "sum", later.ranks, later.axes, str(part.gradient.dtype), alone
            groups.setdefault(key, []).append(part)
        sent: list[tuple[Handle, torch.Tensor, list[_LaterPart]]] = []
        done = []
        for _, members in sorted(groups.items()):
            members = [member for member in members if member.gradient.numel()]
            if not members:
                continue  # this rank's shards have no elements of these, nor have those of the ranks in the set
            later = members[0].later
            whole = members[0].gradient if len(members) == 1 else torch.cat([one.gradient for one in members])
            wanted = torch.view_as_real(whole).view(-1) if whole.is_complex() else whole
            sent.append((members[0].wire.all_reduce(wanted, later.ranks, later.operation), whole, members))
            names = tuple(name for one in members for name in self.number(one.chunk, [one.name]))
            done.append(Reduction(later.kind, later.operation, later.axes, later.ranks, names, whole.numel()))
        for handle, whole, members in sent:
            handle.wait()
            # A single gradient was reduced in place; several were copied into one tensor, and are copied back.
            if len(members) > 1:
                sizes = [one.gradient.numel() for one in members]
                for one, reduced in zip(members, torch.split(whole, sizes), strict=True):
                    one.gradient.copy_(reduced)
        return done


def _parts(number: int, chunk: DistributedDataParallel) -> Iterator[_LaterPart]:
    is_several = isinstance(chunk.module, torch.nn.ModuleList)
    for planned in chunk.plan.parameters:
        if not planned.later:
            continue
        gradient = chunk.main_grad(planned.name).view(-1)[slice(*planned.owned)]
        inner_name = planned.name.partition(".")[2] if is_several else planned.name
        for later in planned.later:
            yield _LaterPart(number, planned.name, inner_name, gradient, later, chunk.wire)


def _shape_fault(first: _LaterPart, other: _LaterPart, rank: int) -> GradientFault:
    return GradientFault(
        f"{other.name}: its shapes in chunks {first.chunk} and {other.chunk} of rank {rank} differ",
        rank,
        other.name,
        got=f"{other.gradient.numel()} elements",
        want=f"the {first.gradient.numel()} of {first.name}, whose copy it is",
        next_step="rename parameters that are not copies, or do not mark them over_pp",
    )
