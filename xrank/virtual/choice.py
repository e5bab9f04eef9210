"""The choice among several operations: the one that sends the fewest bytes on a mesh, or takes the least time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xrank.errors import LayoutError, UsageError
from xrank.virtual.arrays import Array, ArraySpec
from xrank.virtual.collectives import Statistics, check_algorithm
from xrank.virtual.feed_forward import FeedForward, FeedForwardSharding
from xrank.virtual.link_model import LinkModel
from xrank.virtual.matmul import MatMul, MatMulSharding
from xrank.virtual.mesh import MeshLike
from xrank.virtual.planning import compile_operation, count
from xrank.virtual.programs import Operation


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
    seconds: tuple[float, ...] = ()
    """Seconds of each operation of `costs` by the link model; empty without one."""


def cheapest(
    candidates: MatMulSharding | Sequence[Operation | MatMulSharding | FeedForwardSharding],
    mesh: MeshLike,
    *,
    activations: Sequence[Array | ArraySpec | Sequence[int]] = (),
    parameters: Sequence[Array | ArraySpec | Sequence[int]] = (),
    algorithm: str = "push",
    links: LinkModel | None = None,
) -> Choice:
    """Choose the candidate that sends the fewest bytes between devices, or takes the fewest seconds by a link model.

    Ties go to fewer bytes, then to fewer flops, then to the first.

    Args:
        candidates: operations; a `MatMulSharding` means its product by each policy, a `FeedForwardSharding` its layer
        mesh: as for `VirtualCluster`.
        activations: as for `plan`; the same for all candidates.
        parameters: as for `plan`; the same for all candidates.
        algorithm: ``"push"`` or ``"ring"``.
        links: speed of devices and links; bytes decide when None.

    Raises:
        LayoutError: no candidate fits this mesh and these sizes; the first candidate's error.
        UsageError: the candidates are empty.

    >>> choice = cheapest(MatMulSharding(("[m, k/x]", "[k/x, n]")), 4, activations=[(64, 8)], parameters=[(8, 64)])
    >>> choice.operation.policy.name, choice.statistics.nbytes
    ('UnmatchedInnerSharding', 12288)
    """
    check_algorithm(algorithm)
    given = [candidates] if isinstance(candidates, MatMulSharding) else candidates
    planned: list[tuple[Operation, Statistics, float]] = []
    refused: list[tuple[Operation, LayoutError]] = []
    for operation in (each for one in given for each in _operations(one)):
        try:
            programs = compile_operation(operation, mesh, activations, parameters)
        except LayoutError as error:
            refused.append((operation, error))
        else:
            seconds = 0.0 if links is None else links.seconds(programs, algorithm)
            planned.append((operation, count(programs, algorithm), seconds))
    if not planned:
        if refused:
            raise refused[0][1]
        raise UsageError("there is nothing to choose from", got="no candidate", want="one or more")
    costs = tuple((operation, statistics.nbytes, statistics.flops) for operation, statistics, _ in planned)
    operation, statistics, _ = min(planned, key=lambda each: (each[2], each[1].nbytes, each[1].flops))
    times = () if links is None else tuple(seconds for _, _, seconds in planned)
    return Choice(operation, statistics, costs, tuple(refused), times)


def _operations(candidate: Operation | MatMulSharding | FeedForwardSharding) -> list[Operation]:
    """Expand a candidate to operations."""
    if isinstance(candidate, MatMulSharding):
        return [MatMul(candidate, policy) for policy in candidate.policies]
    return [FeedForward(candidate)] if isinstance(candidate, FeedForwardSharding) else [candidate]
