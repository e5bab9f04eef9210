"""Gathers that the ranks of a launcher share: the same folder as one process makes, or a failure that all name."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import Ended, run
from tests.commands.forked_ranks import ForkedRanks, Rank, forked_ranks
from tests.commands.made_workspaces import assert_holds, flip, layout_of, leave, made_model, state_of, wide_model
from tests.free_port import free_port
from tests.readers.made_zero import made_model as made_zero_model
from tests.readers.made_zero import write_zero
from tests.sampled import sampled, sampled_rows
from xrank.layout import DeviceMesh, LayoutMap
from xrank.ranks.store import GroupStore
from xrank.ranks.tcp_store import TcpStore
from xrank.ranks.waits import name_of_ranks

SMALL: dict[str, Any] = {"window_nbytes": 4096, "round_nbytes": 20_000}
"""Of the engine: so that a small model crosses windows, ranks and rounds."""
FILES = ("--max-shard-size", "60KB")
"""About ten."""
_START_SECONDS = 25.0
"""In which a process begins on a busy machine."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    with forked_ranks() as forked:
        yield forked


def leave_wide(folder: Path) -> dict[str, torch.Tensor]:
    model = wide_model()
    return leave(folder, model, layouts={name: layout_of(name) for name in model})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "run42"
    leave_wide(folder)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def beside(out: Path) -> list[str]:
    return [name for name in os.listdir(out.parent) if name.startswith(".")]


def alone(source: Path, out: Path, *options: object) -> dict[str, Any]:
    """Gather as one process; return its report."""
    ended = run("gather", source, "--out", out, "--json", *options)
    assert ended.exit_code == 0, ended.stderr
    return without_times(json.loads(ended.stdout))


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps({**report, "seconds": 0, "peak_rss_nbytes": 0})
    return dict(json.loads(text.replace(report["output"]["path"], "OUT")))


def shared(ended: list[Rank]) -> dict[str, Any]:
    """Check that all ranks ended well, that rank 0 alone said so, and return its report."""
    assert [rank.exit_code for rank in ended] == [0] * len(ended), ended
    assert [(rank.stdout, rank.stderr) for rank in ended[1:]] == [("", "")] * (len(ended) - 1)
    return without_times(json.loads(ended[0].stdout))


def check_follows(rank: Rank, failed: int) -> None:
    """Check that a rank ended because another failed, and names it."""
    assert rank.exit_code == 1 and rank.stdout == "", rank
    assert f"xrank: RankFailedError: rank {failed} failed: " in rank.stderr, rank


# ---- the same output


@pytest.mark.parametrize(
    ("num_ranks", "files", "workers"),
    sampled_rows([(3, FILES, 2), (4, FILES, 1), (2, (), 1), (3, (), 2)], 2),
)
def test_ranks_make_what_one_process_makes(
    ranks: ForkedRanks, source: Path, tmp_path: Path, num_ranks: int, files: tuple[str, ...], workers: int
) -> None:
    want = alone(source, tmp_path / "alone", *files)
    assert_holds(tmp_path / "alone", wide_model())
    out = tmp_path / "shared"
    command = ("gather", source, "--out", out, "--json", "--workers", workers, *files)
    assert shared(ranks(*command, num_ranks=num_ranks, **SMALL)) == want
    assert content(out) == content(tmp_path / "alone")
    assert not beside(out)


@pytest.mark.parametrize("where", [{"far": True}, {"launcher": "srun"}, {"launcher": "bare"}], ids=str)
def test_ranks_on_several_hosts_and_ranks_without_torchrun(
    ranks: ForkedRanks, source: Path, tmp_path: Path, where: dict[str, Any]
) -> None:
    want = alone(source, tmp_path / "alone", *FILES)
    distributed = ["--distributed"] if where.get("launcher") == "bare" else []
    out = tmp_path / "new" / "shared"  # its parents are made, too
    ended = ranks("gather", source, "--out", out, "--json", *FILES, *distributed, num_ranks=3, **SMALL, **where)
    assert shared(ended) == want
    assert content(out) == content(tmp_path / "alone")
    assert os.listdir(out.parent) == ["shared"], "no message and no stage is left"


