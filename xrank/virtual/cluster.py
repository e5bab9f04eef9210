"""The interpreter: executes a program on a virtual device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from xrank.errors import UsageError, require_linux
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import Array, concatenate, nbytes_of, spec_of, split_evenly
from xrank.virtual.channels import HOST, ChannelStatistics, Links
from xrank.virtual.collectives import DeviceStatistics, Statistics, check_algorithm
from xrank.virtual.device import VirtualDevice
from xrank.virtual.engine import Counts, DeviceJob, Engine, EngineOutcome
from xrank.virtual.kernels import find_kernel
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.planning import compile_programs
from xrank.virtual.programs import (
    Communicate,
    Compute,
    Operation,
    Program,
    Receive,
    Return,
    Send,
    Take,
    find_last_uses,
    list_inputs,
    list_outputs,
)


def interpret(program: Program, device: VirtualDevice) -> None:
    """Run a program to its end.

    A register is freed after the last instruction that reads it, or at once if none does. The device's peak counts
    the inputs and the outputs of an instruction together.
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


ENGINES = ("processes", "in-process")


@dataclass(frozen=True, slots=True)
class Channels:
    """Counts of the channels, independent of the devices' statistics, by (source, target); the host is -1."""

    sent: Counts
    received: Counts

    @property
    def between_devices(self) -> ChannelStatistics:
        """Sum of the messages sent between devices."""
        counts = (count for ends, count in self.sent.items() if HOST not in ends)
        return sum(counts, ChannelStatistics())


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run."""

    outputs: list[Any]
    """One output per device, in mesh order. For a function: its return value. For an operation: the returned array, a
    dict by name if a device returned several, None if it returned none."""
    statistics: Statistics
    """Statistics counted by the devices."""
    channels: Channels
    """Statistics counted by the channels between them."""
    seconds: float
    """Seconds from the call to the last result, including the start of the devices."""


class VirtualCluster:
    """A mesh of virtual devices on this machine.

    Args:
        mesh: a `DeviceMesh`; a `Mesh` or a tuple of up to four lengths, whose axes are x, y, z and w; or a number.
        engine: ``"processes"`` runs a process per device; ``"in-process"`` runs a thread per device, with results equal
            bit by bit: it starts faster and suits tests and debuggers.
        algorithm: ``"push"`` or ``"ring"``, the default of the collectives (`xrank.virtual.collectives`).
        timeout_seconds: time limit of a run; the error names the devices that are late.

    >>> import numpy as np
    >>> cluster = VirtualCluster((2, 2), engine="in-process")
    >>> run = cluster.run(lambda device, x: device.all_reduce(x * device.index, "y"), np.ones(3))
    >>> run.outputs[0], run.statistics.nbytes
    (array([1., 1., 1.]), 96)
    """

    def __init__(
        self, mesh: MeshLike, *, engine: str = "processes", algorithm: str = "push", timeout_seconds: float = 60.0
    ) -> None:
        self.mesh: DeviceMesh = as_device_mesh(mesh)
        if engine not in ENGINES:
            raise UsageError(f"unknown engine {engine!r}", got=repr(engine), want=" or ".join(map(repr, ENGINES)))
        if not isinstance(timeout_seconds, int | float) or not timeout_seconds > 0:
            raise UsageError("a timeout must be positive", got=repr(timeout_seconds), want="seconds above 0")
        self.engine = engine
        self.algorithm = check_algorithm(algorithm)
        self.timeout_seconds = timeout_seconds

    def __repr__(self) -> str:
        return f"<VirtualCluster {self.mesh.grid}, {self.engine}, {self.algorithm}>"

    def run(
        self,
        operation: Operation | Callable[..., Any],
        *args: Any,
        activations: Sequence[Array] = (),
        parameters: Sequence[Array] = (),
    ) -> Run:
        """Run an operation, or a function of a `VirtualDevice`, on all devices at once.

        Args:
            operation: an `Operation`; or a function, which every device calls with itself and `args`.
            *args: arguments of a function; each device gets its own copies, except of memory already shared.
            activations: input arrays of an operation.
            parameters: parameter arrays of an operation.

        Raises:
            RankFailedError: a device raised or died; ``rank`` is the device and ``__cause__`` its exception.
            RankTimeoutError: the time limit is over, or all devices wait.
            UsageError: the arguments do not fit; or a device never received a message that was sent.
        """
        begin = monotonic()
        if isinstance(operation, Operation):
            if args:
                raise UsageError(
                    "an operation takes its arrays as keywords",
                    got=f"{len(args)} further arguments",
                    want="activations=(...), parameters=(...)",
                )
            jobs, names = self._make_program_jobs(operation, activations, parameters)
        else:
            if activations or parameters:
                raise UsageError(
                    "activations and parameters are for operations",
                    got=f"the function {getattr(operation, '__qualname__', operation)}",
                    want="its arguments after it: run(function, x, y)",
                )
            _check_function(operation)
            jobs, names = self._make_function_jobs(operation, args), None
        outcome = self._engine()(jobs, timeout_seconds=self.timeout_seconds)
        _check_received(outcome)
        statistics = Statistics(tuple(statistics for _, statistics in outcome.results))
        outputs = [value for value, _ in outcome.results] if names is None else _name_outputs(names, outcome)
        return Run(outputs, statistics, Channels(outcome.sent, outcome.received), monotonic() - begin)

    def _engine(self) -> Engine:
        if self.engine == "in-process":
            from xrank.virtual import threads

            return threads.run
        require_linux('VirtualCluster(engine="processes")')
        from xrank.virtual import processes

        return processes.run

    def _make_function_jobs(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[DeviceJob]:
        # A forked process has its own copies.
        copied = self.engine == "in-process"
        return [
            DeviceJob(device, partial(self._call, device, function, _copy_arguments(args) if copied else args))
            for device in self.mesh.ranks
        ]

    def _call(
        self, index: int, function: Callable[..., Any], args: tuple[Any, ...], links: Links
    ) -> tuple[Any, DeviceStatistics]:
        device = VirtualDevice(links, index, self.mesh, self.algorithm)
        value = function(device, *args)
        return value, device.statistics

    def _make_program_jobs(
        self, operation: Operation, activations: Sequence[Array], parameters: Sequence[Array]
    ) -> tuple[list[DeviceJob], list[tuple[str, ...]]]:
        """Return the jobs of an operation, and the names of each device's outputs."""
        specs = [tuple(map(spec_of, arrays)) for arrays in (activations, parameters)]
        programs = compile_programs(operation, self.mesh, specs[0], specs[1])
        jobs, names = [], []
        for program in programs:
            packets = operation.packets(self.mesh, program.device, activations, parameters)
            returned = tuple(i.name for i in program.instructions if isinstance(i, Return))
            ordered = _order_packets(program, packets)
            jobs.append(DeviceJob(program.device, partial(self._interpret, program), ordered, len(returned)))
            names.append(returned)
        return jobs, names

    def _interpret(self, program: Program, links: Links) -> tuple[None, DeviceStatistics]:
        device = VirtualDevice(links, program.device, self.mesh, self.algorithm)
        interpret(program, device)
        # A program without registers has a peak of 0, unlike a function, whose peak is unknown.
        statistics = device.statistics
        return None, replace(statistics, peak_nbytes=statistics.peak_nbytes or 0)


