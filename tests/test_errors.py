"""Texts name options in the words of whoever reads them: the command line, Python, or one function alone."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import xrank
from tests.cli.bench import run
from xrank.errors import (
    AGAIN,
    COMMAND,
    PYTHON,
    NoSpaceError,
    RankFailedError,
    RankTimeoutError,
    Text,
    UsageError,
    Wording,
    XrankError,
    either,
    errors_of,
    needs,
    option,
)
from xrank.ranks.failure import FailureRecord

LIVE = Wording.of_function(xrank.export_model)
GATHER = Wording.of_command(["--dtype", "--exclude", "--layout", "--timeout"])


@pytest.mark.parametrize(
    ("text", "of_command", "of_python"),
    [
        ("plain", "plain", "plain"),
        (option("base_model"), "--base-model", "base_model="),
        (option("dtype", "bf16"), "--dtype bf16", 'dtype="bf16"'),
        (option("overwrite", True), "--overwrite", "overwrite=True"),
        (option("resume", False), "--no-resume", "resume=False"),
        (option("num_ranks", 4), "--ranks 4", "num_ranks=4"),
        (option("layouts", metavar="FILE"), "--layout FILE", "layouts="),
        (option("out", "a b/\udcff\"'"), "--out a b/\udcff\"'", 'out="a b/\udcff"\'"'),
        (f"wait, then {AGAIN}", "wait, then run the same command", "wait, then make the same call"),
    ],
)
def test_an_option(text: str, of_command: str, of_python: str) -> None:
    assert (COMMAND.render(text), PYTHON.render(text)) == (of_command, of_python)
    shown = Text(text)
    assert shown == of_python and COMMAND.render(shown) == of_command
    for copy in (pickle.loads(pickle.dumps(shown)), Text(shown)):
        assert copy == of_python and COMMAND.render(copy) == of_command


def test_remedies_are_those_that_a_face_has() -> None:
    text = either(
        f"leave it out with {option('exclude')}",
        f"give {option('layouts')}, then {AGAIN}",
        needs("transform", "let it return the tensor"),
    )
    assert GATHER.render(text) == "leave it out with --exclude, or give --layout, then run the same command"
    assert LIVE.render(text) == "give layouts=, then make the same call, or let it return the tensor"
    assert Wording.of_command([]).render(text).count(", or ") == 2  # none fits: all are shown


@pytest.mark.parametrize("text", ["\ufdd0", "\ufdd0A b\ufdd2", "\ufdd0dtype\ufdd1{\ufdd2", "\ufdd3\ufdd5"])
def test_a_name_that_holds_marks_is_shown(text: str) -> None:
    for face in (COMMAND, PYTHON, LIVE):
        assert isinstance(face.render(f"{text} and {option('dtype', 'bf16')}"), str)


def test_an_error_keeps_its_marks() -> None:
    made = UsageError(f"{option('dtype')} is wrong", got=option("dtype", "x"), next_step=f"correct it, then {AGAIN}")
    copies = (pickle.loads(pickle.dumps(made)), XrankError.from_record(json.loads(json.dumps(made.to_record()))))
    for error in (made, *copies):
        assert str(error) == error.args[0] == error.message == "dtype= is wrong"
        assert error.__notes__ == ['  got   dtype="x"', "  try   correct it, then make the same call"]
        assert json.loads(json.dumps(error.to_dict()))["try"] == "correct it, then make the same call"
        assert COMMAND.render(error.to_dict()["try"]) == "correct it, then run the same command"


def test_a_record_has_the_parts_of_every_class() -> None:
    late = RankTimeoutError("late", rank=2, waiting_for=(2, 3))
    full = NoSpaceError("full", needed_nbytes=5, free_nbytes=3)
    failed = RankFailedError("failed", rank=1, host="h", pid=7, cause="KeyError: 'a'", failures=(late, full))
    failed.failures = (failed, *failed.failures)
    found = XrankError.from_record(json.loads(json.dumps(failed.to_record())))
    assert isinstance(found, RankFailedError) and (found.pid, found.cause, found.rank) == (7, "KeyError: 'a'", 1)
    first, second, third = found.failures
    assert first is found and found.to_dict() == failed.to_dict()
    assert isinstance(second, RankTimeoutError) and second.waiting_for == (2, 3)
    assert isinstance(third, NoSpaceError) and (third.needed_nbytes, third.free_nbytes) == (5, 3)
    with pytest.raises(KeyError):
        XrankError.from_record({**late.to_record(), "type": "find_spec"})


def test_another_rank_renders_a_failure_for_its_own_face() -> None:
    content = FailureRecord.from_error(UsageError("no", got=option("dtype", "x")), 3, "its plan").to_text()
    error = FailureRecord.from_text(content).to_error()
    assert isinstance(error, RankFailedError)
    assert error.cause == 'UsageError: no; got dtype="x"'
    assert COMMAND.render(error.message) == "rank 3 failed: UsageError: no; got --dtype x"


def test_what_is_known_above_fills_what_is_absent() -> None:
    error = UsageError("is wrong", got="a", file="x")
    error.about("w", tensor="w", file="y", got="b", next_step="first")
    error.about("w", tensor="v", next_step="second")
    assert (error.message, error.tensor, error.file, error.got, error.next_step) == (
        "w is wrong", "w", "x", "a; b", "first",
    )  # fmt: skip
    error.advise("third")
    assert error.next_step == "third" and error.args == ("w is wrong",)
    short = UsageError("the sharding is wrong")
    short.about("t")  # the message begins with the same letter
    assert short.message == "t: the sharding is wrong"


def test_a_public_function_names_its_own_arguments() -> None:
    with pytest.raises(UsageError) as raised, errors_of(xrank.export_model):
        raise UsageError("no", next_step=either(f"use {option('exclude')}", f"use {option('layouts')}"))
    assert raised.value.next_step == "use layouts="


def test_one_error_in_all_three_faces(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "z": torch.ones(1)}, tmp_path / "model.safetensors")
    base = tmp_path / "base"
    base.mkdir()
    save_file({"w": torch.ones(2)}, base / "model.safetensors")
    words = ["gather", tmp_path, "--out", tmp_path / "out", "--base-model", base]
    assert "try   give the right base model, or leave the tensor out with --exclude" in run(*words).stderr
    error = json.loads(run(*words, "--json").stdout)["error"]
    assert error["try"] == "give the right base model, or leave the tensor out with --exclude"
    with pytest.raises(XrankError) as raised:
        xrank.gather_checkpoint(tmp_path, tmp_path / "out", base_model=base)
    assert "or leave the tensor out with exclude=" in str(raised.value.next_step)
    with pytest.raises(XrankError) as raised:
        xrank.export_model({"w": torch.ones(2), "z": torch.ones(1)}, tmp_path / "out", base_model=base)
    assert raised.value.next_step == "give the right base model, or omit the tensor"


def test_advice_with_an_option_is_the_whole_command_where_it_is_known() -> None:
    text = f"add it, then {AGAIN} with {option('overwrite', True)}"
    assert PYTHON.render(text) == "add it, then make the same call with overwrite=True"
    assert COMMAND.render(text) == "add it, then run the same command with --overwrite"
    for typed in ("xrank gather 'a b' --out c", "xrank gather 'a b' --out c --overwrite"):
        assert Wording(True, typed=typed).render(text) == "add it, then run: xrank gather 'a b' --out c --overwrite"
    assert Wording(True, typed="xrank gather a").render(f"wait, then {AGAIN}") == "wait, then run the same command"
