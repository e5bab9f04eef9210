"""Registers of a program: the instructions' inputs and outputs, lifetimes, and peak memory."""

from __future__ import annotations

from xrank.errors import UsageError
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.programs.program import Communicate, Compute, Instruction, Program, Receive, Return, Send, Take


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
    """Return, for each instruction, the registers whose last use it is.

    Raises:
        UsageError: a register is read before it is written, or written twice.
    """
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
