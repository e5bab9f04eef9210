"""Programs of devices as data, the steps of their collectives, and their costs: calls, messages, bytes and flops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.errors import UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import Array, Arrays, ArraySpec, Specs, spec_of, split_lengths, with_length
from xrank.virtual.sharding import MeshLike, as_device_mesh


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls, messages and bytes of one kind of exchange."""

    calls: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    sent_nbytes: int = 0
    """Bytes of the arrays' elements; headers and shapes are not counted."""
    received_nbytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.calls + other.calls,
            self.sent_messages + other.sent_messages,
            self.received_messages + other.received_messages,
            self.sent_nbytes + other.sent_nbytes,
            self.received_nbytes + other.received_nbytes,
        )


_NOTHING: Mapping[str, Traffic] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Statistics of one device."""

    collectives: Mapping[str, Traffic] = field(default_factory=lambda: _NOTHING)
    """Traffic between devices by collective name, including ``"send"`` and ``"receive"``."""
    from_host: Traffic = Traffic()
    to_host: Traffic = Traffic()
    flops: int = 0
    peak_nbytes: int | None = None
    """Largest number of bytes in registers at once; None for a function that never reported it."""

    @property
    def traffic(self) -> Traffic:
        """Traffic with other devices, over all collectives."""
        return sum(self.collectives.values(), Traffic())


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of all devices, in mesh order."""

    devices: tuple[DeviceStatistics, ...]

    @property
    def flops(self) -> int:
        """Number of floating-point operations of all devices."""
        return sum(device.flops for device in self.devices)

    @property
    def traffic(self) -> Traffic:
        """Traffic between all devices."""
        return sum((device.traffic for device in self.devices), Traffic())

    @property
    def messages(self) -> int:
        """Number of messages sent between devices."""
        return self.traffic.sent_messages

    @property
    def nbytes(self) -> int:
        """Number of bytes sent between devices."""
        return self.traffic.sent_nbytes

    def by_collective(self) -> dict[str, Traffic]:
        """Return the traffic of all devices, summed by collective name."""
        total: defaultdict[str, Traffic] = defaultdict(Traffic)
        for device in self.devices:
            for name, traffic in device.collectives.items():
                total[name] += traffic
        return dict(total)


IntArray: TypeAlias = npt.NDArray[np.int64]

ALGORITHMS = ("push", "ring")

COLLECTIVES = (
    "all_scatter",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
)

ALWAYS_PUSH = frozenset(("all_scatter", "all_to_all"))

REDUCTIONS = ("sum", "mean", "max", "min", "prod")

ROOTED = frozenset(("broadcast", "gather", "scatter"))


