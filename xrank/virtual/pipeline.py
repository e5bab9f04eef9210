"""Pipelines: schedules as data, the devices of a mesh as stages, and each stage's view of the schedule.

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

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import TracebackType
from typing import Literal, NoReturn, Self, TypeAlias

from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.pictures.picture import Lane, Picture, Span, draw_timeline
from xrank.virtual.arrays import Specs
from xrank.virtual.builder import ProgramBuilder, Value
from xrank.virtual.programs import Operation, Program, Send, Take
from xrank.virtual.sharding import MeshLike, as_device_mesh
from xrank.words import plural

SCHEDULES = ("gpipe", "1f1b", "interleaved")

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
                    self._refuse(
                        f"stage {stage} does the {_text(work)} after cycle {last}", "one work a cycle, in order"
                    )
                last = work.cycle
                if not (0 <= work.run < self.num_runs and 0 <= work.chunk < self.num_chunks):
                    self._refuse(
                        f"the {_text(work)} on stage {stage}",
                        f"runs below {self.num_runs}, chunks below {self.num_chunks}",
                    )
                key = (work.direction, work.run, work.chunk * self.num_stages + stage)
                if key in done:
                    self._refuse(f"stage {stage} does the {_text(work)} a second time", "each work once")
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
        turns = ([1 if work.direction == "forward" else -1 for work in works] for works in self.stages)
        return tuple(max(accumulate(stage), default=0) for stage in turns)

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
        has_chunks = self.num_chunks > 1
        kinds = [
            f"{direction} of chunk {chunk}" if has_chunks else direction
            for chunk in range(self.num_chunks)
            for direction in ("forward", "backward")
        ]
        lanes = [
            Lane(
                f"stage {stage}",
                tuple(
                    Span(work.cycle, 1, 2 * work.chunk + (work.direction == "backward"), str(work.run), _text(work))
                    for work in works
                ),
            )
            for stage, works in enumerate(self.stages)
        ]
        facts = (
            f"{self.name}: {plural(self.num_runs, 'run')}, {plural(self.num_stages, 'stage')}"
            f"{f', {self.num_chunks} chunks a stage' if has_chunks else ''}; {plural(self.num_cycles, 'cycle')}, "
            f"{self.bubble_fraction:.1%} idle; at most {max(self.peak_live_activations)} live activations a stage"
        )
        body = (f"<p>{facts}</p>", *draw_timeline(lanes, kinds, "cycle"))
        lines = [facts]
        width = len(str(self.num_runs - 1)) + (2 if has_chunks else 1)
        for stage, works in enumerate(self.stages):
            cells = ["." * width] * self.num_cycles
            for work in works:
                chunk = chr(ord("a") + work.chunk % 26) if has_chunks else ""
                cells[work.cycle] = f"{work.direction[0].upper()}{work.run}{chunk}".ljust(width)
            lines.append(f"stage {stage}  {' '.join(cells)}".rstrip())
        return Picture(f"Schedule {self.name}", "\n".join(lines), body)

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def _refuse(self, got: str, want: str) -> NoReturn:
        raise UsageError(f"the schedule {self.name!r} is impossible", got=got, want=want)


def make_schedule(name: str, num_runs: int, num_stages: int, num_chunks: int = 1) -> Schedule:
    """Create a schedule by name, one of `SCHEDULES`.

    `gpipe` does all forwards first. `1f1b` does each backward as soon as possible. `interleaved` is 1f1b with several
    chunks per stage, as Megatron-LM's: smaller bubbles, but more messages.

    Raises:
        UsageError: the name is unknown, or the schedule does not support chunks.
    """
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}", got=repr(name), want="one of " + ", ".join(SCHEDULES))
    if num_chunks != 1 and name != "interleaved":
        raise UsageError(
            f"the schedule {name!r} has one chunk per stage", got=f"num_chunks={num_chunks}", want='1, or "interleaved"'
        )
    for count, what in ((num_runs, "runs"), (num_stages, "stages"), (num_chunks, "chunks")):
        _check_count(count, what)
    runs, chunks = range(num_runs), range(num_chunks)
    # Runs pass the chunks in groups of at least S, so no stage waits for a group's first run to return. Megatron
    # requires groups of exactly S, and so an R divisible by S.
    num_groups = max(1, num_runs // num_stages)
    groups = [runs[i * num_runs // num_groups : (i + 1) * num_runs // num_groups] for i in range(num_groups)]
    forwards: _Order = [("forward", run, chunk) for group in groups for chunk in chunks for run in group]
    backwards: _Order = [("backward", run, chunk) for group in groups for chunk in reversed(chunks) for run in group]
    # Before its first backward, the last stage has done all chunks but one of a group. Each earlier stage is further
    # ahead: by one forward, because its first backward needs those behind it; with chunks by two works, because a run
    # needs one cycle to reach the next stage and one to come back.
    before_last = (num_chunks - 1) * max(map(len, groups))
    orders = []
    for stage in range(num_stages):
        ahead = (num_stages - 1 - stage) * (1 if num_chunks == 1 else 2)
        num_before = num_runs if name == "gpipe" else min(before_last + ahead, len(forwards))
        order = forwards[:num_before]
        for forward, backward in zip(forwards[num_before:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[len(forwards) - num_before :])
    return _assign_cycles(name, num_runs, num_stages, num_chunks, orders)


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


def _check_count(count: int, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"a pipeline has 1 or more {what}", got=repr(count), want="an integer, 1 or more")


def _text(work: StageWork) -> str:
    return f"{work.direction} of run {work.run}, chunk {work.chunk}, in cycle {work.cycle}"


@dataclass(frozen=True, slots=True, init=False)
class Pipeline:
    """A mesh whose devices are grouped into the stages of a model.

    If the mesh has any of the axes `pp`, `dp` and `tp`, the stages are along `pp`, and a stage's devices divide a
    batch's rows along `dp` and the columns of weights along `tp`; a missing axis counts as length 1. Otherwise every
    device is a stage, in mesh order.

    Args:
        mesh: a mesh, its shape, or the number of devices.
        num_runs: R, the number of runs (micro-batches) per batch.
        num_stages: S; None means that of the mesh.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, or a `Schedule`.
        num_chunks: v, the number of the model's chunks per stage; only for ``"interleaved"``.
        pp: name of the axis of stages.
        dp: name of the axis that divides rows.
        tp: name of the axis that divides columns.

    Raises:
        LayoutError: the mesh has a different number of stages, or an additional axis.
        UsageError: the schedule is impossible, or its counts differ.

    >>> pipeline = Pipeline(4, num_runs=8, schedule="1f1b")
    >>> pipeline.num_cycles, pipeline.stage_of(3)
    (22, 3)
    """

    mesh: DeviceMesh
    num_runs: int
    num_stages: int
    schedule: Schedule
    pp: str
    dp: str
    tp: str
    stage_meshes: tuple[DeviceMesh, ...] = field(repr=False, compare=False)
    """Devices of each stage, along the axes `dp` and `tp`; devices at equal places of two stages communicate."""

    def __init__(
        self,
        mesh: MeshLike,
        num_runs: int,
        num_stages: int | None = None,
        *,
        schedule: str | Schedule = "gpipe",
        num_chunks: int = 1,
        pp: str = "pp",
        dp: str = "dp",
        tp: str = "tp",
    ) -> None:
        mesh = as_device_mesh(mesh)
        stage_meshes = _stage_meshes(mesh, pp, dp, tp)
        if num_stages is None:
            num_stages = len(stage_meshes)
        if num_stages != len(stage_meshes):
            raise LayoutError(
                f"the mesh {mesh.grid!r} does not have {num_stages} stages",
                got=f"{len(stage_meshes)} stages",
                want=f"{num_stages} stages",
                next_step=f"make {pp} as long, or give a mesh of that many devices without {pp}, {dp} and {tp}",
            )
        if isinstance(schedule, str):
            schedule = make_schedule(schedule, num_runs, num_stages, num_chunks)
        if (schedule.num_runs, schedule.num_stages) != (num_runs, num_stages):
            raise UsageError(
                f"the schedule {schedule.name!r} is for a different pipeline",
                got=f"{schedule.num_runs} runs over {schedule.num_stages} stages",
                want=f"{num_runs} runs over {num_stages} stages",
            )
        values = (mesh, num_runs, num_stages, schedule, pp, dp, tp, stage_meshes)
        for name, value in zip(Pipeline.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[PipelineStage]:
        return iter(self.stages)

    @property
    def num_cycles(self) -> int:
        """Number of cycles per batch, from the first forward to the last backward."""
        return self.schedule.num_cycles

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """A new `PipelineStage` for each stage, before its first cycle."""
        return tuple(PipelineStage(self, index) for index in range(self.num_stages))

    def stage_of(self, device: int) -> int:
        """Return the stage of a device.

        Raises:
            LayoutError: the mesh has no such device.
        """
        self.mesh.coordinate(device)
        return next(index for index, mesh in enumerate(self.stage_meshes) if device in mesh)

    def stage(self, device: int) -> PipelineStage:
        """Return a new `PipelineStage` for a device's stage, before its first cycle.

        Raises:
            LayoutError: the mesh has no such device.
        """
        return PipelineStage(self, self.stage_of(device), device)


class PipelineStage:
    """The position of one stage in the cycles of a batch; each cycle is one ``with`` block.

        stage = pipeline.stage(device.index)
        for _ in range(pipeline.num_cycles):
            with stage:
                if stage.forward:
                    ...

    Each device has its own stage object and counts its own cycles. Properties that depend on the cycle raise a
    RuntimeError outside of the block. `device` is one of the stage's devices; None means the first.
    """

    def __init__(self, pipeline: Pipeline, index: int, device: int | None = None) -> None:
        if not 0 <= index < pipeline.num_stages:
            raise UsageError(
                f"the pipeline has no stage {index}", got=f"stage {index}", want=f"0 to {pipeline.num_stages - 1}"
            )
        self.pipeline = pipeline
        self.index = index
        self.device = pipeline.stage_meshes[index].ranks[0] if device is None else device
        self.cycle = 0
        """Number of the current block's cycle, or of the next one between blocks."""
        self._inside = False
        self._works = {work.cycle: work for work in pipeline.schedule.stages[index]}

    def __enter__(self) -> Self:
        if self._inside:
            raise RuntimeError(f"stage {self.index} is already in cycle {self.cycle}: use one block per cycle")
        if self.cycle == self.pipeline.num_cycles:
            raise UsageError(
                f"stage {self.index} has finished all cycles",
                got=f"cycle {self.cycle}",
                want=f"{self.pipeline.num_cycles} cycles",
                next_step="create a new stage for a new batch",
            )
        self._inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        self.cycle += 1

    def __add__(self, offset: int) -> PipelineStage:
        """Return the stage `offset` places further on, with the device there that this device sends to."""
        index = self.index + offset
        if not 0 <= index < self.pipeline.num_stages:
            raise UsageError(
                f"the pipeline has no stage {offset:+d} from stage {self.index}",
                got=f"stage {index}",
                want=f"0 to {self.pipeline.num_stages - 1}",
            )
        place = self.pipeline.stage_meshes[self.index].ranks.index(self.device)
        return PipelineStage(self.pipeline, index, self.pipeline.stage_meshes[index].ranks[place])

    def __sub__(self, offset: int) -> PipelineStage:
        return self + -offset

    def __repr__(self) -> str:
        return f"<PipelineStage {self.index} of {self.pipeline.num_stages}, device {self.device}, cycle {self.cycle}>"

    @property
    def first_stage(self) -> bool:
        """Whether this is the first stage of the model."""
        return self.index == 0

    @property
    def last_stage(self) -> bool:
        """Whether this is the last stage of the model."""
        return self.index == self.pipeline.num_stages - 1

    @property
    def work(self) -> StageWork | None:
        """The scheduled work of this cycle; None in an idle cycle."""
        self._check_inside()
        return self._works.get(self.cycle)

    @property
    def forward(self) -> bool:
        """Whether this cycle is a forward."""
        return self.work is not None and self.work.direction == "forward"

    @property
    def backward(self) -> bool:
        """Whether this cycle is a backward."""
        return self.work is not None and self.work.direction == "backward"

    @property
    def idle(self) -> bool:
        """Whether this cycle has no work."""
        return self.work is None

    @property
    def current_run(self) -> int:
        """The micro-batch of this cycle; raises a ValueError in an idle cycle."""
        return self._busy("run").run

    @property
    def current_chunk(self) -> int:
        """The stage's chunk in this cycle; raises a ValueError in an idle cycle."""
        return self._busy("chunk").chunk

    @property
    def first_cycle(self) -> bool:
        """Whether this is the first cycle of the batch."""
        self._check_inside()
        return self.cycle == 0

    @property
    def last_cycle(self) -> bool:
        """Whether this is the last cycle of the batch."""
        self._check_inside()
        return self.cycle == self.pipeline.num_cycles - 1

    def _check_inside(self) -> None:
        if not self._inside:
            raise RuntimeError(f"stage {self.index} is between two cycles: ask inside of the block (with stage: ...)")

    def _busy(self, what: str) -> StageWork:
        work = self.work
        if work is None:
            raise UsageError(
                f"stage {self.index} is idle in cycle {self.cycle} and has no {what}",
                got="an idle cycle",
                want="a forward or a backward",
                next_step="check stage.idle first",
            )
        return work


