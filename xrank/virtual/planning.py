"""Messages and bytes of each member in a collective, in closed form, for groups of thousands of members.

The sums are those of the steps in `xrank.virtual.collectives`. A group of g members has g(g-1) steps, but a plan needs
only the sums of each member.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, SupportsIndex

from xrank.errors import UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import Array, ArraySpec, num_elements, spec_of, split_lengths
from xrank.virtual.collectives import (
    ALWAYS_PUSH,
    DeviceStatistics,
    SendSlot,
    Statistics,
    Traffic,
    check_algorithm,
    course,
    step_specs,
)
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.programs import Communicate, Compute, Operation, Program, Receive, Return, Send, Take, peak_nbytes


def group_traffic(
    collective: str, algorithm: str, given: Sequence[ArraySpec], *, dim: int | None = None, root: int = 0
) -> tuple[Traffic, ...]:
    """Return each member's counts for one call, in the group's order; arguments as for `collectives.step_specs`.

    Raises:
        UsageError: the collective is unknown.
    """
    size = len(given)
    course(collective, algorithm, 1, 0)  # Raises for an unknown collective.
    ring = algorithm == "ring" and collective not in ALWAYS_PUSH
    nbytes = [spec.nbytes for spec in given]
    others = size - 1
    match collective:
        case "all_scatter" | "all_gather" | "all_reduce" if not ring:
            total = sum(nbytes)
            return tuple(Traffic(1, others, others, others * own, total - own) for own in nbytes)
        case "all_gather":
            return _count_ring(nbytes)
        case "all_reduce":
            pieces = flat_nbytes(given[0], size)
            rounds = zip(_count_reduce_ring(pieces), _count_ring(pieces), strict=True)
            return tuple(Traffic(1, 2 * others, 2 * others, *_sums(reducing, whole)) for reducing, whole in rounds)
        case "reduce_scatter" if ring:
            return _count_reduce_ring(part_nbytes(given[0], size, dim))
        case "reduce_scatter" | "all_to_all":
            return _count_all_to_all(given, dim)
        case "broadcast":
            gives = [1] * others + [0] if ring else [others] + [0] * others
            return tuple(
                Traffic(
                    1,
                    gives[distance],
                    min(1, distance),
                    gives[distance] * nbytes[root],
                    min(1, distance) * nbytes[root],
                )
                for distance in ((member - root) % size for member in range(size))
            )
        case "scatter":
            return _count_from_root(part_nbytes(given[root], size, dim), root, ring)
        case _:
            return tuple(map(_reverse, _count_from_root(nbytes, root, ring)))


def _count_ring(slots: Sequence[int]) -> tuple[Traffic, ...]:
    """Each slot once around: a member sends all but the next member's, and receives all but its own."""
    size, total = len(slots), sum(slots)
    return tuple(
        Traffic(1, size - 1, size - 1, total - slots[(member + 1) % size], total - slots[member])
        for member in range(size)
    )


def _count_reduce_ring(slots: Sequence[int]) -> tuple[Traffic, ...]:
    """Each slot reduced around: a member sends all but its own, and receives all but the previous member's."""
    size, total = len(slots), sum(slots)
    return tuple(
        Traffic(1, size - 1, size - 1, total - slots[member], total - slots[member - 1]) for member in range(size)
    )


def _count_all_to_all(given: Sequence[ArraySpec], dim: int | None) -> tuple[Traffic, ...]:
    """Each member sends part j of its array to member j."""
    size = len(given)
    where = dim or 0
    shorts = 0
    # By receiver, as differences that `accumulate` sums: one step for each sender instead of one for each pair.
    longer_nbytes = [0] * (size + 1)
    own_parts = []
    for member, spec in enumerate(given):
        short, num_longer = divmod(spec.shape[where], size)
        each = spec.nbytes // (spec.shape[where] or 1)
        # The parts before `num_longer` have one element of the dim more than the others.
        shorts += short * each
        longer_nbytes[0] += each
        longer_nbytes[num_longer] -= each
        own_parts.append((short + (member < num_longer)) * each)
    longer = list(accumulate(longer_nbytes))
    return tuple(
        Traffic(1, size - 1, size - 1, spec.nbytes - own, shorts + longer[member] - own)
        for member, (spec, own) in enumerate(zip(given, own_parts, strict=True))
    )


