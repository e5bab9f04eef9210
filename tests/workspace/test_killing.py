"""Ranks that are killed, or stopped, at any moment; and two jobs at once.

The ranks are forked from one process that has imported torch, each job in a process of its own, which no thread has
touched: a start of torch for each rank would take two seconds.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from tests.named_memory import named_memory

pytestmark = pytest.mark.timeout(400)  # twenty jobs of four ranks, one after another

JOB = """
import contextlib, functools, gc, json, mmap, os, random, select, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import torch.distributed.tensor  # what a rank imports late is not to be killed first
torch.set_num_threads(1)
import xrank.ranks.waits
from xrank.errors import RankFailedError, RankTimeoutError
from xrank.workspace.parallel import get_tensors_parallel


def left():
    kinds = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            kinds.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [kind for kind in kinds if "xrank" in kind or "pidfd" in kind]


def serve():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def fork_store():
    # No file, which a rank that is stopped might keep locked, and no rank, which might be killed.
    (reading, writing), (life, held) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(held)
        server = serve()
        os.write(writing, str(server.port).encode())
        os.read(life, 1)  # until all who have the other end have ended
        os._exit(0)
    return int(os.read(reading, 10))


def join_store(rank, is_rank_0s, name):
    if not is_rank_0s:
        return dist.PrefixStore(name, connect(PORT))
    if rank == 0:
        server = serve()
        ready[100:105] = b"%05d" % server.port
        ready[105] = 1  # it is told whole
        return server
    while not ready[105]:
        time.sleep(0.005)
    return connect(int(ready[100:105]))


def fork_ranks(n, body, name, store_is_rank_0s=False):
    ranks = []
    ready[105] = 0
    for rank in range(n):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            answer = {"error": "no answer"}
            try:
                store = join_store(rank, store_is_rank_0s, name)
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


def await_answers(readings):
    # Waits until each can be read, and returns by how much the waits were longer than asked: the machine was busy.
    late = 0.0
    for reading in readings:
        for _ in range(2400):
            began = time.monotonic()
            if select.select([reading], [], [], 0.05)[0]:
                break
            late += max(0.0, time.monotonic() - began - 0.05)
    return late


def gather_for_ever(
    rank, n, timeout_seconds=1800.0, until=None, offset=0, rotate=True, stop_at=None, directory=None, far=False
):
    # Sizes around the step from inline to arena, early exits, nested ones, and an order of ranks that changes.
    answer, i, begun = {}, 0, time.monotonic()
    if far:  # each rank on a host of its own, as far as it can tell
        xrank.ranks.waits.process_space = lambda: f"host {rank}"
    gather = functools.partial(get_tensors_parallel, timeout_seconds=timeout_seconds, workspace_path=directory)
    try:
        try:
            for first in range(n if rotate else 1):
                # All lists of ranks meet, whatever the deadline: who dies before has left no trace to be known by.
                with gather(None, [(first + r) % n for r in range(n)], timeout_seconds=1800.0):
                    pass
        finally:
            ready[rank] = 1  # where it failed, too: who waits for it would wait for ever
        while until is None or i < until:
            ranks = [(r + i // 7) % n for r in range(n)] if rotate and i % 14 < 7 else list(range(n))
            if (rank, i) == stop_at:
                os.kill(os.getpid(), signal.SIGSTOP)
            size = (5, 3000, 40000)[i % 3]
            value = torch.full((size,), offset + 1000 * rank + i % 1000)
            begun = time.monotonic()
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
            "waited": time.monotonic() - begun, "waiting_for": getattr(error, "waiting_for", None),
        }
    parts = None  # the last ones hold the memory that they lie in
    dist.destroy_process_group()
    gc.collect()
    return {**answer, "calls": i, "left": left()}


def wait_for_start(n):
    while ready[:n] != bytes([1] * n):
        time.sleep(0.005)
    ready[:n] = bytes(n)


ready = mmap.mmap(-1, 4096)
PORT = fork_store()
"""

KILL = """
def main(through, seed):
    chosen = random.Random(seed)
    body = functools.partial(gather_for_ever, directory=through or None, rotate=not through)
    ranks = fork_ranks(4, body, f"job {seed}", store_is_rank_0s=bool(through))
    victim = chosen.randrange(4)
    wait_for_start(4)
    time.sleep(chosen.random() * 0.1)
    killed = time.monotonic()
    os.kill(ranks[victim][0], signal.SIGKILL)
    late = await_answers(reading for rank, (_, reading) in enumerate(ranks) if rank != victim)
    return {"victim": victim, "killed": killed, "late": late, "answers": collect(ranks)}

print(json.dumps([main(sys.argv[1], seed) for seed in range(*map(int, sys.argv[2:4]))]))
"""

FAR = """
def job(directory, sign):
    body = functools.partial(gather_for_ever, directory=f"{directory}/{sign}", rotate=False, far=True)
    return fork_ranks(3, body, f"job {sign}")

signs = [signal.SIGKILL, signal.SIGSTOP]
jobs = [job(sys.argv[1], sign) for sign in signs[:1]]
wait_for_start(3)
jobs.append(job(sys.argv[1], signs[1]))
wait_for_start(3)
struck = time.monotonic()
for ranks, sign in zip(jobs, signs):
    os.kill(ranks[1][0], sign)
late = await_answers(reading for _, reading in (jobs[1][0], jobs[1][2]))
os.kill(jobs[1][1][0], signal.SIGCONT)
print(json.dumps({"struck": struck, "late": late, "jobs": [collect(ranks) for ranks in jobs]}))
"""

END_ALL = """
through, num_others = sys.argv[1], int(sys.argv[2])
ranks = fork_ranks(3, functools.partial(gather_for_ever, directory=through), "the one that is killed")
wait_for_start(3)
while True:
    for pid, _ in ranks:  # all at one moment, so that none clears up after another
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
    if len(os.listdir(through)) > num_others:
        break
    for pid, _ in ranks:
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.001)
for pid, _ in ranks:
    os.kill(pid, signal.SIGKILL)
