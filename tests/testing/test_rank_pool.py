import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.testing.rank_pool import RankPool


class BoomError(Exception):
    pass


def find_rank(offset):
    import torch.distributed as dist

    total = [None] * dist.get_world_size()
    dist.all_gather_object(total, dist.get_rank() + offset)
    return dist.get_rank(), total, os.getpid()


def boom_on(bad):
    import torch.distributed as dist

    if dist.get_rank() == bad:
        raise BoomError(f"no luck on {bad}")
    dist.barrier()


def die_on(bad):
    import torch.distributed as dist

    if dist.get_rank() == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def a_rank_that_waits_here():
    threading.Event().wait()


def hang_on(bad):
    import torch.distributed as dist

    if dist.get_rank() == bad:
        a_rank_that_waits_here()


def unpicklable():
    return threading.Lock()


def environment_of():
    import torch

    return torch.get_num_threads(), os.environ.get("RANK"), os.environ.get("SLURM_PROCID")


def mesh_sum():
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).sum().full_tensor().item()


def test_forms_a_world_each_call_with_the_same_processes(rank_pool):
    first = rank_pool.run(2, find_rank, 10)
    assert [(rank, total) for rank, total, _ in first] == [(0, [10, 11]), (1, [10, 11])]
    again = rank_pool.run(2, find_rank, 0)
    assert [pid for *_, pid in again] == [pid for *_, pid in first]
    assert rank_pool.run(1, find_rank, 5)[0][1] == [5]


def test_grows_to_the_largest_world_asked(rank_pool):
    two = [pid for *_, pid in rank_pool.run(2, find_rank, 0)]
    four = [pid for *_, pid in rank_pool.run(4, find_rank, 0)]
    assert four[:2] == two and len(set(four)) == 4


def test_ranks_start_without_a_launchers_marks(rank_pool):
    assert rank_pool.run(2, environment_of) == [(1, None, None)] * 2


def test_meshes_of_one_world_are_unknown_to_the_next(rank_pool):
    assert [rank_pool.run(n, mesh_sum)[0] for n in (4, 2, 4)] == [28.0] * 3


def keep_a_model_in_a_cycle(axis_name):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=(axis_name, "b"))
    tensor = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(0)])
    module = torch.nn.Module()
    module.itself, module.whole = [module], (tensor @ tensor).redistribute(mesh, [Shard(0), Replicate()])
    return len(os.listdir("/proc/self/task"))


def test_meshes_of_earlier_worlds_leave_no_threads(rank_pool):
    _, *counts = (rank_pool.run(2, keep_a_model_in_a_cycle, axis_name, timeout_seconds=150)[0] for axis_name in "vwxyz")
    assert counts == counts[:1] * 4


def test_an_exception_is_the_cause_with_its_traceback_and_the_pool_goes_on(rank_pool):
    pids = [pid for *_, pid in rank_pool.run(2, find_rank, 0)]
    with pytest.raises(RankFailedError, match=r"rank 1 failed: .*BoomError: no luck on 1") as caught:
        rank_pool.run(2, boom_on, 1)
    assert caught.value.rank == 1 and caught.value.failures[0] is caught.value
    assert isinstance(caught.value.__cause__, BoomError)
    assert any("raise BoomError(" in note for note in caught.value.__notes__)
    assert [pid for *_, pid in rank_pool.run(2, find_rank, 0)] == pids


def test_a_result_that_cannot_travel_is_that_ranks_failure(rank_pool):
    with pytest.raises(RankFailedError, match=r"rank [01] failed: .*pickle"):
        rank_pool.run(2, unpicklable)


def test_a_hang_names_the_ranks_and_where_they_stand(rank_pool):
    for seconds in (1, 5, 25):  # a busy machine may not even have let them meet in the first, which is a failure then
        with pytest.raises((RankTimeoutError, RankFailedError)) as caught:
            rank_pool.run(2, hang_on, 1, timeout_seconds=seconds)
        stacks = "".join(getattr(caught.value, "__notes__", ()))
        if getattr(caught.value, "waiting_for", None) == (1,) and "a_rank_that_waits_here" in stacks:
            break
    assert isinstance(caught.value, RankTimeoutError) and "did not return" in str(caught.value)
    assert caught.value.waiting_for == (1,) and str(caught.value).startswith("rank 1 did not return")
    assert any("a_rank_that_waits_here" in note for note in caught.value.__notes__)
    assert rank_pool.run(2, find_rank, 0)[1][1] == [0, 1]


def test_a_death_is_reported_with_its_signal_and_the_pool_is_rebuilt(rank_pool):
    with pytest.raises(RankFailedError, match="rank 1 died: killed by SIGKILL") as caught:
        rank_pool.run(2, die_on, 1)
    assert caught.value.rank == 1
    assert rank_pool.run(2, find_rank, 0)[1][1] == [0, 1]


@pytest.mark.parametrize("world_size", [0, 9])
def test_worlds_that_no_pool_has(rank_pool, world_size):
    with pytest.raises(UsageError, match="ranks"):
        rank_pool.run(world_size, find_rank, 0)


def test_functions_inside_functions_are_refused(rank_pool):
    with pytest.raises(UsageError, match="cannot be found by its name"):
        rank_pool.run(1, lambda: None)  # its qualname has <locals>


def test_ranks_die_with_their_parent():
    script = """
        import os, signal
        from xrank.testing.rank_pool import RankPool
        pool = RankPool()
        print(*pool.run(1, os.getpid), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=150)
    pid = int(done.stdout)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.01)
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return
        except (FileNotFoundError, ProcessLookupError):
            return
    raise AssertionError(f"rank {pid} lives on")


def test_close_ends_the_ranks_and_a_later_run_starts_new_ones():
    pool = RankPool()
    pool.close()
    (pid,) = pool.run(1, os.getpid)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---- the marker


@pytest.mark.ranks(2)
def test_body_runs_as_ranks(rank, world_size, tmp_path):
    import torch.distributed as dist

    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    (tmp_path / str(rank)).write_text("here")
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("power", [2, 3])
def test_parameters_reach_the_ranks(power, rank):
    assert rank**power in (0, 1)


class TestMethods:
    @pytest.mark.ranks(2)
    def test_methods_get_a_fresh_instance(self, world_size):
        assert isinstance(self, TestMethods) and world_size == 2


def test_the_marker_refuses_bad_arguments_and_shows_values(tmp_path):
    (tmp_path / "test_inner.py").write_text(
        textwrap.dedent("""
        import threading, pytest
        @pytest.fixture
        def lock():
            return threading.Lock()

        @pytest.mark.ranks(1)
        def test_lock(lock): ...

        @pytest.mark.ranks(1)
        def test_patch(monkeypatch): ...

        @pytest.mark.ranks(99)
        def test_many(): ...

        def test_unmarked(rank): ...

        @pytest.mark.ranks(1)
        def test_skip():
            pytest.skip("seen on the rank")

        @pytest.mark.ranks(1)
        def test_assert(rank):
            assert [rank, 1] == [5, 1]
        """)
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "-p",
            "xrank.testing.plugin",
            "--strict-markers",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=150,
    )
    assert "4 failed, 1 skipped, 1 error" in done.stdout, done.stdout + done.stderr
    for text in (
        "cannot take the fixture 'lock': its value cannot be pickled",
        "cannot take the fixture 'monkeypatch': it acts on this process",
        "a pool has 1 to 8 ranks",
        "the fixture 'rank' is for tests with @pytest.mark.ranks",
        "assert [0, 1] == [5, 1]",
        "seen on the rank",
    ):
        assert text in done.stdout, text
