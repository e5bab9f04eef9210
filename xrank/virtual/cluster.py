"""Virtual devices with their collectives, the interpreter of programs, and the cluster that runs them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, SupportsIndex

from xrank.engine.report import align_rows
from xrank.errors import UsageError, require_linux
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import (
    Array,
    Arrays,
    ArraySpec,
    concatenate,
    copy_of,
    find_kernel,
    fold,
    kind_of,
    mean_of,
    reduce,
    reshape,
    spec_of,
    split_evenly,
    with_length,
)
from xrank.virtual.engine import (
    HOST,
    ChannelStatistics,
    Counts,
    DeviceJob,
    EngineOutcome,
    Heading,
    Links,
    make_heading,
)
from xrank.virtual.engine import run as run_on_threads
from xrank.virtual.programs import (
    ALWAYS_PUSH,
    COLLECTIVES,
    REDUCTIONS,
    ROOTED,
    Communicate,
    Compute,
    Course,
    DeviceStatistics,
    Operation,
    Program,
    Receive,
    Return,
    Send,
    Statistics,
    Take,
    Traffic,
    check_algorithm,
    compile_programs,
    course,
    find_last_uses,
    list_inputs,
    list_outputs,
)
from xrank.virtual.sharding import Axes, Group, MeshLike, as_device_mesh, group_of
from xrank.words import plural, repr_text, size_text


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One call of a collective by one device."""

    device: int
    collective: str
    members: tuple[int, ...]
    course: Course
    heading: Heading
    dim: int | None = None
    """The dim along which parts are cut or joined; None for lists."""
    reduction: str | None = None
    slots: dict[int, Array] = field(default_factory=dict)

    @property
    def place(self) -> int:
        """This device's place in the group."""
        return self.members.index(self.device)

    def run(self, brought: Array | Sequence[Array] | None, links: Links) -> tuple[Any, Traffic]:
        """Execute all steps with an array, or one part per member; return the caller's own result, and the traffic."""
        traffic = Traffic(1)
        size = len(self.members)
        match self.course.start:
            case "whole":
                self.slots[self.place] = brought
            case "flat":
                assert brought is not None
                self.slots.update(enumerate(split_evenly(reshape(brought, (-1,)), size, 0)))
            case "parts" if isinstance(brought, list | tuple):
                self.slots.update(enumerate(brought))
            case "parts":
                assert brought is not None and self.dim is not None
                self.slots.update(enumerate(split_evenly(brought, size, self.dim)))
        # The spec that each slot must receive, as far as this device knows; a length of -1 matches any.
        wanted: dict[int, ArraySpec] = {}
        own = self.slots.get(self.place)
        if self.reduction is not None and self.course.finish == "reduce":
            wanted = dict.fromkeys(range(size), spec_of(own))
        elif self.reduction is not None:
            wanted = {slot: spec_of(array) for slot, array in self.slots.items()}
        elif self.collective in ("all_gather", "gather") and self.dim is not None:
            wanted = dict.fromkeys(range(size), with_length(spec_of(own), self.dim, -1))
        for step in self.course.steps:
            if step.does == "send":
                array = self.slots[step.slot]
                links.to_device(self.members[step.member]).send(array, self.heading)
                traffic += Traffic(0, 1, 0, array.nbytes, 0)
                continue
            array = links.from_device(self.members[step.member]).receive(self.heading)
            traffic += Traffic(0, 0, 1, 0, array.nbytes)
            if wanted:
                # A ring forwards slots: the array comes from the member of the slot's number, not from the neighbor.
                origin = step.member if self.course.start != "whole" else step.slot
                self._check(array, wanted[step.slot], self.members[origin])
            assert not step.fold or self.reduction is not None
            self.slots[step.slot] = fold(array, self.slots[step.slot], self.reduction or "") if step.fold else array
        return self._result(brought), traffic

    def _check(self, array: Array, wanted: ArraySpec, origin: int) -> None:
        found, own = spec_of(array), self.slots[self.place]
        fits = len(found.shape) == len(wanted.shape) and all(
            want in (-1, got) for got, want in zip(found.shape, wanted.shape, strict=True)
        )
        if fits and found.dtype == wanted.dtype and kind_of(array) == kind_of(own):
            return
        mine, its = (
            f"{kind_of(one)} {spec.dtype} ({', '.join('any' if n == -1 else str(n) for n in spec.shape)})"
            for one, spec in ((own, wanted), (array, found))
        )
        raise UsageError(
            f"{self.collective}: device {origin} brings {its}, which does not match device {self.device}'s {mine}",
            rank=self.device,
            got=its,
            want=mine,
            next_step="let all members of the group pass the same kind, element type and shape"
            + ("" if self.reduction else f", but for the length of dim {self.dim}"),
        )

    def _result(self, brought: Array | Sequence[Array] | None) -> Array | list[Array] | None:
        size = len(self.members)
        match self.course.finish:
            case "all":
                arrays = [self.slots[slot] for slot in range(size)]
                if self.dim is not None and self.collective != "all_to_all":
                    return concatenate(arrays, self.dim)
                # The other arrays came through channels and are new; this one is still the caller's argument.
                arrays[self.place] = copy_of(arrays[self.place])
                return arrays
            case "reduce":
                assert self.reduction is not None
                return reduce([self.slots[slot] for slot in range(size)], self.reduction)
            case "flat":
                whole = concatenate([self.slots[slot] for slot in range(size)], 0)
                return reshape(self._finish_mean(whole), spec_of(brought).shape)
            case "one":
                one = self.slots[self.course.slot]
                received = {step.slot for step in self.course.steps if step.does == "receive"}
                return self._finish_mean(one if self.course.slot in received else copy_of(one))
        return None

    def _finish_mean(self, total: Array) -> Array:
        return mean_of(total, len(self.members)) if self.reduction == "mean" else total