collect(ranks)
num_left = len(os.listdir(through)) - num_others
body = functools.partial(gather_for_ever, directory=through, until=20)
print(json.dumps({"left": num_left, "answers": collect(fork_ranks(3, body, "the next one"))}))
"""

DEADLINE = 4.0
"""Seconds: on a busy machine a rank that lives takes more than one."""

STOP = """
def main(through, seed):
    chosen = random.Random(seed)
    # While the first rank's body runs the others wait as long as it lives, so that it stops itself, between gathers.
    victim = seed % 4
    stop_at = None if victim else (0, 20)
    body = functools.partial(
        gather_for_ever, timeout_seconds=float(sys.argv[4]), rotate=False, stop_at=stop_at, directory=through or None
    )
    ranks = fork_ranks(4, body, f"job {seed}")
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
            select.select([reading], [], [], 60)
    os.kill(ranks[victim][0], signal.SIGCONT)
    return {"victim": victim, "stopped": stopped, "answers": collect(ranks)}

print(json.dumps([main(sys.argv[1], seed) for seed in range(*map(int, sys.argv[2:4]))]))
"""

TWO = """
jobs = [
    fork_ranks(3, functools.partial(gather_for_ever, until=200, offset=100000 * j), f"job {j}")
    for j in (1, 2)
]
print(json.dumps([collect(job) for job in jobs]))
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the seeds, some to a job: all in `make soak`, the first in `make test`, some more in `make test-all`."""
    if "seeds" in metafunc.fixturenames:
        step, count = (6, 60) if "directory" in metafunc.function.__name__ else (20, 100)
        firsts = range(0, count if metafunc.config.getoption("soak") else step, step)
        jobs = [(first, first + step) for first in firsts]
        # The first fifth or so is enough for `make test`.
        some = 4 if step > 6 else 1
        first, *others = [(0, some), (some, step), *jobs[1:]]
        slow = [pytest.param(job, marks=pytest.mark.slow) for job in others]
        metafunc.parametrize("seeds", [first, *slow], ids=lambda job: f"{job[0]}-{job[1]}")


def run(program: str, *arguments: object) -> Any:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    job = subprocess.Popen(
        [sys.executable, "-c", JOB + program, *map(str, arguments)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        answers, complaints = job.communicate(timeout=370)
    finally:
        with suppress(ProcessLookupError):  # after a success no process is left
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, complaints[-3000:]
    return json.loads(answers.splitlines()[-1])


def check_killed(jobs: list[dict[str, Any]]) -> None:
    slowest = []
    for seed, job in enumerate(jobs):
        survivors = [answer for rank, answer in enumerate(job["answers"]) if rank != job["victim"]]
        assert job["answers"][job["victim"]] is None
        for answer in survivors:
            assert answer.get("type") == "RankFailedError" and answer["rank"] == job["victim"], (seed, job)
            assert answer["left"] == [], (seed, job)
        # Where the machine lets the job's first process wait, it lets the four ranks wait, too.
        slowest.append(max(answer["when"] - job["killed"] for answer in survivors) - 4 * job["late"])
    # Two seconds are the claim, which a machine that does other things keeps most of the time; a rank that heard of the
    # death in no other way than by a heartbeat would take more than ten.
    assert statistics.median(slowest) < 2 and max(slowest) < 10, slowest


def test_a_rank_killed_at_any_moment_is_named_by_all_others(seeds):
    before = set(named_memory())
    check_killed(run(KILL, "", *seeds))
    assert set(named_memory()) <= before


def test_a_rank_killed_at_any_moment_of_a_gather_through_a_directory_is_named(tmp_path, seeds):
    check_killed(run(KILL, tmp_path / "through", *seeds))


@pytest.mark.slow
def test_a_rank_of_another_host_that_is_killed_or_stopped_is_named_within_15_seconds(tmp_path):
    answers = run(FAR, tmp_path / "through")
    survivors = [job[rank] for job in answers["jobs"] for rank in (0, 2)]
    for answer in survivors:
        assert answer.get("type") == "RankFailedError" and answer["rank"] == 1, answers
    assert answers["jobs"][0][1] is None
    assert answers["jobs"][1][1]["type"] == "RankFailedError", (
        "a rank that continues after a stop learns that it was given up"
    )
    slowest = max(answer["when"] - answers["struck"] for answer in survivors)
    # Where the machine lets this process wait, it lets the beats of the six ranks wait, too.
    assert slowest < 15 + 6 * answers["late"], (slowest, answers["late"])


def test_a_job_that_is_killed_whole_leaves_a_directory_that_the_next_one_sweeps(tmp_path):
    through = tmp_path / "through"
    through.mkdir()
    others = {"rank_0_state.pth", ".rank_0.notes", ".rank_0.0123456789abcdef.99999999.0123456789abcdef.1.message"}
    for name in others:  # a state, a foreign file, a message of another host
        (through / name).write_text("another's")
    said = run(END_ALL, through, len(others))
    assert said["left"] > 0
    assert [answer.get("calls") for answer in said["answers"]] == [20] * 3, said
    assert {path.name for path in through.iterdir()} == others


@pytest.mark.parametrize(
    ("way", "seed"),
    [("memory", 0)]
    + [pytest.param("memory", seed, marks=pytest.mark.slow) for seed in (1, 2, 3)]
    + [pytest.param("directory", seed, marks=pytest.mark.slow) for seed in (0, 1)],
)
def test_a_rank_that_is_stopped_is_named_at_the_deadline(tmp_path, way, seed):
    for job in run(STOP, "" if way == "memory" else tmp_path / "through", seed, seed + 1, DEADLINE):
        victim = job["victim"]
        for rank, answer in enumerate(job["answers"]):
            assert "error" not in answer, (seed, job)  # nothing was corrupted, there and then
            assert answer["left"] == [], (seed, job)
            if rank != victim:
                assert f"rank {victim} " in answer["text"], (seed, job)
                assert answer["when"] - job["stopped"] < DEADLINE + 20, (seed, job)
        others = [a for rank, a in enumerate(job["answers"]) if rank != victim]
        assert any(
            a["type"] == "RankTimeoutError" and a["waiting_for"] == [victim] and a["waited"] >= DEADLINE for a in others
        ), (seed, job)
        assert job["answers"][victim]["type"] == "RankFailedError", (seed, job)


def test_two_jobs_at_once_never_meet():
    for job in run(TWO):
        assert [answer.get("calls") for answer in job] == [200] * 3, job
