"""The choice among several operations: the one that sends the fewest bytes on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xrank.errors import LayoutError, UsageError
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import Array
from xrank.virtual.costs.planning import plan
from xrank.virtual.mesh import MeshLike
from xrank.virtual.operations.feed_forward import FeedForward, FeedForwardSharding
from xrank.virtual.operations.matmul import MatMul, MatMulSharding
from xrank.virtual.programs.operation import Operation
from xrank.virtual.statistics import Statistics

__all__ = ["Choice", "cheapest"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen operation, with the costs of all candidates."""

    operation: Operation
    statistics: Statistics
    """Planned statistics of the operation."""
    costs: tuple[tuple[Operation, int, int], ...]
    """(operation, bytes sent, flops) of each possible operation, in the order of the candidates."""
    refused: tuple[tuple[Operation, LayoutError], ...] = ()
    """Operations that do not fit this mesh and these sizes, with the reason."""


def cheapest(
    candidates: MatMulSharding | Sequence[Operation | MatMulSharding | FeedForwardSharding],
    mesh: MeshLike,
    *,
    activations: Sequence[Array | ArraySpec | Sequence[int]] = (),
    parameters: Sequence[Array | ArraySpec | Sequence[int]] = (),
    algorithm: str = "push",
) -> Choice:
    """Choose the candidate that sends the fewest bytes between devices; ties go to fewer flops, then to the first.

    Args:
        candidates: operations; a `MatMulSharding` means its product by each policy, a `FeedForwardSharding` its layer
        mesh: as for `VirtualCluster`.
        activations: as for `plan`; the same for all candidates.
        parameters: as for `plan`; the same for all candidates.
        algorithm: ``"push"`` or ``"ring"``.

    Raises:
        LayoutError: no candidate fits this mesh and these sizes; the first candidate's error.
        UsageError: the candidates are empty.

    >>> choice = cheapest(MatMulSharding(("[m, k/x]", "[k/x, n]")), 4, activations=[(64, 8)], parameters=[(8, 64)])
    >>> choice.operation.policy.name, choice.statistics.nbytes
    ('UnmatchedInnerSharding', 12288)
    """
    given = [candidates] if isinstance(candidates, MatMulSharding) else candidates
    planned: list[tuple[Operation, Statistics]] = []
    refused: list[tuple[Operation, LayoutError]] = []
    for operation in (each for one in given for each in _operations(one)):
        try:
            statistics = plan(operation, mesh, activations=activations, parameters=parameters, algorithm=algorithm)
        except LayoutError as error:
            refused.append((operation, error))
        else:
            planned.append((operation, statistics))
    if not planned:
        if refused:
            raise refused[0][1]
        raise UsageError("there is nothing to choose from", got="no candidate", want="one or more")
    costs = tuple((operation, statistics.nbytes, statistics.flops) for operation, statistics in planned)
    operation, statistics = min(planned, key=lambda each: (each[1].nbytes, each[1].flops))
    return Choice(operation, statistics, costs, tuple(refused))


def _operations(candidate: Operation | MatMulSharding | FeedForwardSharding) -> list[Operation]:
    """Expand a candidate to operations."""
    if isinstance(candidate, MatMulSharding):
        return [MatMul(candidate, policy) for policy in candidate.policies]
    return [FeedForward(candidate)] if isinstance(candidate, FeedForwardSharding) else [candidate]
