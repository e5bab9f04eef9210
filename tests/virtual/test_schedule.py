"""Schedules: their closed forms at every size, and that none can be made in which someone takes what is not sent."""

from dataclasses import replace

import numpy as np
import pytest

from xrank.errors import UsageError
from xrank.virtual.pipeline import SCHEDULES, Schedule, StageWork, make_schedule

RUNS = (*range(1, 13), 17, 32)
STAGES = (1, 2, 3, 4, 6, 8)
SIZES = [(runs, stages) for runs in RUNS for stages in STAGES]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_cycles_and_bubble_are_those_of_the_closed_forms(name):
    for runs, stages in SIZES:
        schedule = make_schedule(name, runs, stages)
        assert schedule.num_cycles == 2 * (runs + stages - 1)
        assert schedule.bubble_fraction == pytest.approx((stages - 1) / (runs + stages - 1))


def test_gpipe_keeps_every_run_and_1f1b_no_more_than_there_are_stages_to_come():
    for runs, stages in SIZES:
        assert make_schedule("gpipe", runs, stages).peak_live_activations == (runs,) * stages
        peaks = make_schedule("1f1b", runs, stages).peak_live_activations
        assert peaks == tuple(min(runs, stages - stage) for stage in range(stages))


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved_stages_are_idle_less(chunks):
    for runs, stages in SIZES:
        schedule = make_schedule("interleaved", runs, stages, chunks)
        assert schedule.num_cycles == 2 * (chunks * max(runs, stages) + min(runs, stages) - 1)
        if runs >= stages:
            assert schedule.bubble_fraction == pytest.approx((stages - 1) / (chunks * runs + stages - 1))
        plain = make_schedule("1f1b", runs, stages)
        if chunks == 1:
            assert schedule.stages == plain.stages
        elif stages > 1 and runs > 1:
            assert schedule.bubble_fraction < plain.bubble_fraction
        # The forwards before the first backward, plus one: no stage keeps more than necessary.
        group = max(map(len, np.array_split(range(runs), max(1, runs // stages))))
        wanted = ((chunks - 1) * group + 2 * (stages - 1 - stage) + 1 for stage in range(stages))
        if chunks > 1:
            assert schedule.peak_live_activations == tuple(min(chunks * runs, live) for live in wanted)


def test_1f1b_as_drawn_in_its_paper():
    # PipeDream-flush of 4 runs over 3 stages: F forward, B backward, of run 0 to 3; a dot is an idle cycle.
    drawn = [
        "F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3",
        ".. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..",
        ".. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..",
    ]
    schedule = make_schedule("1f1b", 4, 3)
    for stage, line in enumerate(drawn):
        works = [schedule.find_work(stage, cycle) for cycle in range(schedule.num_cycles)]
        assert " ".join(".." if work is None else work.direction[0].upper() + str(work.run) for work in works) == line


def test_interleaved_passes_runs_in_groups_of_as_many_as_there_are_stages():
    order = [
        (work.run, work.chunk)
        for work in make_schedule("interleaved", 4, 2, 2).stages[0]
        if work.direction == "forward"
    ]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]


def test_backwards_come_in_the_order_of_the_runs_whatever_the_schedule():
    for runs, stages in SIZES:
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
            schedule = make_schedule(name, runs, stages, chunks)
            for works in schedule.stages:
                for chunk in range(schedule.num_chunks):
                    backwards = [work.run for work in works if (work.direction, work.chunk) == ("backward", chunk)]
                    assert backwards == list(range(runs))


def test_in_order_gives_every_work_after_what_it_needs():
    schedule = make_schedule("interleaved", 5, 3, 2)
    done = set()
    for stage, work in schedule.iterate_works():
        part = work.chunk * 3 + stage
        if work.direction == "forward":
            assert part == 0 or ("forward", work.run, part - 1) in done
        else:
            assert ("forward", work.run, part) in done
            assert part == 5 or ("backward", work.run, part + 1) in done
        done.add((work.direction, work.run, part))
    assert len(done) == 2 * 5 * 6


def test_names_make_their_schedules():
    assert [make_schedule(name, 3, 2).name for name in SCHEDULES] == list(SCHEDULES)
    assert make_schedule("interleaved", 3, 2, 2).num_chunks == 2
    with pytest.raises(UsageError, match="unknown schedule 'zb'") as failure:
        make_schedule("zb", 3, 2)
    assert failure.value.want == "one of gpipe, 1f1b, interleaved"
    with pytest.raises(UsageError, match="'1f1b' has one chunk per stage"):
        make_schedule("1f1b", 3, 2, 2)


@pytest.mark.parametrize(("runs", "stages"), [(0, 1), (1, 0), (-3, 2), (True, 2), (2.0, 2), ("2", 2)])
def test_invalid_counts_are_refused(runs, stages):
    for name in SCHEDULES:
        with pytest.raises(UsageError, match="a pipeline has 1 or more"):
            make_schedule(name, runs, stages)
    with pytest.raises(UsageError, match="1 or more chunks"):
        make_schedule("interleaved", 2, 2, 0)


def with_works(schedule, stage, works):
    stages = list(schedule.stages)
    stages[stage] = tuple(works)
    return replace(schedule, stages=tuple(stages))


def test_a_valid_custom_schedule_is_accepted():
    # The first stage does its backwards two cycles later than it could.
    schedule = make_schedule("gpipe", 2, 2)
    later = [
        work if work.direction == "forward" else replace(work, cycle=work.cycle + 2) for work in schedule.stages[0]
    ]
    slow = with_works(schedule, 0, later)
    assert slow.num_cycles == schedule.num_cycles + 2
    assert slow.bubble_fraction == pytest.approx(1 - 8 / (2 * slow.num_cycles))


def test_a_forward_before_it_is_sent_is_refused():
    schedule = make_schedule("gpipe", 2, 2)
    sooner = [replace(work, cycle=work.cycle - 1) for work in schedule.stages[1]]
    with pytest.raises(UsageError, match="'gpipe' is impossible") as failure:
        with_works(schedule, 1, sooner)
    assert failure.value.got == "the forward of run 0 on part 1 of the model in cycle 0"
    assert failure.value.want == "a cycle after 0, the cycle of the forward on part 0"


def test_a_backward_before_it_is_sent_is_refused():
    schedule = make_schedule("gpipe", 2, 2)
    first = schedule.stages[0]
    sooner = [*first[:2], *(replace(work, cycle=work.cycle - 1) for work in first[2:])]
    with pytest.raises(UsageError, match="is impossible") as failure:
        with_works(schedule, 0, sooner)
    assert failure.value.got == "the backward of run 0 on part 0 of the model in cycle 3"
    assert failure.value.want == "a cycle after 3, the cycle of the backward on part 1"


def test_a_backward_without_its_forward_is_refused():
    with pytest.raises(UsageError, match="is impossible") as failure:
        Schedule("own", 1, 1, 1, ((StageWork(0, "backward", 0), StageWork(1, "forward", 0)),))
    assert "after 1, the cycle of the forward on part 0" in failure.value.want


@pytest.mark.parametrize(
    ("works", "got"),
    [
        ([StageWork(0, "forward", 0)], "1 works"),
        ([StageWork(0, "forward", 0), StageWork(0, "backward", 0)], "after cycle 0"),
        ([StageWork(1, "forward", 0), StageWork(0, "backward", 0)], "after cycle 1"),
        ([StageWork(0, "forward", 0), StageWork(1, "forward", 0)], "a second time"),
        ([StageWork(0, "forward", 1), StageWork(1, "backward", 1)], "run 1, chunk 0"),
        ([StageWork(0, "forward", 0, 1), StageWork(1, "backward", 0, 1)], "run 0, chunk 1"),
        ([StageWork(0, "forward", 0, -1), StageWork(1, "backward", 0)], "run 0, chunk -1"),
    ],
)
def test_works_that_are_missing_doubled_or_of_nothing_are_refused(works, got):
    with pytest.raises(UsageError, match="is impossible") as failure:
        Schedule("own", 1, 1, 1, (tuple(works),))
    assert got in failure.value.got


def test_a_schedule_with_a_wrong_number_of_stages_is_refused():
    with pytest.raises(UsageError, match="is impossible") as failure:
        replace(make_schedule("gpipe", 2, 2), num_stages=3)
    assert (failure.value.got, failure.value.want) == ("2 stages", "3 stages")


def test_gpipe_works_in_the_cycles_in_which_it_must():
    # Stage p begins its forwards in cycle p and its backwards in cycle R + 2S - 2 - p, and then does one a cycle.
    for runs, stages in SIZES:
        schedule = make_schedule("gpipe", runs, stages)
        for stage in range(stages):
            for run in range(runs):
                assert schedule.find_work(stage, stage + run) == StageWork(stage + run, "forward", run)
                cycle = runs + 2 * stages - 2 - stage + run
                assert schedule.find_work(stage, cycle) == StageWork(cycle, "backward", run)
