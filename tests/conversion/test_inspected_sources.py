"""What ``xrank inspect`` prints of a source: words and sizes for people, a row for each rank, where its config is."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.cli.bench import Bench, run
from tests.conversion.made_workspaces import CONFIG, leave, leave_plain


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A checkpoint of torch with a model, an optimizer's tensor, and a value that is none."""
    state = {"model": {"up.weight": torch.rand(40, 30)}, "optimizer": {"m": torch.rand(40, 30), "lr": 0.1}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "step", no_dist=True)
    return tmp_path / "step"


def rows(path: Path, *options: object) -> dict[str, str]:
    ended = run("inspect", path, *options)
    assert ended.exit_code == 0, ended.stderr
    width = ended.stdout.index(str(path))
    return {line[:width].strip(): line[width:] for line in ended.stdout.splitlines()}


def test_words_and_sizes(step: Path) -> None:
    shown = rows(step, "--ranks")
    assert shown["values that are not tensors"] == "1" and shown["ranks that wrote"] == "1"
    model, optimizer = shown["parts"].split("; ")
    # The parts count what the files have, headers of torch included.
    assert model.startswith("model: 1 tensor in ") and model.endswith(" KB")
    assert optimizer.startswith("optimizer: left out: 1 tensor in ")
    assert shown["rank 0"] == "1 tensor, 4.8 KB of the model"
    assert not [label for label in shown if "_" in label]
    report = json.loads(run("inspect", step, "--json").stdout)
    assert report["ranks"] == [{"rank": 0, "num_tensors": 1, "nbytes": 4800}]


def test_where_the_config_is(step: Path, bench: Bench) -> None:
    assert rows(step)["config"] == "none; gather with --base-model, or put a config.json beside it"
    (step / "config.json").write_text(json.dumps(CONFIG))
    assert rows(step)["config"] == str(step / "config.json")
    leave(bench.workspace)
    assert rows(bench.workspace)["config"] == "in the states"
    assert rows(bench.workspace, "--base-model", step)["config"] == str(step / "config.json")


def test_ranks_of_a_format_without_any(bench: Bench) -> None:
    bench.out.mkdir()
    torch.save({"a": torch.ones(2)}, bench.out / "pytorch_model.bin")
    assert rows(bench.out, "--ranks")["ranks"] == "the format does not record which rank wrote which tensor"


def test_a_problem_is_shown_and_no_failure(bench: Bench) -> None:
    for rank in range(2):
        leave_plain(bench.workspace, rank, {"a": torch.ones(2)})
    ended = run("inspect", bench.workspace, "--json")
    report = json.loads(ended.stdout)
    assert (ended.exit_code, report["status"], report["error"]) == (0, "ok", None)
    assert [(problem["type"], problem["exit_code"]) for problem in report["problems"]] == [("LayoutError", 2)]
    assert rows(bench.workspace)["problem"].endswith("(a gather would exit 2)")
    assert "The exit status is 0 even with problems" in " ".join(run("inspect", "--help").stdout.split())
