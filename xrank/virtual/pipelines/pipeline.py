"""Pipelines: the devices of a mesh as the stages of a model, and what each does in a cycle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.pipelines.schedule import Schedule, Work, make_schedule

__all__ = ["Pipeline", "PipelineStage"]


@dataclass(frozen=True, slots=True, init=False)
class Pipeline:
    """A mesh whose devices are the stages of a model; each stage may be many devices.

    Where the mesh has one of the axes `pp`, `dp` and `tp`, the stages lie along `pp`, a stage's devices share the rows
    of a batch along `dp` and the columns of weights along `tp`; an axis that is not there has length 1. Where it has
    none of them, every device is a stage, in the order of the mesh.

    Args:
        mesh: the devices: a mesh, its shape, or their number.
        num_runs: R, the runs (micro-batches) into which a batch is cut.
        num_stages: S; None: as the mesh has.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, or a schedule of one's own.
        num_chunks: v, the chunks of the model that each stage holds; of ``"interleaved"`` alone.
        pp: the name of the axis of stages.
        dp: the name of the axis that shares rows.
        tp: the name of the axis that shares columns.

    Raises:
        LayoutError: the mesh has not so many stages, or an axis with no part in this.
        UsageError: the schedule cannot be made, or is of other counts.
    """

    mesh: DeviceMesh
    num_runs: int
    num_stages: int
    schedule: Schedule
    pp: str
    dp: str
    tp: str
    stage_meshes: tuple[DeviceMesh, ...] = field(repr=False, compare=False)
    """Of each stage its devices, along the axes `dp` and `tp`; devices at the same place of two stages correspond."""

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
                f"the mesh {mesh.grid!r} has not {num_stages} stages",
                got=f"{len(stage_meshes)} stages",
                want=f"{num_stages} stages",
                next_step=f"make {pp} as long, or give a mesh of as many devices without {pp}, {dp} and {tp}",
            )
        if isinstance(schedule, str):
            schedule = make_schedule(schedule, num_runs, num_stages, num_chunks)
        if (schedule.num_runs, schedule.num_stages) != (num_runs, num_stages):
            raise UsageError(
                f"the schedule {schedule.name!r} is of another pipeline",
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
        """The cycles of a batch, from the first forward to the last backward."""
        return self.schedule.num_cycles

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """A new `PipelineStage` of each stage, before its first cycle."""
        return tuple(PipelineStage(self, index) for index in range(self.num_stages))

    def stage_of(self, device: int) -> int:
        """Return the stage of a device.

        Raises:
            LayoutError: the mesh has no such device.
        """
        self.mesh.coordinate(device)
        return next(index for index, mesh in enumerate(self.stage_meshes) if device in mesh)

    def stage(self, device: int) -> PipelineStage:
        """Return a new `PipelineStage` of a device's stage, before its first cycle.

        Raises:
            LayoutError: the mesh has no such device.
        """
        return PipelineStage(self, self.stage_of(device), device)


class PipelineStage:
    """A stage on its way through the cycles of a batch; each cycle is one ``with`` block.

        stage = pipeline.stage(device.index)
        for _ in range(pipeline.num_cycles):
            with stage:
                if stage.forward:
                    ...

    Each device has a stage of its own and counts its own cycles. What depends on the cycle can be asked inside of the
    block only: outside it is a RuntimeError.

    Args:
        pipeline: the pipeline.
        index: which of its stages.
        device: which of the stage's devices; None: the first.
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
        """The cycle of the current block, or of the next one."""
        self._inside = False
        self._works = {work.cycle: work for work in pipeline.schedule.stages[index]}

    def __enter__(self) -> Self:
        if self._inside:
            raise RuntimeError(f"stage {self.index} is in cycle {self.cycle} already: a cycle is one block")
        if self.cycle == self.pipeline.num_cycles:
            raise UsageError(
                f"stage {self.index} has done all cycles",
                got=f"cycle {self.cycle}",
                want=f"{self.pipeline.num_cycles} cycles",
                next_step="take a new stage for a new batch",
            )
        self._inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        self.cycle += 1

    def __add__(self, offset: int) -> PipelineStage:
        """Return the stage so many further on; the device there is the one that this one sends to."""
        index = self.index + offset
        if not 0 <= index < self.pipeline.num_stages:
            raise UsageError(
                f"there is no stage {offset:+d} from stage {self.index}",
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
        """Whether the model's beginning lies here."""
        return self.index == 0

    @property
    def last_stage(self) -> bool:
        """Whether the model's end lies here."""
        return self.index == self.pipeline.num_stages - 1

    @property
    def work(self) -> Work | None:
        """What the schedule says for this cycle; None: nothing."""
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
        """Whether this cycle is neither."""
        return self.work is None

    @property
    def current_run(self) -> int:
        """The micro-batch of this cycle; in an idle cycle a ValueError."""
        return self._busy("run").run

    @property
    def current_chunk(self) -> int:
        """The chunk of the stage that this cycle is about; in an idle cycle a ValueError."""
        return self._busy("chunk").chunk

    @property
    def first_cycle(self) -> bool:
        """Whether the batch begins."""
        self._check_inside()
        return self.cycle == 0

    @property
    def last_cycle(self) -> bool:
        """Whether the batch ends."""
        self._check_inside()
        return self.cycle == self.pipeline.num_cycles - 1

    def _check_inside(self) -> None:
        if not self._inside:
            raise RuntimeError(f"stage {self.index} is between two cycles: ask inside of the block (with stage: ...)")

    def _busy(self, what: str) -> Work:
        work = self.work
        if work is None:
            raise UsageError(
                f"stage {self.index} is idle in cycle {self.cycle} and has no {what}",
                got="an idle cycle",
                want="a forward or a backward",
                next_step="ask stage.idle before",
            )
        return work


def _stage_meshes(mesh: DeviceMesh, pp: str, dp: str, tp: str) -> tuple[DeviceMesh, ...]:
    """Return the devices of each stage, along `dp` and `tp`."""
    if len({pp, dp, tp}) < 3:
        raise LayoutError("the axes of a pipeline have one name", got=f"pp={pp}, dp={dp}, tp={tp}", want="three names")
    if not {pp, dp, tp} & set(mesh.axis_names):
        return tuple(DeviceMesh((1, 1), (dp, tp), (rank,)) for rank in mesh.ranks)
    lengths = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    for axis, length in lengths.items():
        if axis not in (pp, dp, tp) and length > 1:
            raise LayoutError(
                f"the axis {axis!r} of the mesh {mesh.grid!r} has no part in a pipeline",
                got=f"{axis}={length}",
                want=f"the axes {pp}, {dp} and {tp}, or others of length 1",
                next_step="name the axes: Pipeline(..., pp=, dp=, tp=)",
            )
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
