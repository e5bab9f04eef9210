"""Pipelined operations: a model in parts, whose stages send each other what the schedule says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.pipelines.pipeline import Pipeline
from xrank.virtual.pipelines.schedule import Direction, Work
from xrank.virtual.programs.operation import Operation
from xrank.virtual.programs.program import Program, Send, Take
from xrank.virtual.programs.program_builder import ProgramBuilder, Value

__all__ = ["PipelinedOperation", "StageProgram"]

_Message: TypeAlias = tuple[Direction, int, int]
"""What a message is for: the direction, the run, and the part of the model that takes it."""


class StageProgram(ABC):
    """What one stage does, written with its builder.

    Call order: `begin` once; `forward` and `backward` in the order of the schedule, each once for every run and chunk;
    `end` once.
    """

    @abstractmethod
    def begin(self) -> None:
        """Write what comes before the first cycle: the parameters come."""

    @abstractmethod
    def forward(self, run: int, chunk: int, given: Value | None) -> Value | None:
        """Write a forward; return what the next part of the model gets (of its last part, nothing).

        Args:
            run: the micro-batch.
            chunk: which of the stage's chunks.
            given: what the part before returned; None: this is the first one.
        """

    @abstractmethod
    def backward(self, run: int, chunk: int, given: Value | None) -> Value | None:
        """Write a backward; return what the part before gets (of the model's first part, nothing).

        Args:
            run: the micro-batch.
            chunk: which of the stage's chunks.
            given: what the part behind returned; None: this is the last one.
        """

    @abstractmethod
    def end(self) -> None:
        """Write what comes after the last cycle: results go to the host."""


class PipelinedOperation(Operation):
    """An operation that the stages of a pipeline do together: a subclass says what one stage does.

    Each stage is written as one program of its devices (`stage_program`); what a stage returns, every device of it
    sends to the device at the same place of the next stage.

    Args:
        pipeline: who does what when.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        told: object = pipeline
        if not isinstance(told, Pipeline):
            name = type(self).__qualname__
            raise UsageError(f"{name} takes a Pipeline", got=repr(told), want=f"{name}(Pipeline(mesh, num_runs))")
        self.pipeline = pipeline

    @abstractmethod
    def stage_program(
        self, stage: int, builder: ProgramBuilder, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> StageProgram:
        """Return the writer of one stage's program."""

    @abstractmethod
    def check(self, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]) -> None:
        """Refuse what the operation cannot do, before anything of it is written.

        Raises:
            LayoutError: sizes do not fit each other or the pipeline.
            UsageError: the arguments are not those that the operation takes.
        """

    def compile(
        self, mesh: DeviceMesh, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> tuple[Program, ...]:
        """Return the programs of all devices.

        Raises:
            LayoutError: as `check`, or the mesh is not the pipeline's.
            UsageError: as `check`.
        """
        if mesh != self.pipeline.mesh:
            raise LayoutError(
                "the pipeline is of another mesh than the cluster",
                got=f"{self.pipeline.mesh.grid!r} of {self.pipeline.mesh.size} devices",
                want=f"{mesh.grid!r} of {mesh.size} devices",
                next_step="make both of one DeviceMesh",
            )
        self.check(activations, parameters)
        schedule = self.pipeline.schedule
        builders = [ProgramBuilder(devices) for devices in self.pipeline.stage_meshes]
        stages = [self.stage_program(stage, builder, activations, parameters) for stage, builder in enumerate(builders)]
        mail = _Mail(builders, self.pipeline)
        for program in stages:
            program.begin()
        for stage, work in schedule.in_order():
            mail.pass_on(stage, work, stages[stage])
        for program in stages:
            program.end()
        programs = {program.device: program for builder in builders for program in builder.programs()}
        return tuple(programs[device] for device in mesh.ranks)


class _Mail:
    """What is under way between stages while their programs are written, cycle by cycle."""

    def __init__(self, builders: Sequence[ProgramBuilder], pipeline: Pipeline) -> None:
        self._builders = builders
        self._num_parts = pipeline.schedule.num_parts
        named = pipeline.pp in pipeline.mesh.axis_names
        self._axes = (pipeline.pp,) if named else pipeline.mesh.axis_names
        self._sent: dict[tuple[int, int], deque[tuple[_Message, Value]]] = {}
        """By sender and taker, in the order of sending."""
        self._arrived: dict[_Message, Value] = {}

    def pass_on(self, stage: int, work: Work, program: StageProgram) -> None:
        """Write one work: take what it needs, do it, send what comes of it."""
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
        if stage == target:
            self._arrived[message] = value
            return
        sender = self._builders[stage]
        devices = self._builders[target].mesh.ranks
        for own, device, spec in zip(sender.instructions.values(), devices, sender.specs(value), strict=True):
            own.append(Send(value.register, device, spec, self._axes))
        self._sent.setdefault((stage, target), deque()).append((message, value))

    def _take(self, source: int, stage: int, message: _Message) -> Value:
        """Take messages of a stage, in the order of their sending, up to this one."""
        source %= len(self._builders)
        taker = self._builders[stage]
        devices = self._builders[source].mesh.ranks
        while message not in self._arrived:
            found, value = self._sent[source, stage].popleft()
            direction, run, part = found
            taken = Value(taker.register(f"{direction}.{run}.{part}"), value.shape, value.dtype, value.sharding)
            for own, device, spec in zip(taker.instructions.values(), devices, taker.specs(taken), strict=True):
                own.append(Take(taken.register, device, spec, self._axes))
            self._arrived[found] = taken
        return self._arrived.pop(message)
