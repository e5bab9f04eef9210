"""Schedules of pipelines, as data: which stage works at which micro-batch in which cycle.

A batch is cut into R runs (micro-batches) and a model into S stages. A cycle is the time of one forward or one backward
of one chunk of the model; a stage does one of them in a cycle, or is idle. With v chunks a stage, stage p holds the
chunks p, S + p, 2S + p, ... of the model's S * v, so that a run passes every stage v times.

| schedule | cycles | bubble | live activations of stage p |
| --- | --- | --- | --- |
| `gpipe` | 2(R + S - 1) | (S - 1) / (R + S - 1) | R |
| `one_forward_one_backward` | 2(R + S - 1) | (S - 1) / (R + S - 1) | min(R, S - p) |
| `interleaved`, R >= S | 2(vR + S - 1) | (S - 1) / (vR + S - 1) | more, each of 1/v the size |
| `interleaved`, R < S | 2(vS + R - 1) | 1 - vR / (vS + R - 1) | the same |

The runs' backwards come in the runs' order on every stage under each of the three, so that gradients which are summed
as they come are equal to the last bit whichever is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias

from xrank.errors import UsageError

__all__ = ["SCHEDULES", "Schedule", "Work", "gpipe", "interleaved", "make_schedule", "one_forward_one_backward"]

SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""The names that `make_schedule` knows."""

Direction: TypeAlias = Literal["forward", "backward"]
_Order: TypeAlias = list[tuple[Direction, int, int]]
"""What a stage does, first to last: direction, run, chunk."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one stage does in one cycle."""

    cycle: int
    direction: Direction
    run: int
    """The micro-batch."""
    chunk: int = 0
    """Which of the stage's chunks of the model, from the model's beginning."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who does what when.

    Args:
        name: what it is called.
        num_runs: R, the micro-batches of a batch.
        num_stages: S, the stages.
        num_chunks: v, the chunks of the model that each stage holds.
        stages: of each stage, its works by cycle.

    Raises:
        UsageError: a stage has two works in a cycle, takes what no one sent in an earlier cycle, or does a work never,
            or twice.
    """

    name: str
    num_runs: int
    num_stages: int
    num_chunks: int
    stages: tuple[tuple[Work, ...], ...] = field(repr=False)

    def __post_init__(self) -> None:
        for count, what in ((self.num_runs, "runs"), (self.num_stages, "stages"), (self.num_chunks, "chunks")):
            _check_count(count, what)
        if len(self.stages) != self.num_stages:
            self._refuse(f"{len(self.stages)} stages", f"{self.num_stages} stages")
        done: dict[tuple[Direction, int, int], int] = {}
        for stage, works in enumerate(self.stages):
            last = -1
            for work in works:
                if work.cycle <= last:
                    self._refuse(f"stage {stage} does {_said(work)} after cycle {last}", "one work a cycle, in order")
                last = work.cycle
                if not (0 <= work.run < self.num_runs and 0 <= work.chunk < self.num_chunks):
                    self._refuse(
                        f"{_said(work)} on stage {stage}", f"runs below {self.num_runs}, chunks below {self.num_chunks}"
                    )
                key = (work.direction, work.run, work.chunk * self.num_stages + stage)
                if key in done:
                    self._refuse(f"stage {stage} does {_said(work)} a second time", "each work once")
                done[key] = work.cycle
        wanted = 2 * self.num_runs * self.num_chunks * self.num_stages
        if len(done) != wanted:
            self._refuse(f"{len(done)} works", f"{wanted}: a forward and a backward of every run, stage and chunk")
        for (direction, run, part), cycle in done.items():
            for needed in _needs(direction, run, part, self.num_parts):
                if done[needed] >= cycle:
                    self._refuse(
                        f"the {direction} of run {run} on part {part} of the model in cycle {cycle}",
                        f"a cycle after {done[needed]}, in which the {needed[0]} on part {needed[2]} is done",
                    )

    @property
    def num_parts(self) -> int:
        """The parts of the model, S * v; part k lies on stage k mod S, as its chunk k // S."""
        return self.num_stages * self.num_chunks

    @property
    def num_cycles(self) -> int:
        """The cycles from the first work to the last."""
        return 1 + max(works[-1].cycle for works in self.stages)

    @property
    def bubble_fraction(self) -> float:
        """The part of all stages' cycles that is idle."""
        return 1 - sum(map(len, self.stages)) / (self.num_stages * self.num_cycles)

    @property
    def peak_live_activations(self) -> tuple[int, ...]:
        """Of each stage, the most forwards (of one chunk each) whose backward is still to come, at any time."""
        return tuple(_peak(works) for works in self.stages)

    def at(self, stage: int, cycle: int) -> Work | None:
        """Return what a stage does in a cycle; None where it is idle."""
        return next((work for work in self.stages[stage] if work.cycle == cycle), None)

    def in_order(self) -> Iterator[tuple[int, Work]]:
        """Yield stages with their works, cycle by cycle: what a work needs has come before it."""
        everything = ((work.cycle, stage, work) for stage, works in enumerate(self.stages) for work in works)
        return ((stage, work) for _, stage, work in sorted(everything, key=lambda one: one[:2]))

    def _refuse(self, got: str, want: str) -> NoReturn:
        raise UsageError(f"the schedule {self.name!r} cannot be kept", got=got, want=want)


