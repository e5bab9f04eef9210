"""What the commands print: JSON, paths alone, rows; in whatever state the streams are. And how they are called."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import xrank
from tests.cli.bench import Bench, Ended, refusal, run
from tests.commands.made_workspaces import RUN, STEP, assert_holds, leave, leave_plain, made_model, state_of
from tests.sampled import sampled
from xrank.cli.command import Output

XRANK = os.path.join(os.path.dirname(sys.executable), "xrank")

KEYS = {
    *("schema", "command", "status", "exit_code", "seconds", "peak_rss_nbytes"),
    *("source", "proof", "output", "notes", "error"),
}
ERROR_KEYS = {"type", "message", "tensor", "rank", "host", "file", "index_range", "got", "want", "try"}


# ---- JSON


def test_the_report_of_a_gather(bench: Bench) -> None:
    model = leave(bench.workspace)
    report = bench.succeeds(model)
    assert set(report) == KEYS
    assert (report["schema"], report["command"], report["status"], report["exit_code"]) == (1, "gather", "ok", 0)
    assert report["error"] is None
    assert report["seconds"] > 0
    assert 10e6 < report["peak_rss_nbytes"] < 10e9
    source = report["source"]
    assert (source["path"], source["format"], source["recipe"]) == (str(bench.workspace), "workspace", None)
    assert (source["step"], source["world_size"], source["run_id"]) == (STEP, 4, RUN)
    assert {"nbytes", "skipped_nbytes"} <= set(source)
    assert report["proof"] == {
        "coverage": "proven", "base_model": None, "num_checksums": 20, "num_replicas_compared": 10,
    }  # fmt: skip
    output = report["output"]
    assert set(output) == {
        *("path", "num_tensors", "num_parameters", "nbytes", "files", "tied", "padding_dropped", "excluded", "cast"),
        *("companions", "resumed_nbytes", "shared_nbytes"),
    }
    assert output["path"] == str(bench.out)
    assert output["num_tensors"] == 5
    assert output["num_parameters"] == sum(tensor.numel() for tensor in model.values())
    assert output["nbytes"] == sum(tensor.nbytes for tensor in model.values())
    (file,) = output["files"]
    assert (file["name"], file["nbytes"]) == ("model.safetensors", (bench.out / "model.safetensors").stat().st_size)
    assert file["digest"].startswith("xxh3:")


def test_the_report_of_a_failure(bench: Bench) -> None:
    leave(bench.workspace, ranks=[0, 1, 3])
    ended = bench.gather()
    report = json.loads(ended.stdout)
    assert set(report) == KEYS
    assert (report["schema"], report["command"], report["status"], report["exit_code"]) == (1, "gather", "failed", 3)
    assert set(report["error"]) == ERROR_KEYS
    assert report["output"] is None
    assert report["seconds"] > 0 and report["peak_rss_nbytes"] > 10**7


@pytest.mark.parametrize(
    ("arguments", "command"),
    [(["gather", "--json"], "gather"), (["gather", "--json", "--bogus"], "gather"), (["verify", "--json"], "verify")],
)
def test_a_command_line_that_cannot_be_parsed_is_reported_too(arguments: list[str], command: str) -> None:
    ended = run(*arguments)
    error = refusal(ended, "UsageError")
    assert set(error) == ERROR_KEYS
    assert json.loads(ended.stdout)["command"] == command


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def test_a_dry_run(bench: Bench) -> None:
    leave(bench.workspace)
    before = times(bench.folder)
    report = json.loads(bench.gather("--dry-run", "--max-shard-size", "600").stdout)
    assert set(report) == KEYS | {"plan"}
    assert report["output"] is None
    plan = report["plan"]
    assert [file["num_tensors"] for file in plan["files"]] == [1, 2, 2]
    assert plan["num_tensors"] == 5
    assert plan["peak_buffer_nbytes"] > 0
    assert report["proof"]["num_replicas_to_compare"] == 10
    ended = run("gather", bench.workspace, "--out", bench.out, "--dry-run")
    assert "nothing was written" in ended.stdout
    assert times(bench.folder) == before
    # What it foretells comes true, also where it is bad.
    bench.gather("--max-shard-size", "600")
    made = sorted((path.name, path.stat().st_size) for path in bench.out.glob("*.safetensors"))
    assert made == [(file["name"], file["nbytes"]) for file in plan["files"]]
    state_of(bench.workspace, 1).unlink()
    shutil.rmtree(bench.out)
    bench.refused("IncompleteError", "--dry-run", rank=1)


def test_the_report_of_verify(bench: Bench) -> None:
    leave(bench.workspace)
    bench.gather()
    for path in (bench.out, bench.workspace):
        report = json.loads(run("verify", path, "--json").stdout)
        assert set(report) >= KEYS
        assert (report["command"], report["status"], report["error"]) == ("verify", "ok", None)
    assert report["proof"] == {"coverage": "proven", "num_checksums": 20, "num_replicas_compared": 10}


def test_the_report_of_inspect(bench: Bench) -> None:
    leave(bench.workspace)
    state_of(bench.workspace, 2).write_bytes(b"PK")
    report = json.loads(run("inspect", bench.workspace, "--json").stdout)
    assert set(report) >= {*KEYS, "problems", "tensors", "companions", "ranks"}
    assert report["exit_code"] == 0
    (problem,) = report["problems"]
    assert (problem["type"], problem["rank"], problem["exit_code"]) == ("CorruptError", 2, 4)
    assert [row["state"] for row in report["ranks"]] == ["present", "present", "CorruptError", "present"]


# ---- words


def test_rows(bench: Bench) -> None:
    model = leave(bench.workspace)
    ended = run("gather", "--workspace", bench.workspace, "--out", bench.out)
    rows = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
    assert rows["source"].startswith(f"workspace, step {STEP}, written by 4 ranks; 2.2 KB")
    assert rows["proof"] == "5 tensors, every element exactly once; 20 checksums good; 10 replicas equal"
    assert rows["wrote"].startswith(f"{bench.out}: 1 file, 1.1 KB, ")
    assert rows["wrote"].endswith("; with config.json")
    # The log goes elsewhere: what is on stdout is the result alone.
    assert "model.safetensors, 5,240 bytes" in ended.stderr
    assert_holds(bench.out, model)


def test_quiet(bench: Bench) -> None:
    leave(bench.workspace)
    ended = run("gather", "--workspace", bench.workspace, "--out", bench.out, "-q")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, f"{bench.out}\n", "")
    ended = run("gather", "--workspace", bench.workspace, "--out", bench.out, "--dtype", "bf16", "-q")
    assert ended.stdout == ""
    assert ended.stderr.startswith("xrank: OutputExistsError: ")
    assert run("clean", bench.folder, "-q") == Ended(0, "", "")  # nothing has a path: no empty line either


def test_verbose_shows_the_place(bench: Bench) -> None:
    leave(bench.workspace, ranks=[1])
    assert "Traceback" not in run("gather", bench.workspace, "--out", bench.out).stderr
    ended = run("gather", bench.workspace, "--out", bench.out, "-v")
    assert "Traceback" in ended.stderr
    assert "xrank/readers/" in ended.stderr
    assert ended.stderr.count("\n  got   ") == ended.stderr.count("\n  try   ") == 1
    assert ended.stderr.splitlines()[-1].endswith("(exit 3)")


def test_names_with_controls_are_escaped_wherever_they_are_printed(bench: Bench) -> None:
    leave_plain(bench.workspace, 0, {"a\x1b[31m\u202e": torch.ones(4)})
    for arguments in (
        ["inspect", bench.workspace, "--tensors"],
        ["verify", bench.workspace],
        ["gather", "\x1b[31m", "--out", "x"],
    ):
        ended = run(*arguments)
        assert not [c for c in ended.stdout + ended.stderr if c != "\n" and not c.isprintable()], arguments
    assert "a\\x1b[31m\\u202e" in run("inspect", bench.workspace, "--tensors").stdout


# ---- the call


def test_unknown_options_and_commands() -> None:
    for arguments, said in (
        (["gather", "--bogus"], "No such option '--bogus'"),
        (["gather"], "Missing option '-o' / '--out'"),
        (["gather", "a", "b", "--out", "c"], "unexpected extra argument"),
        (["gather", "a", "--out", "b", "--workers", "x"], "'x' is not a valid integer"),
        (["bogus"], "No such command 'bogus'"),
        (["gahter", "a"], "No such command 'gahter'. Did you mean 'gather'?"),
        (["gather", "--outt", "b"], "No such option '--outt'. Did you mean '--out' or"),
        (["layout", "dif", "a"], "No such command 'dif'. Did you mean 'diff'?"),
        (["verify"], "Missing argument 'PATH'"),
    ):
        ended = run(*arguments)
        lines = ended.stderr.splitlines()
        assert ended.exit_code == 2, arguments
        assert lines[0].startswith("xrank: UsageError: ")
        assert said in lines[0]
        assert [line[:8] for line in lines[1:]] == ["  want  ", "  try   "]
        assert lines[-1].endswith("(exit 2)")
        assert ended.stdout == ""


def test_help_and_version() -> None:
    assert run("--version").stdout == run("-V").stdout == f"xrank, version {xrank.__version__}\n"
    for arguments in (["--help"], ["gather", "-h"], ["verify", "--help"], ["inspect", "--help"], ["clean", "--help"]):
        ended = run(*arguments)
        assert (ended.exit_code, ended.stderr) == (0, "")
        assert ended.stdout.startswith("Usage: xrank")
    ended = run()
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "Convert:\n" in ended.stderr and "\n  gather " in ended.stderr


def test_the_workspace_by_its_variable(bench: Bench) -> None:
    model = leave(bench.workspace)
    ended = run("gather", "--out", bench.out, environ={"XRANK_WORKSPACE": str(bench.workspace)})
    assert ended.exit_code == 0, ended.stderr
    assert_holds(bench.out, model)
    # An argument wins over it; two arguments are a question.
    other = bench.folder / "other"
    shutil.copytree(bench.out, other)
    shutil.rmtree(bench.out)
    ended = run("gather", other, "--out", bench.out, "--json", environ={"XRANK_WORKSPACE": str(bench.workspace)})
    assert json.loads(ended.stdout)["source"]["path"] == str(other)
    ended = run("gather", other, "--workspace", bench.workspace, "--out", bench.out, "--json")
    refusal(ended, "UsageError", says=["SRC and --workspace were both given", f"got   {other} and {bench.workspace}"])
    refusal(run("gather", "--out", bench.out, "--json"), "UsageError", says=["no source was given", "XRANK_WORKSPACE"])


# ---- streams, as a shell has them


def shell(script: str, bench: Bench, **environ: str) -> subprocess.CompletedProcess[bytes]:
    named = {"GATHER": f"{XRANK} gather --workspace {bench.workspace} --out {bench.out}", **environ}
    return subprocess.run(["bash", "-c", script], env={**os.environ, **named}, capture_output=True, timeout=150)


STREAMS = ["$GATHER >&-", "$GATHER >&- 2>&- <&-", "$GATHER > /dev/full"]
STREAMS += [
    "$GATHER 2> /dev/full",
    "$GATHER 2>&1 | true; exit ${PIPESTATUS[0]}",
]
STREAMS += ["$GATHER --json | head -c 0; exit ${PIPESTATUS[0]}"]


@pytest.mark.parametrize("script", sampled(STREAMS, 3))
def test_a_stream_that_takes_nothing_changes_nothing(bench: Bench, script: str) -> None:
    model = leave(bench.workspace)
    ended = shell(script, bench)
    assert ended.returncode == 0, ended.stderr
    assert b"Traceback" not in ended.stderr
    assert_holds(bench.out, model)
    # Refused, it says so by its status.
    leave(bench.workspace, made_model(1))
    ended = shell(script, bench)
    assert ended.returncode == 2, ended.stderr
    assert b"Traceback" not in ended.stderr


def test_a_full_stdout_is_told(bench: Bench) -> None:
    leave(bench.workspace)
    ended = shell("$GATHER > /dev/full", bench)
    assert b"xrank: the result cannot be printed: No space left on device; the command itself is done" in ended.stderr


def test_closed_descriptors_are_not_given_to_files(bench: Bench) -> None:
    # The first file opened would be number 1 or 2, and what a library prints would go into a shard.
    bench.workspace.mkdir()
    script = f"""
