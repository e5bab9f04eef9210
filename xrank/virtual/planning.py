"""Messages and bytes of each member in a collective, in closed form, for groups of thousands of members.

The sums are those of the steps in `xrank.virtual.collectives`. A group of g members has g(g-1) steps, but a plan needs
only the sums of each member.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, SupportsIndex

from xrank.errors import UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import Array, ArraySpec, spec_of
from xrank.virtual.collectives import DeviceStatistics, Statistics, Traffic, check_algorithm, count_traffic
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.programs import Communicate, Compute, Operation, Program, Receive, Return, Send, Take, peak_nbytes


def plan(
    operation: Operation | Callable[..., Any],
    mesh: MeshLike,
    *,
    activations: Sequence[Array | ArraySpec | Sequence[int]] = (),
    parameters: Sequence[Array | ArraySpec | Sequence[int]] = (),
    algorithm: str = "push",
) -> Statistics:
    """Return the statistics of a run of an operation, equal in every count, without running it.

    Args:
        operation: an `Operation`.
        mesh: as for `VirtualCluster`.
        activations: arrays, their specs, or shapes (meaning F32).
        parameters: likewise.
        algorithm: ``"push"`` or ``"ring"``.

    Raises:
        UsageError: the operation is a function, whose work is unknown before it runs; or an argument is neither an
            array nor a shape.
        LayoutError: the operation does not fit this mesh and these sizes.

    >>> from xrank.virtual import MatMul, MatMulSharding
    >>> product = MatMul(MatMulSharding(("[m, k/x]", "[k/x, n]")))
    >>> plan(product, 4, activations=[(64, 8)], parameters=[(8, 64)]).nbytes
    196608
    """
    check_algorithm(algorithm)
    return count(compile_operation(operation, mesh, activations, parameters), algorithm)


def compile_operation(
    operation: Operation | Callable[..., Any],
    mesh: MeshLike,
    activations: Sequence[Array | ArraySpec | Sequence[int]],
    parameters: Sequence[Array | ArraySpec | Sequence[int]],
) -> tuple[Program, ...]:
    """Compile an operation on a mesh to one program per device; arguments and errors as in `plan`."""
    if not isinstance(operation, Operation):
        raise UsageError(
            "a function cannot be planned: its work is known only after a run",
            got=f"the {'class' if isinstance(operation, type) else 'function'} "
            f"{getattr(operation, '__qualname__', operation)}",
            want="an Operation, which compiles to programs",
            next_step='run it: VirtualCluster(mesh, engine="in-process").run(function, ...).statistics',
        )
    specs = [tuple(map(_spec, arrays)) for arrays in (activations, parameters)]
    return compile_programs(operation, as_device_mesh(mesh), specs[0], specs[1])


def compile_programs(
    operation: Operation, mesh: DeviceMesh, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
) -> tuple[Program, ...]:
    """Compile an operation to one program per device, in mesh order."""
    programs = tuple(operation.compile(mesh, activations, parameters))
    if tuple(program.device for program in programs) != mesh.ranks:
        raise UsageError(
            f"{type(operation).__qualname__} compiled to programs for other devices than the mesh {mesh.grid!r}",
            got=str([program.device for program in programs][:32]),
            want=str(list(mesh.ranks[:32])),
        )
    return programs


def count(programs: Sequence[Program], algorithm: str) -> Statistics:
    """Count the costs of programs."""
    shares = _Shares(algorithm)
    return Statistics(tuple(_count_one(program, shares) for program in programs))


class _Shares:
    """Counts of each member of a group, computed once for all: a group may be a whole mesh of thousands."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._places: dict[int, dict[int, int]] = {}
        self._traffic: dict[tuple[object, ...], tuple[Traffic, ...]] = {}

    def traffic(self, instruction: Communicate, device: int) -> Traffic:
        """Return the counts of a device in a collective."""
        # Keys use the tuples' identities, which the programs preserve: comparing tuples of thousands is too slow.
        group, given, collective, dim = instruction.group, instruction.given, instruction.collective, instruction.dim
        places = self._places.get(id(group))
        if places is None:
            places = self._places[id(group)] = {member: place for place, member in enumerate(group)}
        check_group(instruction, device, places)
        root = 0 if instruction.root is None else places[instruction.root]
        key = (id(given), collective, dim, root)
        if key not in self._traffic:
            self._traffic[key] = count_traffic(collective, self._algorithm, given, dim=dim, root=root)
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
                collectives[name] = collectives.get(name, Traffic()) + shares.traffic(instruction, program.device)
            case Send():
                collectives["send"] = collectives.get("send", Traffic()) + Traffic(1, 1, 0, instruction.spec.nbytes, 0)
            case Take():
                taken = Traffic(1, 0, 1, 0, instruction.spec.nbytes)
                collectives["receive"] = collectives.get("receive", Traffic()) + taken
    return DeviceStatistics(collectives, from_host, to_host, flops, peak_nbytes(program))


def check_group(instruction: Communicate, device: int, members: Container[int]) -> None:
    """Check that an instruction has an input for each member, and its device and its root among them."""
    group, root = instruction.group, instruction.root
    if len(instruction.given) != len(group) or device not in members or not (root is None or root in members):
        raise UsageError(
            f"device {device}: its program's {instruction.collective} does not match its group",
            rank=device,
            got=f"{len(instruction.given)} specs of the members' arrays, group {list(group)[:32]}"
            + ("" if root is None else f", root {root}"),
            want="a spec for each member, this device among them" + ("" if root is None else ", and the root"),
        )


def _spec(given: Array | ArraySpec | Sequence[int]) -> ArraySpec:
    if isinstance(given, int | str):
        raise UsageError(
            f"{given!r} is neither an array nor a shape",
            got=repr(given),
            want="an array, its ArraySpec or its shape, for each",
            next_step="give several: activations=((64, 32),)",
        )
    spec = ArraySpec(tuple(given)) if isinstance(given, tuple | list) else given
    if not isinstance(spec, ArraySpec):
        return spec_of(given)
    if not all(isinstance(length, SupportsIndex) and length >= 0 for length in spec.shape):
        raise UsageError(f"the shape {spec.shape} is impossible", got=str(spec.shape), want="lengths of 0 or more")
    return spec
