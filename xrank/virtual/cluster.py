"""The virtual cluster: a mesh of devices on this machine that runs an operation, or any function, on all of them.

    cluster = VirtualCluster((2, 4))
    run = cluster.run(lambda device, x: device.all_reduce(x * device.index, "y"), numpy.ones(3))
    run.outputs, run.statistics.nbytes

An engine (`xrank.virtual.engines.engine`) gives each device a process or a thread and the channels between them.
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
from xrank.virtual.arrays import Array, spec_of
from xrank.virtual.channels.channel import HOST, ChannelStatistics, Links
from xrank.virtual.collectives import check_algorithm
from xrank.virtual.costs.planning import compiled
from xrank.virtual.device import VirtualDevice
from xrank.virtual.engines.engine import Counts, Engine, Job, Outcome
from xrank.virtual.interpreter import interpret
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.programs.operation import Operation
from xrank.virtual.programs.program import Program, Receive, Return
from xrank.virtual.statistics import DeviceStatistics, Statistics

__all__ = ["Channels", "Run", "VirtualCluster"]

ENGINES = ("processes", "in-process")


@dataclass(frozen=True, slots=True)
class Channels:
    """What the channels counted, whatever the devices say: by source and target, the host being -1."""

    sent: Counts
    received: Counts

    @property
    def between_devices(self) -> ChannelStatistics:
        """What was sent from device to device, all together."""
        counts = (count for ends, count in self.sent.items() if HOST not in ends)
        return sum(counts, ChannelStatistics())


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave."""

    outputs: list[Any]
    """In the order of the mesh. Of a function: what it returned. Of an operation: the array that a device returned, a
    dict by name where it returned several, None where it returned none."""
    statistics: Statistics
    """What the devices counted."""
    channels: Channels
    """What the channels between them counted."""
    seconds: float
    """From the call to the last result; starting the devices is part of it."""


class VirtualCluster:
    """A mesh of virtual devices on this machine.

    Args:
        mesh: a `DeviceMesh`; a `Mesh` or a tuple of up to four lengths, whose axes are x, y, z and w; or a number.
        engine: ``"processes"``, a process for each device; or ``"in-process"``, a thread for each: the same results bit
            by bit, sooner, for tests and debuggers.
        algorithm: ``"push"`` or ``"ring"``, how collectives go (`xrank.virtual.collectives`) where a call says nothing.
        timeout_seconds: how long a run may take; who is late is named then.
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
            raise UsageError(f"no engine is called {engine!r}", got=repr(engine), want=" or ".join(map(repr, ENGINES)))
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
            operation: an `Operation`; or a function that every device calls with itself and the further arguments.
            *args: for a function; each device has copies of its own, but of memory that was shared before.
            activations: for an operation.
            parameters: for an operation.

        Raises:
            RankFailedError: a device raised or ended; ``rank`` says which, ``__cause__`` is what it raised.
            RankTimeoutError: the time is over, or no device can go on.
            UsageError: the arguments do not fit; or a message was sent that no device has received.
        """
        begin = monotonic()
        if isinstance(operation, Operation):
            if args:
                raise UsageError(
                    "an operation takes its arrays by name",
                    got=f"{len(args)} further arguments",
                    want="activations=(...), parameters=(...)",
                )
            jobs, names = self._compiled_jobs(operation, activations, parameters)
        else:
            if activations or parameters:
                raise UsageError(
                    "activations and parameters are for operations",
                    got=f"the function {getattr(operation, '__qualname__', operation)}",
                    want="its arguments after it: run(function, x, y)",
                )
            _check_function(operation)
            jobs, names = self._called_jobs(operation, args), None
        outcome = self._engine()(jobs, timeout_seconds=self.timeout_seconds)
        _check_received(outcome)
        statistics = Statistics(tuple(statistics for _, statistics in outcome.results))
        outputs = [value for value, _ in outcome.results] if names is None else _named_outputs(names, outcome)
        return Run(outputs, statistics, Channels(outcome.sent, outcome.received), monotonic() - begin)

    def _engine(self) -> Engine:
        if self.engine == "in-process":
            from xrank.virtual.engines import in_process

            return in_process.run
        from xrank.virtual.engines import process_engine

        return process_engine.run

    def _called_jobs(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Job]:
        # A forked process has copies by itself.
        copied = self.engine == "in-process"
        return [
            Job(device, partial(self._call, device, function, _copied(args) if copied else args))
            for device in self.mesh.ranks
        ]

    def _call(
        self, index: int, function: Callable[..., Any], args: tuple[Any, ...], links: Links
    ) -> tuple[Any, DeviceStatistics]:
        device = VirtualDevice(links, index, self.mesh, self.algorithm)
        value = function(device, *args)
        return value, device.statistics

    def _compiled_jobs(
        self, operation: Operation, activations: Sequence[Array], parameters: Sequence[Array]
    ) -> tuple[list[Job], list[tuple[str, ...]]]:
        """Return the jobs of an operation, and the names of what each device returns."""
        specs = [tuple(map(spec_of, arrays)) for arrays in (activations, parameters)]
        programs = compiled(operation, self.mesh, specs[0], specs[1])
        jobs, names = [], []
        for program in programs:
            packets = operation.packets(self.mesh, program.device, activations, parameters)
            returned = tuple(i.name for i in program.instructions if isinstance(i, Return))
            jobs.append(
                Job(program.device, partial(self._interpret, program), _ordered(program, packets), len(returned))
            )
            names.append(returned)
        return jobs, names

    def _interpret(self, program: Program, links: Links) -> tuple[None, DeviceStatistics]:
        device = VirtualDevice(links, program.device, self.mesh, self.algorithm)
        interpret(program, device)
        statistics = device.statistics
        return None, replace(statistics, peak_nbytes=statistics.peak_nbytes or 0)