def _stage_meshes(mesh: DeviceMesh, pp: str, dp: str, tp: str) -> tuple[DeviceMesh, ...]:
    """Return the devices of each stage, along `dp` and `tp`."""
    if len({pp, dp, tp}) < 3:
        raise LayoutError("axes of a pipeline must differ", got=f"pp={pp}, dp={dp}, tp={tp}", want="three names")
    if not {pp, dp, tp} & set(mesh.axis_names):
        return tuple(DeviceMesh((1, 1), (dp, tp), (rank,)) for rank in mesh.ranks)
    lengths = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    for axis, length in lengths.items():
        if axis not in (pp, dp, tp) and length > 1:
            raise LayoutError(
                f"the axis {axis!r} of the mesh {mesh.grid!r} has no role in a pipeline",
                got=f"{axis}={length}",
                want=f"the axes {pp}, {dp} and {tp}, or others of length 1",
                next_step="name the axes: Pipeline(..., pp=, dp=, tp=)",
            )
    # Axes without a role have the one place 0; of the three, those that the mesh lacks are left out below.
    at = dict.fromkeys(mesh.axis_names, 0)
    return tuple(
        DeviceMesh(
            (lengths.get(dp, 1), lengths.get(tp, 1)),
            (dp, tp),
            [
                mesh.rank_at(
                    {axis: place for axis, place in {**at, pp: stage, dp: row, tp: column}.items() if axis in at}
                )
                for row in range(lengths.get(dp, 1))
                for column in range(lengths.get(tp, 1))
            ],
        )
        for stage in range(lengths.get(pp, 1))
    )


