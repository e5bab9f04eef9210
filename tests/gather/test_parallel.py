"""The two context managers on real ranks."""

import gc
import os
import select
import signal
import time
from contextlib import suppress

import pytest
import torch

from tests.gather.notes import assert_soon, await_note, read_note, write_note
from tests.named_memory import named_memory
from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.gather.parallel import get_configs_parallel, get_tensors_parallel
from xrank.testing.workspace_contract import has_same_bytes, tensor_zoo


@pytest.mark.ranks(3)
def test_the_first_of_ranks_gets_all_in_their_order(rank):
    for ranks in ([0, 1, 2], [2, 0, 1], [1, 2]):
        with get_tensors_parallel(torch.full((2, 3), rank), ranks) as parts:
            if rank == ranks[0]:
                assert [int(part[0, 0]) for part in parts] == ranks
            else:
                assert parts == []
    # Yielded tensors are valid after the body, and the caller may write to them.
    if rank == 1:
        parts[1].zero_()
        assert parts[1].sum() == 0


@pytest.mark.ranks(2)
def test_every_kind_of_tensor_comes_as_it_was(rank):
    zoo = tensor_zoo()
    with get_tensors_parallel(zoo, [0, 1]) as parts:
        if rank == 0:
            assert list(parts[1]) == list(zoo)
            for name, tensor in zoo.items():
                assert has_same_bytes(parts[1][name], tensor), name
                assert not parts[1][name].requires_grad


@pytest.mark.ranks(3)
def test_none_keeps_its_place_and_shapes_may_differ(rank):
    mine = None if rank == 1 else torch.arange(10 * (rank + 1))
    with get_tensors_parallel(mine, [0, 1, 2]) as parts:
        if rank == 0:
            assert [None if part is None else len(part) for part in parts] == [10, None, 30]
    with get_tensors_parallel([mine, None], [0, 1, 2]) as parts:
        if rank == 0:
            assert parts[1] == [None, None] and len(parts[2][0]) == 30


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
def test_nothing_is_left_after_many_gathers(rank):
    def list_leftovers() -> tuple[int, list[str]]:
        gc.collect()  # of earlier tests' errors, whose frames hold groups and with them their gathers
        return len(os.listdir("/proc/self/fd")), named_memory()

    with get_tensors_parallel(torch.ones(4), [0, 1]):
        before = list_leftovers()
    for i in range(500):
        with get_tensors_parallel(torch.full((300,), i + rank), [0, 1], early_exit=i % 3 == 0) as parts:
            if rank == 0:
                assert int(parts[1][-1]) == i + 1
    with get_tensors_parallel(torch.ones(4), [0, 1]):
        assert list_leftovers()[1] == before[1]
        # Calls left early hold an arena each until the first rank is done with them: a few at most.
        assert list_leftovers()[0] <= before[0] + 4


@pytest.mark.ranks(3)
def test_nested_and_disjoint_gathers_do_not_meet(rank):
    with get_tensors_parallel(torch.tensor(rank), [0, 1, 2]) as outer:
        with get_tensors_parallel(torch.tensor(10 + rank), [0, 1, 2]) as inner:
            if rank == 0:
                assert [int(t) for t in outer] == [0, 1, 2] and [int(t) for t in inner] == [10, 11, 12]
        with get_tensors_parallel(torch.tensor(20 + rank), [1, 2]) as pair:
            if rank == 1:
                assert [int(t) for t in pair] == [21, 22]


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


@pytest.mark.ranks(2)
def test_repeated_ranks_are_refused(rank):
    with pytest.raises(UsageError, match="different ranks"), get_tensors_parallel(torch.ones(1), [0, 1, 1]):
        pass


@pytest.mark.parametrize("ranks", [[0, 1.5], ["a"], 3, None], ids=repr)
def test_ranks_that_are_no_whole_numbers_are_refused(ranks):
    with pytest.raises(UsageError, match="whole numbers"), get_tensors_parallel(torch.ones(1), ranks):
        pass


@pytest.mark.ranks(2)
def test_a_rank_that_there_is_not_is_refused_at_once(rank):
    refused = pytest.raises(UsageError, match="there is no rank 2 in a world of 2")
    with refused as raised, get_tensors_parallel(torch.ones(1), [0, 2], timeout_seconds=20):
        pass
    assert raised.value.rank == 2 and "from 0 to 1" in raised.value.want


@pytest.mark.ranks(3)
@pytest.mark.parametrize("raising", [0, 1])
@pytest.mark.parametrize("where", ["call", "body"])
def test_a_rank_that_raises_is_named_on_all_others(rank, raising, where):
    with get_tensors_parallel(torch.ones(1), [0, 1, 2]):
        pass
    expected = RankFailedError if rank != raising else UsageError if where == "call" else KeyError

    def gather_and_raise():
        started = time.monotonic()
        with pytest.raises(expected) as raised:
            mine = "not a tensor" if where == "call" and rank == raising else torch.ones(1)
            with get_tensors_parallel(mine, [0, 1, 2]):
                if rank == raising:
                    raise KeyError("the body of one rank")
        took, error = time.monotonic() - started, raised.value
        if rank != raising:
            assert error.rank == raising and error.host and error.cause
            assert ("not a tensor" if where == "call" else "the body of one rank") in str(error) + str(error.got)
        return took

    assert_soon(gather_and_raise)
    # The next gather begins anew.
    with get_tensors_parallel(torch.tensor(rank), [0, 1, 2]) as parts:
        if rank == 0:
            assert [int(t) for t in parts] == [0, 1, 2]


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


@pytest.mark.ranks(2)
def test_another_call_is_an_error_on_both_sides(rank):
    with pytest.raises((ValueError, RankFailedError)) as raised:  # noqa: SIM117
        with get_tensors_parallel(torch.ones(1), [0, 1], key="weight" if rank == 0 else "bias"):
            pass
    assert "another gather" in str(raised.value) and "bias" in str(raised.value.got)


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
        "from tests.gather.test_parallel import die_in_the_body\n"
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