import os, sys
from unittest import mock
from xrank.cli import main
with mock.patch.object(main.cli, "main", lambda **options: os.open("{bench.out}", os.O_CREAT | os.O_WRONLY)):
    try:
        main.main()
    except SystemExit:
        os.write(1, b"stray")
        os.write(2, b"stray")
"""
    subprocess.run(["bash", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, script], check=True, timeout=150)
    assert bench.out.read_bytes() == b""


def test_a_path_that_is_no_text(bench: Bench) -> None:
    leave(bench.workspace)
    out = os.fsencode(bench.folder) + b"/m\xff\xe9"
    ended = subprocess.run(
        [XRANK, "gather", bench.workspace, "--out", out, "-q"], capture_output=True, timeout=150
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, out + b"\n"), ended.stderr
    assert os.path.isdir(out)
    ended = subprocess.run([XRANK, "verify", out], capture_output=True, timeout=150)
    assert ended.returncode == 0, ended.stderr
    assert b"m\\udcff\\udce9" in ended.stdout


def test_a_bar_is_drawn_on_a_terminal(bench: Bench) -> None:
    leave(bench.workspace)
    layout = bench.folder / "layout.toml"
    layout.write_text(run("layout", "show", bench.workspace, "--toml").stdout)
    for words in (
        ["gather", bench.workspace, "--out", bench.out],
        ["verify", bench.out],
        ["verify", bench.workspace],
        ["verify", bench.workspace, "--against", bench.out],
        ["reshard", bench.workspace, "--layout", layout, "--out", bench.folder / "again"],
    ):
        with mock.patch.object(Output, "shows_progress", True):
            ended = run(*words)
        assert ended.exit_code == 0 and "\r\x1b[K100%  ####################  " in ended.stderr, words
        assert ended.stderr.endswith("\r\x1b[K")  # the line is gone when the report is printed
        assert "%" not in ended.stdout


def test_a_terminal_of_few_characters(bench: Bench) -> None:
    leave_plain(bench.workspace, 0, {"größe.权": torch.ones(4)}, {"model_type": "toy"})
    ended = shell(f"{XRANK} inspect {bench.workspace} --tensors", bench, PYTHONIOENCODING="latin1")
    assert ended.returncode == 0, ended.stderr
    assert b"gr\xf6\xdfe.\\u6743" in ended.stdout


def test_as_a_module(bench: Bench, tmp_path: Path) -> None:
    model = leave(bench.workspace)
    command: list[Any] = [sys.executable, "-m", "xrank", "gather", bench.workspace, "--out", bench.out, "-q"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=150)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{bench.out}\n", "")
    assert_holds(bench.out, model)


def test_a_gather_costs_no_torch(bench: Bench) -> None:
    leave(bench.workspace)
    code = (
        "import sys; from xrank.commands.gather import gather_checkpoint;"
        f"gather_checkpoint({str(bench.workspace)!r}, {str(bench.out)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="only Linux shows threads so")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenBLAS has no thread of its own on one core")
@pytest.mark.parametrize(("told", "num_threads"), [({}, 1), ({"OPENBLAS_NUM_THREADS": "2"}, 2)])
def test_a_command_has_no_threads_of_openblas_unless_told_so(
    bench: Bench, told: dict[str, str], num_threads: int
) -> None:
    leave(bench.workspace)
    code = """
        import atexit, os, sys, time
        from xrank.cli.main import main

        def count(wanted=int(sys.argv.pop(1)), end=time.monotonic() + 60):
            # The system may show a worker a moment longer than Python; one of OpenBLAS stays.
            while len(os.listdir("/proc/self/task")) > wanted and time.monotonic() < end:
                time.sleep(0.01)
            print(len(os.listdir("/proc/self/task")))

        atexit.register(count)
        main()
    """
    environ = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"} | told
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(code),
        str(num_threads),
        "gather",
        bench.workspace,
        "--out",
        bench.out,
        "-q",
    ]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=True)
    assert ended.stdout.splitlines()[-1] == str(num_threads)


def test_every_option_of_gather_is_explained() -> None:
    text = run("gather", "--help").stdout
    options = {word.rstrip(",") for line in text.splitlines() for word in line.split()[:2] if word.startswith("-")}
    assert {"--workspace", "--out", "--base-model", "--layout", "--dtype", "--max-shard-size", "--overwrite"} <= options
    assert {"--replicas", "--dry-run", "--include", "--exclude", "--keep-fp32", "--max-memory", "--workers"} <= options


@pytest.mark.parametrize(("name", "value"), [("XRANK_WORKERS", "0"), ("XRANK_MAX_MEMORY", "1KB")])
def test_options_by_their_variables(bench: Bench, name: str, value: str) -> None:
    leave(bench.workspace)
    ended = run("gather", bench.workspace, "--out", bench.out, "--json", environ={name: value})
    refusal(ended, "UsageError")


def test_the_launchers_variables_change_nothing(bench: Bench) -> None:
    model = leave(bench.workspace)
    ended = run("gather", bench.workspace, "--out", bench.out, environ={"RANK": "1", "WORLD_SIZE": "2"})
    assert ended.exit_code == 0
    assert_holds(bench.out, model)
