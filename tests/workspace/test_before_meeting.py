"""Failures before ranks meet: deaths, wrong arguments, lists that disagree, threads; each on real processes."""

import logging
import os
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from tests.sampled import sampled
from tests.workspace.forked_ranks import attempt, gather, kill_self, run_ranks
from xrank.workspace.parallel import get_tensors_parallel

SOON_SECONDS = 15
"""Two seconds on a quiet machine; on a busy one a process may wait that long for a processor."""


def named(results, victim, of=None):
    for rank, result in enumerate(results):
        if rank != victim:
            assert result["error"] == "RankFailedError" and result["rank"] == (victim if of is None else of), results
            assert result["seconds"] < SOON_SECONDS, results


# ---- deaths


def die_before_the_first_gather(rank):
    if rank == 2:
        kill_self()
    return attempt(lambda: gather(rank, [0, 1, 2], timeout_seconds=1.0))


def test_a_rank_that_dies_before_its_first_gather_is_named_at_the_time_out():
    for result in run_ranks(die_before_the_first_gather, 3)[:2]:
        assert result["error"] in ("RankTimeoutError", "RankFailedError") and "rank 2" in result["text"], result
        assert result["seconds"] < SOON_SECONDS


def die_between_circles(rank, path):
    path = None if path == "memory" else path
    if rank < 2:
        gather(rank, [0, 1], workspace_path=path)
    if rank > 0:
        gather(rank, [1, 2], workspace_path=path)
    if rank == 2:
        kill_self()
    first = attempt(lambda: gather(rank, [0, 1, 2], workspace_path=path))
    assert gather(rank, [1, 0]) == ([1, 0] if rank == 1 else []), "those that live gather"
    return first


@pytest.mark.parametrize("way", ["memory", "directory"])
def test_a_rank_that_dies_between_gathers_of_other_ranks_is_named(tmp_path, way):
    named(run_ranks(die_between_circles, 3, way if way == "memory" else str(tmp_path)), 2)


def wait_for_a_slow_rank(rank):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("xrank").addHandler(handler)
    if rank == 1:
        time.sleep(11.5)
    value = gather(rank, [0, 1], key="weight")
    return [value, records]


@pytest.mark.slow
def test_a_wait_of_more_than_ten_seconds_is_logged_with_the_rank_that_is_missing():
    (value, records), (_, others) = run_ranks(wait_for_a_slow_rank, 2)
    assert value == [0, 1] and others == [] and len(records) == 1
    assert "rank 1" in records[0] and "'weight'" in records[0] and "has not called xrank" in records[0]


# ---- errors of arguments on one rank

WRONG = {
    "no time": {"timeout_seconds": 0},
    "no number": {"timeout_seconds": "soon"},
    "a URL": {"workspace_path": "https://host/folder"},
    "no path": {"workspace_path": 7},
    "a key of another type": {"key": (1, 2)},
    "ranks twice": {"ranks": [0, 1, 1]},
    "an unknown rank": {"ranks": [0, 7]},
    "no ranks": {"ranks": "ab"},
    "no group": {"group": "gloo"},
    "not in the group": {"group": -100},
}


def give_a_wrong_argument(rank, name):
    results = []
    for wrong_rank in (1, 0, 1):  # before a meeting, and after it
        for number, options in enumerate((WRONG[name], {})):
            options = dict(options if rank == wrong_rank else {})
            ranks = options.pop("ranks", [0, 1])
            results.append(attempt(lambda: gather(10 * number + rank, ranks, **options)))  # noqa: B023
    return results


@pytest.mark.parametrize("name", sampled(WRONG, 4))
def test_a_wrong_argument_fails_the_call_on_all_ranks_and_no_other(name):
    results = run_ranks(give_a_wrong_argument, 2, name)
    for turn, wrong_rank in enumerate((1, 0, 1)):
        bad, good = 2 * turn, 2 * turn + 1
        mine, other = results[wrong_rank][bad], results[1 - wrong_rank][bad]
        assert mine["error"] == "UsageError", results
        assert other["error"] == "RankFailedError" and other["rank"] == wrong_rank, results
        assert "UsageError" in other["text"] and other["seconds"] < SOON_SECONDS, results
        assert [result[good]["value"] for result in results] == [[10, 11], []], results


