"""The seconds that messages and computations of a program take on links and devices of given rates."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.errors import UsageError
from xrank.layout.layout_map import parse_toml
from xrank.virtual.engine import HOST
from xrank.virtual.programs import (
    ROOTED,
    Communicate,
    Compute,
    Program,
    Receive,
    Return,
    Send,
    Take,
    check_algorithm,
    check_group,
    iterate_steps,
    rooted_steps,
)


def unit_seconds(amounts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Fit the seconds per unit of each kind of work to samples (rows) of its amounts per second.

    Amounts per second give equal weights. A kind that would be negative or is unused gets 0.
    """
    used = np.flatnonzero(amounts.any(axis=0)).tolist()
    seconds = np.zeros(amounts.shape[1])
    while used:
        # Equal scales keep the problem well-conditioned: a second per byte is tiny against a second per start.
        scales = np.linalg.norm(amounts[:, used], axis=0)
        found = np.linalg.lstsq(amounts[:, used] / scales, np.ones(len(amounts)), rcond=None)[0] / scales
        if (found >= 0).all():
            seconds[used] = found
            break
        used.pop(int(np.argmin(found * scales)))
        # Non-negative least squares: drop the most negative kind and fit the rest again.
    return seconds


Kind: TypeAlias = Literal["seconds", "bandwidth", "flops"]

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2.0**10, "Mi": 2.0**20,
             "Gi": 2.0**30, "Ti": 2.0**40}  # fmt: skip

_PARTS_OF_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"

_UNITS = {
    "seconds": re.compile(_NUMBER + r"(?P<unit>s|ms|us|ns)"),
    "bandwidth": re.compile(_NUMBER + r"(?P<unit>[kKMGT]?i?)B/s"),
    "flops": re.compile(_NUMBER + r"(?P<unit>[kKMGTP]?)FLOP/s"),
}

_EXAMPLES = {"seconds": "5us", "bandwidth": "25GB/s", "flops": "10TFLOP/s"}

_LINK: Mapping[str, Kind] = {"latency": "seconds", "bandwidth": "bandwidth"}

_MAX_FILE_NBYTES = 1 << 20


def read_words(
    source: str | os.PathLike[str], kinds: Mapping[str, Kind]
) -> tuple[dict[str, float], tuple[float, float], dict[str, tuple[float, float]]]:
    """Parse words ``name=value`` separated by blanks, or else a TOML file; `kinds` are those of further names.

    A table ``[tp]`` of a file stands for names that begin with ``tp.``. Returns the values of those names, and
    (latency, bandwidth) of all links, 0 and no limit by default, and of links along each axis that has its own.
    """
    text = os.fspath(source)
    words = text.split()
    if not words:
        raise _unreadable(None, "nothing", "words name=value, or a file")
    # With a "=" and no such file, the text is words with a typo: a better message than a missing file.
    if "=" in words[0] or (len(words) > 1 and "=" in text and not os.path.exists(text)):
        for word in words:
            if "=" not in word:
                raise _unreadable(None, f"{word!r} has no value", "words name=value, with no blanks in them")
        pairs: Iterable[tuple[str, ...]] = (tuple(word.split("=", 1)) for word in words)
        values = _values(pairs, {**_LINK, **kinds}, None)
    else:
        try:
            with open(text, "rb") as stream:
                tables = parse_toml(stream.read(_MAX_FILE_NBYTES).decode())
        except OSError as error:
            raise _unreadable(text, f"{error.strerror}", "words name=value, or a file") from error
        except ValueError as error:
            raise _unreadable(text, f"not TOML: {error}", "a TOML file") from error
        values = _values(list(_flatten(tables, "", text)), {**_LINK, **kinds}, text)
    general = (values.pop("latency", 0.0), values.pop("bandwidth", inf))
    others = {name: values.pop(name) for name in kinds if name in values}
    axes: dict[str, tuple[float, float]] = {}
    for name, value in values.items():
        axis, _, what = name.rpartition(".")
        if what not in _LINK:
            raise UsageError(
                f"the link has {name!r}, but only links have axes", got=repr(name), want=f"{what!r}, which has no axis"
            )
        latency, bandwidth = axes.get(axis, general)
        axes[axis] = (value, bandwidth) if what == "latency" else (latency, value)
    return others, general, axes