class VirtualDevice:
    """One device of a running cluster, created by the cluster; its `index` is its number (rank) in the mesh."""

    def __init__(self, links: Links, index: int, mesh: DeviceMesh, algorithm: str = "push") -> None:
        self.index = index
        self.mesh = mesh
        self.algorithm = check_algorithm(algorithm)
        self.coordinate = mesh.coordinate(index)
        """The device's place along every mesh axis, by axis name."""
        self._links = links
        self._traffic: dict[str, Traffic] = {}
        self._from_host = Traffic()
        self._to_host = Traffic()
        self._flops = 0
        self._peak_nbytes: int | None = None
        self._calls: dict[tuple[int, ...], int] = {}

    def __repr__(self) -> str:
        return f"<VirtualDevice {self.index} at {self.coordinate}>"

    @property
    def statistics(self) -> DeviceStatistics:
        """Statistics of this device up to now."""
        return DeviceStatistics(dict(self._traffic), self._from_host, self._to_host, self._flops, self._peak_nbytes)

    def group(self, axes: Axes = None, *, group: Group = None) -> tuple[int, ...]:
        """Return the members of the group that these arguments select, including this device."""
        return group_of(self.mesh, self.index, axes, group)

    def all_scatter(self, array: Array, axes: Axes = None, *, group: Group = None) -> list[Array]:
        """Send an array to all others at once and return all in group order; shapes may differ. Always a push."""
        result = self.exchange("all_scatter", array, axes, group)
        assert isinstance(result, list)
        return result

    def all_gather(
        self,
        array: Array,
        axes: Axes = None,
        *,
        group: Group = None,
        dim: int | None = None,
        algorithm: str | None = None,
    ) -> Array:
        """Return the arrays of all members: a list in group order, or, with a dim, one array joined there.

        Shapes and element types may differ in a list; in a joined array only the lengths of the dim may differ.
        """
        return self.exchange("all_gather", array, axes, group, dim=dim, algorithm=algorithm)

    def all_reduce(
        self,
        array: Array,
        axes: Axes = None,
        *,
        group: Group = None,
        reduction: str = "sum",
        algorithm: str | None = None,
    ) -> Array:
        """Reduce the arrays of all members element by element, in their element type.

        ``"push"`` reduces in group order; ``"ring"`` reduces each flat piece from the member after its own on. Both
        orders are the same in every run and on every member. Sums of bools are "or".
        The arrays have one shape and element type. `reduction`: ``"sum"``, ``"mean"`` (of floats), ``"max"``, ``"min"``
        or ``"prod"``.
        """
        return self.exchange("all_reduce", array, axes, group, reduction=reduction, algorithm=algorithm)

    def reduce_scatter(
        self,
        array: Array,
        axes: Axes = None,
        *,
        group: Group = None,
        dim: int = 0,
        reduction: str = "sum",
        algorithm: str | None = None,
    ) -> Array:
        """Reduce the arrays of all members and return this member's part along a dim.

        Parts are cut as by ``numpy.array_split``: lengths differ by at most 1, longer ones first.
        """
        return self.exchange("reduce_scatter", array, axes, group, dim=dim, reduction=reduction, algorithm=algorithm)

    def broadcast(
        self, array: Array | None, root: int, axes: Axes = None, *, group: Group = None, algorithm: str | None = None
    ) -> Array:
        """Return the array of the device `root`; the arrays of the other members are ignored."""
        return self.exchange("broadcast", array, axes, group, root=root, algorithm=algorithm)

    def gather(
        self,
        array: Array,
        root: int,
        axes: Axes = None,
        *,
        group: Group = None,
        dim: int | None = None,
        algorithm: str | None = None,
    ) -> Array | None:
        """Return the arrays of all members on the root, as `all_gather` does, and None on the other members."""
        return self.exchange("gather", array, axes, group, dim=dim, root=root, algorithm=algorithm)

    def scatter(
        self,
        array: Array | None,
        root: int,
        axes: Axes = None,
        *,
        group: Group = None,
        dim: int = 0,
        algorithm: str | None = None,
    ) -> Array:
        """Return this member's part of the root's array along a dim, cut as in `reduce_scatter`."""
        return self.exchange("scatter", array, axes, group, dim=dim, root=root, algorithm=algorithm)

    def all_to_all(self, arrays: Arrays, axes: Axes = None, *, group: Group = None) -> list[Array]:
        """Send each member its own array and return the received ones, both in group order. Always a push."""
        result = self.exchange("all_to_all", list(arrays), axes, group)
        assert isinstance(result, list)
        return result

    def send(self, array: Array, device: int) -> None:
        """Send an array to one other device, which must call `receive`; returns without waiting for it."""
        self._check_array("send", array)
        self._links.to_device(self._partner(device)).send(array)
        self._count("send", Traffic(1, 1, 0, array.nbytes, 0))

    def receive(self, device: int) -> Array:
        """Wait for the next array that another device sends to this one, and return it."""
        array = self._links.from_device(self._partner(device)).receive()
        self._count("receive", Traffic(1, 0, 1, 0, array.nbytes))
        return array

    def receive_from_host(self) -> Array:
        """Return the host's next packet; for interpreters of programs."""
        array = self._links.from_device(HOST).receive(make_heading("packet", call=self._from_host.calls))
        self._from_host += Traffic(1, 0, 1, 0, array.nbytes)
        return array

    def send_to_host(self, array: Array) -> None:
        """Send a program's output to the host; for interpreters of programs."""
        self._links.to_device(HOST).send(array, make_heading("return", call=self._to_host.calls))
        self._to_host += Traffic(1, 1, 0, array.nbytes, 0)

    def count_flops(self, flops: int) -> None:
        """Add floating-point operations that the caller has done; the device cannot see them."""
        self._flops += flops

    def count_held(self, nbytes: int) -> None:
        """Record that registers contain this many bytes now; the maximum becomes the statistics' peak."""
        self._peak_nbytes = max(self._peak_nbytes or 0, nbytes)

    def exchange(
        self,
        collective: str,
        brought: Array | list[Array] | None,
        axes: Axes = None,
        group: Group = None,
        *,
        dim: int | None = None,
        reduction: str | None = None,
        root: int | None = None,
        algorithm: str | None = None,
    ) -> Array | list[Array] | None:
        """Call a collective by its name; for interpreters of programs."""
        members = group_of(self.mesh, self.index, axes, group)
        algorithm = self.algorithm if algorithm is None else check_algorithm(algorithm)
        # The heading has the algorithm, and members with different defaults do the same here.
        if collective in ALWAYS_PUSH:
            algorithm = "push"
        if collective in ROOTED and root not in members:
            raise self._refusal(collective, f"has the root {root}", f"one of its group {list(members)}")
        if collective == "all_to_all":
            assert isinstance(brought, list)
            if len(brought) != len(members):
                raise self._refusal(collective, f"has {len(brought)} arrays", f"{len(members)}, one for each member")
            for array in brought:
                self._check_array(collective, array)
        elif collective in ("broadcast", "scatter") and root != self.index:
            brought = None
        else:
            dim = self._check_array(collective, brought, dim, reduction)
        place = members.index(self.index)
        plan = course(collective, algorithm, len(members), place, 0 if root is None else members.index(root))
        # The number of the call is part of the heading, so a skipped collective is found at the next message.
        call = self._calls.get(members, 0)
        self._calls[members] = call + 1
        # Flat pieces do not show the array's shape, so the heading carries its digest.
        shape = spec_of(brought).shape if plan.start == "flat" else None
        heading = make_heading(
            collective, algorithm=algorithm, reduction=reduction, root=root, group=members, call=call, shape=shape
        )
        exchange = CollectiveCall(self.index, collective, members, plan, heading, dim, reduction)
        result, traffic = exchange.run(brought, self._links)
        self._count(collective, traffic)
        return result

    def _check_array(
        self, collective: str, array: Array | None, dim: int | None = None, reduction: str | None = None
    ) -> int | None:
        """Check an array for a collective and return the dim as a non-negative number."""
        if array is None:
            raise self._refusal(collective, "has no array", "an array on this device")
        try:
            spec = spec_of(array)
        except UsageError as error:
            error.about(rank=self.index)
            raise
        if dim is None and collective in ("reduce_scatter", "scatter"):
            raise self._refusal(collective, "needs dim=", "the dim along which parts are split")
        is_dim = isinstance(dim, SupportsIndex) and -len(spec.shape) <= dim < len(spec.shape)
        if not is_dim and dim is not None:
            raise self._refusal(collective, f"has dim {dim!r} of a shape {spec.shape}", "a dim of the array")
        if collective in ("all_reduce", "reduce_scatter"):
            dtype = spec.dtype
            if reduction not in REDUCTIONS:
                raise self._refusal(collective, f"has the reduction {reduction!r}", f"one of {list(REDUCTIONS)}")
            if reduction == "mean" and (dtype[0] in "IU" or dtype == "BOOL"):
                raise self._refusal(collective, f"is a mean of {dtype}", "floats; or a sum, divided as you choose")
            if reduction in ("max", "min") and dtype == "C64":
                raise self._refusal(collective, f"is a {reduction} of {dtype}", "numbers that have an order")
        return dim if dim is None else dim % len(spec.shape)

    def _partner(self, device: int) -> int:
        if device not in self.mesh or device == self.index:
            raise self._refusal("send or receive", f"names device {device!r}", "another device of the mesh")
        return device

    def _count(self, name: str, traffic: Traffic) -> None:
        self._traffic[name] = self._traffic.get(name, Traffic()) + traffic

    def _refusal(self, collective: str, got: str, want: str) -> UsageError:
        return UsageError(f"device {self.index}: {collective} {got}", rank=self.index, want=want)


