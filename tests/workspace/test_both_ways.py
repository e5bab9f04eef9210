"""Gathers on 2, 3, 4 and 8 real ranks, through memory and through a directory."""

import gc
import os
import socket
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest
import torch

from tests.named_memory import named_memory
from tests.open_files import open_files
from tests.workspace.notes import assert_soon, await_note, read_note, write_note
from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.testing.workspace_contract import has_same_bytes, tensor_zoo
from xrank.workspace.parallel import get_configs_parallel, get_tensors_parallel


def worlds(*counts):
    """Run a test's body in a world of each of these numbers of ranks; two and four are enough for `make test`."""
    cases = [pytest.param(n, marks=[pytest.mark.ranks(n), *([pytest.mark.slow] if n == 3 else [])]) for n in counts]
    return pytest.mark.parametrize("num_ranks", cases)


@pytest.fixture(params=["memory", "directory"])
def workspace_path(request, tmp_path):
    return None if request.param == "memory" else str(tmp_path / "messages")


@worlds(2, 3, 4, 8)
def test_the_first_gets_all_in_the_order_of_ranks(rank, num_ranks, workspace_path):
    world = list(range(num_ranks))
    for ranks in (world, world[::-1], world[1:] + world[:1], world[1:]):
        # Small and large ones go different ways.
        for size in (3, 20_000):
            with get_tensors_parallel(
                torch.full((size,), 10 * rank), ranks, workspace_path=workspace_path, key=f"{ranks}"
            ) as parts:
                want = [[10 * r] * size for r in ranks] if rank == ranks[0] else []
                assert [part.tolist() for part in parts] == want


@worlds(2, 3, 4)
def test_every_kind_of_tensor_comes_as_it_was(rank, num_ranks, workspace_path):
    mine = tensor_zoo() | {"rank": torch.tensor(rank)}
    with get_tensors_parallel(mine, range(num_ranks), workspace_path=workspace_path) as parts:
        for r, part in enumerate(parts):
            assert list(part) == list(mine) and part["rank"] == r
            for name, tensor in tensor_zoo().items():
                assert has_same_bytes(part[name], tensor), name
                assert type(part[name]) is torch.Tensor and not part[name].requires_grad
    for name, tensor in tensor_zoo().items():
        with get_tensors_parallel(tensor, range(num_ranks), workspace_path=workspace_path, key=name) as parts:
            assert all(has_same_bytes(part, tensor) for part in parts), name


@worlds(2, 3, 4)
def test_none_keeps_its_place(rank, num_ranks, workspace_path):
    ranks = list(range(num_ranks))
    for nobody in (*ranks, None):
        config = None if rank == nobody or nobody is None else {"of": rank, "w": torch.ones(rank)}
        with get_configs_parallel(config, ranks, None, workspace_path) as configs:
            want = [None if r == nobody or nobody is None else r for r in ranks] if rank == 0 else []
            assert [config and config["of"] for config in configs] == want
            assert all(config is None or config["w"].tolist() == [1.0] * config["of"] for config in configs)


@worlds(2, 3)
def test_stages_of_one_length_need_no_care_and_uneven_ones_are_an_error_on_all_sides(rank, num_ranks, workspace_path):
    ranks = list(range(num_ranks))

    def gather_stage(num_layers):
        for layer in range(num_layers):
            with get_configs_parallel({"layer": layer}, ranks, None, workspace_path, key=f"layer {layer}") as configs:
                assert configs == ([{"layer": layer}] * num_ranks if rank == 0 else [])
        with get_configs_parallel({"ln_f": 1}, ranks, None, workspace_path, key="ln_f") as configs:
            assert configs == ([{"ln_f": 1}] * num_ranks if rank == 0 else [])

    gather_stage(3)
    for longer in (0, ranks[-1]):
        with pytest.raises((ValueError, RankFailedError)) as raised:
            gather_stage(3 if rank == longer else 2)
        said = f"{raised.value} {raised.value.got} {getattr(raised.value, 'want', '')}"
        assert "a different gather" in said and "ln_f" in said and "layer 2" in said
    gather_stage(1)


@pytest.mark.ranks(4)
def test_subsets_gather_at_once_and_do_not_meet(rank, workspace_path):
    def gather(ranks, number):
        with get_tensors_parallel(
            torch.full((3000,), 100 * number + rank), ranks, workspace_path=workspace_path
        ) as parts:
            assert [int(part[-1]) for part in parts] == ([100 * number + r for r in ranks] if rank == ranks[0] else [])

    mine = [0, 1] if rank < 2 else [3, 2]
    for number in range(5):
        gather(mine, number)
        gather([rank % 2, rank % 2 + 2], number)
        if rank != 2:
            gather([3, 1, 0], number)
    # One pair is inside a body until the other has gathered again and again.
    if rank < 2:
        with get_tensors_parallel(torch.tensor(rank), [0, 1], workspace_path=workspace_path) as parts:
            assert await_note("the others are done 2") and await_note("the others are done 3")
        assert parts == ([0, 1] if rank == 0 else [])
    else:
        for number in range(5):
            gather([2, 3], number)
        write_note(f"the others are done {rank}")
    # One pair fails, which is nothing to the other, nor to all of them later.
    with suppress(KeyError, RankFailedError), get_tensors_parallel(None, mine, workspace_path=workspace_path):
        if rank == 1:
            raise KeyError("of one pair")
        if rank == 0:
            assert not await_note("nothing", 0.1)
    gather([0, 1, 2, 3], 9)


