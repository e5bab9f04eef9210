"""Pipeline schedules as data: which stage works on which micro-batch in which cycle.

A batch is divided into R runs (micro-batches) and a model into S stages. A cycle is the time of one forward or one
backward of one chunk of the model; a stage does one of them per cycle, or is idle. With v chunks per stage, stage p has
the chunks p, S + p, 2S + p, ... of the model's S * v, so a run passes every stage v times.

| schedule | cycles | bubble | live activations of stage p |
| --- | --- | --- | --- |
| `gpipe` | 2(R + S - 1) | (S - 1) / (R + S - 1) | R |
| `1f1b` | 2(R + S - 1) | (S - 1) / (R + S - 1) | min(R, S - p) |
| `interleaved`, R >= S | 2(vR + S - 1) | (S - 1) / (vR + S - 1) | more, each of 1/v the size |
| `interleaved`, R < S | 2(vS + R - 1) | 1 - vR / (vS + R - 1) | the same |

In all three, every stage does the backwards in the order of the runs, so gradients that are summed on arrival are equal
bit by bit under every schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias

from xrank.errors import UsageError
from xrank.pictures.page import Lane, Span, draw_timeline
from xrank.pictures.picture import Picture
from xrank.words import plural

SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""The names that `make_schedule` accepts."""

Direction: TypeAlias = Literal["forward", "backward"]
_Order: TypeAlias = list[tuple[Direction, int, int]]
"""(direction, run, chunk) of a stage's works, first to last."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """The work of one stage in one cycle."""

    cycle: int
    direction: Direction
    run: int
    """The micro-batch."""
    chunk: int = 0
    """Index of the stage's chunk, from the model's beginning."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The works of all stages by cycle.

    Args:
        name: name of the schedule.
        num_runs: R, the number of micro-batches per batch.
        num_stages: S, the number of stages.
        num_chunks: v, the number of the model's chunks per stage.
        stages: works of each stage, by cycle.

    Raises:
        UsageError: a stage has two works in a cycle, needs an input that was not sent in an earlier cycle, or does a
            work twice or never.

    >>> make_schedule("1f1b", num_runs=8, num_stages=4).bubble_fraction
    0.2727272727272727
    """

    name: str
    num_runs: int
    num_stages: int
    num_chunks: int
    stages: tuple[tuple[StageWork, ...], ...] = field(repr=False)

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
                    self._refuse(f"stage {stage} does {_text(work)} after cycle {last}", "one work a cycle, in order")
                last = work.cycle
                if not (0 <= work.run < self.num_runs and 0 <= work.chunk < self.num_chunks):
                    self._refuse(
                        f"{_text(work)} on stage {stage}", f"runs below {self.num_runs}, chunks below {self.num_chunks}"
                    )
                key = (work.direction, work.run, work.chunk * self.num_stages + stage)
                if key in done:
                    self._refuse(f"stage {stage} does {_text(work)} a second time", "each work once")
                done[key] = work.cycle
        wanted = 2 * self.num_runs * self.num_chunks * self.num_stages
        if len(done) != wanted:
            self._refuse(f"{len(done)} works", f"{wanted}: a forward and a backward for each run, stage and chunk")
        # Every work is done once, by the count above, so each needed one has a cycle.
        for (direction, run, part), cycle in done.items():
            for needed in _needs(direction, run, part, self.num_parts):
                if done[needed] >= cycle:
                    self._refuse(
                        f"the {direction} of run {run} on part {part} of the model in cycle {cycle}",
                        f"a cycle after {done[needed]}, the cycle of the {needed[0]} on part {needed[2]}",
                    )

    @property
    def num_parts(self) -> int:
        """Number of the model's parts, S * v; part k is chunk k // S of stage k mod S."""
        return self.num_stages * self.num_chunks

    @property
    def num_cycles(self) -> int:
        """Number of cycles from the first work to the last."""
        return 1 + max(works[-1].cycle for works in self.stages)

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of all stages' cycles."""
        return 1 - sum(map(len, self.stages)) / (self.num_stages * self.num_cycles)

    @property
    def peak_live_activations(self) -> tuple[int, ...]:
        """Per stage, the largest number of forwards (of one chunk each) that wait for their backward."""
        return tuple(_peak(works) for works in self.stages)

    def find_work(self, stage: int, cycle: int) -> StageWork | None:
        """Return the work of a stage in a cycle; None if it is idle."""
        return next((work for work in self.stages[stage] if work.cycle == cycle), None)

    def iterate_works(self) -> Iterator[tuple[int, StageWork]]:
        """Yield (stage, work) cycle by cycle; a work comes after the works that it needs."""
        everything = ((work.cycle, stage, work) for stage, works in enumerate(self.stages) for work in works)
        return ((stage, work) for _, stage, work in sorted(everything, key=lambda one: one[:2]))

    def picture(self) -> Picture:
        """Return the timeline of the stages, for a terminal, a notebook or a page.

        >>> make_schedule("1f1b", num_runs=2, num_stages=2).picture()
        1f1b: 2 runs, 2 stages; 6 cycles, 33.3% idle; at most 2 live activations a stage
        stage 0  F0 F1 .. B0 .. B1
        stage 1  .. F0 B0 F1 B1 ..
        """
        return picture_schedule(self)

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def _refuse(self, got: str, want: str) -> NoReturn:
        raise UsageError(f"the schedule {self.name!r} is impossible", got=got, want=want)


