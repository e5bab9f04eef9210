"""Programs: what each device of a mesh does, step by step, as data.

An operation compiles to one program a device. Both engines of the cluster interpret the same programs, a dry plan
counts them without running anything, and a link model times them. Values live in registers, which have names; each
register is written once, and lives until the last instruction that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from xrank.virtual.array_spec import ArraySpec

__all__ = ["Communicate", "Compute", "Instruction", "Program", "Receive", "Return", "Send", "Take"]


@dataclass(frozen=True, slots=True)
class Receive:
    """Take a packet from the host."""

    output: str
    """The register, and the packet's name."""
    spec: ArraySpec


@dataclass(frozen=True, slots=True)
class Compute:
    """Call a kernel (`xrank.virtual.programs.kernels`) on registers of this device."""

    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    specs: tuple[ArraySpec, ...]
    """Of the outputs."""
    flops: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the kernel, plain values."""


@dataclass(frozen=True, slots=True)
class Communicate:
    """Take part in a collective of a group of devices; each member has the like at the same place of the order."""

    collective: str
    """A name of `xrank.virtual.collectives`: ``"all_gather"``."""
    group: tuple[int, ...]
    """The members, in the group's order; this device is one of them."""
    input: str
    """What this member gives; "" where it gives nothing (a receiver of a broadcast)."""
    output: str
    """What it gets; "" where it gets nothing."""
    given: tuple[ArraySpec, ...]
    """What each member gives, in the group's order; for those who give nothing, what they get."""
    spec: ArraySpec
    """Of the output."""
    dim: int | None = None
    """Where parts are joined or cut."""
    reduction: str | None = None
    """``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"``."""
    root: int | None = None
    """The device that broadcasts, scatters or gathers."""
    axes: tuple[str, ...] = ()
    """The mesh axes that the group spans, for the link model."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a register to another device, which has a `Take` for it; returns before it is taken."""

    input: str
    device: int
    spec: ArraySpec
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Take:
    """Take what another device sends, in the order of its sends."""

    output: str
    device: int
    spec: ArraySpec
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Return:
    """Send a register to the host, which knows it by this name."""

    input: str
    name: str
    spec: ArraySpec


Instruction: TypeAlias = Receive | Compute | Communicate | Send | Take | Return


@dataclass(frozen=True, slots=True)
class Program:
    """What one device does, first to last."""

    device: int
    instructions: tuple[Instruction, ...]
