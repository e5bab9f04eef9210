"""The engine of processes: the same results as the engine of threads, in processes that leave their parent alone."""

import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import numpy as np
import pytest
import torch

from tests.sampled import sampled
from tests.virtual.remains import children, remains
from xrank.errors import RankFailedError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual import VirtualCluster, processes
from xrank.virtual.arrays import ArraySpec, bytes_of, from_bytes, kind_of, spec_of
from xrank.virtual.engine import HOST, DeviceJob, make_heading


@pytest.fixture(autouse=True)
def nothing_remains():
    """Every test here leaves what it found."""
    before = remains()
    yield
    assert not remains() - before


def test_packets_come_in_order_and_returned_arrays_outlive_the_run():
    packets = tuple(np.full((n, 1000), n, np.float32) for n in range(50))

    def body(links):
        for number, packet in enumerate(packets):
            got = links.from_device(HOST).receive(make_heading("packet", call=number))
            assert np.array_equal(got, packet)
            got += 1
            links.to_device(HOST).send(got, make_heading("return", call=number))
        return links.to_device(HOST).sent.messages

    outcome = processes.run([DeviceJob(5, body, packets), DeviceJob(2, body, packets)], timeout_seconds=30)
    assert outcome.results == (50, 50)
    for returned in outcome.returned:
        assert [array.shape for array in returned] == [(n, 1000) for n in range(50)]
        assert all((array == n + 1).all() for n, array in enumerate(returned))
        returned[7][:] = 0
    assert set(outcome.sent) == set(outcome.received) == {(HOST, 5), (HOST, 2), (5, HOST), (2, HOST)}
    assert outcome.sent == outcome.received and outcome.sent[HOST, 5].nbytes == sum(p.nbytes for p in packets)


def test_two_devices_send_each_other_more_than_any_buffer_before_they_receive():
    def swap(device):
        other = 1 - device.index
        mine = np.full((64 << 20) // 8, device.index + 0.5)
        for _ in range(2):
            device.send(mine, other)
        for number in range(5000):
            device.send(np.full(10, number), other)
        large = all((device.receive(other) == other + 0.5).all() for _ in range(2))
        return large and all((device.receive(other) == number).all() for number in range(5000))

    run = VirtualCluster(2).run(swap)
    assert run.outputs == [True, True]
    assert run.statistics.nbytes == 2 * (2 * (64 << 20) + 5000 * 80)


def test_ten_thousand_small_messages_one_by_one():
    def bounce(device):
        number = np.zeros((), np.int64)
        for _ in range(5000):
            if device.index == 0:
                device.send(number, 1)
                number = device.receive(1)
            else:
                device.send(device.receive(0) + 1, 0)
        return int(number)

    assert VirtualCluster(2).run(bounce).outputs[0] == 5000


def test_devices_have_what_the_caller_had_and_change_nothing_of_it():
    array, tensor, words = np.zeros(3), torch.zeros(3), []

    def change(device, given):
        array[:] = device.index + 1
        tensor.fill_(device.index + 1)
        given.append(device.index)
        words.append(device.index)
        os.chdir("/")
        return device.all_gather(array)[0][0] + tensor[0].item(), given, words

    given, here = [9], os.getcwd()
    run = VirtualCluster(2).run(change, given)
    assert run.outputs == [(2.0, [9, 0], [0]), (3.0, [9, 1], [1])]
    assert not array.any() and not tensor.any() and (given, words, os.getcwd()) == ([9], [], here)


def test_one_outputs_arrays_are_not_another_devices_in_the_next_run():
    """Outputs are the caller's private memory, which a forked device copies."""
    weights = VirtualCluster(2).run(lambda device: np.ones(1 << 20)).outputs

    def change(device):
        for array in weights:
            array += 1 + device.index
        device.all_gather(np.zeros(1))
        return [float(array[0]) for array in weights]

    assert VirtualCluster(2).run(change).outputs == [[2.0, 2.0], [3.0, 3.0]]
    assert [float(array.max()) for array in weights] == [1.0, 1.0]


def test_what_waits_to_be_printed_is_printed_once():
    code = """
        import atexit, sys
        from xrank.virtual import VirtualCluster

        atexit.register(print, "the end")
        print("half a line", end=", ")
        VirtualCluster(2).run(lambda device: print(f"device {device.index}"))
        print("the other half")
        assert "torch" not in sys.modules
    """
    environ = {**os.environ, "PYTHONUNBUFFERED": ""}  # empty is as if it were not there: there are buffers
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.replace(", ", "\n").splitlines()) == [
        "device 0", "device 1", "half a line", "the end", "the other half"
    ]  # fmt: skip


