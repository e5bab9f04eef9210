"""The interpreter: executes a program on a virtual device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrank.errors import UsageError
from xrank.virtual.arrays import Array, concatenate, nbytes_of, spec_of, split_evenly
from xrank.virtual.device import VirtualDevice
from xrank.virtual.programs.kernels import find_kernel
from xrank.virtual.programs.program import Communicate, Compute, Program, Receive, Return, Send, Take
from xrank.virtual.programs.registers import find_last_uses, list_inputs, list_outputs


def interpret(program: Program, device: VirtualDevice) -> None:
    """Run a program to its end.

    A register is freed after the last instruction that reads it, or at once if none does. The device's peak counts
    the inputs and the outputs of an instruction together.

    Raises:
        UsageError: a kernel's output differs from the program's spec, or another device calls something else.
    """
    registers: dict[str, Array] = {}
    free_after = find_last_uses(program)
    for instruction, unused in zip(program.instructions, free_after, strict=True):
        inputs = [registers[name] for name in list_inputs(instruction)]
        outputs = _do(instruction, inputs, device)
        for (name, spec), array in zip(list_outputs(instruction), outputs, strict=True):
            if spec_of(array) != spec:
                raise UsageError(
                    f"device {device.index}: {_title(instruction)} returns {name!r} with another shape or element type",
                    tensor=name,
                    rank=device.index,
                    got=f"{spec_of(array).dtype} {spec_of(array).shape}",
                    want=f"{spec.dtype} {spec.shape}",
                )
            registers[name] = array
        # Counted before unused registers are freed: inputs and outputs coexist.
        device.count_held(sum(map(nbytes_of, registers.values())))
        for name in unused:
            del registers[name]


def _do(instruction: Any, inputs: Sequence[Array], device: VirtualDevice) -> Sequence[Array]:
    """Execute an instruction and return the arrays for the registers that it writes."""
    match instruction:
        case Receive():
            return (device.receive_from_host(),)
        case Return():
            device.send_to_host(inputs[0])
            return ()
        case Send():
            device.send(inputs[0], instruction.device)
            return ()
        case Take():
            return (device.receive(instruction.device),)
        case Compute():
            device.count_flops(instruction.flops)
            result = find_kernel(instruction.kernel)(*inputs, **dict(instruction.options))
            outputs = result if isinstance(result, tuple) else (result,)
            if len(outputs) != len(instruction.outputs):
                raise UsageError(
                    f"device {device.index}: the kernel {instruction.kernel!r} returns {len(outputs)} arrays",
                    rank=device.index,
                    got=str(len(outputs)),
                    want=f"{len(instruction.outputs)}: {', '.join(instruction.outputs)}",
                )
            return outputs
        case Communicate():
            result = _communicate(instruction, inputs[0] if inputs else None, device)
            return (result,) if instruction.output else ()
    raise AssertionError(instruction)


def _communicate(instruction: Communicate, array: Array | None, device: VirtualDevice) -> Array | None:
    group, dim = instruction.group, instruction.dim
    cut = 0 if dim is None else dim
    match instruction.collective:
        case "all_scatter":
            return concatenate(device.all_scatter(array, group=group), cut)
        case "all_gather":
            return device.all_gather(array, group=group, dim=cut)
        case "all_reduce":
            return device.all_reduce(array, group=group, reduction=instruction.reduction or "sum")
        case "reduce_scatter":
            return device.reduce_scatter(array, group=group, dim=cut, reduction=instruction.reduction or "sum")
        case "broadcast":
            return device.broadcast(array, _root(instruction), group=group)
        case "gather":
            return device.gather(array, _root(instruction), group=group, dim=cut)
        case "scatter":
            return device.scatter(array, _root(instruction), group=group, dim=cut)
        case "all_to_all":
            return concatenate(device.all_to_all(split_evenly(array, len(group), cut), group=group), cut)
    raise UsageError(
        f"unknown collective {instruction.collective!r}",
        rank=device.index,
        next_step="compile the program with one of the collectives of xrank.virtual",
    )


def _root(instruction: Communicate) -> int:
    if instruction.root is None:
        raise UsageError(f"{instruction.collective} has no root", want="a device of its group")
    return instruction.root


def _title(instruction: Any) -> str:
    match instruction:
        case Compute():
            return f"the kernel {instruction.kernel!r}"
        case Communicate():
            return instruction.collective
        case _:
            return f"its {type(instruction).__name__.lower()}"
