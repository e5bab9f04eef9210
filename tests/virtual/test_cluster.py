"""The cluster: its arguments, its results, and its errors when devices fail, hang or disagree."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.virtual.random_programs import RandomOperation
from tests.virtual.sample_arrays import plain
from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.layout import DeviceMesh
from xrank.virtual import MatMul, MatMulSharding, Mesh, VirtualCluster, engine

engines = pytest.mark.parametrize("engine", ["in-process", "processes"])


def device_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("virtual-device-")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """After a failure some may still be on their way out; none stays."""
    yield
    await_threads()
    assert device_threads() == []


def await_threads():
    for thread in device_threads():
        thread.join(20)


@engines
def test_a_function_runs_on_every_device(virtual_cluster, engine):
    mesh = DeviceMesh((2, 2), ("dp", "tp"), [2, 3, 0, 1])
    run = virtual_cluster(mesh, engine=engine).run(
        lambda device, x, y: (device.coordinate, x + device.index, y), 10, "y"
    )
    assert run.outputs == [
        ({"dp": 0, "tp": 0}, 12, "y"), ({"dp": 0, "tp": 1}, 13, "y"),
        ({"dp": 1, "tp": 0}, 10, "y"), ({"dp": 1, "tp": 1}, 11, "y"),
    ]  # fmt: skip
    assert run.statistics.nbytes == 0 and len(run.statistics.devices) == 4
    assert 0 < run.seconds < 30


def test_a_run_is_shown_in_a_few_lines(virtual_cluster):
    run = VirtualCluster((2, 2), engine="in-process").run(lambda device, x: device.all_reduce(x, "y"), np.ones((2, 3)))
    assert str(run).splitlines()[1:] == [
        "all_reduce  4 calls, 4 messages, 192 B",
        "output      of device 0: [2, 3] of float64",
    ]
    assert repr(run).startswith("<Run of 4 devices: 4 messages, 192 B, 0.")
    matmul = MatMul(MatMulSharding(("[m, k]", "[k, n]", "[m, n]")))
    run = VirtualCluster(1, engine="in-process").run(
        matmul, activations=[np.ones((2, 3))], parameters=[np.ones((3, 1))]
    )
    assert [line.split()[0] for line in str(run).splitlines()] == ["run", "from", "to", "flops", "memory", "output"]


@engines
def test_devices_have_arguments_of_their_own(virtual_cluster, engine):
    array, words = np.zeros(3), ["a"]

    def body(device, array, words):
        array += device.index + 1
        words.append(device.index)
        return array.copy(), list(words)

    run = virtual_cluster(3, engine=engine).run(body, array, words)
    assert [(list(a), w) for a, w in run.outputs] == [([n + 1.0] * 3, ["a", n]) for n in range(3)]
    assert list(array) == [0, 0, 0] and words == ["a"]


def gradients(device, x):
    """A function of floats in which any other order, or another number of threads, would show."""
    whole = device.all_gather(x, "y", dim=0)
    part = device.reduce_scatter(whole @ whole.T, "x", dim=1)
    mean = device.all_reduce(part, reduction="mean")
    device.send(mean[:1], (device.index + 1) % 4)
    return mean, device.receive((device.index - 1) % 4), device.gather(part, 0, dim=1)


@pytest.mark.parametrize("algorithm", ["push", "ring"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_both_engines_give_the_same_bits_and_counts(kind, algorithm):
    x = np.random.default_rng(0).standard_normal((33, 257)).astype(np.float32)
    x = torch.from_numpy(x) if kind == "torch" else x
    runs = [
        VirtualCluster((2, 2), engine=engine, algorithm=algorithm).run(gradients, x)
        for engine in ("in-process", "processes")
    ]
    for one, other in zip(runs[0].outputs, runs[1].outputs, strict=True):
        assert [a if a is None else plain(a) for a in one] == [a if a is None else plain(a) for a in other]
    assert runs[0].statistics == runs[1].statistics
    assert runs[0].channels == runs[1].channels
    assert runs[0].statistics.nbytes == runs[0].channels.between_devices.nbytes > 0


@engines
def test_an_operation_with_all_instructions(engine):
    mesh = DeviceMesh((2, 2), ("a", "b"))
    for seed in range(4):
        operation = RandomOperation(mesh, seed)
        run = VirtualCluster(mesh, engine=engine, algorithm="ring").run(operation)
        for device, output in enumerate(run.outputs):
            found = output if isinstance(output, dict) else {"last": output}
            assert {n: plain(a) for n, a in found.items()} == {
                n: plain(a.copy()) for n, a in operation.wanted[device].items()
            }


def test_many_devices_run_at_once(virtual_cluster):
    run = virtual_cluster((4, 4, 4), algorithm="ring").run(lambda device: int(device.all_reduce(np.int64(1))))
    assert run.outputs == [64] * 64
    assert run.statistics.messages == 64 * 2 * 63


@pytest.mark.parametrize("mesh", [4, (4,), [2, 2], (1, 2, 1, 2), Mesh(2, 2), DeviceMesh((4,), ("tp",))])
def test_a_mesh_in_any_form(virtual_cluster, mesh):
    cluster = virtual_cluster(mesh)
    assert isinstance(cluster.mesh, DeviceMesh) and cluster.mesh.size == 4
    assert repr(cluster) == f"<VirtualCluster {cluster.mesh.grid}, in-process, push>"
    assert cluster.run(lambda device: device.index).outputs == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "threads"}, "unknown engine 'threads'"),
        ({"algorithm": "tree"}, "unknown algorithm 'tree'"),
        ({"timeout_seconds": 0}, "must be positive"),
        ({"timeout_seconds": None}, "must be positive"),
        ({"timeout_seconds": "60"}, "must be positive"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        VirtualCluster(2, **options)


@pytest.mark.parametrize("mesh", ["x=2 y=2", 2.0, None, {"x": 2}, np.array([2, 2])])
def test_an_invalid_mesh_is_refused(mesh):
    with pytest.raises(UsageError, match="is not a mesh") as raised:
        VirtualCluster(mesh)
    assert "DeviceMesh" in raised.value.next_step


def yields(device):
    yield device.index


async def is_awaited(device):
    return device.index


@engines
@pytest.mark.parametrize(
    ("function", "got"),
    [(yields, "generator yields"), (is_awaited, "coroutine is_awaited"), (MatMul, "class MatMul"), (5, "5")],
)
def test_what_would_not_do_its_work_is_refused(virtual_cluster, engine, function, got):
    with pytest.raises(UsageError, match="runs operations and functions") as raised:
        virtual_cluster(2, engine=engine).run(function)
    assert got in raised.value.got


def test_functions_and_operations_take_their_arguments_each_in_its_way(virtual_cluster):
    cluster = virtual_cluster(2)
    with pytest.raises(UsageError, match="are for operations"):
        cluster.run(lambda device: None, activations=(np.ones(2),))
    with pytest.raises(UsageError, match="takes its arrays as keywords"):
        cluster.run(RandomOperation(cluster.mesh, 0), np.ones(2))


def test_arguments_that_cannot_be_copied_are_refused(virtual_cluster):
    grown = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(UsageError, match="cannot be copied, but every device needs its own"):
        virtual_cluster(2).run(lambda device, x: None, grown)


# Failures


def fail_on_one(device):
    if device.index == 1:
        raise ValueError("it broke here")
    return device.all_reduce(np.ones(3))


@engines
def test_a_device_that_raises_is_named_with_what_it_raised(virtual_cluster, engine):
    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="device 1 failed: ValueError: it broke here") as raised:
        virtual_cluster((2, 2), engine=engine).run(fail_on_one)
    assert time.monotonic() - begin < 20, "long before the deadline; here it takes milliseconds"
    error = raised.value
    assert error.rank == 1 and error.cause == "ValueError: it broke here"
    assert type(error.__cause__) is ValueError
    assert "in fail_on_one" in "".join(error.__notes__)


def test_all_failures_are_reported(virtual_cluster):
    barrier = threading.Barrier(3)

    def body(device):
        if device.index < 3:
            barrier.wait(30)
            raise ValueError(device.index)
        device.receive(0)

    with pytest.raises(RankFailedError) as raised:
        virtual_cluster(4).run(body)
    failures = raised.value.failures
    assert failures[0] is raised.value
    assert {failure.rank for failure in failures} <= {0, 1, 2}
    assert len({failure.rank for failure in failures}) == len(failures)


def test_a_device_that_exits_is_named(virtual_cluster):
    with pytest.raises(RankFailedError, match="device 0 failed: SystemExit: 3"):
        virtual_cluster(2).run(lambda device: sys.exit(3) if device.index == 0 else device.receive(0))


def test_waiting_devices_run_their_own_cleanup(virtual_cluster):
    cleaned = []

    def body(device):
        if device.index == 0:
            device.receive(1)
            raise ValueError("boom")
        device.send(np.ones(1), 0)
        try:
            device.receive(0)
        except Exception:
            cleaned.append("held up")
        finally:
            cleaned.append("finally")

    with pytest.raises(RankFailedError, match="boom"):
        virtual_cluster(2).run(body)
    await_threads()  # a busy machine may not have let it run
    assert cleaned == ["finally"]


STUCK = {
    "for each other": (lambda d: d.receive(1 - d.index), r"device 0 waits for device 1 \(send\); device 1 waits for"),
    "for one that has ended": (
        lambda d: d.all_gather(np.ones(2)) if d.index else None,
        r"device 1 waits for device 0, which has ended \(all_gather by push, call 0",
    ),
    "in the second call of a group": (
        lambda d: d.all_reduce(np.ones(2)) is not None and d.index and d.all_reduce(np.ones(2)),
        r"device 1 waits for device 0, which has ended \(all_reduce sum by push, call 1 of group",
    ),
    "for the host": (lambda d: d.receive_from_host(), r"waits for the host \(packet\)"),
}


@pytest.mark.parametrize("name", STUCK)
def test_when_nobody_can_go_on_it_is_said_at_once(virtual_cluster, name):
    function, message = STUCK[name]
    begin = time.monotonic()
    with pytest.raises(RankTimeoutError, match=message) as raised:
        virtual_cluster(2, timeout_seconds=50).run(function)
    assert time.monotonic() - begin < 30, "long before the deadline; here it takes milliseconds"
    assert raised.value.waiting_for and raised.value.next_step


def test_the_last_device_to_end_leaves_a_reported_deadlock(virtual_cluster):
    def body(device):
        if device.index == 0:
            for other in (1, 2):
                device.receive(other)
            return
        device.send(np.ones(1), 0)
        device.receive(0)

    with pytest.raises(
        RankTimeoutError, match=r"device 1 waits for device 0, which has ended.*device 2 waits"
    ) as raised:
        virtual_cluster(3).run(body)
    assert raised.value.waiting_for == (1, 2)


def test_who_is_late_is_named_with_the_place_where_it_stands(virtual_cluster, monkeypatch):
    """By a clock on which the deadline passes when the others wait, however busy the machine is."""
    let_go, is_over = threading.Event(), threading.Event()
    monkeypatch.setattr(engine, "monotonic", lambda: float(is_over.is_set()))

    def sleep_here(device):
        if device.index == 1:
            while device._links.monitor.waits.keys() != {0, 2}:
                time.sleep(0.001)
            is_over.set()
            let_go.wait()
        else:
            device.receive(1)

    begin = time.monotonic()
    try:
        with pytest.raises(RankTimeoutError, match=r"device 1 did not end within 0\.2 seconds") as raised:
            virtual_cluster(3, timeout_seconds=0.2).run(sleep_here)
        assert time.monotonic() - begin < 30, "late devices are not awaited"
    finally:
        let_go.set()
    assert raised.value.rank == 1 and raised.value.waiting_for == (1,)
    assert "device 0 waits for device 1 (send)" in raised.value.got
    assert "in sleep_here" in "".join(raised.value.__notes__)


@engines
def test_messages_never_received_are_refused(virtual_cluster, engine):
    with pytest.raises(UsageError, match="device 1 never received messages that device 0 sent") as raised:
        virtual_cluster(2, engine=engine).run(lambda d: d.send(np.ones(2), 1) if d.index == 0 else None)
    assert raised.value.rank == 1 and raised.value.got == "0 received"


# Surroundings


def test_torch_computes_with_one_thread_and_is_left_as_it_was(virtual_cluster):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run = virtual_cluster(2).run(lambda device: torch.get_num_threads())
        assert run.outputs == [1, 1]
        with pytest.raises(RankFailedError):
            virtual_cluster(2).run(fail_on_one)
        # The number of torch threads for future threads is one number per process.
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="only Linux shows threads so")
def test_the_threads_are_gone_for_the_system_too(virtual_cluster):
    """MKL cleans up after a thread under a lock, when Python has done with it; a fork would copy that lock."""

    def body(device):
        (torch.ones(64, 64) @ torch.ones(64, 64)).sum()
        return threading.get_native_id()

    for _ in range(10):
        run = virtual_cluster(16).run(body)
        assert set(map(str, run.outputs)) & set(os.listdir("/proc/self/task")) == set()


def test_threads_that_are_exiting_are_awaited_longer(virtual_cluster, monkeypatch):
    live = engine._run_device

    def live_slowly(*arguments):
        live(*arguments)
        time.sleep(0.2)  # as a busy machine lets it wait

    monkeypatch.setattr(engine, "_run_device", live_slowly)
    monkeypatch.setattr(engine, "_GRACE_SECONDS", 0.0)
    assert virtual_cluster(3).run(lambda device: device.index).outputs == [0, 1, 2]
    assert device_threads() == []


def test_a_thread_started_after_the_run_does_nothing(virtual_cluster, monkeypatch):
    """As on a busy machine, which has not let it run before."""
    live, begun, is_over = engine._run_device, [], threading.Event()

    def live_late(job, *arguments):
        if job.device == 0:
            is_over.wait(50)
        live(job, *arguments)

    def body(device):
        begun.append(device.index)
        fail_on_one(device)

    monkeypatch.setattr(engine, "_run_device", live_late)
    monkeypatch.setattr(engine, "_GRACE_SECONDS", 0.0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(RankFailedError, match="device 1 failed"):
            virtual_cluster(2).run(body)
        is_over.set()
        await_threads()
        assert begun == [1]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_devices_compute_in_the_callers_context(virtual_cluster):
    with np.errstate(divide="raise"), pytest.raises(RankFailedError, match="FloatingPointError"):
        virtual_cluster(1).run(lambda device: np.ones(1) / np.zeros(1))


def test_a_cluster_inside_a_device(virtual_cluster):
    def body(device):
        inner = VirtualCluster(2, engine="in-process").run(lambda d: int(d.all_reduce(np.int64(device.index + 1))))
        return int(device.all_reduce(np.int64(inner.outputs[0])))

    assert virtual_cluster(2).run(body).outputs == [6, 6]
