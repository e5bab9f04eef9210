"""Pipelined operations: a model in parts, whose stages communicate according to the schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.pipelines.pipeline import Pipeline
from xrank.virtual.pipelines.schedule import Direction, StageWork
from xrank.virtual.programs.operation import Operation
from xrank.virtual.programs.program import Program, Send, Take
from xrank.virtual.programs.program_builder import ProgramBuilder, Value

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
        """Write a forward; return the input of the model's next part (None after the last part).

        Args:
            run: the micro-batch.
            chunk: the stage's chunk.
            given: the value from the previous part; None for the first part.
        """

    @abstractmethod
    def backward(self, run: int, chunk: int, given: Value | None) -> Value | None:
        """Write a backward; return the gradient for the previous part (None before the first part).

        Args:
            run: the micro-batch.
            chunk: the stage's chunk.
            given: the value from the next part; None for the last part.
        """

    @abstractmethod
    def end(self) -> None:
        """Write the instructions after the last cycle, which send results to the host."""


class PipelinedOperation(Operation):
    """An operation that the stages of a pipeline execute together; a subclass defines the program of one stage.

    Each stage is written as one program for all its devices (`stage_program`). Every device of a stage sends the
    returned value to the device at the same place of the next stage.

    Args:
        pipeline: the stages and their schedule.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        given: object = pipeline
        if not isinstance(given, Pipeline):
            name = type(self).__qualname__
            raise UsageError(f"{name} takes a Pipeline", got=repr(given), want=f"{name}(Pipeline(mesh, num_runs))")
        self.pipeline = pipeline

    @abstractmethod
    def stage_program(
        self, stage: int, builder: ProgramBuilder, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> StageProgram:
        """Return the writer of one stage's program."""

    @abstractmethod
    def check(self, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]) -> None:
        """Check the arguments before anything is written.

        Raises:
            LayoutError: sizes do not fit each other or the pipeline.
            UsageError: the operation takes other arguments.
        """

    def compile(
        self, mesh: DeviceMesh, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> tuple[Program, ...]:
        """Return the programs of all devices.

        Raises:
            LayoutError: as in `check`, or the pipeline has another mesh.
            UsageError: as in `check`.
        """
        if mesh != self.pipeline.mesh:
            raise LayoutError(
                "the pipeline has another mesh than the cluster",
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