def make_gpipe(num_runs: int, num_stages: int) -> Schedule:
    """Schedule all forwards, then all backwards."""
    order: _Order = [("forward", run, 0) for run in _range(num_runs, "runs")]
    order += [("backward", run, 0) for run in range(num_runs)]
    return _assign_cycles("gpipe", num_runs, num_stages, 1, [order for _ in _range(num_stages, "stages")])


def make_1f1b(num_runs: int, num_stages: int) -> Schedule:
    """Schedule each backward as soon as possible: fewer live activations than in `gpipe`."""
    forwards: _Order = [("forward", run, 0) for run in _range(num_runs, "runs")]
    backwards: _Order = [("backward", run, 0) for run in range(num_runs)]
    # A stage is one forward ahead for each stage behind it: its first backward needs theirs.
    orders = [_alternating(forwards, backwards, num_stages - 1 - stage) for stage in _range(num_stages, "stages")]
    return _assign_cycles("1f1b", num_runs, num_stages, 1, orders)


def make_interleaved(num_runs: int, num_stages: int, num_chunks: int) -> Schedule:
    """Schedule 1f1b with several chunks per stage (as Megatron-LM): smaller bubbles but more messages.

    Runs pass the chunks in groups of at least S, so no stage waits for a group's first run to return. Megatron
    requires groups of exactly S, and so an R divisible by S.
    """
    runs, stages, chunks = (_range(num_runs, "runs"), _range(num_stages, "stages"), _range(num_chunks, "chunks"))
    if num_chunks == 1:
        plain = make_1f1b(num_runs, num_stages)
        return Schedule("interleaved", num_runs, num_stages, 1, plain.stages)
    num_groups = max(1, num_runs // num_stages)
    groups = [
        runs[index * num_runs // num_groups : (index + 1) * num_runs // num_groups] for index in range(num_groups)
    ]
    forwards: _Order = [("forward", run, chunk) for group in groups for chunk in chunks for run in group]
    backwards: _Order = [("backward", run, chunk) for group in groups for chunk in reversed(chunks) for run in group]
    # Before its first backward, the last stage has done all chunks but one of a group. Each earlier stage is two works
    # further ahead, because a run needs one cycle to reach the next stage and one to come back.
    before_last = (num_chunks - 1) * max(map(len, groups))
    orders = [_alternating(forwards, backwards, before_last + 2 * (num_stages - 1 - stage)) for stage in stages]
    return _assign_cycles("interleaved", num_runs, num_stages, num_chunks, orders)


def make_schedule(name: str, num_runs: int, num_stages: int, num_chunks: int = 1) -> Schedule:
    """Create a schedule by name, one of `SCHEDULES`.

    Raises:
        UsageError: the name is unknown, or the schedule does not support chunks.
    """
    if name == "interleaved":
        return make_interleaved(num_runs, num_stages, num_chunks)
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}", got=repr(name), want="one of " + ", ".join(SCHEDULES))
    if num_chunks != 1:
        raise UsageError(
            f"the schedule {name!r} has one chunk per stage", got=f"num_chunks={num_chunks}", want='1, or "interleaved"'
        )
    return make_gpipe(num_runs, num_stages) if name == "gpipe" else make_1f1b(num_runs, num_stages)


def _alternating(forwards: _Order, backwards: _Order, num_before: int) -> _Order:
    """Return the first forwards, then forwards and backwards in turn, then the remaining backwards."""
    num_before = min(num_before, len(forwards))
    order = forwards[:num_before]
    for forward, backward in zip(forwards[num_before:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - num_before :]


def _assign_cycles(name: str, num_runs: int, num_stages: int, num_chunks: int, orders: Sequence[_Order]) -> Schedule:
    """Assign cycles: each stage keeps its order and does each work as early as possible."""
    num_parts = num_stages * num_chunks
    done: dict[tuple[Direction, int, int], int] = {}
    stages: list[list[StageWork]] = [[] for _ in orders]
    cycle = 0
    while len(done) < sum(map(len, orders)):
        new = []
        for stage, order in enumerate(orders):
            if len(stages[stage]) == len(order):
                continue
            direction, run, chunk = order[len(stages[stage])]
            part = chunk * num_stages + stage
            if all(needed in done for needed in _needs(direction, run, part, num_parts)):
                stages[stage].append(StageWork(cycle, direction, run, chunk))
                new.append((direction, run, part))
        assert new, f"the stages of {name} wait for each other in cycle {cycle}"
        # Only now: works of one cycle must not depend on each other.
        done.update(dict.fromkeys(new, cycle))
        cycle += 1
    return Schedule(name, num_runs, num_stages, num_chunks, tuple(map(tuple, stages)))


def _needs(direction: Direction, run: int, part: int, num_parts: int) -> Iterator[tuple[Direction, int, int]]:
    """Yield the works that must be done in earlier cycles."""
    if direction == "backward":
        yield "forward", run, part
        if part < num_parts - 1:
            yield "backward", run, part + 1
    elif part > 0:
        yield "forward", run, part - 1


def _peak(works: Iterable[StageWork]) -> int:
    live = peak = 0
    for work in works:
        live += 1 if work.direction == "forward" else -1
        peak = max(peak, live)
    return peak


def _range(count: int, what: str) -> range:
    _check_count(count, what)
    return range(count)


def _check_count(count: int, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"a pipeline has 1 or more {what}", got=repr(count), want="an integer, 1 or more")


def _text(work: StageWork) -> str:
    return f"the {work.direction} of run {work.run}, chunk {work.chunk}, in cycle {work.cycle}"


def picture_schedule(schedule: Schedule) -> Picture:
    """Return the timeline: a lane for each stage; forwards and backwards with the numbers of their runs."""
    has_chunks = schedule.num_chunks > 1
    kinds = [
        f"{direction} of chunk {chunk}" if has_chunks else direction
        for chunk in range(schedule.num_chunks)
        for direction in ("forward", "backward")
    ]
    lanes = [
        Lane(f"stage {stage}", tuple(_span(work) for work in works)) for stage, works in enumerate(schedule.stages)
    ]
    facts = (
        f"{schedule.name}: {plural(schedule.num_runs, 'run')}, {plural(schedule.num_stages, 'stage')}"
        f"{f', {schedule.num_chunks} chunks a stage' if has_chunks else ''}; {plural(schedule.num_cycles, 'cycle')}, "
        f"{schedule.bubble_fraction:.1%} idle; at most {max(schedule.peak_live_activations)} live activations a stage"
    )
    body = (f"<p>{facts}</p>", *draw_timeline(lanes, kinds, "cycle"))
    return Picture(f"Schedule {schedule.name}", "\n".join((facts, *_text_lines(schedule))), body)


def _span(work: StageWork) -> Span:
    title = f"{work.direction} of run {work.run}, chunk {work.chunk}, in cycle {work.cycle}"
    return Span(work.cycle, 1, 2 * work.chunk + (work.direction == "backward"), str(work.run), title)


def _text_lines(schedule: Schedule) -> list[str]:
    """Return a line for each stage: ``F0`` and ``B0`` for the forward and the backward of run 0, dots while idle."""
    width = len(str(schedule.num_runs - 1)) + (2 if schedule.num_chunks > 1 else 1)
    lines = []
    for stage, works in enumerate(schedule.stages):
        cells = ["." * width] * schedule.num_cycles
        for work in works:
            chunk = chr(ord("a") + work.chunk % 26) if schedule.num_chunks > 1 else ""
            cells[work.cycle] = f"{work.direction[0].upper()}{work.run}{chunk}".ljust(width)
        lines.append(f"stage {stage}  {' '.join(cells)}".rstrip())
    return lines
