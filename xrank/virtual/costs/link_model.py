"""Link models: how long programs would take over links and devices that need not exist.

    model = LinkModel.read("latency=5us bandwidth=25GB/s tp.bandwidth=300GB/s flops=100TFLOP/s")
    model.play(programs, "ring").seconds

Every device has a clock. A sender is busy for ``nbytes / bandwidth``, then the message is on its way for the latency; a
taker waits for it. So waiting shows where it comes from: bubbles of pipelines, stragglers, the root of a gather. What
is assumed: a device sends one message at a time and computes nothing meanwhile; receiving costs nothing but the wait;
links do not slow each other; the host sends the packets of one device after another.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from xrank.errors import UsageError
from xrank.virtual.channels.channel import HOST
from xrank.virtual.collectives import check_algorithm
from xrank.virtual.costs.group_clocks import group_times, nobody_leaves_early
from xrank.virtual.costs.link_words import read_words
from xrank.virtual.costs.planning import moves
from xrank.virtual.costs.unit_seconds import unit_seconds
from xrank.virtual.programs.program import Communicate, Compute, Program, Receive, Return, Send, Take

__all__ = ["DeviceTime", "LinkModel", "Sample", "Timeline"]


class Sample(NamedTuple):
    """Something that was measured, for `LinkModel.fitted`: what one device did, one thing after another."""

    messages: int
    nbytes: int
    seconds: float
    flops: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What one device does with its time."""

    seconds: float
    """When it ends."""
    compute_seconds: float = 0.0
    send_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """What all devices do with their time, in the order of their programs."""

    devices: tuple[DeviceTime, ...]
    seconds: float
    """When the last has ended, and the host has all that was returned to it."""

    @property
    def idle_fraction(self) -> float:
        """The share of all devices' time in which they neither compute nor send: 0 where there is no time at all."""
        busy = sum(device.compute_seconds + device.send_seconds for device in self.devices)
        whole = self.seconds * len(self.devices)
        return 1 - busy / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class LinkModel:
    """How fast devices and the links between them are; times are seconds, rates are per second.

    Args:
        latency_seconds: from the end of sending to the arrival.
        bandwidth_nbytes_per_second: of a sender.
        axes: the same two where devices differ along these mesh axes; of several axes, the slower of each.
        host: the same two between the host and each device; as between devices where None.
        flops_per_second: of a device.
        slowdowns: by what factor some devices compute slower.

    Raises:
        UsageError: a latency is negative, a rate not above 0.
    """

    latency_seconds: float = 0.0
    bandwidth_nbytes_per_second: float = inf
    axes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    host: tuple[float, float] | None = None
    flops_per_second: float = inf
    slowdowns: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        links = [(self.latency_seconds, self.bandwidth_nbytes_per_second), *self.axes.values()]
        for latency, bandwidth in [*links, *([self.host] if self.host else [])]:
            if not 0 <= latency < inf or not bandwidth > 0:
                got = f"latency {latency} s, bandwidth {bandwidth} B/s"
                raise UsageError("no link is like this", got=got, want="a latency of 0 or more, a bandwidth above 0")
        if not self.flops_per_second > 0 or not all(factor > 0 for factor in self.slowdowns.values()):
            got = f"{self.flops_per_second} FLOP/s, slowdowns {dict(self.slowdowns)}"
            raise UsageError("no device is like this", got=got, want="rates and factors above 0")

    @classmethod
    def read(cls, told: str | os.PathLike[str]) -> LinkModel:
        """Return the model that words say, or a TOML file with the same names.

        ``latency bandwidth flops`` for all, ``host.latency host.bandwidth``, ``tp.latency tp.bandwidth`` along the axis
        ``tp``; what an axis or the host does not say is as for all.

        Raises:
            UsageError: it cannot be read; names the word.
        """
        values, general, axes = read_words(told, {"flops": "flops"})
        host = axes.pop("host", None)
        return cls(*general, axes, host, values.get("flops", inf))

    @classmethod
    def fitted(cls, samples: Sequence[Sample]) -> LinkModel:
        """Return the model that comes nearest to measurements, all of them weighing alike whatever time they took.

        Of latency, bandwidth and flops those are left at nothing (no latency, no limit) that the samples do not need.

        Raises:
            UsageError: there are no samples, or none that took time.
        """
        if not samples or not all(sample.seconds > 0 for sample in samples):
            raise UsageError("a link model is fitted to measured times", want="samples of more than 0 seconds")
        seconds = np.array([sample.seconds for sample in samples])
        columns = np.array([(s.messages, s.nbytes, s.flops) for s in samples], np.float64) / seconds[:, None]
        latency, *others = map(float, unit_seconds(columns))
        bandwidth, flops = (1 / rate if rate else inf for rate in others)
        return cls(latency, bandwidth, flops_per_second=flops)

    def link(self, axes: Sequence[str] = ()) -> tuple[float, float]:
        """Return latency and bandwidth between devices that differ along these axes."""
        general = (self.latency_seconds, self.bandwidth_nbytes_per_second)
        links = [self.axes.get(axis, general) for axis in axes] or [general]
        return max(latency for latency, _ in links), min(bandwidth for _, bandwidth in links)

    def message_seconds(self, nbytes: int, axes: Sequence[str] = ()) -> float:
        """Return how long one message takes, from the begin of sending to the arrival."""
        latency, bandwidth = self.link(axes)
        return latency + nbytes / bandwidth

    def seconds(self, programs: Sequence[Program], algorithm: str = "push") -> float:
        """Return how long programs take, all together."""
        return self.play(programs, algorithm).seconds

    def play(self, programs: Sequence[Program], algorithm: str = "push") -> Timeline:
        """Return what each device does with its time.

        Raises:
            UsageError: they are no programs, or would wait for each other for ever.
        """
        told: object = programs
        if not isinstance(told, Sequence) or not all(isinstance(each, Program) for each in told):
            raise UsageError(
                "a link model plays programs",
                got=type(told).__qualname__,
                want="the programs of all devices",
                next_step="let the operation make them: operation.compile(mesh, activation_specs, parameter_specs)",
            )
        return _Play(self, check_algorithm(algorithm)).run(programs)