def test_casts_exclusions_and_replicas_that_were_picked(ranks: ForkedRanks, tmp_path: Path) -> None:
    source, out = tmp_path / "run42", tmp_path / "shared"
    model = leave_wide(source)
    leave(source, {**model, "2.up": model["2.up"] + 1, "norm.weight": model["norm.weight"] + 1},
          layouts={name: layout_of(name) for name in model}, ranks=[2, 3])  # fmt: skip
    options = (*FILES, "--replicas", "pick", "--dtype", "bf16", "--exclude", "1.*", "--verify")
    want = alone(source, tmp_path / "alone", *options)
    assert sum(note["code"] == "replicas-differ" for note in want["notes"]) == 4
    assert shared(ranks("gather", source, "--out", out, "--json", *options, num_ranks=3, **SMALL)) == want
    assert content(out) == content(tmp_path / "alone")
    refused = ranks("gather", source, "--out", tmp_path / "refused", "--json", num_ranks=3, **SMALL)
    assert sorted(rank.exit_code for rank in refused) in ([1, 1, 4], [1, 4, 4], [4, 4, 4])
    assert any("holds different values than rank" in rank.stderr for rank in refused)
    assert not (tmp_path / "refused").exists() and not beside(out)


def test_an_output_is_replaced(ranks: ForkedRanks, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    leave(tmp_path / "old")
    alone(tmp_path / "old", out)
    alone(source, tmp_path / "alone", *FILES)
    refused = ranks("gather", source, "--out", out, *FILES, **SMALL)
    assert refused[0].exit_code == 2 and "OutputExistsError" in refused[0].stderr
    for rank in refused[1:]:
        check_follows(rank, 0)
    assert_holds(out, made_model())
    shared(ranks("gather", source, "--out", out, "--json", *FILES, "--overwrite", **SMALL))
    assert content(out) == content(tmp_path / "alone") and not beside(out)


def test_a_dry_run_is_everybodys_own(ranks: ForkedRanks, source: Path, tmp_path: Path) -> None:
    ended = ranks("gather", source, "--out", tmp_path / "model", "--dry-run", num_ranks=2)
    assert [rank.exit_code for rank in ended] == [0, 0]
    assert "nothing was written" in ended[0].stdout and ended[1].stdout == ""
    assert os.listdir(tmp_path) == []


# ---- which processes are ranks


def test_bare_rank_and_world_size_are_one_process(source: Path, tmp_path: Path) -> None:
    marks = {"RANK": "1", "WORLD_SIZE": "4"}
    ended = run("gather", source, "--out", tmp_path / "model", "--json", environ=marks)
    assert ended.exit_code == 0
    notes = {note["code"]: note["message"] for note in json.loads(ended.stdout)["notes"]}
    assert "--distributed" in notes["one-process"]
    assert_holds(tmp_path / "model", wide_model())
    wrong = run("gather", source, "--out", tmp_path / "other", "--json", environ={"RANK": "9", "WORLD_SIZE": "4"})
    assert wrong.exit_code == 0
    assert refused_usage(run("gather", source, "--out", tmp_path / "third", "--distributed")) == (
        "--distributed was given, but the environment does not name this rank"
    )


@pytest.mark.parametrize("launcher", ["srun", "bare"])
def test_without_a_place_to_meet_it_says_what_to_set(source: Path, tmp_path: Path, launcher: str) -> None:
    marks = (
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} if launcher == "srun" else {"RANK": "1", "WORLD_SIZE": "2"}
    )
    options = ["--distributed"] if launcher == "bare" else []
    ended = run("gather", source, "--out", tmp_path / "model", *options, environ=marks)
    assert "have no address to connect through" in refused_usage(ended)
    assert "MASTER_ADDR" in ended.stderr and "MASTER_PORT" in ended.stderr and "torchrun" in ended.stderr


def refused_usage(ended: Ended) -> str:
    assert ended.exit_code == 2 and ended.stdout == ""
    return ended.stderr.splitlines()[0].removeprefix("xrank: UsageError: ")


_WITHOUT_TORCH = (
    "import sys; from xrank.cli.main import main; sys.argv = ['xrank', 'gather', *sys.argv[1:]]\n"
    "try: main()\nexcept SystemExit as left: assert not left.code, left.code\n"
    "assert 'torch' not in sys.modules"
)