def gpipe(num_runs: int, num_stages: int) -> Schedule:
    """Return the schedule that does all forwards, then all backwards."""
    order: _Order = [("forward", run, 0) for run in _counted(num_runs, "runs")]
    order += [("backward", run, 0) for run in range(num_runs)]
    return _timed("gpipe", num_runs, num_stages, 1, [order for _ in _counted(num_stages, "stages")])


def one_forward_one_backward(num_runs: int, num_stages: int) -> Schedule:
    """Return the schedule that does a run's backward as soon as it can: fewer activations live than under `gpipe`."""
    forwards: _Order = [("forward", run, 0) for run in _counted(num_runs, "runs")]
    backwards: _Order = [("backward", run, 0) for run in range(num_runs)]
    orders = [_alternating(forwards, backwards, num_stages - 1 - stage) for stage in _counted(num_stages, "stages")]
    return _timed("1f1b", num_runs, num_stages, 1, orders)


def interleaved(num_runs: int, num_stages: int, num_chunks: int) -> Schedule:
    """Return the 1f1b of several chunks a stage (Megatron-LM's): smaller bubbles for more messages.

    Runs pass the chunks in groups of at least S, so that no stage waits for a group's first run to come around;
    Megatron asks for groups of exactly S, and so for R divisible by S.
    """
    runs, stages, chunks = _counted(num_runs, "runs"), _counted(num_stages, "stages"), _counted(num_chunks, "chunks")
    if num_chunks == 1:
        plain = one_forward_one_backward(num_runs, num_stages)
        return Schedule("interleaved", num_runs, num_stages, 1, plain.stages)
    num_groups = max(1, num_runs // num_stages)
    groups = [
        runs[index * num_runs // num_groups : (index + 1) * num_runs // num_groups] for index in range(num_groups)
    ]
    forwards: _Order = [("forward", run, chunk) for group in groups for chunk in chunks for run in group]
    backwards: _Order = [("backward", run, chunk) for group in groups for chunk in reversed(chunks) for run in group]
    # Before its first backward, the last stage has all chunks but one of a group behind it; each stage before it has
    # two works more, for a run needs a cycle to get to the last stage and one to come back.
    before_last = (num_chunks - 1) * max(map(len, groups))
    orders = [_alternating(forwards, backwards, before_last + 2 * (num_stages - 1 - stage)) for stage in stages]
    return _timed("interleaved", num_runs, num_stages, num_chunks, orders)


def make_schedule(name: str, num_runs: int, num_stages: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule of that name, one of `SCHEDULES`.

    Raises:
        UsageError: there is no such schedule, or it has no chunks.
    """
    if name == "interleaved":
        return interleaved(num_runs, num_stages, num_chunks)
    if name not in SCHEDULES:
        raise UsageError(f"there is no schedule {name!r}", got=repr(name), want="one of " + ", ".join(SCHEDULES))
    if num_chunks != 1:
        raise UsageError(
            f"the schedule {name!r} has one chunk a stage", got=f"num_chunks={num_chunks}", want='1, or "interleaved"'
        )
    return gpipe(num_runs, num_stages) if name == "gpipe" else one_forward_one_backward(num_runs, num_stages)


def _alternating(forwards: _Order, backwards: _Order, num_before: int) -> _Order:
    """Return some forwards, then a forward and a backward in turns, then the backwards that are left."""
    num_before = min(num_before, len(forwards))
    order = forwards[:num_before]
    for forward, backward in zip(forwards[num_before:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - num_before :]


def _timed(name: str, num_runs: int, num_stages: int, num_chunks: int, orders: Sequence[_Order]) -> Schedule:
    """Return the schedule in which each stage does its works in its order, each as soon as it can."""
    num_parts = num_stages * num_chunks
    done: dict[tuple[Direction, int, int], int] = {}
    stages: list[list[Work]] = [[] for _ in orders]
    cycle = 0
    while len(done) < sum(map(len, orders)):
        new = []
        for stage, order in enumerate(orders):
            if len(stages[stage]) == len(order):
                continue
            direction, run, chunk = order[len(stages[stage])]
            part = chunk * num_stages + stage
            if all(needed in done for needed in _needs(direction, run, part, num_parts)):
                stages[stage].append(Work(cycle, direction, run, chunk))
                new.append((direction, run, part))
        assert new, f"the stages of {name} wait for each other in cycle {cycle}"
        done.update(dict.fromkeys(new, cycle))
        cycle += 1
    return Schedule(name, num_runs, num_stages, num_chunks, tuple(map(tuple, stages)))


def _needs(direction: Direction, run: int, part: int, num_parts: int) -> Iterator[tuple[Direction, int, int]]:
    """Yield what must be done in earlier cycles."""
    if direction == "backward":
        yield "forward", run, part
        if part < num_parts - 1:
            yield "backward", run, part + 1
    elif part > 0:
        yield "forward", run, part - 1


def _peak(works: Iterable[Work]) -> int:
    live = peak = 0
    for work in works:
        live += 1 if work.direction == "forward" else -1
        peak = max(peak, live)
    return peak


def _counted(count: int, what: str) -> range:
    _check_count(count, what)
    return range(count)


def _check_count(count: int, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"a pipeline has 1 or more {what}", got=repr(count), want="an integer, 1 or more")


def _said(work: Work) -> str:
    return f"the {work.direction} of run {work.run}, chunk {work.chunk}, in cycle {work.cycle}"