def test_process_state_of_a_device():
    handlers = []
    before = signal.signal(signal.SIGTERM, lambda *_: handlers.append(1))

    def look(device):
        return (
            torch.get_num_threads(),
            signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            signal.pthread_sigmask(signal.SIG_BLOCK, []),
            threading.current_thread() is threading.main_thread() and threading.active_count() == 1,
            sys.stdin.read(),
            os.getpgid(0) == os.getpid(),
        )

    threads = torch.get_num_threads()
    try:
        outputs = VirtualCluster(2).run(look).outputs
        assert outputs == [(1, True, True, set(), True, "", True)] * 2
        os.kill(os.getpid(), signal.SIGTERM)
        assert handlers == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert torch.get_num_threads() == threads and signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_parents_garbage_is_finalized_by_the_parent_alone(tmp_path):
    class Folder:
        def __init__(self):
            self.itself = self  # garbage that only a collection finds
            self.path = tmp_path / "folder"
            self.path.mkdir()

        def __del__(self):
            self.path.rmdir()

    import gc

    gc.disable()
    try:
        Folder()
        assert VirtualCluster(2).run(lambda device: gc.collect() * 0 + (tmp_path / "folder").exists()).outputs == [1, 1]
        assert (tmp_path / "folder").exists()
    finally:
        gc.enable()
    gc.collect()
    assert not (tmp_path / "folder").exists()


def test_runs_from_threads_and_inside_of_devices():
    def nested(device):
        inner = VirtualCluster(2).run(lambda d: d.all_reduce(np.array([d.index + 10 * device.index])))
        return device.all_reduce(inner.outputs[1])

    found, before = {}, children()
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: VirtualCluster(2).run(nested).outputs})) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert found == {n: [np.array([22]), np.array([22])] for n in range(3)}
    assert set(children()) <= set(before)


def test_living_threads_of_the_caller_are_no_warning():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert VirtualCluster(2).run(lambda device: device.index).outputs == [0, 1]
    finally:
        done.set()
        thread.join()


def test_ctrl_c_ends_devices_and_is_the_callers():
    def interrupt(device):
        if device.index == 1:
            os.kill(os.getppid(), signal.SIGINT)
        device.receive(1 - device.index)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        VirtualCluster(2).run(interrupt)
    assert time.monotonic() - start < 30, "long before the deadline; here it takes milliseconds"