def _check_function(function: object) -> None:
    """Refuse what would not do its work when it is called."""
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        got = f"the {'coroutine' if inspect.iscoroutinefunction(function) else 'generator'} {function.__qualname__}"
        want = "a function that does its work when it is called"
    elif isinstance(function, type) and issubclass(function, Operation):
        got, want = f"the class {function.__qualname__}", f"an operation: {function.__qualname__}(...)"
    elif not callable(function):
        got, want = f"{function!r}", "an Operation, or a function of a VirtualDevice"
    else:
        return
    raise UsageError("a cluster runs operations and functions", got=got, want=want)


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return copy.deepcopy(args)
    except Exception as error:
        raise UsageError(
            f"the arguments cannot be copied, and every device has its own: {error}",
            got=", ".join(type(arg).__qualname__ for arg in args),
            next_step="detach tensors computed with gradients; let the function itself reach what all may share",
        ) from error


def _ordered(program: Program, packets: dict[str, Array]) -> tuple[Array, ...]:
    """Return packets in the order in which a program takes them."""
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


def _named_outputs(names: Sequence[tuple[str, ...]], outcome: Outcome) -> list[Any]:
    outputs: list[Any] = []
    for its, arrays in zip(names, outcome.returned, strict=True):
        outputs.append(arrays[0] if len(its) == 1 else dict(zip(its, arrays, strict=True)) or None)
    return outputs


def _check_received(outcome: Outcome) -> None:
    """Refuse a run in which something was sent that nobody took: two devices meant different things."""
    for (source, target), count in outcome.sent.items():
        taken = outcome.received.get((source, target), ChannelStatistics())
        if taken != count:
            ends = ["the host" if end == HOST else f"device {end}" for end in (source, target)]
            raise UsageError(
                f"{ends[0]} sent {ends[1]} messages that it never received",
                rank=None if target == HOST else target,
                got=f"{taken.messages} received",
                want=f"{count.messages}, as many as were sent",
                next_step="let all members of a group call the same collectives, and each send have a receive",
            )
