"""What the commands say of their options, of paths that cannot be read, and after Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.bench import Bench, refusal, run
from tests.commands.made_workspaces import leave
from xrank.cli import command
from xrank.commands import verify
from xrank.errors import Wording, XrankError
from xrank.recipes.options import GatherOptions


def test_summaries_are_whole() -> None:
    for words in (["--help"], ["layout", "--help"]):
        text = run(*words).stdout
        assert "..." not in text.partition("Commands:")[2], text


def test_the_timeout() -> None:
    text = " ".join(run("gather", "--help").stdout.split())
    assert "a rank that is alive but late. [default: 1800] [env var: XRANK_TIMEOUT]" in text and "x>0" not in text
    for value in ("0", "-1", "nan"):
        ended = run("gather", "x", "--out", "y", "--timeout", value, "--json")
        refusal(
            ended, "UsageError", says=["must be more than 0 seconds", "xrank gather --help lists arguments and options"]
        )


@pytest.mark.parametrize(
    "words",
    [
        ("gather", "ws", "--out", ""),
        ("gather", "", "--out", "x"),
        ("reshard", "ws", "--layout", "", "--out", "x"),
        ("verify", "x", "--against", ""),
        ("inspect", ""),
        ("layout", "show", ""),
    ],
)
def test_an_empty_path_is_none(words: tuple[str, ...]) -> None:
    refusal(run(*words, "--json"), "UsageError", says=["the path is empty"])


def test_a_layout_file_that_cannot_be_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(bench.workspace)
    file = bench.folder / "l.toml"
    says = ["cannot be read: No such file or directory", "give a readable layout file"]
    refusal(run("layout", "check", file, "--json"), "UsageError", says=says)
    file.write_text("no")
    for words in (["layout", "show", file], ["gather", bench.workspace, "--layout", file, "--out", bench.out]):
        refusal(run(*words, "--json"), "LayoutError", says=["is not TOML", "correct the file"])
    # Whether a path can be read is not asked beforehand: root may read what it has no permission for.
    monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)
    assert run("inspect", bench.workspace).exit_code == 0


def test_a_source_without_permission(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(bench.workspace)
    listdir = os.listdir

    def refused(path: str | Path = ".") -> list[str]:
        if os.fspath(path) == str(bench.workspace):
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    for words in (["inspect", bench.workspace], ["gather", bench.workspace, "--out", bench.out]):
        refusal(run(*words, "--json"), "UsageError", says=["Permission denied", "change its owner or mode"])


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Give back the handlers that an interrupted command, whose process is about to end, leaves behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
def test_an_interrupted_verify_starts_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(bench.workspace)

    def interrupted(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(verify, "verify_model", interrupted)
    ended = run("verify", bench.workspace)
    assert (ended.exit_code, ended.stderr) == (130, "xrank: interrupted; the same command starts again (exit 130)\n")


@pytest.mark.usefixtures("own_signals")
def test_a_failure_is_told_whole_whatever_arrives_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # torchrun ends all ranks as soon as one has left: here, while rank 0 says what failed.
    leave(bench.workspace, ranks=[0])
    told = command.error_text

    def interrupted(error: XrankError, wording: Wording, columns: int | None) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return told(error)

    monkeypatch.setattr(command, "error_text", interrupted)
    refusal(bench.gather(), "IncompleteError", says=["wrote nothing in"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sizes_as_people_type_them() -> None:
    sizes = {"2G": 2 * 10**9, "1.5GB": 1_500_000_000, "64 MB": 64 * 10**6, "1gib": 2**30, "512k": 512_000}
    assert {text: GatherOptions(max_shard_size=text).max_shard_nbytes for text in sizes} == sizes