def test_devices_end_with_their_parent():
    """A killed parent leaves no devices: the kernel ends them."""
    code = """
        import os, time
        from xrank.virtual import VirtualCluster

        def live(device):
            os.write(1, b"%d\\n" % os.getpid())  # in one piece
            time.sleep(100)

        VirtualCluster(3).run(live)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(3)]
    pidfds = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.wait()
    # The pipe ends when the last process that could write to it has.
    assert parent.stdout.read() == ""
    parent.stdout.close()
    for pidfd in pidfds:
        # Readable once it has ended; whoever reaps orphans here may be slow, or nobody.
        assert select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)


def test_processes_started_by_a_device_end_with_the_run():
    def begin(device):
        return subprocess.Popen(["sleep", "1000"]).pid

    for pid in VirtualCluster(2).run(begin).outputs:
        deadline = time.monotonic() + 30
        while _is_running(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] != b"Z"  # whoever reaps orphans here is slow
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_too_many_devices_are_refused():
    with pytest.raises(UsageError, match="300 devices need too many processes"):
        VirtualCluster(300).run(lambda device: None)
    assert VirtualCluster(1).run(lambda device: device.all_reduce(np.ones(2)).tolist()).outputs == [[1.0, 1.0]]


def test_descriptors_that_end_leave_no_process(monkeypatch):
    """The third device cannot be watched: the first two, and itself, are ended."""
    calls = []
    opened = os.pidfd_open

    def open_twice(pid):
        calls.append(pid)
        if len(calls) == 3:
            raise OSError(24, "too many open files")
        return opened(pid)

    monkeypatch.setattr(os, "pidfd_open", open_twice)
    with pytest.raises(OSError, match="too many open files"):
        VirtualCluster(4).run(lambda device: device.receive(3))
    assert len(calls) == 3


class Stubborn:
    """Can be made only by the process that made it."""

    def __reduce__(self):
        return _made_by, (os.getpid(),)


def _made_by(pid):
    if pid != os.getpid():
        raise ValueError("not here")


def test_an_object_that_cannot_be_unpickled_is_named():
    with pytest.raises(RankFailedError, match=r"device 1 failed: ValueError: not here") as caught:
        VirtualCluster(2).run(lambda device: Stubborn() if device.index else 0)
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, ValueError)
    assert caught.value.failures == (caught.value,)


def test_an_object_that_cannot_be_pickled_is_named():
    with pytest.raises(RankFailedError, match=r"device 1 failed: UsageError: the return value of .* 1 cannot be sent"):
        VirtualCluster(2).run(lambda device: (lambda: 3) if device.index else 0)


MESHES = [DeviceMesh((2, 3), ("x", "y")), DeviceMesh((2, 2, 2), ("a", "b", "c")), DeviceMesh((3,), ("x",), [7, 0, 4])]


DTYPES = ["F32", "F64", "BF16", "F16", "I32", "U8", "BOOL", "F8_E4M3"]


def script(seed, mesh):
    """Some collectives, the same on all devices."""
    chance = random.Random(seed)
    calls = []
    for _ in range(12):
        axes = tuple(chance.sample(mesh.axis_names, chance.randint(1, len(mesh.axis_names))))
        axes = tuple(axis for axis in mesh.axis_names if axis in axes)
        how = {"name": chance.choice(NAMES), "axes": axes, "dtype": chance.choice(DTYPES),
               "kind": chance.choice(["numpy", "torch"]), "rows": chance.choice([0, 1, 5, 7, 40]),
               "columns": chance.choice([1, 3, 300]), "algorithm": chance.choice(["push", "ring"]),
               "reduction": chance.choice(["sum", "max", "min", "prod"]), "seed": chance.random()}  # fmt: skip
        calls.append(how)
    return calls


NAMES = ["all_scatter", "all_gather", "joined", "all_reduce", "reduce_scatter", "broadcast", "gather", "scatter",
         "all_to_all", "shift"]  # fmt: skip


def play(device, calls):
    """Make the calls and return their results."""
    return [_called(device, how) for how in calls]


def _called(device, how):
    group = device.group(how["axes"])
    place, options = group.index(device.index), {"algorithm": how["algorithm"]}
    root = group[how["rows"] % len(group)]
    array = _made(how, device.index)
    match how["name"]:
        case "all_scatter":
            return device.all_scatter(array, group=group)
        case "all_gather":
            return device.all_gather(array, group=group, **options)
        case "joined":
            return device.all_gather(_made(how, device.index, place), group=group, dim=0, **options)
        case "all_reduce" | "reduce_scatter" as name:
            return getattr(device, name)(array, group=group, reduction=how["reduction"], **options)
        case "broadcast":
            return device.broadcast(array if device.index == root else None, root, group=group, **options)
        case "gather":
            return device.gather(array, root, group=group, **options)
        case "scatter":
            return device.scatter(array if device.index == root else None, root, group=group, **options)
        case "all_to_all":
            return device.all_to_all([array[:1] for _ in group], group=group)
        case "shift":
            device.send(array, group[(place + 1) % len(group)])
            return device.receive(group[place - 1])


def _made(how, device, more=0):
    spec = ArraySpec((how["rows"] + more, how["columns"]), how["dtype"])
    chance = np.random.default_rng([int(1e9 * how["seed"]), device])
    content = chance.integers(0, 2 if how["dtype"] == "BOOL" else 60, spec.nbytes, np.uint8)
    return from_bytes(content, spec, how["kind"])


def normalize(value):
    """A value in a form that compares bit by bit."""
    if isinstance(value, list | tuple):
        return [normalize(part) for part in value]
    return value if value is None else (kind_of(value), spec_of(value), bytes_of(value).tobytes())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("seed", sampled(range(3), 3))
def test_both_engines_give_the_same_bits_and_counts(seed, mesh):
    calls = script(seed, mesh)
    runs = [VirtualCluster(mesh, engine=engine).run(play, calls) for engine in ("processes", "in-process")]
    first, second = runs
    for ours, theirs in zip(first.outputs, second.outputs, strict=True):
        for how, one, other in zip(calls, ours, theirs, strict=True):
            assert normalize(one) == normalize(other), how
    assert first.statistics == second.statistics
    assert first.channels == second.channels
    assert first.channels.sent == first.channels.received
    assert first.statistics.nbytes == first.channels.between_devices.nbytes > 0


def test_all_pairs_of_eight_devices_at_once():
    def talk(device):
        others = [d for d in range(8) if d != device.index]
        for number in range(30):
            for other in others:
                device.send(torch.full((1 + 97 * number,), 100 * device.index + number, dtype=torch.int32), other)
        return all(
            (device.receive(other) == 100 * other + number).all().item() for number in range(30) for other in others
        )

    run = VirtualCluster((2, 4)).run(talk)
    assert all(run.outputs) and run.statistics.messages == 8 * 7 * 30
