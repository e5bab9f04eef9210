"""Long calls alike report progress, end when progress raises, and return printable reports."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import xrank
from tests.commands.made_workspaces import leave
from xrank.errors import RankFailedError, UsageError
from xrank.layout import LayoutMap

NAMES = ("gather", "verify", "reshard", "export", "load")


class _StoppedError(Exception):
    """Raised by a program that wants to stop a call."""


@pytest.fixture
def calls(tmp_path: Path) -> dict[str, Callable[..., Any]]:
    """Return long calls, each ready to be made with `progress`."""
    leave(tmp_path / "workspace")
    xrank.gather_checkpoint(tmp_path / "workspace", tmp_path / "model")
    state = {"w": torch.arange(3_000_000, dtype=torch.float32)}
    layouts = xrank.open_checkpoint(tmp_path / "workspace").layouts
    assert isinstance(layouts, LayoutMap)
    layouts.write(tmp_path / "layouts.toml")
    xrank.export_model(state, tmp_path / "exported")
    return {
        "gather": lambda **more: xrank.gather_checkpoint(tmp_path / "workspace", tmp_path / "out", **more),
        "verify": lambda **more: xrank.verify_model(tmp_path / "workspace", **more),
        "reshard": lambda **more: xrank.reshard_checkpoint(
            tmp_path / "workspace", tmp_path / "layouts.toml", tmp_path / "out", **more
        ),
        "export": lambda **more: xrank.export_model(state, tmp_path / "out", **more),
        "load": lambda **more: xrank.load_model({"w": torch.zeros(3_000_000)}, tmp_path / "exported", **more),
    }


@pytest.mark.parametrize("name", NAMES)
def test_progress_counts_to_the_end(calls: dict[str, Callable[..., Any]], name: str) -> None:
    seen: list[tuple[int, int]] = []
    assert calls[name](progress=lambda done, total: seen.append((done, total))).ok
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0
    assert len({total for _, total in seen}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_of_progress_ends_the_call(
    calls: dict[str, Callable[..., Any]], name: str, tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        raise _StoppedError

    threads = threading.active_count()
    with pytest.raises(_StoppedError):
        calls[name](progress=stop)
    assert threading.active_count() == threads
    assert not os.path.exists(tmp_path / "out")
    assert calls[name]().ok  # the same call works, from what was finished


def test_an_event_ends_a_call_from_another_thread(calls: dict[str, Callable[..., Any]]) -> None:
    cancelled = threading.Event()

    def check(done: int, total: int) -> None:
        if cancelled.is_set():
            raise _StoppedError

    cancelled.set()
    with pytest.raises(_StoppedError):
        calls["gather"](progress=check)


@pytest.mark.ranks(2)
def test_an_exception_of_progress_ends_the_call_on_all_ranks(rank: int, tmp_path: Path) -> None:
    state = {"w": torch.arange(3_000_000, dtype=torch.float32)}

    def stop(done: int, total: int) -> None:
        raise _StoppedError("no more")

    with pytest.raises(_StoppedError if rank == 0 else RankFailedError):
        xrank.export_model(state, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
    assert xrank.export_model(state, tmp_path / "out").ok
    with pytest.raises(_StoppedError if rank == 1 else RankFailedError):
        xrank.load_model(state, tmp_path / "out", progress=stop if rank == 1 else None)


# ---- reports


def test_a_report_is_printed_as_lines(calls: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    report = calls["gather"]()
    labels = [line.split()[0] for line in str(report).splitlines()]
    assert labels == ["gather", "source", "proof", "output"]
    assert f"ok, {report.seconds:.1f} s: {tmp_path / 'out'}" in str(report)
    assert "20 checksums good; 10 replicas equal" in str(report) and "5 tensors, " in str(report)
    planned = xrank.gather_checkpoint(tmp_path / "workspace", tmp_path / "other", dry_run=True)
    assert [line.split()[0] for line in str(planned).splitlines()] == ["gather", "source", "proof", "plan"]
    found = xrank.inspect(tmp_path / "workspace")
    assert re.search("^tensors +5$", str(found), re.MULTILINE)


def test_a_report_of_a_fault(calls: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    calls["export"]()
    other = {"w": torch.zeros(3_000_000)}
    xrank.export_model(other, tmp_path / "differs<b>")
    report = xrank.verify_model(tmp_path / "out", against=tmp_path / "differs<b>")
    assert not report.ok
    lines = str(report).splitlines()
    assert lines[0].startswith("verify") and "failed" in lines[0]
    assert [line.split()[0] for line in lines][-2:] == ["want", "try"] or "try" in lines[-1]
    text = report._repr_html_()
    assert "<b>" not in text and "differs&lt;b&gt;" in text
    parser = HTMLParser()
    parser.feed(text)
    parser.close()
    assert text.count("<tr>") == len(lines)


# ---- names at the top


def test_inspect_simulate_and_clean_are_at_the_top(tmp_path: Path) -> None:
    leave(tmp_path / "workspace")
    assert xrank.inspect(tmp_path / "workspace").details["problems"] == []
    found = xrank.simulate(tmp_path / "workspace", num_ranks=2)
    assert str(found).splitlines()[-1].startswith("all")
    stage = tmp_path / ".out.xrank-0123456789abcdef"
    assert xrank.clean(tmp_path).details["num_removed"] == 0 and not stage.exists()
    with pytest.raises(UsageError, match="none is not a folder"):
        xrank.clean([tmp_path / "none"])


def test_errors_of_these_calls_name_python_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no operation") as raised:
        xrank.simulate(tmp_path, "no operation")
    assert "--" not in str(raised.value)
