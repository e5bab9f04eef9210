"""Choices: which of several ways to do an operation sends the fewest bytes on a mesh."""

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
    """The operation chosen, and what it was chosen by."""

    operation: Operation
    statistics: Statistics
    """What a run of it will count."""
    costs: tuple[tuple[Operation, int, int], ...]
    """Of every operation that could be done, in the order of the candidates: bytes sent, and flops."""
    refused: tuple[tuple[Operation, LayoutError], ...] = ()
    """What cannot be done on this mesh with these sizes."""


def cheapest(
    candidates: MatMulSharding | Sequence[Operation | MatMulSharding | FeedForwardSharding],
    mesh: MeshLike,
    *,
    activations: Sequence[Array | ArraySpec | Sequence[int]] = (),
    parameters: Sequence[Array | ArraySpec | Sequence[int]] = (),
    algorithm: str = "push",
) -> Choice:
    """Return the candidate that sends the fewest bytes between devices; of equals that of fewer flops, then the first.

    Args:
        candidates: operations; the shardings of a product stand for it by each of their policies, those of a
            feed-forward layer for the layer.
        mesh: as of `VirtualCluster`.
        activations: as of `plan`; of all candidates.
        parameters: the same.
        algorithm: ``"push"`` or ``"ring"``.

    Raises:
        LayoutError: none can be done on this mesh with these sizes; the first one's.
        UsageError: there is no candidate.
    """
    told = [candidates] if isinstance(candidates, MatMulSharding) else candidates
    planned: list[tuple[Operation, Statistics]] = []
    refused: list[tuple[Operation, LayoutError]] = []
    for operation in (each for one in told for each in _operations(one)):
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
    """Return the operations that a candidate stands for."""
    if isinstance(candidate, MatMulSharding):
        return [MatMul(candidate, policy) for policy in candidate.policies]
    return [FeedForward(candidate)] if isinstance(candidate, FeedForwardSharding) else [candidate]