class Unsendable:
    pass


@worlds(2, 4, 8)
@pytest.mark.parametrize("raising", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("where", ["before", "before a meeting", "call", "body"])
def test_a_rank_that_raises_is_named_on_all_others_within_a_second(rank, num_ranks, workspace_path, raising, where):
    ranks = list(range(num_ranks))
    raising = ranks[raising]
    with get_tensors_parallel(torch.ones(1), ranks, workspace_path=workspace_path):
        write_note(f"pid of {rank}", str(os.getpid()))

    def gather_and_raise():
        with get_configs_parallel({"w": torch.ones(9)}, ranks, None, workspace_path):
            if rank == raising:
                write_note(f"raised {turn}", str(time.monotonic()))
                if where.startswith("before"):
                    raise KeyError("on one rank")
            inner = ranks[::-1] if where == "before a meeting" else ranks
            config = Unsendable() if where == "call" and rank == raising else None
            with get_configs_parallel(config, inner, None, workspace_path):
                if rank == raising:
                    assert rank == 0 or await_note(f"the first's body is over {turn}")
                    write_note(f"raised {turn}", str(time.monotonic()))
                    raise KeyError("on one rank")
                if rank == 0:
                    write_note(f"the first's body is over {turn}")

    expected = RankFailedError if rank != raising else UsageError if where == "call" else KeyError

    def hear():
        nonlocal turn
        turn += 1
        with pytest.raises(expected) as raised:
            gather_and_raise()
        heard_at, error = time.monotonic(), raised.value
        if rank != raising:
            assert (error.rank, error.host) == (raising, socket.gethostname())
            assert error.pid == int(read_note(f"pid of {raising}"))
            assert ("Unsendable" if where == "call" else "on one rank") in error.cause
        # The next gather begins with a new meeting.
        with get_tensors_parallel(torch.tensor(rank), ranks, workspace_path=workspace_path) as parts:
            assert parts == (ranks if rank == 0 else [])
        return heard_at - float(read_note(f"raised {turn}"))

    turn = 0
    assert_soon(hear)


@worlds(2, 3)
def test_all_leave_together_when_all_bodies_have_ended(rank, num_ranks, workspace_path):
    ranks = list(range(num_ranks))
    for slow in (0, ranks[-1]):
        with get_tensors_parallel(torch.full((5000,), rank), ranks, workspace_path=workspace_path):
            if rank == slow:
                assert not any(await_note(f"{r} left {slow}", 0.1) for r in ranks)
                write_note(f"{slow} is ready")
        assert read_note(f"{slow} is ready") is not None
        write_note(f"{rank} left {slow}")


@worlds(2, 3)
def test_writers_with_early_exit_leave_while_the_first_rank_is_in_its_body(rank, num_ranks, workspace_path):
    ranks = list(range(num_ranks))
    for number in range(5):
        with get_tensors_parallel(
            torch.full((5000,), 10 * number + rank), ranks, workspace_path=workspace_path, early_exit=True
        ) as parts:
            if rank == 0:
                assert all(await_note(f"{r} left {number}") for r in ranks[1:])
                assert [int(part[-1]) for part in parts] == [10 * number + r for r in ranks]
        write_note(f"{rank} left {number}")


@worlds(3)
def test_a_rank_that_left_early_receives_a_failure_in_the_next_gather(rank, num_ranks, workspace_path):
    def gather(early_exit=False):
        return get_tensors_parallel(
            torch.full((5,), rank), [0, 1, 2], workspace_path=workspace_path, early_exit=early_exit, timeout_seconds=20
        )

    for last in (1, 2):  # the ranks from `last` on leave early
        try:
            with gather(early_exit=rank >= last):
                if rank == 0:
                    assert all(await_note(f"{r} left {last}") for r in range(last, 3))
                    raise KeyError("the first's")
        except (KeyError, RankFailedError):
            assert rank < last
        else:
            assert rank >= last
            write_note(f"{rank} left {last}")
        with pytest.raises(RankFailedError, match='rank 0 failed: KeyError: "the first\'s"') as raised, gather():
            pass
        assert raised.value.rank == 0
        with gather() as parts:
            assert [int(part[0]) for part in parts] == ([0, 1, 2] if rank == 0 else [])


@worlds(2)
@pytest.mark.parametrize("end", [None, SystemExit])
def test_a_process_forked_in_a_body_does_not_speak_for_its_rank(rank, num_ranks, workspace_path, end):
    for number in range(2):
        pid = -1
        with suppress(SystemExit):
            with get_tensors_parallel(torch.full((5,), rank), [0, 1], workspace_path=workspace_path) as parts:
                pid = os.fork() if rank == 1 else -1
                if pid == 0 and end is not None:
                    raise end
                if pid > 0:
                    assert os.waitpid(pid, 0) == (pid, 0)
                    assert not await_note(f"0 left {number}", 0.1)
            write_note(f"{rank} left {number}") if pid != 0 else None
        if pid == 0:
            os._exit(0)
        assert [int(part[0]) for part in parts] == ([0, 1] if rank == 0 else [])


def list_leftovers():
    """Return a process's open files and threads, and the ranks' shared memory."""
    gc.collect()  # of earlier tests' errors, whose frames hold groups and with them their gathers
    leads_to = [name.rstrip("0123456789[]") for name in open_files().values()]
    beats = [thread for thread in threading.enumerate() if thread.name == "xrank heartbeat"]
    # The heartbeat's thread has the file of the ranks' store open every now and then.
    leads_to = [name for name in leads_to if "/store-" not in name]
    return sorted(leads_to), len(beats), named_memory()


@pytest.mark.ranks(2)
def test_nothing_is_left_after_many_gathers(rank, workspace_path, num_repeats):
    def gather(number, early_exit=False):
        size = (5, 300, 70_000)[number % 3]
        with get_tensors_parallel(
            torch.full((size,), number + rank), [0, 1], workspace_path=workspace_path, early_exit=early_exit
        ) as parts:
            assert [int(part[-1]) for part in parts] == ([number, number + 1] if rank == 0 else [])

    for number in range(6):
        gather(number)
    before = list_leftovers()
    for number in range(6 * num_repeats if workspace_path is None else num_repeats):
        gather(number, early_exit=number % 5 == 0)
    for number in range(6):
        gather(number)
    after = list_leftovers()
    assert after[1:] == before[1:]
    # Calls left early hold an arena each until the first rank is done with them: a few at most.
    assert len(after[0]) <= len(before[0]) + 4, (before, after)
    if workspace_path is not None:
        assert not Counter(after[0]) - Counter(before[0])
        # A writer removes its file when it leaves, which the first rank does not wait for; by its next gather it has.
        with get_tensors_parallel(None, [0, 1], workspace_path=workspace_path):
            assert os.listdir(workspace_path) == []


@pytest.mark.parametrize("dropping", [0, 1])
@worlds(2, 3)
def test_a_gather_that_was_entered_and_dropped_fails_on_all_others(rank, num_ranks, workspace_path, dropping):
    def gather():
        return get_tensors_parallel(torch.full((4,), rank), range(num_ranks), workspace_path=workspace_path)

    for _ in range(2):
        began = time.monotonic()
        if rank == dropping:
            dropped = gather()
            dropped.__enter__()
            del dropped
        else:
            with pytest.raises(RankFailedError, match="entered but never left") as caught, gather():
                pass
            assert caught.value.rank == dropping and time.monotonic() - began < 20
        with gather() as parts:
            assert [int(part[0]) for part in parts] == ([*range(num_ranks)] if rank == 0 else [])


@pytest.mark.parametrize("closing", [0, 1])
@worlds(2)
def test_a_gather_that_another_thread_closes_fails_on_all(rank, num_ranks, workspace_path, closing):
    def gather():
        return get_tensors_parallel(torch.full((4,), rank), [0, 1], workspace_path=workspace_path)

    if rank == closing:
        entered, errors = gather(), []
        entered.__enter__()

        def leave():
            try:
                entered.__exit__(None, None, None)
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert "in the thread that entered it" in errors[0].next_step
    else:
        began = time.monotonic()
        with pytest.raises(RankFailedError, match="ends in") as caught, gather():
            pass
        assert caught.value.rank == closing and time.monotonic() - began < 20
    with gather() as parts:
        assert len(parts) == 2 * (rank == 0)


@worlds(2)
def test_the_first_rank_leaves_at_its_deadline_whatever_another_does(rank, num_ranks, workspace_path):
    """The other rank has entered the gather, and neither leaves it nor looks at anything."""
    kept = get_tensors_parallel(torch.ones(4), [0, 1], workspace_path=workspace_path, timeout_seconds=3)
    kept.__enter__()
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(RankTimeoutError) as caught:
            kept.__exit__(None, None, None)
        assert caught.value.waiting_for == (1,) and time.monotonic() - began < 3 + 3.5
        write_note(f"gave up {workspace_path}")
    else:
        assert await_note(f"gave up {workspace_path}")
        with pytest.raises(RankFailedError, match="did not end the body"):
            kept.__exit__(None, None, None)