class Step(NamedTuple):
    """Send a slot to a member, given by its place in the group, or receive one from it."""

    does: Literal["send", "receive"]
    member: int
    slot: int
    fold: bool = False
    """Whether the received array is reduced with the slot's array."""


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of one member in a collective."""

    start: Literal["whole", "flat", "parts", "nothing"]
    """Initial slots: "whole" puts the input into the member's own slot; "flat" cuts the flattened input into one piece
    per member; "parts" has one part of the input per member; "nothing" leaves all slots empty."""
    steps: tuple[Step, ...]
    finish: Literal["all", "reduce", "flat", "one", "nothing"]
    """The result: all slots in order; all slots reduced to one array; the flat pieces joined and reshaped; one slot;
    or nothing."""
    slot: int = 0
    """The slot of the result, for finish "one"."""


def check_algorithm(algorithm: str) -> str:
    """Return the name of an algorithm."""
    if algorithm not in ALGORITHMS:
        raise UsageError(f"unknown algorithm {algorithm!r}", got=repr(algorithm), want='"push" or "ring"')
    return algorithm


@lru_cache(maxsize=65536)
def course(collective: str, algorithm: str, size: int, member: int, root: int = 0) -> Course:
    """Return the steps of one member; `member` and `root` are places in the group.

    >>> course("broadcast", "ring", size=3, member=1).steps
    (Step(does='receive', member=0, slot=0, fold=False), Step(does='send', member=2, slot=0, fold=False))
    """
    ring = algorithm == "ring" and collective not in ALWAYS_PUSH
    # The next one first, so that simultaneous sends have distinct first targets.
    others = tuple((member + distance) % size for distance in range(1, size))
    steps: tuple[Step, ...]
    match collective:
        case "all_scatter" | "all_gather":
            steps = _pass_around(size, member, member) if ring else _exchange_directly(others, lambda _: member)
            return Course("whole", steps, "all")
        case "all_reduce":
            if ring:
                # The first half leaves each member with its own piece reduced; the second passes these around.
                steps = (*_pass_around(size, member, member - 1, fold=True), *_pass_around(size, member, member))
                return Course("flat", steps, "flat")
            return Course("whole", _exchange_directly(others, lambda _: member), "reduce")
        case "reduce_scatter":
            if ring:
                # A slot's reduction begins at the member after its owner and ends at the owner, so every member adds in
                # the same order in each run: results are reproducible bit by bit.
                return Course("parts", _pass_around(size, member, member - 1, fold=True), "one", member)
            return Course("parts", _exchange_directly(others, lambda other: other), "reduce")
        case "all_to_all":
            return Course("parts", _exchange_directly(others, lambda other: other), "all")
        case "broadcast" | "scatter" | "gather":
            is_broadcast, after = collective == "broadcast", (member + 1) % size
            own = root if is_broadcast else member
            if ring and is_broadcast:
                steps = (Step("receive", (member - 1) % size, root), Step("send", after, root))
                steps = steps[member == root : 1 + (after != root)]  # the root has it, and the last one keeps it
            elif ring:
                steps = _send_along_ring(size, member, root)
            elif member == root:
                steps = tuple(Step("send", one, root if is_broadcast else one) for one in others)
            else:
                steps = (Step("receive", root, own),)
            if collective == "gather":
                # The scatter backwards in time; without a ring, the root receives in the order of its group.
                turned = reversed(steps) if ring else steps
                steps = tuple(Step("receive" if it.does == "send" else "send", it.member, it.slot) for it in turned)
                return Course("whole", steps, "all" if member == root else "nothing")
            return Course("nothing" if member != root else "whole" if is_broadcast else "parts", steps, "one", own)
        case _:
            raise UsageError(
                f"unknown collective {collective!r}", got=repr(collective), want=f"one of {list(COLLECTIVES)}"
            )


def iterate_steps(
    collective: str, algorithm: str, given: Specs, dim: int | None = None
) -> Iterator[tuple[Step, IntArray]]:
    """Yield the steps of member 0 of a collective without a root, each with the bytes that every member sends in it.

    Every other member does the same steps at places that are as much further on in the group as itself. A receive has
    no bytes of its own: it takes what a send before it has sent.
    """
    size, where = len(given), dim or 0
    ring = algorithm == "ring" and collective not in ALWAYS_PUSH
    members, none = np.arange(size), np.zeros(0, np.int64)
    slots = np.array([spec.nbytes for spec in given])
    each = none
    if collective == "all_reduce" and ring:
        flat = ArraySpec((prod(given[0].shape),), given[0].dtype)
        slots = np.array([piece.nbytes for piece in _cut_spec(flat, size, 0)])
    elif collective == "reduce_scatter" and ring:
        slots = np.array([part.nbytes for part in _cut_spec(given[0], size, where)])
    elif collective in ("reduce_scatter", "all_to_all"):
        lengths = np.array([spec.shape[where] for spec in given])
        shorts, longer = np.divmod(lengths, size)
        each = slots // np.maximum(lengths, 1)
    for step in course(collective, algorithm, size, 0).steps:
        if step.does == "receive":
            yield step, none
        elif len(each):
            # As numpy.array_split cuts: the first `longer` parts have one element of the dim more.
            yield step, (shorts + ((members + step.member) % size < longer)) * each
        else:
            yield step, np.roll(slots, -step.slot)


def rooted_steps(
    collective: str, algorithm: str, given: Specs, member: int, *, dim: int | None = None, root: int = 0
) -> Iterator[tuple[Step, int]]:
    """Yield the steps of a member of a collective of `ROOTED`, each with its bytes."""
    slots = _cut_spec(given[root], len(given), dim or 0) if collective == "scatter" else given
    # Without the cache: on a ring, the members of a large group have millions of steps together.
    for step in course.__wrapped__(collective, algorithm, len(given), member, root).steps:
        yield step, slots[step.slot].nbytes


def count_traffic(
    collective: str, algorithm: str, given: Specs, *, dim: int | None = None, root: int = 0
) -> tuple[Traffic, ...]:
    """Count what each member sends and receives in one call, in the group's order."""
    size = len(given)
    if collective in ROOTED:
        return tuple(
            sum(
                (
                    Traffic(0, 1, 0, nbytes, 0) if step.does == "send" else Traffic(0, 0, 1, 0, nbytes)
                    for step, nbytes in rooted_steps(collective, algorithm, given, member, dim=dim, root=root)
                ),
                Traffic(1),
            )
            for member in range(size)
        )
    sent, received, messages = np.zeros(size, np.int64), np.zeros(size, np.int64), 0
    for step, nbytes in iterate_steps(collective, algorithm, given, dim):
        if step.does == "send":
            sent += nbytes
            received += np.roll(nbytes, step.member)
            messages += 1
    return tuple(Traffic(1, messages, messages, *both) for both in zip(sent.tolist(), received.tolist(), strict=True))


