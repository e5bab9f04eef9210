"""Pipelines: the devices of stages, the properties of a stage in each cycle, and messages in real runs."""

import numpy as np
import pytest

from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import ArraySpec
from xrank.virtual.cluster import VirtualCluster
from xrank.virtual.pipeline import Pipeline, PipelinedOperation, PipelineStage, StageProgram, make_schedule
from xrank.virtual.programs import Send, Take, plan
from xrank.virtual.sharding import Mesh, TensorSharding

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]


def test_without_the_axes_every_device_is_a_stage():
    for mesh in (4, (2, 2), Mesh(2, 2), DeviceMesh((4,), ("layer",))):
        pipeline = Pipeline(mesh, 8, 4)
        assert [stage.device for stage in pipeline] == [0, 1, 2, 3]
        assert all(devices.shape == (1, 1) for devices in pipeline.stage_meshes)


def test_stages_lie_along_pp_wherever_it_is_in_the_mesh():
    # tp outermost, and ranks that do not count up: each stage's devices are still dp by tp.
    mesh = DeviceMesh((2, 2, 2), ("tp", "pp", "dp"), [7, 6, 5, 4, 3, 2, 1, 0])
    pipeline = Pipeline(mesh, 3)
    assert pipeline.num_stages == 2
    assert [devices.ranks for devices in pipeline.stage_meshes] == [(7, 3, 6, 2), (5, 1, 4, 0)]
    assert [devices.axis_names for devices in pipeline.stage_meshes] == [("dp", "tp")] * 2
    for devices in pipeline.stage_meshes:
        for device in devices.ranks:
            at = mesh.coordinate(device)
            assert devices.coordinate(device) == {"dp": at["dp"], "tp": at["tp"]}
    assert [pipeline.stage_of(device) for device in range(8)] == [1, 1, 0, 0, 1, 1, 0, 0]


def test_axes_may_have_other_names_and_may_be_absent():
    pipeline = Pipeline(DeviceMesh((3, 2), ("stage", "batch")), 4, pp="stage", dp="batch")
    assert [devices.ranks for devices in pipeline.stage_meshes] == [(0, 1), (2, 3), (4, 5)]
    only = Pipeline(DeviceMesh((2, 1), ("dp", "spare")), 4)
    assert (only.num_stages, only.stage_meshes[0].grid) == (1, "dp=2 tp=1")


def test_a_mesh_of_other_stages_is_refused():
    with pytest.raises(LayoutError, match="does not have 3 stages") as failure:
        Pipeline((2, 2), 8, 3)
    assert (failure.value.got, failure.value.want) == ("4 stages", "3 stages")
    with pytest.raises(LayoutError, match="does not have 4 stages"):
        Pipeline(DeviceMesh((2, 2), ("pp", "tp")), 8, 4)


def test_an_axis_without_a_part_is_refused():
    with pytest.raises(LayoutError, match="the axis 'ep'") as failure:
        Pipeline(DeviceMesh((2, 2), ("pp", "ep")), 8)
    assert failure.value.got == "ep=2"
    with pytest.raises(LayoutError, match="must differ"):
        Pipeline(DeviceMesh((2, 2), ("pp", "tp")), 8, tp="pp")


def test_a_schedule_of_another_pipeline_is_refused():
    with pytest.raises(UsageError, match="for a different pipeline") as failure:
        Pipeline(2, 4, schedule=make_schedule("gpipe", 3, 2))
    assert (failure.value.got, failure.value.want) == ("3 runs over 2 stages", "4 runs over 2 stages")
    assert Pipeline(2, 4, schedule=make_schedule("gpipe", 4, 2)).num_cycles == 10


def test_pipelines_are_values():
    assert Pipeline((2, 2), 8, 4) == Pipeline((2, 2), 8)
    assert Pipeline((2, 2), 8, 4) != Pipeline((2, 2), 8, 4, schedule="1f1b")
    assert hash(Pipeline((2, 2), 8, 4)) == hash(Pipeline((2, 2), 8))


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_a_stage_follows_its_schedule(name, chunks):
    pipeline = Pipeline(3, 4, schedule=name, num_chunks=chunks)
    for index, stage in enumerate(pipeline.stages):
        for cycle in range(pipeline.num_cycles):
            work = pipeline.schedule.find_work(index, cycle)
            with stage as inside:
                assert inside is stage and stage.cycle == cycle
                assert (stage.forward, stage.backward, stage.idle) == (
                    work is not None and work.direction == "forward",
                    work is not None and work.direction == "backward",
                    work is None,
                )
                assert (stage.first_cycle, stage.last_cycle) == (cycle == 0, cycle == pipeline.num_cycles - 1)
                if work is not None:
                    assert (stage.current_run, stage.current_chunk) == (work.run, work.chunk)
        assert (stage.first_stage, stage.last_stage) == (index == 0, index == 2)


