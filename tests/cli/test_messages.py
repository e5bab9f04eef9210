"""Messages on stderr while a command runs: the progress line, log lines, JSON, colors."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import click
import pytest

from tests.cli.bench import Bench, run
from tests.commands.made_workspaces import leave
from xrank.cli.command import Messages, Output, error_text, following_progress, rows_text
from xrank.errors import UsageError


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def output(*, as_json: bool = False, quiet: bool = False) -> Output:
    return Output("gather", as_json=False, quiet=quiet, messages=Messages(as_json=as_json))


def drawn(columns: int, calls: list[tuple[float, int]], total: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((columns, 24)))
    with following_progress(output(), clock) as progress:
        assert progress is not None
        for clock.now, done in calls:
            progress(done, total)
    return stream.getvalue().split("\r\x1b[K")[1:]


def test_the_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [(0.0, 0), (0.05, 10**9), (1.0, 2 * 10**9), (4.0, 8 * 10**9), (8.0, 16 * 10**9)]
    assert drawn(80, calls, 16 * 10**9, monkeypatch) == [
        " 12%  ##------------------  2.0 GB of 16.0 GB  2.0 GB/s  0:07 left",
        " 50%  ##########----------  8.0 GB of 16.0 GB  2.0 GB/s  0:04 left",
        "100%  ####################  16.0 GB of 16.0 GB  finishing",
        "",
    ]
    assert drawn(60, calls[:3], 16 * 10**9, monkeypatch)[0] == " 12%  2.0 GB of 16.0 GB  2.0 GB/s  0:07 left"
    assert all(len(line) < 20 for line in drawn(20, calls, 16 * 10**9, monkeypatch))


def test_bytes_of_an_interrupted_run_are_not_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(60, [(0.0, 9 * 10**9), (2.0, 10 * 10**9)], 16 * 10**9, monkeypatch)
    assert lines[0] == " 62%  10.0 GB of 16.0 GB  500 MB/s  0:12 left"


def test_elsewhere_one_message_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO, "xrank"), following_progress(output(), clock) as progress:
        assert progress is not None
        for clock.now in range(200):
            progress(int(clock.now) * 10**9, 8000 * 10**9)
    assert [record.getMessage() for record in caplog.records] == [
        f"{size} of 8.0 TB  1.0 GB/s  2:{left}:20 left"
        for size, left in (("60.0 GB", 12), ("120 GB", 11), ("180 GB", 10))
    ]
    with following_progress(output(quiet=True)) as progress:
        assert progress is None


def test_messages_as_json(bench: Bench) -> None:
    leave(bench.workspace)
    ended = run("gather", bench.workspace, "-o", bench.out, "--log-json", "-v")
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["debug", "info", "debug"]
    assert lines[0]["message"].startswith("plan: 5 tensors in 1 file, ") and lines[2]["message"].endswith("B/s")
    failed = json.loads(run("gather", bench.workspace, "-o", bench.out, "--dtype", "bf16", "--log-json").stderr)
    assert (failed["level"], failed["exit_code"], failed["error"]["type"]) == ("error", 2, "OutputExistsError")


def test_progress_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    clock, made = Clock(), output(as_json=True)
    logger = logging.getLogger("xrank")
    with (
        mock.patch.object(logger, "handlers", [made.messages]),
        mock.patch.object(logger, "level", logging.INFO),
        following_progress(made, clock) as progress,
    ):
        assert progress is not None
        for clock.now, done in ((0.0, 0), (60.0, 30)):
            progress(done, 90)
    line = json.loads(capsys.readouterr().err)
    facts = {name: line[name] for name in ("event", "done_nbytes", "total_nbytes", "seconds_left")}
    assert facts == {"event": "progress", "done_nbytes": 30, "total_nbytes": 90, "seconds_left": 120.0}


def test_more_is_printed_with_v(bench: Bench) -> None:
    leave(bench.workspace)
    ended = run("gather", bench.workspace, "-o", bench.out, "-v")
    assert "recipe  none: the names are those of the source\n" in ended.stdout
    assert "file    model.safetensors: " in ended.stdout and ", xxh3:" in ended.stdout
    assert "plan: 5 tensors in 1 file, " in ended.stderr and "model.safetensors took " in ended.stderr


# ---- colors


def in_terminal(act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the text printed to stderr on a terminal."""
    mine, its = pty.openpty()
    with open(its, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        act()
    os.close(its)
    text = os.read(mine, 65536).decode()
    os.close(mine)
    return text


@pytest.mark.parametrize(
    ("environ", "on_terminal", "in_file"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_colors(environ: dict[str, str], on_terminal: bool, in_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def act() -> None:
        with pytest.raises(SystemExit):
            output().fail(UsageError("no\x1b[31m", next_step="stop"))

    text = in_terminal(act, monkeypatch)
    assert ("\x1b[31m\x1b[1mxrank: UsageError:\x1b[0m no\\x1b" in text) is on_terminal
    assert ("\x1b" in text) is on_terminal
    assert ("\x1b" in run("gather", "none", "-o", "out", environ=environ).stderr) is in_file


def test_long_lines_are_wrapped_between_words_on_a_terminal() -> None:
    rows = [("source", "a checkpoint of 8 ranks"), ("ok", f"model and {'long' * 9}.safetensors, 3 files")]
    plain = click.unstyle(rows_text(rows, 30))
    assert plain.splitlines() == [
        *("source  a checkpoint of 8", "        ranks", "ok      model and"),
        *(f"        {'long' * 9}.safetensors,", "        3 files"),
    ]
    assert click.unstyle(rows_text(rows)).splitlines() == ["source  a checkpoint of 8 ranks", f"ok      {rows[1][1]}"]
    error = UsageError("the folder is not one that a gather reads", got="nothing", next_step="check the path")
    assert click.unstyle(error_text(error, columns=40)).splitlines() == [
        *("xrank: UsageError: the folder is not one", "        that a gather reads"),
        *("  got   nothing", "  try   check the path (exit 2)"),
    ]


# ---- variables in errors


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("XRANK_MAX_MEMORY", "abc", "XRANK_MAX_MEMORY must be a size"),
        ("XRANK_WORKERS", "0", "XRANK_WORKERS must be 1 or more"),
        ("XRANK_WORKERS", "x", "'--workers' (env var: 'XRANK_WORKERS')"),
        ("XRANK_TIMEOUT", "x", "'--timeout' (env var: 'XRANK_TIMEOUT')"),
    ],
)
def test_an_error_names_the_variable(bench: Bench, name: str, value: str, says: str) -> None:
    leave(bench.workspace)
    ended = run("gather", bench.workspace, "-o", bench.out, environ={name: value})
    assert ended.exit_code == 2 and says in ended.stderr
    option = f"--{name.removeprefix('XRANK_').lower().replace('_', '-')}"
    ended = run("gather", bench.workspace, "-o", bench.out, option, value, environ={name: "1"})
    assert ended.exit_code == 2 and option in ended.stderr


def test_a_plugin_that_does_not_load_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[xrank.readers]\nodd = broken_reader:Reader\n")
    (tmp_path / "broken_reader.py").write_text("raise RuntimeError('two\\nlines')\n")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    from xrank.readers.discovery import plugin_readers

    plugin_readers.cache_clear()
    try:
        ended = run("inspect", tmp_path / "source")
    finally:
        plugin_readers.cache_clear()
    text = "the reader odd of the package broken fails to load: RuntimeError: two\\nlines"
    assert ended.stderr.splitlines()[0] == f"xrank: warning: {text}"
    rows = json.loads(run("doctor", tmp_path, "--json").stdout)["checks"]
    assert [row["text"] for row in rows if row["name"] == "reader odd"] == [
        "of the package broken: RuntimeError: two\\nlines"
    ]