_Message: TypeAlias = tuple[Direction, int, int]
"""Direction, run, and the part of the model that receives the message."""


class StageProgram(ABC):
    """Writes the program of one stage with its builder.

    Call order: `begin` once; `forward` and `backward` in schedule order, each once for every run and chunk; `end` once.
    """

    @abstractmethod
    def begin(self) -> None:
        """Write the instructions before the first cycle, which receive the parameters."""

    @abstractmethod
    def forward(self, run: int, chunk: int, given: Value | None) -> Value | None:
        """Write a forward of a micro-batch; return the input of the model's next part (None after the last part).

        `given` is the value from the previous part; None for the first part.
        """

    @abstractmethod
    def backward(self, run: int, chunk: int, given: Value | None) -> Value | None:
        """Write a backward; return the gradient for the previous part (None before the first part).

        `given` is the value from the next part; None for the last part.
        """

    @abstractmethod
    def end(self) -> None:
        """Write the instructions after the last cycle, which send results to the host."""


class PipelinedOperation(Operation):
    """An operation that the stages of a pipeline execute together; a subclass defines the program of one stage.

    Each stage is written as one program for all its devices (`stage_program`). Every device of a stage sends the
    returned value to the device at the same place of the next stage.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        given: object = pipeline
        if not isinstance(given, Pipeline):
            name = type(self).__qualname__
            raise UsageError(f"{name} takes a Pipeline", got=repr(given), want=f"{name}(Pipeline(mesh, num_runs))")
        self.pipeline = pipeline

    @abstractmethod
    def stage_program(self, stage: int, builder: ProgramBuilder, activations: Specs, parameters: Specs) -> StageProgram:
        """Return the writer of one stage's program."""

    @abstractmethod
    def check(self, activations: Specs, parameters: Specs) -> None:
        """Check the arguments before anything is written.

        Raises:
            LayoutError: sizes do not fit each other or the pipeline.
            UsageError: the operation takes other arguments.
        """

    def compile(self, mesh: DeviceMesh, activations: Specs, parameters: Specs) -> tuple[Program, ...]:
        """Return the programs of all devices.

        Raises:
            LayoutError: as in `check`, or the pipeline has a different mesh.
            UsageError: as in `check`.
        """
        if mesh != self.pipeline.mesh:
            raise LayoutError(
                "the pipeline has a different mesh than the cluster",
                got=f"{self.pipeline.mesh.grid!r} of {self.pipeline.mesh.size} devices",
                want=f"{mesh.grid!r} of {mesh.size} devices",
                next_step="use one DeviceMesh for both",
            )
        self.check(activations, parameters)
        schedule = self.pipeline.schedule
        builders = [ProgramBuilder(devices) for devices in self.pipeline.stage_meshes]
        stages = [self.stage_program(stage, builder, activations, parameters) for stage, builder in enumerate(builders)]
        mail = _Mail(builders, self.pipeline)
        for program in stages:
            program.begin()
        # In schedule order, a value is sent before any stage receives it.
        for stage, work in schedule.iterate_works():
            mail.pass_on(stage, work, stages[stage])
        for program in stages:
            program.end()
        programs = {program.device: program for builder in builders for program in builder.programs()}
        return tuple(programs[device] for device in mesh.ranks)