def _values(pairs: Iterable[tuple[str, ...]], kinds: Mapping[str, Kind], file: str | None) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, text in pairs:
        *axis, what = name.split(".")
        if what not in kinds or "" in axis:
            raise _unreadable(file, f"unknown name {name!r}", f"{', '.join(kinds)}; or latency, bandwidth of an axis")
        kind = kinds[what]
        if name in values:
            raise _unreadable(file, f"{name!r} occurs twice", "each name once")
        match = _UNITS[kind].fullmatch(text)
        factors = _PARTS_OF_A_SECOND if kind == "seconds" else _PREFIXES
        if match is None or match["unit"] not in factors:
            raise _unreadable(file, f"{name} = {text!r}", f"an amount such as {_EXAMPLES[kind]}")
        number, factor = float(match["number"]), factors[match["unit"]]
        # Divide by an integer, so that 5us equals 5e-6 exactly.
        value = number / factor if kind == "seconds" else number * factor
        if not isfinite(value) or (value == 0 and kind != "seconds"):
            raise _unreadable(file, f"{name} = {text!r}", "a finite amount above 0")
        values[name] = value
    return values


def _flatten(table: dict[str, object], prefix: str, path: str) -> Iterable[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.", path)
        elif isinstance(value, str):
            yield prefix + name, value
        else:
            raise _unreadable(path, f"{prefix}{name} = {value!r}", 'a text with a unit, such as "25GB/s"')


def _unreadable(file: str | None, got: str, want: str) -> UsageError:
    return UsageError(
        f"the link {'given' if file is None else f'file {file}'} cannot be read: {got}", file=file, got=got, want=want
    )


class LinkSample(NamedTuple):
    """A measurement for `LinkModel.from_samples`: the sequential work of one device."""

    messages: int
    nbytes: int
    seconds: float
    flops: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Predicted time of one device."""

    seconds: float
    """Time at which the device ends."""
    compute_seconds: float = 0.0
    send_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Predicted times of all devices, in the order of their programs."""

    devices: tuple[DeviceTime, ...]
    seconds: float
    """Time at which the last device has ended and the host has received all outputs."""

    @property
    def idle_fraction(self) -> float:
        """Share of the devices' time without computing or sending; 0 for a total time of 0."""
        busy = sum(device.compute_seconds + device.send_seconds for device in self.devices)
        whole = self.seconds * len(self.devices)
        return 1 - busy / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Speed of devices and of the links between them; times are in seconds, rates per second.

    Args:
        latency_seconds: time from the end of sending to the arrival.
        bandwidth_nbytes_per_second: bandwidth of a sender.
        axes: (latency, bandwidth) between devices that differ along a mesh axis; for several axes, the slower values.
        host: (latency, bandwidth) between the host and each device; None means as between devices.
        flops_per_second: speed of a device.
        slowdowns: factors by which some devices compute slower.

    Raises:
        UsageError: a latency is negative, or a rate is not above 0.

    >>> LinkModel.read("latency=5us bandwidth=25GB/s").message_seconds(1_000_000)
    4.5e-05
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
                raise UsageError("a link is impossible", got=got, want="a latency of 0 or more, a bandwidth above 0")
        if not self.flops_per_second > 0 or not all(factor > 0 for factor in self.slowdowns.values()):
            got = f"{self.flops_per_second} FLOP/s, slowdowns {dict(self.slowdowns)}"
            raise UsageError("a device is impossible", got=got, want="rates and factors above 0")

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> LinkModel:
        """Read a model from text, or from a TOML file with the same names.

        ``latency bandwidth flops`` apply to all, ``host.latency host.bandwidth`` to the host, and ``tp.latency
        tp.bandwidth`` to the axis ``tp``; omitted values of an axis or the host are those for all.

        Raises:
            UsageError: the text or file is invalid; names the word.
        """
        values, general, axes = read_words(source, {"flops": "flops"})
        host = axes.pop("host", None)
        return cls(*general, axes, host, values.get("flops", inf))

    @classmethod
    def from_samples(cls, samples: Sequence[LinkSample]) -> LinkModel:
        """Fit a model to measurements; all samples have the same weight, independent of their times.

        A latency, bandwidth or flop rate that the samples do not need has no effect in the model.

        Raises:
            UsageError: the samples are missing, or one has no positive time.
        """
        if not samples or not all(sample.seconds > 0 for sample in samples):
            raise UsageError("a link model needs measured times", want="samples of more than 0 seconds")
        seconds = np.array([sample.seconds for sample in samples])
        # Divided by the time, so that relative errors count; otherwise the longest samples would decide alone.
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
        """Return the seconds of one message, from the start of sending to the arrival."""
        latency, bandwidth = self.link(axes)
        return latency + nbytes / bandwidth

    def seconds(self, programs: Sequence[Program], algorithm: str = "push") -> float:
        """Return the seconds that the programs take together."""
        return self.play(programs, algorithm).seconds

    def play(self, programs: Sequence[Program], algorithm: str = "push") -> Timeline:
        """Simulate the programs and return the time of each device.

        Raises:
            UsageError: the values are not programs, or the programs wait for each other forever.
        """
        given: object = programs
        if not isinstance(given, Sequence) or not all(isinstance(each, Program) for each in given):
            raise UsageError(
                "a link model plays programs",
                got=type(given).__qualname__,
                want="the programs of all devices",
                next_step="compile the operation to get them: operation.compile(mesh, activation_specs, "
                "parameter_specs)",
            )
        return _Play(self, check_algorithm(algorithm)).run(programs)


_Event: TypeAlias = tuple[float, int | None, int | None, float]
"""(busy seconds, device sent to, device received from, latency) of a step; a plain tuple because there are many.
A computation has neither device."""


_WHOLE_GROUP = -2
"""In place of the device received from: all members of the group."""


@dataclass(slots=True)
class _GroupCall:
    """One call of a collective that every member leaves only after all have entered."""

    instruction: Communicate
    entered: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Clock:
    events: Iterator[_Event]
    now: float = 0.0
    compute: float = 0.0
    send: float = 0.0
    wait: float = 0.0
    taking: _Event | None = None
    call: _GroupCall | None = None
    num_calls: dict[tuple[int, ...], int] = field(default_factory=dict)


class _Play:
    """A simulation of programs. Each ordered pair has a queue, so the order of advancing clocks has no effect."""

    def __init__(self, model: LinkModel, algorithm: str) -> None:
        self.model = model
        self.algorithm = algorithm
        self.arrivals: dict[tuple[int, int], deque[float]] = {}
        self.clocks: dict[int, _Clock] = {}
        self.calls: dict[tuple[int, ...], list[_GroupCall]] = {}

    def run(self, programs: Sequence[Program]) -> Timeline:
        latency, bandwidth = self.model.host or self.model.link()
        now = 0.0
        for program in programs:
            for instruction in program.instructions:
                if isinstance(instruction, Receive):
                    now += instruction.spec.nbytes / bandwidth
                    self.arrivals.setdefault((HOST, program.device), deque()).append(now + latency)
        self.clocks = {program.device: _Clock(self._events(program)) for program in programs}
        ready = deque(self.clocks)
        while ready:
            self._advance(ready.popleft(), ready)
        for device, clock in self.clocks.items():
            if clock.taking is not None:
                sources = {HOST: "the host", _WHOLE_GROUP: "a member of its group"}
                source = sources.get(clock.taking[2] or 0, f"device {clock.taking[2]}")
                raise UsageError(
                    f"device {device} waits forever: {source} does not send the message that it waits for",
                    rank=device,
                    want="a send for each receive, and each collective on all members",
                )
        arrived = [time for (_, target), times in self.arrivals.items() if target == HOST for time in times]
        times = tuple(DeviceTime(c.now, c.compute, c.send, c.wait) for c in self.clocks.values())
        return Timeline(times, max([time.seconds for time in times] + arrived, default=0.0))

    def _advance(self, device: int, ready: deque[int]) -> None:
        """Advance a device's clock until it waits for a message that was not sent yet, or ends."""
        clock = self.clocks[device]
        arrivals = self.arrivals
        while True:
            event = clock.taking or next(clock.events, None)
            clock.taking = None
            if event is None:
                return
            seconds, target, source, latency = event
            if source == _WHOLE_GROUP:
                clock.taking = event
                if not self._enter_call(device, clock, ready):
                    return
                continue
            if source is not None:
                # The event stays in `taking` until its message exists; its sender then makes this clock ready again.
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
            # Not setdefault: it would make a deque for each message, and there are many.
            queue = arrivals.get((device, target))
            if queue is None:
                queue = arrivals[device, target] = deque()
            queue.append(clock.now + latency)
            other = self.clocks.get(target)
            if other is not None and other.taking is not None and other.taking[2] == device:
                ready.append(target)

    def _enter_call(self, device: int, clock: _Clock, ready: deque[int]) -> bool:
        """Let one more member enter a collective; when all have entered, let them leave and return True."""
        call = clock.call
        assert call is not None
        group = call.instruction.group
        call.entered.add(device)  # which may come twice, woken by several messages
        if len(call.entered) < len(group):
            return False
        members = [self.clocks[device] for device in group]
        latency, bandwidth = self.model.link(call.instruction.axes)
        # All members' times at once, in the group's order.
        now = last = np.array([member.now for member in members])
        sent, waited = np.zeros(len(group)), np.zeros(len(group))
        collective, given, dim = call.instruction.collective, call.instruction.given, call.instruction.dim
        for step, nbytes in iterate_steps(collective, self.algorithm, given, dim):
            if step.does == "send":
                now = now + nbytes / bandwidth
                sent += nbytes / bandwidth
                # The roll moves each sender's arrival time to its receiver. Receives that follow one another take all
                # messages in transit, so the last arrival alone counts.
                last = np.maximum(last, np.roll(now + latency, step.member))
            else:
                arrived = np.maximum(now, last)
                waited += arrived - now
                now = arrived
        for place, member in enumerate(members):
            member.now = float(now[place])
            member.send += float(sent[place])
            member.wait += float(waited[place])
            member.taking = member.call = None
        # The last member to enter goes on at once; the others stopped in `_advance` when they entered.
        ready.extend(device for device, member in zip(group, members, strict=True) if member is not clock)
        return True

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
                case Communicate() if instruction.collective not in ROOTED:
                    clock, group = self.clocks[device], instruction.group
                    check_group(instruction, device, group)
                    # Members come here one after another; the number of its earlier calls tells which call each enters.
                    number = clock.num_calls.get(group, 0)
                    clock.num_calls[group] = number + 1
                    calls = self.calls.setdefault(group, [])
                    if number == len(calls):
                        calls.append(_GroupCall(instruction))
                    clock.call = calls[number]
                    yield 0.0, None, _WHOLE_GROUP, 0.0
                case Communicate():
                    # Message by message: members may leave before others enter.
                    latency, bandwidth = model.link(instruction.axes)
                    check_group(instruction, device, group := instruction.group)
                    root = 0 if instruction.root is None else group.index(instruction.root)
                    collective, given, dim = instruction.collective, instruction.given, instruction.dim
                    for step, nbytes in rooted_steps(
                        collective, self.algorithm, given, group.index(device), dim=dim, root=root
                    ):
                        other = group[step.member]
                        if step.does == "send":
                            yield nbytes / bandwidth, other, None, latency
                        else:
                            yield 0.0, None, other, 0.0
