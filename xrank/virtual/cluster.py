"""The virtual cluster: a mesh of devices on this machine that runs an operation or a function on every device.

An engine (`xrank.virtual.engines.engine`) gives each device a process or a thread, and the channels between them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from xrank.errors import UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.system import require_linux
from xrank.virtual.arrays import Array, spec_of
from xrank.virtual.channels.channel import HOST, ChannelStatistics, Links
from xrank.virtual.collectives import check_algorithm
from xrank.virtual.costs.planning import compile_programs
from xrank.virtual.device import VirtualDevice
from xrank.virtual.engines.engine import Counts, Engine, EngineOutcome, Job
from xrank.virtual.interpreter import interpret
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.programs.operation import Operation
from xrank.virtual.programs.program import Program, Receive, Return
from xrank.virtual.statistics import DeviceStatistics, Statistics

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
        self,
        mesh: MeshLike,
        *,
        engine: str = "processes",
        algorithm: str = "push",
        timeout_seconds: float = 60.0,
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
            from xrank.virtual.engines import in_process

            return in_process.run
        require_linux('VirtualCluster(engine="processes")')
        from xrank.virtual.engines import process_engine

        return process_engine.run

    def _make_function_jobs(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Job]:
        # A forked process has its own copies.
        copied = self.engine == "in-process"
        return [
            Job(device, partial(self._call, device, function, _copy_arguments(args) if copied else args))
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
    ) -> tuple[list[Job], list[tuple[str, ...]]]:
        """Return the jobs of an operation, and the names of each device's outputs."""
        specs = [tuple(map(spec_of, arrays)) for arrays in (activations, parameters)]
        programs = compile_programs(operation, self.mesh, specs[0], specs[1])
        jobs, names = [], []
        for program in programs:
            packets = operation.packets(self.mesh, program.device, activations, parameters)
            returned = tuple(i.name for i in program.instructions if isinstance(i, Return))
            jobs.append(
                Job(program.device, partial(self._interpret, program), _order_packets(program, packets), len(returned))
            )
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
