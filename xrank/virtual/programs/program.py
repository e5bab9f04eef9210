"""Programs: the steps of each device of a mesh, as data.

An operation compiles to one program per device. Both engines interpret the same programs, a plan counts their costs
without a run, and a link model times them. Values are in named registers; each register is written once and freed
after the last instruction that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from xrank.virtual.array_spec import ArraySpec


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive a packet from the host."""

    output: str
    """The register; also the packet's name."""
    spec: ArraySpec


@dataclass(frozen=True, slots=True)
class Compute:
    """Call a kernel (`xrank.virtual.programs.kernels`) on registers of this device."""

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