def _count_from_root(slots: Sequence[int], root: int, ring: bool) -> tuple[Traffic, ...]:
    """The root sends each member its slot, directly or along the ring."""
    size = len(slots)
    # Without a ring, only the root sends; with one, each member forwards the slots of all farther members.
    if not ring:
        leaving = Traffic(1, size - 1, 0, sum(slots) - slots[root], 0)
        return tuple(leaving if member == root else Traffic(1, 0, 1, 0, own) for member, own in enumerate(slots))
    traffic = []
    farther = sum(slots)
    for distance in range(size):
        own = slots[(root + distance) % size]
        farther -= own
        messages = size - 1 - distance
        taken = (messages + 1, farther + own) if distance else (0, 0)
        traffic.append(Traffic(1, messages, taken[0], farther, taken[1]))
    return tuple(traffic[(member - root) % size] for member in range(size))


def _reverse(one: Traffic) -> Traffic:
    """Swap sent and received: a gather receives what a scatter sends."""
    return Traffic(one.calls, one.received_messages, one.sent_messages, one.received_nbytes, one.sent_nbytes)


def _sums(left: Traffic, right: Traffic) -> tuple[int, int]:
    return left.sent_nbytes + right.sent_nbytes, left.received_nbytes + right.received_nbytes


def flat_nbytes(spec: ArraySpec, size: int) -> list[int]:
    """Return the bytes of each member's flat piece of an array."""
    each = spec.nbytes // (num_elements(spec) or 1)
    return [length * each for length in split_lengths(num_elements(spec), size)]


def part_nbytes(spec: ArraySpec, size: int, dim: int | None) -> list[int]:
    """Return the bytes of each member's part of an array along a dim."""
    length = spec.shape[dim or 0]
    each = spec.nbytes // (length or 1)
    return [part * each for part in split_lengths(length, size)]


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
    """Compile an operation to one program per device, in mesh order.

    Raises:
        UsageError: the programs are for other devices.
    """
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
                collectives[name] = collectives.get(name, Traffic()) + shares.traffic(instruction, program.device)
            case Send():
                collectives["send"] = collectives.get("send", Traffic()) + Traffic(1, 1, 0, instruction.spec.nbytes, 0)
            case Take():
                taken = Traffic(1, 0, 1, 0, instruction.spec.nbytes)
                collectives["receive"] = collectives.get("receive", Traffic()) + taken
    return DeviceStatistics(collectives, from_host, to_host, flops, peak_nbytes(program))


def moves(instruction: Communicate, device: int, algorithm: str) -> Iterator[tuple[bool, int, int]]:
    """Yield (is sent, other device, bytes) for each message of a device in a collective, in order."""
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
            f"device {device}: its program's {instruction.collective} does not match its group",
            rank=device,
            got=f"{len(instruction.given)} specs of the members' arrays, group {list(group)[:32]}"
            + ("" if root is None else f", root {root}"),
            want="a spec for each member, this device among them" + ("" if root is None else ", and the root"),
        )


@lru_cache(maxsize=4096)
def _moves(
    collective: str, algorithm: str, given: tuple[ArraySpec, ...], member: int, dim: int | None, root: int
) -> tuple[tuple[bool, int, int], ...]:
    """Return one member's messages with the others' places; equal for all groups of a mesh with equal specs."""
    steps = course(collective, algorithm, len(given), member, root).steps
    specs = step_specs(collective, algorithm, given, member, dim=dim, root=root)
    return tuple(
        (isinstance(step, SendSlot), step.member, spec.nbytes) for step, spec in zip(steps, specs, strict=True)
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