_Event: TypeAlias = tuple[float, int | None, int | None, float]
"""What moves a clock, in a plain tuple as there are many: seconds that the device is busy, to whom it sends, from whom
it takes, and the latency. Computing neither sends nor takes."""


_MEETING = -2
"""In place of a device from whom another takes: all of its group."""

_MEETING_SIZE = 32
"""Of how many members on a collective is told at once, when all have come to it, and not message by message."""


@dataclass(slots=True)
class _Meeting:
    """One collective of a large group."""

    instruction: Communicate
    num_entered: int = 0


@dataclass(slots=True)
class _Clock:
    events: Iterator[_Event]
    now: float = 0.0
    compute: float = 0.0
    send: float = 0.0
    wait: float = 0.0
    taking: _Event | None = None
    meeting: _Meeting | None = None
    num_meetings: dict[tuple[int, ...], int] = field(default_factory=dict)
    """By group."""


class _Play:
    """Programs on clocks. Each ordered pair has a queue, so that the order in which clocks advance changes nothing."""

    def __init__(self, model: LinkModel, algorithm: str) -> None:
        self.model = model
        self.algorithm = algorithm
        self.arrivals: dict[tuple[int, int], deque[float]] = {}
        self.clocks: dict[int, _Clock] = {}
        self.meetings: dict[tuple[int, ...], list[_Meeting]] = {}

    def run(self, programs: Sequence[Program]) -> Timeline:
        self._send_packets(programs)
        self.clocks = {program.device: _Clock(self._events(program)) for program in programs}
        ready = deque(self.clocks)
        while ready:
            self._advance(ready.popleft(), ready)
        for device, clock in self.clocks.items():
            if clock.taking is not None:
                sources = {HOST: "the host", _MEETING: "someone of its group"}
                source = sources.get(clock.taking[2] or 0, f"device {clock.taking[2]}")
                raise UsageError(
                    f"device {device} waits for ever: {source} does not send what it takes",
                    rank=device,
                    want="for each take a send, for each collective the like on all members",
                )
        arrived = [time for (_, target), times in self.arrivals.items() if target == HOST for time in times]
        times = tuple(DeviceTime(c.now, c.compute, c.send, c.wait) for c in self.clocks.values())
        return Timeline(times, max([time.seconds for time in times] + arrived, default=0.0))

    def _advance(self, device: int, ready: deque[int]) -> None:
        """Let a device go on until it has to wait for what nobody has sent yet, or ends."""
        clock = self.clocks[device]
        arrivals = self.arrivals
        while True:
            event = clock.taking or next(clock.events, None)
            clock.taking = None
            if event is None:
                return
            seconds, target, source, latency = event
            if source == _MEETING:
                clock.taking = event
                if not self._meet(clock, ready):
                    return
                continue
            if source is not None:
                queue = arrivals.get((source, device))
                if not queue:
                    clock.taking = event
                    return
                arrival = queue.popleft()
                if arrival > clock.now:
                    clock.wait += arrival - clock.now
                    clock.now = arrival
                continue
            clock.now += seconds
            if target is None:
                clock.compute += seconds
                continue
            clock.send += seconds
            queue = arrivals.get((device, target))
            if queue is None:
                queue = arrivals[device, target] = deque()
            queue.append(clock.now + latency)
            other = self.clocks.get(target)
            if other is not None and other.taking is not None and other.taking[2] == device:
                ready.append(target)

    def _meet(self, clock: _Clock, ready: deque[int]) -> bool:
        """Let one more member of a group come to a collective; when all have, let them leave it, and return True."""
        meeting = clock.meeting
        assert meeting is not None
        group = meeting.instruction.group
        meeting.num_entered += 1
        if meeting.num_entered < len(group):
            return False
        members = [self.clocks[device] for device in group]
        entered = np.array([member.now for member in members])
        link = self.model.link(meeting.instruction.axes)
        for member, left, sent, waited in zip(
            members, *group_times(meeting.instruction, self.algorithm, entered, *link), strict=True
        ):
            member.now = float(left)
            member.send += float(sent)
            member.wait += float(waited)
            member.taking = member.meeting = None
        ready.extend(device for device, member in zip(group, members, strict=True) if member is not clock)
        return True

    def _meeting(self, device: int, instruction: Communicate) -> _Meeting:
        """Return the meeting of a device's next collective with this group."""
        clock, group = self.clocks[device], instruction.group
        number = clock.num_meetings.get(group, 0)
        clock.num_meetings[group] = number + 1
        meetings = self.meetings.setdefault(group, [])
        if number == len(meetings):
            meetings.append(_Meeting(instruction))
        return meetings[number]

    def _events(self, program: Program) -> Iterator[_Event]:
        model, device = self.model, program.device
        slowdown = model.slowdowns.get(device, 1.0)
        host_latency, host_bandwidth = model.host or model.link()
        for instruction in program.instructions:
            match instruction:
                case Receive():
                    yield 0.0, None, HOST, 0.0
                case Return():
                    yield instruction.spec.nbytes / host_bandwidth, HOST, None, host_latency
                case Compute():
                    yield instruction.flops / model.flops_per_second * slowdown, None, None, 0.0
                case Send():
                    latency, bandwidth = model.link(instruction.axes)
                    yield instruction.spec.nbytes / bandwidth, instruction.device, None, latency
                case Take():
                    yield 0.0, None, instruction.device, 0.0
                case Communicate() if len(instruction.group) >= _MEETING_SIZE and nobody_leaves_early(
                    instruction.collective
                ):
                    self.clocks[device].meeting = self._meeting(device, instruction)
                    yield 0.0, None, _MEETING, 0.0
                case Communicate():
                    latency, bandwidth = model.link(instruction.axes)
                    for is_given, other, nbytes in moves(instruction, device, self.algorithm):
                        yield (nbytes / bandwidth, other, None, latency) if is_given else (0.0, None, other, 0.0)

    def _send_packets(self, programs: Sequence[Program]) -> None:
        latency, bandwidth = self.model.host or self.model.link()
        now = 0.0
        for program in programs:
            for instruction in program.instructions:
                if isinstance(instruction, Receive):
                    now += instruction.spec.nbytes / bandwidth
                    self.arrivals.setdefault((HOST, program.device), deque()).append(now + latency)