def _cut_spec(spec: ArraySpec, size: int, dim: int) -> list[ArraySpec]:
    return [with_length(spec, dim, length) for length in split_lengths(spec.shape[dim], size)]


def _exchange_directly(others: tuple[int, ...], slot_for: Callable[[int], int]) -> tuple[Step, ...]:
    """Return the sends of a slot to every other member, then the receives, each into the slot of its sender."""
    # Receives in the order of arrival: the previous member sends to this one first, the next one last.
    sends = tuple(Step("send", other, slot_for(other)) for other in others)
    return (*sends, *(Step("receive", other, other) for other in reversed(others)))


def _pass_around(size: int, member: int, first: int, *, fold: bool = False) -> tuple[Step, ...]:
    """Return the steps that pass every slot once around the ring; the member starts with slot `first`."""
    after, before = (member + 1) % size, (member - 1) % size
    steps: list[Step] = []
    for turn in range(size - 1):
        # Each turn sends on the slot that the last turn brought.
        steps += (Step("send", after, (first - turn) % size), Step("receive", before, (first - turn - 1) % size, fold))
    return tuple(steps)


def _send_along_ring(size: int, member: int, root: int) -> tuple[Step, ...]:
    """Return the steps that move slots from the root along the ring, the farthest member's slot first."""
    after, before = (member + 1) % size, (member - 1) % size
    distance = (member - root) % size
    steps: list[Step] = []
    # With the farthest slot first, members forward while the root still sends.
    for farther in range(size - 1, distance, -1):
        slot = (root + farther) % size
        if distance:
            steps.append(Step("receive", before, slot))
        steps.append(Step("send", after, slot))
    if distance:
        steps.append(Step("receive", before, member))
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive a packet from the host."""

    output: str
    """The register; also the packet's name."""
    spec: ArraySpec


@dataclass(frozen=True, slots=True)
class Compute:
    """Call a kernel (`xrank.virtual.arrays`) on registers of this device."""

    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    specs: tuple[ArraySpec, ...]
    flops: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the kernel, plain values."""


@dataclass(frozen=True, slots=True)
class Communicate:
    """Take part in a collective; the other members have matching instructions in the same order."""

    collective: str
    """One of `COLLECTIVES`: ``"all_gather"``."""
    group: tuple[int, ...]
    """The members, in the group's order; this device is one of them."""
    input: str
    """Register with this member's input; "" if it has none (a receiver of a broadcast)."""
    output: str
    """Register of the result; "" without a result."""
    given: tuple[ArraySpec, ...]
    """Spec of each member's input, in the group's order; for members without input, the spec of their result."""
    spec: ArraySpec
    dim: int | None = None
    """The dim along which parts are joined or cut."""
    reduction: str | None = None
    """``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"``."""
    root: int | None = None
    """The device that broadcasts, scatters or gathers."""
    axes: tuple[str, ...] = ()
    """Mesh axes that the group spans, for the link model."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a register to another device, which receives it with a `Take`; does not wait for it."""

    input: str
    device: int
    spec: ArraySpec
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Take:
    """Receive the next array that another device sends to this one."""

    output: str
    device: int
    spec: ArraySpec
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Return:
    """Send a register to the host under a name."""

    input: str
    name: str
    spec: ArraySpec


