"""How a rank that works hears that another has failed, and which processes are a team."""

import pytest

from xrank.errors import RankFailedError, UsageError
from xrank.ranks import team as module
from xrank.ranks.team import SharedTeam, find_launch

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4"}
SRUN = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
BARE = {"RANK": "1", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "distributed", "place"),
    [
        ({}, False, None),
        (TORCHRUN, False, (1, 4)),
        (TORCHRUN, True, (1, 4)),
        (SRUN, False, (3, 8)),
        (MPIRUN, False, (0, 2)),
        (BARE, False, None),
        (BARE, True, (1, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True, None),
        ({"RANK": "five", "WORLD_SIZE": "4"}, False, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, False, None),  # an sbatch shell is no rank
    ],
)
def test_which_processes_share_a_conversion(environ, distributed, place):
    launch, notes = find_launch(environ, distributed=distributed)
    assert (launch and (launch.rank, launch.world_size)) == place
    assert [code for code, _ in notes] == (["one-process"] if environ is BARE and not distributed else [])


@pytest.mark.parametrize(
    ("environ", "distributed"),
    [({}, True), ({"RANK": "five", "WORLD_SIZE": "4"}, True), ({**SRUN, "SLURM_PROCID": "9"}, False)],
)
def test_wrong_marks_are_refused_where_they_count(environ, distributed):
    with pytest.raises(UsageError):
        find_launch(environ, distributed=distributed)


def test_a_rank_that_works_asks_for_failures_now_and_then(monkeypatch):
    """Its windows are many; its failure is everybody's long before its share is done."""
    now, asked = [100.0], []

    def fail() -> None:
        asked.append(now[0])
        if now[0] > 100.5:
            raise RankFailedError("rank 2 failed: gone", rank=2)

    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr("xrank.ranks.gathering.failure_check", lambda: fail)
    look = SharedTeam.make_failure_check(object.__new__(SharedTeam))
    for _ in range(40):
        assert not look()
        now[0] += 0.01
    assert 1 <= len(asked) <= 2
    now[0] += 1
    with pytest.raises(RankFailedError, match="rank 2"):
        look()
