"""The two context managers on real ranks."""

import os
import select
import signal
import time
from contextlib import suppress

import pytest
import torch

from tests.workspace.notes import await_note, read_note, write_note
from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.workspace.parallel import get_configs_parallel, get_tensors_parallel


@pytest.mark.ranks(2)
def test_large_and_many_tensors_grow_and_reuse_the_arena(rank):
    for size in (1 << 10, 1 << 22, 1 << 20, 3 << 22, 5):
        mine = torch.arange(size, dtype=torch.int32) + rank
        with get_tensors_parallel(mine, [0, 1]) as parts:
            if rank == 0:
                assert torch.equal(parts[1], torch.arange(size, dtype=torch.int32) + 1)
    many = {f"layer.{i}": torch.full((4,), i + rank) for i in range(3000)}
    with get_tensors_parallel(many, [0, 1]) as parts:
        if rank == 0:
            assert all(int(parts[1][f"layer.{i}"][0]) == i + 1 for i in range(3000))


@pytest.mark.ranks(2)
def test_configs_keep_ties_and_nones(rank):
    shared = torch.arange(3.0)
    config = None if rank == 0 else {"a": shared, "b": [shared, (1, None)], "dtype": torch.bfloat16, 3: float("inf")}
    with get_configs_parallel(config, [0, 1], None) as configs:
        if rank == 0:
            assert configs[0] is None
            assert configs[1]["a"] is configs[1]["b"][0] and configs[1]["b"][1] == (1, None)
            assert configs[1]["dtype"] is torch.bfloat16 and configs[1][3] == float("inf")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "number",
    [10**5000, -(10**5000), 2**8192, float("nan"), "\ud800"],
    ids=["big", "negative", "just", "nan", "surrogate"],
)
def test_values_that_cannot_be_printed_come_as_they_were(rank, number):
    with get_configs_parallel({"x": number, (number,): [1]}, [0, 1], None) as configs:
        if rank == 0:
            for config in configs:
                found = [config["x"], list(config)[1][0]]
                assert found == [number] * 2 or all(one != one for one in found)  # NaN equals nothing
    with pytest.raises(UsageError, match="cannot be sent"), get_configs_parallel({number: object()}, [rank], None):
        pass


@pytest.mark.parametrize(
    "arguments", [{"ranks": [0, 10**5000]}, {"ranks": [0], "timeout_seconds": 10**5000}], ids=["rank", "time"]
)
def test_numbers_that_cannot_be_printed_are_refused(arguments):
    with pytest.raises(UsageError), get_tensors_parallel(torch.ones(1), **arguments):
        pass


@pytest.mark.ranks(1)
def test_one_rank_works_alone(rank):
    with get_tensors_parallel(torch.ones(2, requires_grad=True), [0]) as parts:
        assert len(parts) == 1 and not parts[0].requires_grad


@pytest.mark.ranks(3)
def test_a_wait_inside_a_gather_that_failed_ends_with_its_failure(rank):
    with pytest.raises(RankFailedError, match="caught") as raised:  # noqa: SIM117
        with get_tensors_parallel(torch.ones(1), [0, 1, 2]):
            with suppress(KeyError, RankFailedError), get_tensors_parallel(torch.ones(1), [0, 1, 2]):
                if rank == 1:
                    raise KeyError("caught")
            if rank == 0:  # the others never come to this one
                with get_tensors_parallel(torch.ones(1), [0, 2]):
                    pytest.fail("no rank came")
    assert raised.value.rank == 1
    with get_tensors_parallel(torch.tensor(rank), [0, 1, 2]) as parts:
        assert parts == ([0, 1, 2] if rank == 0 else [])


@pytest.mark.ranks(2)
def test_a_state_of_many_small_tensors_comes_in_one_gather_again_and_again(rank):
    for turn in range(3):
        mine = {f"layer.{i}": torch.full((i % 5 + 1,), 7 * i + turn + rank) for i in range(2000)}
        with get_tensors_parallel(mine, [0, 1]) as parts:
            for r, part in enumerate(parts):
                assert list(part) == list(mine)
                assert all(part[f"layer.{i}"].tolist() == [7 * i + turn + r] * (i % 5 + 1) for i in range(2000))


@pytest.mark.ranks(2)
def test_held_values_of_many_gathers_do_not_change(rank):
    # Sizes that are sent inline, copied out of an arena, and lent.
    held = []
    for number in range(12):
        size = (100, 9000, 60_000, 200_000)[number % 4]
        with get_tensors_parallel(torch.full((size,), 10 * number + rank), [0, 1]) as parts:
            held += parts[1:]
    assert [int(part[0]) for part in held] == ([10 * number + 1 for number in range(12)] if rank == 0 else [])
    assert all(bool((part == part[0]).all()) for part in held)


@pytest.mark.ranks(3)
def test_a_rank_that_stays_away_is_named_at_the_deadline(rank):
    with get_tensors_parallel(torch.ones(1), [0, 1, 2]):
        pass
    if rank == 2:
        # It comes too late, and receives the reason why the others gave up.
        assert await_note("0 has given up") and await_note("1 has given up")
        with suppress(RankFailedError), get_tensors_parallel(torch.ones(1), [0, 1, 2], timeout_seconds=0.7):
            pytest.fail("the others had given up")
        return
    with pytest.raises((RankTimeoutError, RankFailedError)) as raised:  # noqa: SIM117
        with get_tensors_parallel(torch.ones(1), [0, 1, 2], timeout_seconds=0.7):
            pass
    write_note(f"{rank} has given up")
    # On a busy machine rank 1 may not have come either.
    assert "rank 2" in str(raised.value) or "ranks 1-2" in str(raised.value)


def die_in_the_body(rank: int, world_size: int) -> str:
    """Kill rank 1 while the first rank's body runs, which ends when it has seen the death."""
    try:
        with get_tensors_parallel(torch.tensor(os.getpid()), [0, 1, 2]) as pids:
            if rank == 1:
                write_note("dies", str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                select.select([os.pidfd_open(int(pids[1]))], [], [])
    except RankFailedError as error:
        # Far less than any deadline here; that it is two seconds where nothing else runs, test_killing shows.
        assert error.rank == 1 and time.monotonic() - float(read_note("dies")) < 20
        return error.message
    return "nothing"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_rank_that_dies_is_named(tmp_path):
    """In processes of its own: the pool's ranks are to live."""
    import subprocess
    import sys

    program = (
        "import sys, torch.distributed as d\n"
        "rank = int(sys.argv[1])\n"
        f"d.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=rank, world_size=3)\n"
        "from tests.workspace.test_parallel import die_in_the_body\n"
        "print(die_in_the_body(rank, 3), flush=True)\n"
        "import os; os._exit(0)\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, str(r)], stdout=subprocess.PIPE, text=True)
        for r in range(3)
    ]
    said = [process.communicate(timeout=150)[0] for process in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    assert all("rank 1 failed" in said[r] for r in (0, 2)), said