def interpret(program: Program, device: VirtualDevice) -> None:
    """Run a program to its end."""
    registers: dict[str, Array] = {}
    for instruction, unused in zip(program.instructions, find_last_uses(program), strict=True):
        inputs = [registers[name] for name in list_inputs(instruction)]
        outputs = _do(instruction, inputs, device)
        for (name, spec), array in zip(list_outputs(instruction), outputs, strict=True):
            if spec_of(array) != spec:
                title = f"its {type(instruction).__name__.lower()}"
                if isinstance(instruction, Compute):
                    title = f"the kernel {instruction.kernel!r}"
                elif isinstance(instruction, Communicate):
                    title = instruction.collective
                raise UsageError(
                    f"device {device.index}: {title} returns {name!r} with a different shape or element type",
                    tensor=name,
                    rank=device.index,
                    got=str(spec_of(array)),
                    want=str(spec),
                )
            registers[name] = array
        # Counted before unused registers are freed: inputs and outputs coexist.
        device.count_held(sum(array.nbytes for array in registers.values()))
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
            name, group, dim = instruction.collective, instruction.group, instruction.dim or 0
            if name not in COLLECTIVES:
                raise UsageError(
                    f"unknown collective {name!r}", rank=device.index, want=f"one of {', '.join(COLLECTIVES)}"
                )
            cut = None if name in (*ALWAYS_PUSH, "all_reduce", "broadcast") else dim
            reduction = (instruction.reduction or "sum") if name in ("all_reduce", "reduce_scatter") else None
            given = inputs[0] if inputs else None
            given = list(split_evenly(given, len(group), dim)) if name == "all_to_all" else given
            result = device.exchange(name, given, group=group, dim=cut, reduction=reduction, root=instruction.root)
            result = concatenate(result, dim) if isinstance(result, list) else result
            return (result,) if instruction.output else ()
    raise AssertionError(instruction)


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


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """The result of a run; `print` shows its messages and bytes by collective."""

    outputs: list[Any]
    """One output per device, in mesh order. For a function: its return value. For an operation: the returned array, a
    dict by name if a device returned several, None if it returned none."""
    statistics: Statistics
    """Statistics counted by the devices."""
    channels: Channels
    """Statistics counted by the channels between them."""
    seconds: float
    """Seconds from the call to the last result, including the start of the devices."""

    def __repr__(self) -> str:
        sent = self.statistics.traffic
        what = f"{plural(sent.sent_messages, 'message')}, {size_text(sent.sent_nbytes)}"
        return f"<Run of {plural(len(self.outputs), 'device')}: {what}, {self.seconds:.1f} s>"

    def __str__(self) -> str:
        devices = self.statistics.devices
        kinds = self.statistics.by_collective()
        kinds["from host"] = sum((device.from_host for device in devices), Traffic())
        kinds["to host"] = sum((device.to_host for device in devices), Traffic())
        rows = [("run", f"{plural(len(devices), 'device')}, {self.seconds:.1f} s")]
        for kind, traffic in kinds.items():
            if messages := max(traffic.sent_messages, traffic.received_messages):
                nbytes = size_text(max(traffic.sent_nbytes, traffic.received_nbytes))
                rows.append((kind, f"{plural(traffic.calls, 'call')}, {plural(messages, 'message')}, {nbytes}"))
        rows += [("flops", f"{self.statistics.flops:,}")] if self.statistics.flops else []
        peak = max((device.peak_nbytes or 0 for device in devices), default=0)
        rows += [("memory", f"at most {size_text(peak)} of arrays on a device")] if peak else []
        first = self.outputs[0]
        is_large = getattr(first, "ndim", 0) > 1
        what = f"{list(first.shape)} of {first.dtype}" if is_large else repr_text(first, 80)
        rows.append(("output", f"of device 0: {what}"))
        return align_rows(rows)