def _check_function(function: object) -> None:
    """Check that a call of the function runs it, unlike a generator, a coroutine or a class."""
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        got = f"the {'coroutine' if inspect.iscoroutinefunction(function) else 'generator'} {function.__qualname__}"
        want = "a function that runs when it is called"
    elif isinstance(function, type) and issubclass(function, Operation):
        got, want = f"the class {function.__qualname__}", f"an operation: {function.__qualname__}(...)"
    elif not callable(function):
        got, want = f"{function!r}", "an Operation, or a function of a VirtualDevice"
    else:
        return
    raise UsageError("a cluster runs operations and functions", got=got, want=want)


def _copy_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return copy.deepcopy(args)
    except Exception as error:
        raise UsageError(
            f"the arguments cannot be copied, and every device has its own: {error}",
            got=", ".join(type(arg).__qualname__ for arg in args),
            next_step="detach tensors computed with gradients; let the function itself reach what all may share",
        ) from error


def _order_packets(program: Program, packets: dict[str, Array]) -> tuple[Array, ...]:
    """Return packets in the order in which a program receives them."""
    taken = [i for i in program.instructions if isinstance(i, Receive)]
    if sorted(packets) != sorted(i.output for i in taken):
        raise UsageError(
            f"the packets for device {program.device} are not those that its program receives",
            rank=program.device,
            got=str(sorted(packets)),
            want=str(sorted(i.output for i in taken)),
        )
    for instruction in taken:
        found = spec_of(packets[instruction.output])
        if found != instruction.spec:
            raise UsageError(
                f"the packet {instruction.output!r} for device {program.device} is not what its program receives",
                tensor=instruction.output,
                rank=program.device,
                got=f"{found.dtype} {found.shape}",
                want=f"{instruction.spec.dtype} {instruction.spec.shape}",
            )
    return tuple(packets[instruction.output] for instruction in taken)


def _name_outputs(names: Sequence[tuple[str, ...]], outcome: EngineOutcome) -> list[Any]:
    outputs: list[Any] = []
    for its, arrays in zip(names, outcome.returned, strict=True):
        outputs.append(arrays[0] if len(its) == 1 else dict(zip(its, arrays, strict=True)) or None)
    return outputs


def _check_received(outcome: EngineOutcome) -> None:
    """Raise if a sent message was never received: then two devices called different collectives."""
    for (source, target), count in outcome.sent.items():
        taken = outcome.received.get((source, target), ChannelStatistics())
        if taken != count:
            ends = ["the host" if end == HOST else f"device {end}" for end in (source, target)]
            raise UsageError(
                f"{ends[1]} never received messages that {ends[0]} sent",
                rank=None if target == HOST else target,
                got=f"{taken.messages} received",
                want=f"{count.messages}, as many as were sent",
                next_step="let all members of a group call the same collectives, and each send have a receive",
            )