def give_all_a_wrong_argument(rank):
    first = attempt(lambda: gather(rank, [0, 1, 1]))
    second = attempt(lambda: gather(rank, [0, 1], timeout_seconds=-1))
    return [first["error"], second["error"], attempt(lambda: gather(rank, [0, 1])).get("value")]


def test_a_wrong_argument_on_all_ranks_fails_no_later_call():
    for rank, result in enumerate(run_ranks(give_all_a_wrong_argument, 2)):
        assert result == ["UsageError", "UsageError", [] if rank else [0, 1]]


def give_a_group_without_a_rank(rank):
    pair = dist.new_group([0, 1])
    first = attempt(lambda: gather(rank, [0, 2], group=pair) if rank == 0 else gather(rank, [0, 1, 2]))
    return [first, attempt(lambda: gather(rank, [0, 1, 2]))]


def test_ranks_are_checked_against_the_group():
    results = run_ranks(give_a_group_without_a_rank, 3)
    assert results[0][0]["error"] == "UsageError" and "not in the group" in results[0][0]["text"]
    named([first for first, _ in results[1:]], -1, of=0)
    assert [second["value"] for _, second in results] == [[0, 1, 2], [], []], results


# ---- lists that disagree


def disagree(rank, kind):
    calls = {
        "another order": ({"ranks": [0, 1]}, {"ranks": [1, 0]}),
        "another medium": ({"ranks": [0, 1]}, {"ranks": [0, 1], "workspace_path": "unused"}),
    }[kind]
    results = []
    for _ in range(2):  # before ranks have met, and after
        results.append(attempt(lambda: gather(rank, **calls[rank])))
        results.append(attempt(lambda: gather(rank, [0, 1])))
        results.append(attempt(lambda: gather(rank, [1, 0])))
    return results


