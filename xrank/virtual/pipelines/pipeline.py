"""Pipelines: the devices of a mesh as stages of a model, and each stage's view of the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.pipelines.schedule import Schedule, StageWork, make_schedule


@dataclass(frozen=True, slots=True, init=False)
class Pipeline:
    """A mesh whose devices are grouped into the stages of a model.

    If the mesh has any of the axes `pp`, `dp` and `tp`, the stages lie along `pp`, and a stage's devices divide a
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
        LayoutError: the mesh has another number of stages, or a further axis.
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
                f"the schedule {schedule.name!r} is for another pipeline",
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
    RuntimeError outside of the block.

    Args:
        pipeline: the pipeline.
        index: index of the stage.
        device: one of the stage's devices; None means the first.
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
            raise RuntimeError(f"stage {self.index} is in cycle {self.cycle} already: use one block per cycle")
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
