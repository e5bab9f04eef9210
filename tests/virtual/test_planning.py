"""Plans against runs: random programs count the same before and after; registers live as long as they are read."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from tests.virtual.random_programs import RandomOperation
from tests.virtual.sample_arrays import of_kind, plain
from xrank.errors import RankFailedError, UsageError
from xrank.layout import DeviceMesh
from xrank.virtual import ArraySpec, Mesh, Operation, Program, VirtualCluster, kernel, plan
from xrank.virtual.programs import (
    Communicate,
    Compute,
    Receive,
    Return,
    Send,
    Take,
    find_last_uses,
    list_inputs,
    list_outputs,
    peak_nbytes,
)

meshes = st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda shape: prod(shape) <= 9).flatmap(
    lambda shape: st.permutations(range(prod(shape))).map(lambda ranks: DeviceMesh(shape, "abc"[: len(shape)], ranks))
)  # fmt: skip


@settings(max_examples=count_of(60))
@given(meshes, st.integers(0, 1 << 30), st.sampled_from(["push", "ring"]), st.sampled_from(["numpy", "torch"]))
def test_a_plan_is_what_a_run_counts(mesh, seed, algorithm, kind):
    operation = RandomOperation(mesh, seed, kind)
    planned = plan(operation, mesh, algorithm=algorithm)
    run = VirtualCluster(mesh, engine="in-process", algorithm=algorithm, timeout_seconds=20).run(operation)
    assert run.statistics == planned
    total = planned.traffic
    assert total.sent_nbytes == total.received_nbytes == run.channels.between_devices.nbytes
    assert total.sent_messages == total.received_messages == run.channels.between_devices.messages
    for device, output in zip(mesh.ranks, run.outputs, strict=True):
        wanted = {name: plain(of_kind(array.copy(), kind)) for name, array in operation.wanted[device].items()}
        found = output if isinstance(output, dict) else {"last": output}
        assert {name: plain(array) for name, array in found.items()} == wanted


@settings(max_examples=count_of(60))
@given(meshes, st.integers(0, 1 << 30))
def test_peak_bytes_of_registers(mesh, seed):
    for program in RandomOperation(mesh, seed).compile(mesh, (), ()):
        made = {name: (number, spec) for number, i in enumerate(program.instructions) for name, spec in list_outputs(i)}
        used = {name: [n for n, i in enumerate(program.instructions) if name in list_inputs(i)] for name in made}
        held = [
            sum(s.nbytes for name, (n, s) in made.items() if n <= number <= max([n, *used[name]]))
            for number in range(len(program.instructions))
        ]
        assert peak_nbytes(program) == max(held)
        freed = [name for names in find_last_uses(program) for name in names]
        assert sorted(freed) == sorted(made)


class Made(Operation):
    """An operation of given programs; packets are ones."""

    def __init__(self, *programs):
        self.programs = tuple(Program(device, tuple(program)) for device, program in enumerate(programs))

    def compile(self, mesh, activations, parameters):
        self.specs = (tuple(activations), tuple(parameters))
        return self.programs

    def packets(self, mesh, device, activations, parameters):
        return {
            i.output: np.ones(i.spec.shape, np.float32)
            for i in self.programs[device].instructions
            if isinstance(i, Receive)
        }


FOUR, TWO = ArraySpec((4,)), ArraySpec((2,))


@pytest.mark.parametrize("given_arrays", [[np.ones((2, 3), np.float32)], [ArraySpec((2, 3))], [(2, 3)], [[2, 3]]])
def test_a_plan_takes_arrays_specs_or_shapes(given_arrays):
    operation = Made([])
    plan(operation, 1, activations=given_arrays, parameters=[ArraySpec((1,), "BF16")])
    assert operation.specs == ((ArraySpec((2, 3), "F32"),), (ArraySpec((1,), "BF16"),))


def test_a_plan_takes_every_mesh_that_a_cluster_takes():
    for mesh in (2, (2, 1), Mesh(1, 2), DeviceMesh((2,), ("tp",))):
        assert plan(Made([], []), mesh).devices[1].flops == 0


def test_a_function_cannot_be_planned():
    with pytest.raises(UsageError, match="a function cannot be planned") as raised:
        plan(lambda device: None, 2)
    assert "in-process" in raised.value.next_step


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ((4, 4), "4 is neither an array nor a shape"),
        ("44", "'4' is neither an array"),
        (((4, -4),), r"the shape \(4, -4\) is impossible"),
        (((4.0, 4),), r"the shape \(4\.0, 4\) is impossible"),
        ((ArraySpec((-1,)),), "the shape .* is impossible"),
    ],
)
def test_invalid_shapes_cannot_be_planned(told, message):
    with pytest.raises(UsageError, match=message):
        plan(Made([]), 1, activations=told)


def test_no_such_algorithm():
    with pytest.raises(UsageError, match="'tree'"):
        plan(Made([]), 1, algorithm="tree")


def test_programs_of_other_devices_are_refused():
    for run in (lambda m: plan(m, 2), lambda m: VirtualCluster(2, engine="in-process").run(m)):
        with pytest.raises(UsageError, match="other devices than the mesh 'x=2'"):
            run(Made([]))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ([Return("x", "x", FOUR)], "reads the register 'x', which no instruction has written"),
        ([Receive("x", FOUR), Receive("x", FOUR)], "writes the register 'x', which was written before"),
        ([Receive("x", FOUR), Communicate("all_reduce", (1,), "x", "y", (FOUR,), FOUR)], "does not match its group"),
        ([Receive("x", FOUR), Communicate("all_reduce", (0,), "x", "y", (), FOUR)], "does not match its group"),
    ],
)
def test_invalid_programs_are_refused_before_they_run(program, message):
    with pytest.raises(UsageError, match=message) as raised:
        plan(Made(program), 1)
    assert raised.value.rank == 0


@kernel("test.head")
def head(x):
    return x[:2]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            [Receive("x", FOUR), Compute("test.head", ("x",), ("y",), (FOUR,))],
            "'test.head' returns 'y' with a different shape",
        ),
        ([Receive("x", FOUR), Compute("test.head", ("x",), ("y", "z"), (TWO, TWO))], "returns 1 arrays"),
        ([Receive("x", FOUR), Compute("test.none", ("x",), ("y",), (FOUR,))], "unknown kernel 'test.none'"),
        ([Receive("x", FOUR), Communicate("all_sum", (0,), "x", "y", (FOUR,), FOUR)], "unknown collective"),
        ([Receive("x", FOUR), Communicate("gather", (0,), "x", "y", (FOUR,), FOUR, dim=0)], "gather has the root None"),
        (
            [Receive("x", FOUR), Communicate("all_reduce", (0,), "x", "y", (FOUR,), TWO, reduction="sum")],
            "all_reduce returns 'y' with a different shape",
        ),
    ],
)
def test_a_broken_program_is_named(program, message):
    with pytest.raises(RankFailedError, match=message) as raised:
        VirtualCluster(1, engine="in-process").run(Made(program))
    assert raised.value.rank == 0 and isinstance(raised.value.__cause__, UsageError)


def test_two_kernels_of_one_name_are_refused():
    kernel("test.head")(head)
    with pytest.raises(UsageError, match=r"two kernels are named 'test\.head'"):
        kernel("test.head")(lambda x: x)


class WrongPackets(Made):
    def __init__(self, packets, *programs):
        super().__init__(*programs)
        self.made_packets = packets

    def packets(self, mesh, device, activations, parameters):
        return self.made_packets


@pytest.mark.parametrize(
    ("packets", "message"),
    [
        ({}, "the packet 'x' for device 0 is not the packet"),
        ({"x": np.ones(4, np.float32), "y": np.ones(4)}, "the packet 'y' for device 0 is not the packet"),
        ({"x": np.ones(4)}, "the packet 'x' for device 0 is not the packet"),
        ({"x": np.ones(5, np.float32)}, "the packet 'x' for device 0 is not the packet"),
    ],
)
def test_packets_that_no_program_receives_are_refused_before_anything_runs(packets, message):
    with pytest.raises(UsageError, match=message):
        VirtualCluster(1, engine="in-process").run(WrongPackets(packets, [Receive("x", FOUR)]))


def test_outputs_are_an_array_or_a_dict_or_none():
    one = [Receive("x", FOUR), Return("x", "out", FOUR)]
    two = [*one, Return("x", "again", FOUR)]
    run = VirtualCluster(3, engine="in-process").run(Made(one, two, [Receive("x", FOUR)]))
    assert list(run.outputs[0]) == [1] * 4 and run.outputs[2] is None
    assert {name: list(array) for name, array in run.outputs[1].items()} == {"out": [1] * 4, "again": [1] * 4}
    assert [device.peak_nbytes for device in run.statistics.devices] == [16, 16, 16]
    assert [device.to_host.sent_nbytes for device in run.statistics.devices] == [16, 32, 0]
    assert [device.from_host.received_nbytes for device in run.statistics.devices] == [16] * 3
    assert run.channels.sent[-1, 0].nbytes == 16 and run.channels.received[1, -1].messages == 2


def test_a_send_without_a_receive_is_refused():
    programs = [[Receive("x", FOUR), Send("x", 1, FOUR)], []]
    with pytest.raises(UsageError, match="device 1 never received messages that device 0 sent"):
        VirtualCluster(2, engine="in-process").run(Made(*programs))
    programs = [[Receive("x", FOUR), Send("x", 1, FOUR)], [Take("y", 0, FOUR)]]
    assert VirtualCluster(2, engine="in-process").run(Made(*programs)).statistics == plan(Made(*programs), 2)
