"""Ranks that are killed, or stopped, at any moment; and two jobs at once.

The ranks are forked from one process that has imported torch, each job in a process of its own, which no thread has
touched: a start of torch for each rank would take two seconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = """
import contextlib, functools, gc, json, mmap, os, random, select, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import torch.distributed.tensor  # what a rank imports late is not to be killed first
torch.set_num_threads(1)
import xrank.ranks.peer
from xrank.errors import RankFailedError, RankTimeoutError
from xrank.gather.parallel import get_tensors_parallel


def left():
    kinds = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            kinds.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [kind for kind in kinds if "xrank" in kind or "pidfd" in kind]


def fork_ranks(n, body, path):
    ranks = []
    for rank in range(n):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            answer = {"error": "no answer"}
            try:
                store = dist.FileStore(path, n)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
                answer = body(rank, n)
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
        os.close(writing)
        ranks.append((pid, reading))
    return ranks


def collect(ranks):
    answers = []
    for pid, reading in ranks:
        content = b""
        while part := os.read(reading, 65536):
            content += part
        os.close(reading)
        os.waitpid(pid, 0)
        answers.append(json.loads(content) if content else None)
    return answers


def gather_for_ever(
    rank, n, timeout_seconds=1800.0, until=None, offset=0, rotate=True, stop_at=None, directory=None, far=False
):
    # Sizes around the step from inline to arena, early exits, nested ones, and an order of ranks that changes.
    answer, i = {}, 0
    if far:  # each rank on a host of its own, as far as it can tell
        xrank.ranks.peer.process_space = lambda: f"host {rank}"
    gather = functools.partial(get_tensors_parallel, timeout_seconds=timeout_seconds, workspace_path=directory)
    try:
        for first in range(n if rotate else 1):
            # All lists of ranks meet: who dies before has left no trace to be known by.
            with gather(None, [(first + r) % n for r in range(n)]):
                pass
        ready[rank] = 1
        while until is None or i < until:
            ranks = [(r + i // 7) % n for r in range(n)] if rotate and i % 14 < 7 else list(range(n))
            if (rank, i) == stop_at:
                os.kill(os.getpid(), signal.SIGSTOP)
            size = (5, 3000, 40000)[i % 3]
            value = torch.full((size,), offset + 1000 * rank + i % 1000)
            with gather(value, ranks, early_exit=i % 5 == 4) as parts:
                if rank == ranks[0]:
                    got = [(len(t), int(t[0]), int(t[-1])) for t in parts]
                    want = [(size, offset + 1000 * r + i % 1000, offset + 1000 * r + i % 1000) for r in ranks]
                    assert got == want, f"wrong data: {got} {want}"
                if i % 6 == 5:
                    with gather(torch.tensor(i), ranks):
                        pass
            i += 1
    except (RankFailedError, RankTimeoutError) as error:
        answer = {
            "type": type(error).__name__, "rank": error.rank, "text": f"{error} {error.got}", "when": time.monotonic(),
            "waiting_for": getattr(error, "waiting_for", None),
        }
    dist.destroy_process_group()
    gc.collect()
    return {**answer, "calls": i, "left": left()}


def wait_for_start(n):
    while ready[:n] != bytes([1] * n):
        time.sleep(0.005)
    ready[:n] = bytes(n)


ready = mmap.mmap(-1, 4096)
"""

KILL = """
def main(directory, through, seed):
    chosen = random.Random(seed)
    body = functools.partial(gather_for_ever, directory=through or None, rotate=not through)
    ranks = fork_ranks(4, body, f"{directory}/store{seed}")
    victim = chosen.randrange(4)
    wait_for_start(4)
    time.sleep(chosen.random() * 0.1)
    killed = time.monotonic()
    os.kill(ranks[victim][0], signal.SIGKILL)
    return {"victim": victim, "killed": killed, "answers": collect(ranks)}

print(json.dumps([main(*sys.argv[1:3], seed) for seed in range(*map(int, sys.argv[3:5]))]))
"""

FAR = """
def job(directory, sign):
    body = functools.partial(gather_for_ever, directory=f"{directory}/{sign}", rotate=False, far=True)
    return fork_ranks(3, body, f"{directory}/store{sign}")

signs = [signal.SIGKILL, signal.SIGSTOP]
jobs = [job(sys.argv[1], sign) for sign in signs[:1]]
wait_for_start(3)
jobs.append(job(sys.argv[1], signs[1]))
wait_for_start(3)
struck = time.monotonic()
for ranks, sign in zip(jobs, signs):
    os.kill(ranks[1][0], sign)
for _, reading in (jobs[1][0], jobs[1][2]):
    select.select([reading], [], [], 30)
os.kill(jobs[1][1][0], signal.SIGCONT)
print(json.dumps({"struck": struck, "jobs": [collect(ranks) for ranks in jobs]}))
"""

END_ALL = """
through = f"{sys.argv[1]}/through"
ranks = fork_ranks(3, functools.partial(gather_for_ever, directory=through), f"{sys.argv[1]}/first")
wait_for_start(3)
while not any(name.endswith(".message") for name in os.listdir(through)):
    pass
for pid, _ in ranks:
    os.kill(pid, signal.SIGKILL)
collect(ranks)
num_left = len(os.listdir(through))
body = functools.partial(gather_for_ever, directory=through, until=20)
print(json.dumps({"left": num_left, "answers": collect(fork_ranks(3, body, f"{sys.argv[1]}/second"))}))
"""

STOP = """
def main(directory, seed):
    chosen = random.Random(seed)
    # While the first rank's body runs the others wait as long as it lives, so that it stops itself, between gathers.
    victim = seed % 4
    body = functools.partial(gather_for_ever, timeout_seconds=1.0, rotate=False, stop_at=None if victim else (0, 20))
    ranks = fork_ranks(4, body, f"{directory}/store{seed}")
    wait_for_start(4)
    if victim:
        time.sleep(chosen.random() * 0.1)
        os.kill(ranks[victim][0], signal.SIGSTOP)
    else:
        os.waitpid(ranks[0][0], os.WUNTRACED)
    stopped = time.monotonic()
    # It goes on when all others have ended.
    for rank, (pid, reading) in enumerate(ranks):
        if rank != victim:
            select.select([reading], [], [], 20)
    os.kill(ranks[victim][0], signal.SIGCONT)
    return {"victim": victim, "stopped": stopped, "answers": collect(ranks)}

print(json.dumps([main(sys.argv[1], seed) for seed in range(*map(int, sys.argv[2:4]))]))
"""

TWO = """
jobs = [
    fork_ranks(3, functools.partial(gather_for_ever, until=200, offset=100000 * j), f"{sys.argv[1]}/store{j}")
    for j in (1, 2)
]
print(json.dumps([collect(job) for job in jobs]))
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the seeds, some to a job: all in `make soak`, the first ones in `make test`."""
    if "seeds" in metafunc.fixturenames:
        step, count = (6, 60) if "directory" in metafunc.function.__name__ else (20, 100)
        count = count if metafunc.config.getoption("soak") else step
        metafunc.parametrize("seeds", [(first, first + step) for first in range(0, count, step)])


def run(program: str, *arguments: object) -> Any:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", JOB + program, *map(str, arguments)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def named_memory() -> set[str]:
    """Return what lies in /dev/shm, without the temporary files that other programs may have there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("tmp")}


def check_killed(jobs: list[dict[str, Any]]) -> None:
    for seed, job in enumerate(jobs):
        survivors = [answer for rank, answer in enumerate(job["answers"]) if rank != job["victim"]]
        assert job["answers"][job["victim"]] is None
        for answer in survivors:
            assert answer.get("type") == "RankFailedError" and answer["rank"] == job["victim"], (seed, job)
            assert answer["when"] - job["killed"] < 2, (seed, job)
            assert answer["left"] == [], (seed, job)


def test_a_rank_killed_at_any_moment_is_named_by_all_others(tmp_path, seeds):
    before = named_memory()
    check_killed(run(KILL, tmp_path, "", *seeds))
    assert named_memory() <= before


def test_a_rank_killed_at_any_moment_of_a_gather_through_a_directory_is_named(tmp_path, seeds):
    check_killed(run(KILL, tmp_path, tmp_path / "through", *seeds))


def test_a_rank_of_another_host_that_is_killed_or_stopped_is_named_within_15_seconds(tmp_path):
    answers = run(FAR, tmp_path)
    for job in answers["jobs"]:
        for answer in (job[0], job[2]):
            assert answer.get("type") == "RankFailedError" and answer["rank"] == 1, answers
            assert answer["when"] - answers["struck"] < 15, answers
    assert answers["jobs"][0][1] is None
    assert answers["jobs"][1][1]["type"] == "RankFailedError", "who goes on after a stop hears that it was given up"


def test_a_job_that_is_killed_whole_leaves_a_directory_that_the_next_one_sweeps(tmp_path):
    said = run(END_ALL, tmp_path)
    assert said["left"] > 0
    assert [answer.get("calls") for answer in said["answers"]] == [20] * 3, said
    assert [path.name for path in Path(tmp_path, "through").iterdir()] == []


def test_a_rank_that_is_stopped_is_named_at_the_deadline(tmp_path):
    for seed, job in enumerate(run(STOP, tmp_path, 0, 4)):
        victim = job["victim"]
        for rank, answer in enumerate(job["answers"]):
            assert "error" not in answer, (seed, job)  # nothing was corrupted, there and then
            assert answer["left"] == [], (seed, job)
            if rank != victim:
                assert f"rank {victim} " in answer["text"], (seed, job)
                assert 0.8 < answer["when"] - job["stopped"] < 3, (seed, job)
        others = [a for rank, a in enumerate(job["answers"]) if rank != victim]
        assert any(a["type"] == "RankTimeoutError" and a["waiting_for"] == [victim] for a in others), (seed, job)
        assert job["answers"][victim]["type"] == "RankFailedError", (seed, job)


def test_two_jobs_at_once_never_meet(tmp_path):
    for job in run(TWO, tmp_path):
        assert [answer.get("calls") for answer in job] == [200] * 3, job
