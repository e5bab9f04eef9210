"""Plans: what a run will count, from the programs alone, without a device."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from typing import Any, SupportsIndex

from xrank.errors import UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import Array, spec_of
from xrank.virtual.collectives import SendSlot, check_algorithm, course, step_specs
from xrank.virtual.costs.group_traffic import group_traffic
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.programs.operation import Operation
from xrank.virtual.programs.program import Communicate, Compute, Program, Receive, Return, Send, Take
from xrank.virtual.programs.registers import peak_nbytes
from xrank.virtual.statistics import DeviceStatistics, Statistics, Traffic

__all__ = ["compiled", "count", "plan"]


def plan(
    operation: Operation | Callable[..., Any],
    mesh: MeshLike,
    *,
    activations: Sequence[Array | ArraySpec | Sequence[int]] = (),
    parameters: Sequence[Array | ArraySpec | Sequence[int]] = (),
    algorithm: str = "push",
) -> Statistics:
    """Return the statistics that a run of an operation will have, equal in every count, without running it.

    Args:
        operation: an `Operation`.
        mesh: as of `VirtualCluster`.
        activations: arrays, their specs, or shapes (then of F32).
        parameters: the same.
        algorithm: ``"push"`` or ``"ring"``.

    Raises:
        UsageError: the operation is a function: nobody knows what it does before it runs; or what it is to take is no
            array and no shape.
        LayoutError: the operation cannot be done on this mesh with these sizes.
    """
    if not isinstance(operation, Operation):
        raise UsageError(
            "a function has no plan: what it does is known when it has run",
            got=f"the {'class' if isinstance(operation, type) else 'function'} "
            f"{getattr(operation, '__qualname__', operation)}",
            want="an Operation, which compiles to programs",
            next_step='run it: VirtualCluster(mesh, engine="in-process").run(function, ...).statistics',
        )
    check_algorithm(algorithm)
    specs = [tuple(map(_spec, arrays)) for arrays in (activations, parameters)]
    return count(compiled(operation, as_device_mesh(mesh), specs[0], specs[1]), algorithm)


def compiled(
    operation: Operation, mesh: DeviceMesh, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
) -> tuple[Program, ...]:
    """Return the programs of an operation, one for each device in the order of the mesh.

    Raises:
        UsageError: the operation gave programs of other devices.
    """
    programs = tuple(operation.compile(mesh, activations, parameters))
    if tuple(program.device for program in programs) != mesh.ranks:
        raise UsageError(
            f"{type(operation).__qualname__} compiled to programs of other devices than the mesh {mesh.grid!r} has",
            got=str([program.device for program in programs][:32]),
            want=str(list(mesh.ranks[:32])),
        )
    return programs


def count(programs: Sequence[Program], algorithm: str) -> Statistics:
    """Return what a run of programs will count."""
    shares = _Shares(algorithm)
    return Statistics(tuple(_count_one(program, shares) for program in programs))


class _Shares:
    """What each member of a group counts, found once for all of them: a group may be a whole mesh of thousands."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._places: dict[int, dict[int, int]] = {}
        self._traffic: dict[tuple[object, ...], tuple[Traffic, ...]] = {}

    def of(self, instruction: Communicate, device: int) -> Traffic:
        """Return what a device counts in a collective."""
        # Tuples by their identity, as the programs keep them: to compare two of thousands is what has to be spared.
        group, given = instruction.group, instruction.given
        places = self._places.get(id(group))
        if places is None:
            places = self._places[id(group)] = {member: place for place, member in enumerate(group)}
        _check_group(instruction, device, places)
        root = 0 if instruction.root is None else places[instruction.root]
        key = (id(given), instruction.collective, instruction.dim, root)
        if key not in self._traffic:
            self._traffic[key] = group_traffic(
                instruction.collective, self._algorithm, given, dim=instruction.dim, root=root
            )
        return self._traffic[key][places[device]]


def _count_one(program: Program, shares: _Shares) -> DeviceStatistics:
    collectives: dict[str, Traffic] = {}
    from_host = to_host = Traffic()
    flops = 0
    for instruction in program.instructions:
        match instruction:
            case Receive():
                from_host += Traffic(1, 0, 1, 0, instruction.spec.nbytes)
            case Return():
                to_host += Traffic(1, 1, 0, instruction.spec.nbytes, 0)
            case Compute():
                flops += instruction.flops
            case Communicate():
                name = instruction.collective
                collectives[name] = collectives.get(name, Traffic()) + shares.of(instruction, program.device)
            case Send():
                collectives["send"] = collectives.get("send", Traffic()) + Traffic(1, 1, 0, instruction.spec.nbytes, 0)
            case Take():
                taken = Traffic(1, 0, 1, 0, instruction.spec.nbytes)
                collectives["receive"] = collectives.get("receive", Traffic()) + taken
    return DeviceStatistics(collectives, from_host, to_host, flops, peak_nbytes(program))


def moves(instruction: Communicate, device: int, algorithm: str) -> Iterator[tuple[bool, int, int]]:
    """Yield what a device sends (True) and gets in a collective, in order: to or from which device, how many bytes."""
    group = instruction.group
    _check_group(instruction, device, group)
    root = 0 if instruction.root is None else group.index(instruction.root)
    member = group.index(device)
    for is_given, place, nbytes in _moves(
        instruction.collective, algorithm, instruction.given, member, instruction.dim, root
    ):
        yield is_given, group[place], nbytes


def _check_group(instruction: Communicate, device: int, members: Container[int]) -> None:
    group, root = instruction.group, instruction.root
    if len(instruction.given) != len(group) or device not in members or not (root is None or root in members):
        raise UsageError(
            f"device {device}: its program's {instruction.collective} does not go with its group",
            rank=device,
            got=f"{len(instruction.given)} specs of what members give, group {list(group)[:32]}"
            + ("" if root is None else f", root {root}"),
            want="a spec for each member, this device among them" + ("" if root is None else ", and the root"),
        )


@lru_cache(maxsize=4096)
def _moves(
    collective: str, algorithm: str, given: tuple[ArraySpec, ...], member: int, dim: int | None, root: int
) -> tuple[tuple[bool, int, int], ...]:
    """Return the moves of one member with the others' places; the same for all groups of a mesh that bring alike."""
    steps = course(collective, algorithm, len(given), member, root).steps
    specs = step_specs(collective, algorithm, given, member, dim=dim, root=root)
    return tuple(
        (isinstance(step, SendSlot), step.member, spec.nbytes) for step, spec in zip(steps, specs, strict=True)
    )


def _spec(told: Array | ArraySpec | Sequence[int]) -> ArraySpec:
    if isinstance(told, int | str):
        raise UsageError(
            f"{told!r} is no array, and no shape of one",
            got=repr(told),
            want="an array, its ArraySpec or its shape, for each",
            next_step="give several: activations=((64, 32),)",
        )
    spec = ArraySpec(tuple(told)) if isinstance(told, tuple | list) else told
    if not isinstance(spec, ArraySpec):
        return spec_of(told)
    if not all(isinstance(length, SupportsIndex) and length >= 0 for length in spec.shape):
        raise UsageError(f"no array has the shape {spec.shape}", got=str(spec.shape), want="lengths of 0 or more")
    return spec