@pytest.mark.parametrize("kind", ["another order", "another medium"])
def test_ranks_that_disagree_learn_whom_the_other_waits_for(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    results = run_ranks(disagree, 2, kind)
    for result in results:
        for bad in (0, 3):
            assert result[bad]["error"] in ("ContradictionError", "RankFailedError"), results
            assert result[bad]["seconds"] < SOON_SECONDS
        assert [result[good].get("value") for good in (1, 2, 4, 5)] == (
            [[0, 1], [], [0, 1], []] if result is results[0] else [[], [1, 0], [], [1, 0]]
        ), results
    if kind == "another order":
        assert "rank 0 waits for rank 1" in results[0][0]["text"] and "rank 1 waits for rank 0" in results[1][0]["text"]


def disagree_in_a_ring(rank):
    first = attempt(lambda: gather(rank, [rank, (rank + 1) % 3]))
    return [first, attempt(lambda: gather(rank, [0, 1, 2]))]


def test_three_ranks_that_wait_in_a_ring_all_raise():
    results = run_ranks(disagree_in_a_ring, 3)
    for rank, (first, second) in enumerate(results):
        assert first["error"] in ("ContradictionError", "RankFailedError"), results
        assert second["value"] == ([] if rank else [0, 1, 2]), results


# ---- one failure after another


def give_a_wrong_argument_after_a_disagreement(rank, _):
    first = attempt(lambda: gather(rank, [1, 0] if rank == 0 else [0, 1]))
    options = {"key": (1, 2)} if rank == 0 else {"timeout_seconds": 20.0}
    return [first, attempt(lambda: gather(rank, [0, 1], **options)), gather(rank, [0, 1])]


def test_a_wrong_argument_after_a_disagreement_fails_one_call():
    (first, wrong, values), (second, told, _) = run_ranks(give_a_wrong_argument_after_a_disagreement, 2, "-")
    assert "ContradictionError" in (first["error"], second["error"])
    assert wrong["error"] == "UsageError" and values == [0, 1]
    assert told["error"] == "RankFailedError" and told["rank"] == 0, told


def give_wrong_ranks_one_after_another(rank, _):
    store = dist.distributed_c10d._get_default_store()
    results = [attempt(lambda: gather(rank, [1, 2, 0, 1] if rank == 1 else [1, 2, 0]))]
    store.add("failed", 1)
    while store.add("failed", 0) < 3:
        time.sleep(0.002)
    if rank > 0:
        results.append(attempt(lambda: gather(rank, [2, 1, 2] if rank == 2 else [2, 1], timeout_seconds=20.0)))
        results.append(gather(rank, [2, 1]))
    return results


def test_wrong_ranks_one_after_another_are_each_named():
    (zero,), (one, told, _), (two, wrong, values) = run_ranks(give_wrong_ranks_one_after_another, 3, "-")
    assert one["error"] == wrong["error"] == "UsageError" and values == [2, 1]
    assert zero["rank"] == two["rank"] == 1
    assert told["error"] == "RankFailedError" and told["rank"] == 2, told


# ---- threads


def gather_in_two_threads(rank, groups):
    # Thread 0 belongs to the main group, or each to one of its own.
    made = [dist.new_group([0, 1]) for _ in range(2)] if groups == "two" else [None, None]
    results = []
    both = threading.Barrier(2)

    def work(kind):
        both.wait()
        gather_often(kind)
        both.wait()  # a thread that has ended leaves the group to the other

    def gather_often(kind):
        for number in range(14):
            value = 1000 * kind + 10 * number
            result = attempt(lambda: gather(value + rank, [0, 1], group=made[kind], timeout_seconds=30))  # noqa: B023
            results.append([value, result])
            if "error" in result:
                return

    threads = [threading.Thread(target=work, args=(kind,)) for kind in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results, [attempt(lambda: gather(rank, [0, 1])).get("value") for _ in range(2)]]


def test_two_threads_of_one_group_raise_and_never_mix():
    results = run_ranks(gather_in_two_threads, 2, "one")
    for value, result in results[0][0]:
        assert result.get("value") in (None, [value, value + 1]), results
    errors = [result.get("error") for results_of_rank, _ in results for _, result in results_of_rank]
    assert "UsageError" in errors, results
    # The failure of the second thread may have been the first one's next gather.
    assert [after[-1] for _, after in results] == [[0, 1], []], results


def test_a_group_for_each_thread_works():
    results = run_ranks(gather_in_two_threads, 2, "two")
    for rank, (gathers, _) in enumerate(results):
        assert len(gathers) == 28
        assert all(result.get("value") == ([] if rank else [value, value + 1]) for value, result in gathers), results


def leave_in_another_thread(rank):
    def enter_and_leave():
        entered = get_tensors_parallel(torch.ones(1), [0, 1])
        entered.__enter__()
        if rank == 0:
            entered.__exit__(None, None, None)
            return
        raised = []

        def leave():
            try:
                entered.__exit__(None, None, None)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        raise raised[0]

    return [attempt(enter_and_leave), attempt(lambda: gather(rank, [0, 1]))]


def test_a_gather_left_in_another_thread_is_an_error_on_all():
    first, second = run_ranks(leave_in_another_thread, 2)
    assert second[0]["error"] == "UsageError" and first[0]["error"] == "RankFailedError" and first[0]["rank"] == 1
    assert (first[1]["value"], second[1]["value"]) == ([0, 1], [])


# ---- reports of failures


class MuteError(Exception):
    """An error without a text."""

    def __str__(self):
        raise RuntimeError("no text")


def raise_without_a_text(rank):
    def body():
        with get_tensors_parallel(torch.ones(1), [0, 1]):
            if rank == 1:
                raise MuteError

    return [attempt(body), attempt(lambda: gather(rank, [0, 1]))]


def test_an_exception_without_a_text_comes_through_and_is_reported():
    first, second = run_ranks(raise_without_a_text, 2)
    assert second[0]["error"] == "MuteError"
    assert first[0]["error"] == "RankFailedError" and "MuteError" in first[0]["text"]
    assert (first[1]["value"], second[1]["value"]) == ([0, 1], [])


def interrupt_the_report(rank):
    from xrank.ranks.group import RankGroup

    report = RankGroup.fail

    def fail(circle, record):
        RankGroup.fail = report
        signal.raise_signal(signal.SIGINT)

    def body():
        with get_tensors_parallel(torch.ones(1), [0, 1]):
            if rank == 1:
                RankGroup.fail = fail
                raise KeyError("the user's")

    return [attempt(body), attempt(lambda: gather(rank, [0, 1]))]


def test_a_signal_during_the_report_of_a_failure_loses_neither():
    first, second = run_ranks(interrupt_the_report, 2)
    assert second[0]["error"] == "KeyError" and first[0]["error"] == "RankFailedError"
    assert "the user's" in first[0]["text"]
    assert (first[1]["value"], second[1]["value"]) == ([0, 1], [])


# ---- small things


def gather_odd_tensors(rank):
    odd = [torch.tensor([1 + 2j]).conj(), torch.ones(1).expand(3), torch.tensor([1 + 2j]).conj().imag]
    with get_tensors_parallel(odd, [0, 1]) as parts:
        for part in parts:
            assert not any(tensor.is_conj() or tensor.is_neg() for tensor in part)
            part[1][0] = 7
            assert part[1].tolist() == [7, 1, 1] and part[0].tolist() == [1 - 2j] and part[2].tolist() == [-2]
    return len(parts)


def test_the_first_ranks_own_tensors_are_plain_too():
    assert run_ranks(gather_odd_tensors, 2) == [2, 0]


def exceed_the_file_size(rank, path):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    def send():
        with get_tensors_parallel(torch.ones(1 << 20), [0, 1], workspace_path=None if path == "memory" else path):
            pass

    return attempt(send)


@pytest.mark.parametrize("way", ["memory", "directory"])
def test_a_limit_of_file_sizes_is_named(tmp_path, way):
    first, second = run_ranks(exceed_the_file_size, 2, way if way == "memory" else str(tmp_path))
    assert second["error"] == "UsageError" and "ulimit -f" in second["text"]
    assert first["error"] == "RankFailedError" and first["rank"] == 1


def compile_a_gather(rank):
    import torch._dynamo.convert_frame as convert_frame

    traced, trace = [], convert_frame.ConvertFrameAssert.__call__

    def note(self, frame, *args, **kwargs):
        traced.append(frame.f_code.co_filename)
        return trace(self, frame, *args, **kwargs)

    convert_frame.ConvertFrameAssert.__call__ = note

    def step(x):
        with get_tensors_parallel(x * 2, [0, 1]) as parts:
            total = sum(parts) if parts else x
        return total.sin()

    compiled = torch.compile(step, backend="eager")
    values = [float(compiled(torch.ones(1))) for _ in range(3)]
    with suppress(ValueError):
        traced.remove(__file__)
    return [values, len([name for name in traced if "/xrank/workspace/" in name or "/xrank/ranks/" in name])]


def test_the_compiler_leaves_gathers_alone():
    results = run_ranks(compile_a_gather, 2)
    for rank, (values, num_traced) in enumerate(results):
        want = float(torch.tensor(1.0 if rank else 4.0).sin())
        assert values == pytest.approx([want] * 3)
        assert num_traced <= 8, "the entries alone"


def test_a_rank_that_does_not_exist_is_refused_without_a_process_group():
    from xrank.errors import UsageError

    with pytest.raises(UsageError, match="no rank 1 in a world of 1"), get_tensors_parallel(torch.ones(1), [1]):
        pass
