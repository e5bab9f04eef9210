"""Programs: the steps of each device of a mesh, as data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from xrank.errors import UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import Array, ArraySpec


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive a packet from the host."""

    output: str
    """The register; also the packet's name."""
    spec: ArraySpec


@dataclass(frozen=True, slots=True)
class Compute:
    """Call a kernel (`xrank.virtual.kernels`) on registers of this device."""

    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    specs: tuple[ArraySpec, ...]
    """Specs of the outputs."""
    flops: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the kernel, plain values."""


@dataclass(frozen=True, slots=True)
class Communicate:
    """Take part in a collective; the other members have matching instructions in the same order."""

    collective: str
    """A name of `xrank.virtual.collectives`: ``"all_gather"``."""
    group: tuple[int, ...]
    """The members, in the group's order; this device is one of them."""
    input: str
    """Register with this member's input; "" if it has none (a receiver of a broadcast)."""
    output: str
    """Register of the result; "" without a result."""
    given: tuple[ArraySpec, ...]
    """Spec of each member's input, in the group's order; for members without input, the spec of their result."""
    spec: ArraySpec
    """Spec of the result."""
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
        want="each register written once, before it is read",
    )


class Operation(ABC):
    """Work that compiles to one program per device.

    `VirtualCluster.run` calls `compile` once, then `packets` once per device, before any device starts, so invalid
    arguments are reported before anything runs. `plan` calls only `compile`.
    """

    @abstractmethod
    def compile(
        self, mesh: DeviceMesh, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> tuple[Program, ...]:
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
    def packets(
        self, mesh: DeviceMesh, device: int, activations: Sequence[Array], parameters: Sequence[Array]
    ) -> dict[str, Array]:
        """Return the host's arrays for a device: one per `Receive` of its program, by packet name."""