def test_cycle_properties_need_the_block():
    stage = Pipeline(2, 4).stage(1)
    for name in ("forward", "backward", "idle", "work", "current_run", "current_chunk", "first_cycle", "last_cycle"):
        with pytest.raises(RuntimeError, match="between two cycles"):
            getattr(stage, name)
    with stage:
        assert stage.idle
        with pytest.raises(ValueError, match="idle in cycle 0 and has no run"):
            stage.current_run  # noqa: B018
        with pytest.raises(RuntimeError, match="already in cycle 0"):
            stage.__enter__()


def test_a_cycle_that_raises_is_over_and_the_last_one_is_the_last():
    stage = Pipeline(1, 1).stage(0)
    with pytest.raises(KeyError), stage:
        raise KeyError
    assert stage.cycle == 1
    with stage:
        assert stage.last_cycle
    with pytest.raises(UsageError, match="has finished all cycles"), stage:
        pass


def test_the_stages_around_are_those_at_the_same_place():
    pipeline = Pipeline(DeviceMesh((3, 2), ("pp", "tp")), 4)
    stage = pipeline.stage(3)
    assert (stage.index, stage.device) == (1, 3)
    assert [(stage + 1).device, (stage - 1).device, (stage + 0).device] == [5, 1, 3]
    with pytest.raises(UsageError, match=r"no stage \+2 from stage 1"):
        stage + 2
    with pytest.raises(UsageError, match="no stage -2 from stage 1"):  # and not the last one
        stage - 2
    with pytest.raises(LayoutError, match="rank 9"):
        pipeline.stage(9)
    with pytest.raises(UsageError, match="no stage 3"):
        PipelineStage(pipeline, 3)


def walk(device, pipeline):
    """Run a batch with clocks alone: a message contains its sending time. Return cycles, works, live forwards."""
    stage = pipeline.stage(device.index)
    clock = num_works = live = peak = 0
    for _ in range(pipeline.num_cycles):
        with stage:
            if stage.idle:
                continue
            step = 1 if stage.forward else -1
            before, behind = stage.index - step, stage.index + step
            if 0 <= before < pipeline.num_stages:
                clock = max(clock, int(device.receive((stage - step).device)))
            clock += 1
            num_works += 1
            live += step
            peak = max(peak, live)
            if 0 <= behind < pipeline.num_stages:
                device.send(np.array(clock), (stage + step).device)
    return clock, num_works, peak