class VirtualCluster:
    """A mesh of virtual devices on this machine.

    Args:
        mesh: a `DeviceMesh`; a `Mesh` or a tuple of up to four lengths, whose axes are x, y, z and w; or a number.
        engine: ``"processes"`` runs a process per device; ``"in-process"`` runs a thread per device, with results equal
            bit by bit: it starts faster and suits tests and debuggers.
        algorithm: ``"push"`` or ``"ring"``, the default of the collectives.
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
        activations: Arrays = (),
        parameters: Arrays = (),
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
            # A forked process has its own copies.
            copied = self.engine == "in-process"
            jobs = [
                DeviceJob(device, partial(self._call, device, operation, _copy_arguments(args) if copied else args))
                for device in self.mesh.ranks
            ]
            names = None
        if self.engine == "in-process":
            outcome = run_on_threads(jobs, timeout_seconds=self.timeout_seconds)
        else:
            require_linux('VirtualCluster(engine="processes")')
            from xrank.virtual import processes

            outcome = processes.run(jobs, timeout_seconds=self.timeout_seconds)
        _check_received(outcome)
        statistics = Statistics(tuple(statistics for _, statistics in outcome.results))
        if names is None:
            outputs = [value for value, _ in outcome.results]
        else:
            outputs = [
                arrays[0] if len(its) == 1 else dict(zip(its, arrays, strict=True)) or None
                for its, arrays in zip(names, outcome.returned, strict=True)
            ]
        return Run(outputs, statistics, Channels(outcome.sent, outcome.received), monotonic() - begin)

    def _call(
        self, index: int, function: Callable[..., Any], args: tuple[Any, ...], links: Links
    ) -> tuple[Any, DeviceStatistics]:
        device = VirtualDevice(links, index, self.mesh, self.algorithm)
        return function(device, *args), device.statistics

    def _make_program_jobs(
        self, operation: Operation, activations: Arrays, parameters: Arrays
    ) -> tuple[list[DeviceJob], list[tuple[str, ...]]]:
        """Return the jobs of an operation, and the names of each device's outputs."""
        specs = [tuple(map(spec_of, arrays)) for arrays in (activations, parameters)]
        programs = compile_programs(operation, self.mesh, specs[0], specs[1])
        jobs, names = [], []
        for program in programs:
            packets = operation.packets(self.mesh, program.device, activations, parameters)
            returned = tuple(i.name for i in program.instructions if isinstance(i, Return))
            wanted = {one.output: one.spec for one in program.instructions if isinstance(one, Receive)}
            found = {name: spec_of(array) for name, array in packets.items()}
            for name in sorted(wanted.keys() | found.keys()):
                if found.get(name) != wanted.get(name):
                    raise UsageError(
                        f"the packet {name!r} for device {program.device} is not the packet that its program receives",
                        tensor=name,
                        rank=program.device,
                        got=str(found.get(name, "no such packet")),
                        want=str(wanted.get(name, "no such packet")),
                    )
            ordered = tuple(packets[name] for name in wanted)  # as the program receives them
            jobs.append(DeviceJob(program.device, partial(self._interpret, program), ordered))
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
            f"the arguments cannot be copied, but every device needs its own: {error}",
            got=", ".join(type(arg).__qualname__ for arg in args),
            next_step="detach tensors computed with gradients; let the function itself access shared objects",
        ) from error


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