Instruction: TypeAlias = Receive | Compute | Communicate | Send | Take | Return


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of one device, in order."""

    device: int
    instructions: tuple[Instruction, ...]


def list_inputs(instruction: Instruction) -> tuple[str, ...]:
    """Return the registers that an instruction reads, in its order."""
    match instruction:
        case Compute():
            return instruction.inputs
        case Communicate():
            return (instruction.input,) if instruction.input else ()
        case Send() | Return():
            return (instruction.input,)
        case _:
            return ()


def list_outputs(instruction: Instruction) -> tuple[tuple[str, ArraySpec], ...]:
    """Return the registers that an instruction writes, each with its spec."""
    match instruction:
        case Compute():
            return tuple(zip(instruction.outputs, instruction.specs, strict=True))
        case Communicate():
            return ((instruction.output, instruction.spec),) if instruction.output else ()
        case Receive() | Take():
            return ((instruction.output, instruction.spec),)
        case _:
            return ()


def find_last_uses(program: Program) -> list[tuple[str, ...]]:
    """Return, for each instruction, the registers whose last use it is."""
    last: dict[str, int] = {}
    for number, instruction in enumerate(program.instructions):
        for name in list_inputs(instruction):
            if name not in last:
                raise _misuse(program, number, name, "reads", "which no instruction has written")
            last[name] = number
        for name, _ in list_outputs(instruction):
            if name in last:
                raise _misuse(program, number, name, "writes", "which was written before")
            last[name] = number
    ends: list[list[str]] = [[] for _ in program.instructions]
    # A register that nothing reads ends with the instruction that writes it.
    for name, number in last.items():
        ends[number].append(name)
    return [tuple(names) for names in ends]


def peak_nbytes(program: Program) -> int:
    """Return the largest number of bytes in registers at once; an instruction's inputs and outputs coexist."""
    sizes: dict[str, int] = {}
    held = peak = 0
    for instruction, unused in zip(program.instructions, find_last_uses(program), strict=True):
        for name, spec in list_outputs(instruction):
            sizes[name] = spec.nbytes
            held += spec.nbytes
        peak = max(peak, held)
        held -= sum(sizes[name] for name in unused)
    return peak


def _misuse(program: Program, number: int, name: str, does: str, but: str) -> UsageError:
    return UsageError(
        f"device {program.device}: instruction {number} {does} the register {name!r}, {but}",
        tensor=name,
        rank=program.device,
        want="instructions that write each register once, before it is read",
    )


class Operation(ABC):
    """Work that compiles to one program per device.

    `VirtualCluster.run` calls `compile` once, then `packets` once per device, before any device starts, so invalid
    arguments are reported before anything runs. `plan` calls only `compile`.
    """

    @abstractmethod
    def compile(self, mesh: DeviceMesh, activations: Specs, parameters: Specs) -> tuple[Program, ...]:
        """Return the programs of all devices, in mesh order.

        Args:
            mesh: the mesh of all devices.
            activations: specs of the arrays that change from call to call.
            parameters: specs of the arrays that persist between calls.

        Raises:
            LayoutError: the operation does not fit this mesh and these sizes; names the dim and the axis.
            UsageError: the operation takes other arguments.
        """

    @abstractmethod
    def packets(self, mesh: DeviceMesh, device: int, activations: Arrays, parameters: Arrays) -> dict[str, Array]:
        """Return the host's arrays for a device: one per `Receive` of its program, by packet name."""


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
    """Compile an operation; arguments and errors as in `plan`."""
    if not isinstance(operation, Operation):
        raise UsageError(
            "a function cannot be planned: its work is known only after a run",
            got=f"{getattr(operation, '__qualname__', operation)}, {type(operation).__name__}",
            want="an Operation, which compiles to programs",
            next_step='run it: VirtualCluster(mesh, engine="in-process").run(function, ...).statistics',
        )
    specs = [tuple(map(_spec, arrays)) for arrays in (activations, parameters)]
    return compile_programs(operation, as_device_mesh(mesh), specs[0], specs[1])


def compile_programs(
    operation: Operation, mesh: DeviceMesh, activations: Specs, parameters: Specs
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
    # The members' counts of a collective are computed once for all: a group may be a whole mesh of thousands. Keys use
    # the tuples' identities, which the programs preserve: comparing tuples of thousands is too slow.
    places_of: dict[int, dict[int, int]] = {}
    counted: dict[tuple[object, ...], tuple[Traffic, ...]] = {}
    devices = []
    for program in programs:
        collectives: defaultdict[str, Traffic] = defaultdict(Traffic)
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
                case Send():
                    collectives["send"] += Traffic(1, 1, 0, instruction.spec.nbytes, 0)
                case Take():
                    collectives["receive"] += Traffic(1, 0, 1, 0, instruction.spec.nbytes)
                case Communicate():
                    name, given, dim = instruction.collective, instruction.given, instruction.dim
                    places = places_of.get(id(instruction.group))
                    if places is None:
                        places = {member: place for place, member in enumerate(instruction.group)}
                        places_of[id(instruction.group)] = places
                    check_group(instruction, program.device, places)
                    root = 0 if instruction.root is None else places[instruction.root]
                    key = (id(given), name, dim, root)
                    if key not in counted:
                        counted[key] = count_traffic(name, algorithm, given, dim=dim, root=root)
                    collectives[name] += counted[key][places[program.device]]
        devices.append(DeviceStatistics(dict(collectives), from_host, to_host, flops, peak_nbytes(program)))
    return Statistics(tuple(devices))


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