@pytest.mark.parametrize("engine", ["in-process", "processes"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("runs", [2, 8])
def test_a_run_has_the_bubble_and_the_live_activations_of_its_schedule(engine, name, runs):
    pipeline = Pipeline(4, runs, schedule=name)
    clocks, works, peaks = zip(*VirtualCluster(4, engine=engine).run(walk, pipeline).outputs, strict=True)
    assert max(clocks) == pipeline.num_cycles
    assert 1 - sum(works) / (4 * max(clocks)) == pytest.approx(pipeline.schedule.bubble_fraction) == 3 / (runs + 3)
    assert peaks == pipeline.schedule.peak_live_activations


class Chain(PipelinedOperation):
    """Adds one bias a part on the way forward, and one a part on the way back; nothing else."""

    def check(self, activations, parameters):
        want = self.pipeline.schedule.num_parts
        if len(parameters) != want:
            raise UsageError("a chain has a bias a part", got=str(len(parameters)), want=str(want))

    def stage_program(self, stage, builder, activations, parameters):
        return ChainStage(self.pipeline, stage, builder, activations[0])

    def packets(self, mesh, device, activations, parameters):
        stage = self.pipeline.stage_of(device)
        biases = {f"bias.{part}": parameters[part] for part in ChainStage.parts(self.pipeline, stage)}
        runs = enumerate(activations) if stage == 0 else ()
        return biases | {f"x.{run}": array for run, array in runs}


class ChainStage(StageProgram):
    def __init__(self, pipeline, stage, builder, spec):
        self.pipeline, self.stage, self.builder, self.spec = pipeline, stage, builder, spec
        self.biases, self.top = {}, {}

    @staticmethod
    def parts(pipeline, stage):
        return range(stage, pipeline.schedule.num_parts, pipeline.num_stages)

    def begin(self):
        for part in self.parts(self.pipeline, self.stage):
            shape = self.spec.shape
            self.biases[part] = self.builder.receive(f"bias.{part}", shape, "F32", TensorSharding.replicated(1))

    def plus(self, given, chunk):
        bias = self.biases[chunk * self.pipeline.num_stages + self.stage]
        return self.builder.compute("add_last", (given, bias), given.shape, given.sharding)

    def forward(self, run, chunk, given):
        if given is None:
            given = self.builder.receive(f"x.{run}", self.spec.shape, "F32", TensorSharding.replicated(1))
        value = self.plus(given, chunk)
        if chunk * self.pipeline.num_stages + self.stage == self.pipeline.schedule.num_parts - 1:
            self.builder.give(value, f"y.{run}")
            self.top[run] = value
        return value

    def backward(self, run, chunk, given):
        value = self.plus(self.top.pop(run) if given is None else given, chunk)
        if chunk == 0 and self.stage == 0:
            self.builder.give(value, f"z.{run}")
        return value

    def end(self):
        for part, bias in self.biases.items():
            self.builder.give(bias, f"bias.{part}")


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_values_pass_all_parts_forward_and_back(name, chunks, stages):
    # Two stages with two chunks each send each other forwards and backwards at once: one way carries both.
    pipeline = Pipeline(stages, 5, schedule=name, num_chunks=chunks)
    operation = Chain(pipeline)
    activations = [np.full(3, 1000 * run, np.float32) for run in range(5)]
    parameters = [np.full(3, 2**part, np.float32) for part in range(stages * chunks)]
    run = VirtualCluster(stages, engine="in-process").run(operation, activations=activations, parameters=parameters)
    whole = 2 ** (stages * chunks) - 1
    for number in range(5):
        assert (run.outputs[-1][f"y.{number}"] == 1000 * number + whole).all()
        assert (run.outputs[0][f"z.{number}"] == 1000 * number + 2 * whole).all()
    assert run.statistics == plan(operation, stages, activations=activations, parameters=parameters)
    num_messages = 0 if stages == 1 else 2 * 5 * (stages * chunks - 1)
    assert run.statistics.messages == num_messages and run.statistics.nbytes == 12 * num_messages
    assert set(run.statistics.by_collective()) <= {"send", "receive"}


def test_messages_are_taken_in_the_order_in_which_they_are_sent():
    pipeline = Pipeline(2, 6, schedule=make_schedule("interleaved", 6, 2, 3))
    programs = Chain(pipeline).compile(pipeline.mesh, [ArraySpec((3,))] * 6, [ArraySpec((3,))] * 6)
    for program in programs:
        takes = [i.output for i in program.instructions if isinstance(i, Take)]
        assert len(takes) == len(set(takes)) == 6 * 5
        kinds = [name.split(".")[0] for name in takes]
        assert kinds != sorted(kinds) and kinds != sorted(kinds, reverse=True)  # both ways, mixed


def test_messages_record_their_axes():
    for mesh, axes in ((DeviceMesh((2, 1), ("pp", "dp")), ("pp",)), ((2, 1), ("x", "y"))):
        pipeline = Pipeline(mesh, 2)
        programs = Chain(pipeline).compile(pipeline.mesh, [ArraySpec((3,))] * 2, [ArraySpec((3,))] * 2)
        said = {i.axes for program in programs for i in program.instructions if isinstance(i, Send | Take)}
        assert said == {axes}


def test_an_operation_refuses_before_anything_starts():
    operation = Chain(Pipeline(2, 3))
    x = [np.zeros(3, np.float32)] * 3
    with pytest.raises(LayoutError, match="has a different mesh than the cluster") as failure:
        VirtualCluster(3).run(operation, activations=x, parameters=x[:2])
    assert (failure.value.got, failure.value.want) == ("'x=2' of 2 devices", "'x=3' of 3 devices")
    with pytest.raises(UsageError, match="a bias a part"):
        VirtualCluster(2).run(operation, activations=x, parameters=x)