def test_a_step_of_one_task_and_a_world_of_one_need_no_torch(source: Path, tmp_path: Path) -> None:
    for marks in (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"},
    ):
        out = tmp_path / f"model{len(marks)}"
        subprocess.run(
            [sys.executable, "-c", _WITHOUT_TORCH, source, "--out", out, "-q"],
            env={**os.environ, **marks}, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        assert_holds(out, wide_model())


@pytest.mark.parametrize("keeper", ["the launcher", "rank 0"])
def test_ranks_of_a_launcher_need_no_torch(source: Path, tmp_path: Path, keeper: str) -> None:
    out, port = tmp_path / "model", free_port()
    marks = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    if keeper == "the launcher":
        launcher = torch.distributed.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        assert launcher.port == port
        marks |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(source), "--out", str(out), "-q", "--distributed"]
    started = [
        subprocess.Popen(command, env={**os.environ, **marks, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"
    ]
    assert [rank.wait(60) for rank in started] == [0, 0]
    assert_holds(out, wide_model())


# ---- failures


def test_a_fault_that_all_see_is_everybodys_own(ranks: ForkedRanks, tmp_path: Path) -> None:
    ended = ranks("gather", tmp_path / "nowhere", "--out", tmp_path / "model", "--json")
    assert [rank.exit_code for rank in ended] == [ended[0].exit_code] * 4
    assert json.loads(ended[0].stdout)["exit_code"] == ended[0].exit_code == 3
    assert all("nowhere" in rank.stderr and rank.stdout == "" for rank in ended[1:])


def test_a_rank_that_sees_another_source_is_named(ranks: ForkedRanks, source: Path, tmp_path: Path) -> None:
    """As a network file system may show it, or another command."""
    ended = ranks("gather", source, "--out", tmp_path / "model", "--json", more=(2, ["--exclude", "0.up"]), num_ranks=3)
    assert ended[0].exit_code == 4
    error = json.loads(ended[0].stdout)["error"]
    assert (error["type"], error["rank"]) == ("ContradictionError", 2)
    for rank in ended[1:]:
        assert rank.exit_code == 4 and "ContradictionError: rank 2 plans a different output" in rank.stderr
    assert os.listdir(tmp_path) == []


def test_a_first_rank_killed_while_it_plans_is_named_by_those_that_wait_for_the_plan(
    ranks: ForkedRanks, source: Path, tmp_path: Path
) -> None:
    ended = ranks("gather", source, "--out", tmp_path / "model", act=(0, "kill", 4), num_ranks=3)
    assert ended[0].exit_code == -signal.SIGKILL
    check_follows(ended[1], 0)
    check_follows(ended[2], 0)
    assert os.listdir(tmp_path) == [], "it was killed before it made the stage"


def test_ranks_compare_another_form_of_the_model_together(ranks: ForkedRanks, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    made = made_zero_model()
    write_zero(folder, made)
    saved = {name: tensor.contiguous() for name, tensor in made.expected.items()}
    save_file(saved, folder / "model.safetensors")
    want = alone(folder, tmp_path / "alone")
    assert any(note["code"] == "also-here" and "agree" in note["message"] for note in want["notes"])
    out = tmp_path / "shared"
    assert shared(ranks("gather", folder, "--out", out, "--json", num_ranks=3)) == want
    assert content(out) == content(tmp_path / "alone")
    for name in ("up.weight", "norm.weight"):  # of two sizes: different ranks compare them
        save_file({**saved, name: saved[name] + 1}, folder / "model.safetensors")
        ended = ranks("gather", folder, "--out", tmp_path / "refused", num_ranks=3)
        assert sorted(rank.exit_code for rank in ended) in ([1, 1, 2], [1, 2, 2], [2, 2, 2]), ended
        assert any("hold different models" in rank.stderr or "different models" in rank.stderr for rank in ended)


def test_damage_is_named_by_the_rank_that_reads_it(ranks: ForkedRanks, tmp_path: Path) -> None:
    source, out = tmp_path / "run42", tmp_path / "model"
    model = leave_wide(source)
    state, needles = state_of(source, 0), {}
    whole = state.read_bytes()
    for name in ("embed.weight", "0.up", "3.down"):
        part = model[name].chunk(2, 1 if name == "3.down" else 0)[0].contiguous()
        needles[name] = whole.index(part.numpy().tobytes()) + part.nbytes // 2
    for name, offset in needles.items():
        flip(state, offset)
        ended = ranks("gather", source, "--out", out, "--json", *FILES, **SMALL)
        (named,) = [i for i, rank in enumerate(ended) if rank.exit_code == 4]
        assert re.search(f"CorruptError: {name}, .*: checksum of rank 0's .* is wrong", ended[named].stderr), ended
        for i, rank in enumerate(ended):
            assert i == named or f"rank {named} failed: CorruptError: {name}" in rank.stderr, ended
        assert not out.exists()
        flip(state, offset)
    shared(ranks("gather", source, "--out", out, "--json", *FILES, **SMALL))
    assert_holds(out, model)
    assert not beside(out)


@pytest.mark.parametrize("victim", sampled([2, 0], 2))
def test_a_rank_whose_disk_is_full_is_named(ranks: ForkedRanks, source: Path, tmp_path: Path, victim: int) -> None:
    out = tmp_path / "model"
    ended = ranks("gather", source, "--out", out, "--json", *FILES, act=(victim, "full", 12), **SMALL)
    assert ended[victim].exit_code == 1 and "NoSpaceError" in ended[victim].stderr
    for i, rank in enumerate(ended):
        if i != victim:
            assert rank.exit_code == 1 and f"RankFailedError: rank {victim} failed: NoSpaceError" in rank.stderr, rank
    assert not out.exists()
    report = shared(ranks("gather", source, "--out", out, "--json", *FILES, **SMALL))
    assert report["output"]["resumed_nbytes"] > 0, "rounds that were finished are kept"
    assert_holds(out, wide_model())
    assert not beside(out)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_at_the_deadline(ranks: ForkedRanks, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    # Longer than a busy machine lets one rank stand, which would be missed as well.
    patience = ("--timeout", 8)
    ended = ranks("gather", source, "--out", out, *patience, *FILES, act=(1, "stop", 9), num_ranks=3, **SMALL)
    assert all(rank.exit_code == 1 and rank.stdout == "" for rank in ended)
    assert all("RankTimeoutError: rank 1 (host" in rank.stderr for rank in (ended[0], ended[2]))
    assert any("--timeout" in rank.stderr for rank in (ended[0], ended[2])), "whoever waited first"
    assert "RankFailedError" in ended[1].stderr, "who goes on after a stop hears that it was given up"
    assert not out.exists()
    shared(ranks("gather", source, "--out", out, "--json", *FILES, **SMALL))
    assert_holds(out, wide_model())
    assert not beside(out)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the seeds: all in `make soak`, the first ones in `make test`."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", sampled(range(100 if metafunc.config.getoption("soak") else 4), 4))


def test_a_rank_killed_at_any_moment(ranks: ForkedRanks, source: Path, tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    victim = chosen.randrange(4)
    moment = chosen.randrange(1, 300 if victim == 0 else 80)
    far = {"far": True} if seed % 8 == 7 else {}
    out, want = tmp_path / "model", tmp_path / "alone"
    alone(source, want, *FILES)
    command = ("gather", source, "--out", out, "--json", *FILES)
    ended = ranks(*command, act=(victim, "kill", moment), **SMALL, **far)
    if ended[victim].exit_code == 0:
        shared(ended)  # it was never so far
    else:
        assert ended[victim].exit_code == -9
        for i, rank in enumerate(ended):
            # Who has done its part of a gather that then succeeds has not failed.
            assert i == victim or rank.exit_code == 1 or (victim and out.exists()), (victim, moment, ended)
            if i != victim and rank.exit_code == 1:
                assert f"rank {victim} failed" in rank.stderr, (victim, moment, ended)
    if out.exists():
        assert content(out) == content(want), "half a model is visible"
        shutil.rmtree(out)
    shared(ranks(*command, **SMALL, **far))
    assert content(out) == content(want)
    assert not beside(out), (victim, moment)


@pytest.mark.parametrize("moment", sampled(["while others are awaited", "before it came"], 2))
def test_a_first_rank_killed_before_all_have_met(source: Path, tmp_path: Path, moment: str) -> None:
    """Real processes with a store of rank 0's: each of the others ends in time, with one line and none of torch's."""
    port, out = free_port(), tmp_path / "out"
    environ = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "xrank", "gather", str(source), "--out", str(out), "--distributed", "--timeout"]

    def start(rank: int, timeout: int) -> subprocess.Popen[str]:
        environ["RANK"] = str(rank)
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, str(timeout)], env=environ, stdout=pipe, stderr=pipe, text=True)

    began = time.monotonic()
    if moment == "before it came":
        others, limit = [start(1, 3), start(2, 3)], 3 + 5 + _START_SECONDS
    else:
        first, others, limit = start(0, 600), [start(1, 600)], 5 + _START_SECONDS  # rank 2 never comes
        store = connected_store(port)
        while store.peek(f"meeting/{name_of_ranks((0, 1, 2))}/1/here/1") is None:
            assert others[0].poll() is None and first.poll() is None, others[0].stderr.read()
            time.sleep(0.05)
        first.kill()
        first.communicate()
        began = time.monotonic()
    for other in others:
        stdout, stderr = other.communicate()
        assert other.returncode == 1 and stdout == "" and time.monotonic() - began < limit, stderr
        assert re.match(r"xrank: Rank(Timeout|Failed)Error: rank 0 (opened no store|failed)", stderr), stderr
        assert len(stderr.splitlines()) <= 3 and "frame #" not in stderr, stderr
    assert not out.exists()


def connected_store(port: int) -> GroupStore:
    """Return a connection to the store of the first gather at a port, once there is one."""
    end = time.monotonic() + 60
    while True:
        try:
            return GroupStore(TcpStore("127.0.0.1", port, timeout_seconds=5)).with_prefix("group_1")
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.slow
def test_torchrun(source: Path, tmp_path: Path) -> None:
    """The real launcher, 4 real processes: windows of the real size, and a tensor of several."""
    big, out = tmp_path / "run42", tmp_path / "model"
    model = {"a": torch.rand(1200, 1000), "b": torch.rand(900, 1000), "c": torch.rand(7)}
    leave(big, model, layouts={"a": "[f/tp, h]", "b": "[h, f/tp/~dp]", "c": "[h]"})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [*torchrun, "-m", "xrank", "gather", str(big), "--out", str(out), "--json", "--max-shard-size", "5MB"],
        env={**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    want = alone(big, tmp_path / "alone", "--max-shard-size", "5MB")
    assert without_times(json.loads(ended.stdout)) == want
    assert content(out) == content(tmp_path / "alone")
    assert_holds(out, model)


@pytest.mark.parametrize("where", [{}, {"far": True}], ids=["one host", "hosts"])
def test_a_shared_reshard_makes_the_same_states(
    ranks: ForkedRanks, source: Path, tmp_path: Path, where: dict[str, Any]
) -> None:
    """Torch archives: their endings need the checksums of tensors that several ranks wrote."""
    layout = LayoutMap(DeviceMesh((3,), ("tp",)))
    for name, tensor in wide_model().items():
        layout[name] = "[f/~tp, h]" if tensor.dim() == 2 else "[h]"
    layout.write(tmp_path / "layout.toml")
    alone_at, out = tmp_path / "alone", tmp_path / "shared"
    command = ("reshard", source, "--layout", tmp_path / "layout.toml", "--json", "--out")
    ended = run(*command, alone_at)
    assert ended.exit_code == 0, ended.stderr
    assert shared(ranks(*command, out, **SMALL, **where)) == without_times(json.loads(ended.stdout))
    assert content(out) == content(alone_at)
    assert not beside(out)


def test_a_file_is_finished_only_when_all_it_is_made_of_is_checked(ranks: ForkedRanks, tmp_path: Path) -> None:
    """A flat buffer is one record under tensors of several files: its end is read, and compared, in a later round."""
    source, out = tmp_path / "run42", tmp_path / "model"
    model = {name: torch.rand(10_000) + 0.5 for name in ("a", "b", "c")}
    flat = {"flat": torch.cat(list(model.values()))}
    leave(source, flat, layouts={"flat": "[n/dp]"}, mesh=DeviceMesh((2,), ("dp",)), recorded=False)
    layout = LayoutMap(DeviceMesh((2,), ("dp",)))
    layout["flat"] = "flat(a [10000], b [10000], c [10000])/dp"
    layout.write(tmp_path / "layout.toml")
    command = ("gather", source, "--layout", tmp_path / "layout.toml", "--json", "--max-shard-size", "40KB")
    alone(source, tmp_path / "alone", *command[2:])
    assert_holds(tmp_path / "alone", model)
    flip(state_of(source, 1), state_of(source, 1).read_bytes().index(model["c"].numpy().tobytes()) + 39_000)
    ended = ranks(*command, "--out", out, **SMALL)
    assert sorted(rank.exit_code for rank in ended) == [1, 1, 1, 4]
    assert any("finished model-00001" in rank.stderr for rank in ended), "it needs nothing of the second buffer"
    assert not any("finished model-00002" in rank.stderr for rank in ended), "half of it is of the damaged one"