class _Mail:
    """Messages in transit between stages while their programs are written, cycle by cycle."""

    def __init__(self, builders: Sequence[ProgramBuilder], pipeline: Pipeline) -> None:
        self._builders = builders
        self._num_parts = pipeline.schedule.num_parts
        named = pipeline.pp in pipeline.mesh.axis_names
        self._axes = (pipeline.pp,) if named else pipeline.mesh.axis_names
        self._sent: dict[tuple[int, int], deque[tuple[_Message, Value]]] = {}
        """Messages by (sender, receiver) stage, in sending order."""
        self._arrived: dict[_Message, Value] = {}

    def pass_on(self, stage: int, work: StageWork, program: StageProgram) -> None:
        """Write one work: receive its input, execute it, send its result."""
        step = 1 if work.direction == "forward" else -1
        part = work.chunk * len(self._builders) + stage
        source, target = part - step, part + step
        given = self._take(source, stage, (work.direction, work.run, part)) if 0 <= source < self._num_parts else None
        do = program.forward if work.direction == "forward" else program.backward
        value = do(work.run, work.chunk, given)
        if 0 <= target < self._num_parts:
            assert value is not None, f"part {part} of the model returned nothing for part {target}"
            self._send(stage, target % len(self._builders), (work.direction, work.run, target), value)

    def _send(self, stage: int, target: int, message: _Message, value: Value) -> None:
        # In a pipeline of one stage the next chunk finds the value in its register.
        if stage == target:
            self._arrived[message] = value
            return
        sender = self._builders[stage]
        devices = self._builders[target].mesh.ranks
        for own, device, spec in zip(sender.instructions.values(), devices, sender.specs(value), strict=True):
            own.append(Send(value.register, device, spec, self._axes))
        self._sent.setdefault((stage, target), deque()).append((message, value))

    def _take(self, source: int, stage: int, message: _Message) -> Value:
        """Receive messages from a stage, in sending order, until this one has arrived."""
        source %= len(self._builders)
        taker = self._builders[stage]
        devices = self._builders[source].mesh.ranks
        while message not in self._arrived:
            # A channel delivers in sending order, so messages for later works may have to be received first.
            found, value = self._sent[source, stage].popleft()
            direction, run, part = found
            taken = Value(taker.register(f"{direction}.{run}.{part}"), value.shape, value.dtype, value.sharding)
            for own, device, spec in zip(taker.instructions.values(), devices, taker.specs(taken), strict=True):
                own.append(Take(taken.register, device, spec, self._axes))
            self._arrived[found] = taken
        return self._arrived.pop(message)
