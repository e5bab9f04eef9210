"""``xrank verify``: a gathered model by its manifest, a workspace by its own proof, two by their values."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import Bench, Ended, refusal, run
from tests.commands.made_workspaces import copied, flip, leave, model_in, rewrite, state_of
from xrank.commands.verify import verify_model
from xrank.formats.safetensors_header import read_header

MANIFEST = "xrank_manifest.json"


def gathered(bench: Bench, *options: str) -> dict[str, torch.Tensor]:
    model = leave(bench.workspace)
    bench.succeeds(model, *options)
    return model


def verify(path: Path, *options: object) -> Ended:
    return run("verify", path, "--json", *options)


def good(path: Path, *options: object) -> dict[str, Any]:
    ended = verify(path, *options)
    assert ended.exit_code == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


# ---- against the manifest


@pytest.mark.parametrize("options", [[], ["--max-shard-size", "600"]], ids=["one file", "three files"])
def test_what_was_gathered_is_good(bench: Bench, options: list[str]) -> None:
    gathered(bench, *options)
    before = {path: path.stat().st_mtime_ns for path in bench.folder.rglob("*")}
    report = good(bench.out)
    assert report["proof"]["num_digests"] == 5
    assert "every digest as in" in run("verify", bench.out).stdout
    assert {path: path.stat().st_mtime_ns for path in bench.folder.rglob("*")} == before


@pytest.mark.parametrize("tensor", ["embed.weight", "steps"])
def test_a_flipped_byte_names_tensor_and_file(bench: Bench, tensor: str) -> None:
    gathered(bench, "--max-shard-size", "600")
    file = json.loads((bench.out / "model.safetensors.index.json").read_text())["weight_map"][tensor]
    header = read_header(str(bench.out / file))
    (place,) = [header.data_start + found.start for found in header.tensors if found.name == tensor]
    flip(bench.out / file, place + 3)
    says = [
        f"{tensor}: its bytes differ from those that were gathered ({file})",
        f"; want {json.loads((bench.out / MANIFEST).read_text())['tensors'][tensor]['digest']}\n",
        "gather the model again",
    ]
    refusal(verify(bench.out), "CorruptError", says=says, tensor=tensor, file=file)
    flip(bench.out / file, place + 3)
    good(bench.out)


def test_a_gather_of_a_damaged_model_is_refused_unless_its_manifest_is_gone(bench: Bench, tmp_path: Path) -> None:
    gathered(bench)
    file = next(bench.out.glob("*.safetensors"))
    header = read_header(str(file))
    flip(file, header.data_start + header.tensors[0].start)
    says = [f"{header.tensors[0].name}: its bytes differ from those that were gathered", f"delete {MANIFEST}"]
    refusal(run("gather", bench.out, "--out", tmp_path / "again", "--json"), "CorruptError", says=says)
    assert not (tmp_path / "again").exists()
    (bench.out / MANIFEST).unlink()
    assert run("gather", bench.out, "--out", tmp_path / "again").exit_code == 0


def test_no_flipped_bit_goes_unseen(bench: Bench) -> None:
    gathered(bench)
    random.seed(6)
    for path in bench.out.iterdir():
        nbytes = path.stat().st_size
        places = {*random.sample(range(nbytes), 40), 0, nbytes - 1}
        places |= set(range(nbytes - 1100, nbytes, 29)) if path.suffix == ".safetensors" else set()
        for at in sorted(places):
            flip(path, at, bit=at % 8)
            report = verify_model(bench.out)
            # The manifest's own prose (which source a tensor came from) is not compared with anything.
            assert not report.ok or path.name == MANIFEST, (path.name, at)
            assert report.ok or report.exit_code == 4, (path.name, at, report.error)
            flip(path, at, bit=at % 8)
    assert verify_model(bench.out).ok


FAULTS: dict[str, tuple[Callable[[Path], object], str, str | None, list[str]]] = {
    "a shard too few": (
        lambda out: next(out.glob("model-00002*")).unlink(),
        "IncompleteError",
        "model-00002-of-00003.safetensors",
        ["copy the missing file"],
    ),
    "no companion": (
        lambda out: (out / "config.json").unlink(),
        "IncompleteError",
        "config.json",
        ["config.json is in the manifest but not in"],
    ),
    "no index": (
        lambda out: (out / "model.safetensors.index.json").unlink(),
        "IncompleteError",
        "model.safetensors.index.json",
        ["is in the manifest but not in"],
    ),
    "a file too many": (
        lambda out: save_file({"zzz": torch.ones(3)}, out / "model-00004-of-00004.safetensors"),
        "ContradictionError",
        "model-00004-of-00004.safetensors",
        ["not in its manifest", "move the file to another folder"],
    ),
    "a shard twice": (
        lambda out: shutil.copy(next(out.glob("model-00002*")), out / "copy.safetensors"),
        "ContradictionError",
        "copy.safetensors",
        ["not in its manifest"],
    ),
    "a shard cut short": (
        lambda out: os.truncate(next(out.glob("model-00002*")), 4100),
        "CorruptError",
        "model-00002-of-00003.safetensors",
        [],
    ),
    "shards that changed places": (
        lambda out: swap(out, "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"),
        "ContradictionError",
        None,
        [],
    ),
    "another config": (
        lambda out: (out / "config.json").write_text("{}"),
        "CorruptError",
        "config.json",
        ["config.json: its bytes differ from those"],
    ),
    "another index": (
        lambda out: reformat(out / "model.safetensors.index.json"),
        "CorruptError",
        "model.safetensors.index.json",
        ["its bytes differ from those"],
    ),
    "an empty manifest": (
        lambda out: (out / MANIFEST).write_text(""),
        "CorruptError",
        MANIFEST,
        ["is not a valid xrank manifest"],
    ),
    "a manifest cut short": (
        lambda out: os.truncate(out / MANIFEST, 700),
        "CorruptError",
        MANIFEST,
        ["is not a valid xrank manifest"],
    ),
    "a manifest of another version": (
        lambda out: replace(out / MANIFEST, '"schema": 1', '"schema": 9'),
        "CorruptError",
        MANIFEST,
        ["its schema must be 1"],
    ),
    "a manifest that points outside": (
        lambda out: replace(out / MANIFEST, '"name": "config.json"', '"name": "../../etc/passwd"'),
        "CorruptError",
        MANIFEST,
        ["is not the name of a file inside the folder"],
    ),
    "a manifest with a wrong digest": (
        lambda out: replace(out / MANIFEST, '"digest": "xxh3:', '"digest": "xxh3:000000', 2),
        "CorruptError",
        None,
        ["its bytes differ from those"],
    ),
    "a manifest that is a pipe": (
        lambda out: ((out / MANIFEST).unlink(), os.mkfifo(out / MANIFEST)),
        "CorruptError",
        MANIFEST,
        ["not a regular file"],
    ),
}


def swap(out: Path, one: str, other: str) -> None:
    (out / one).rename(out / "x")
    (out / other).rename(out / one)
    (out / "x").rename(out / other)


def reformat(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text())))


def replace(path: Path, old: str, new: str, count: int = 1) -> None:
    """Replace the last occurrences of a text."""
    assert old in path.read_text()
    path.write_text(new.join(path.read_text().rsplit(old, count)))


@pytest.mark.parametrize("what", FAULTS)
def test_models_with(bench: Bench, what: str) -> None:
    change, kind, file, says = FAULTS[what]
    gathered(bench, "--max-shard-size", "600")
    change(bench.out)
    ended = verify(bench.out)
    assert ended.stderr.startswith(f"xrank: {kind}: "), ended.stderr
    report = json.loads(ended.stdout)
    assert (report["command"], report["status"]) == ("verify", "failed")
    assert report["exit_code"] == ended.exit_code == (3 if kind == "IncompleteError" else 4)
    assert all(text in ended.stderr for text in says), ended.stderr
    assert file is None or Path(report["error"]["file"]).name == file


def test_a_model_without_a_manifest(bench: Bench) -> None:
    gathered(bench)
    (bench.out / MANIFEST).unlink()
    refusal(verify(bench.out), "UsageError", says=[f"has no {MANIFEST} to verify it by", "--against"])


def test_nothing_to_verify(bench: Bench) -> None:
    refusal(verify(bench.folder / "absent"), "IncompleteError", says=["does not exist", "check the path"])
    (bench.folder / "empty").mkdir()
    refusal(verify(bench.folder / "empty"), "UnknownFormatError", says=["contains no file"])


# ---- a workspace


def test_a_workspace(bench: Bench) -> None:
    leave(bench.workspace)
    aside = copied(bench.workspace)
    report = good(bench.workspace)
    assert report["proof"] == {"coverage": "proven", "num_checksums": 20, "num_replicas_compared": 10}
    state_of(bench.workspace, 1).unlink()
    refusal(verify(bench.workspace), "IncompleteError", says=["rank 1 of 4 wrote nothing"], rank=1)
    shutil.copytree(aside, bench.workspace, dirs_exist_ok=True)
    rewrite(bench.workspace, 2, lambda state: state["weight"]["norm.weight"].mul_(2))
    refusal(verify(bench.workspace), "ContradictionError", says=["norm.weight: rank 2 holds different values"], rank=2)
    shutil.copytree(aside, bench.workspace, dirs_exist_ok=True)
    path = state_of(bench.workspace, 3)
    flip(path, path.read_bytes().index(bytes(model_bytes(path, "norm.weight"))))
    refusal(verify(bench.workspace), "CorruptError", says=["checksum of rank 3's"], rank=3, tensor="norm.weight")
    shutil.copytree(aside, bench.workspace, dirs_exist_ok=True)
    good(bench.workspace)


def model_bytes(path: Path, name: str) -> memoryview:
    return memoryview(torch.load(path, weights_only=True)["weight"][name].numpy()).cast("B")


# ---- two, value by value


@pytest.fixture
def pair(bench: Bench) -> tuple[Path, dict[str, torch.Tensor]]:
    model = gathered(bench)
    other = bench.folder / "other"
    other.mkdir()
    save_file(model, other / "model.safetensors")
    return other, model


def test_equal_values(bench: Bench, pair: tuple[Path, dict[str, torch.Tensor]]) -> None:
    other, _ = pair
    for one, two in ((bench.out, other), (other, bench.out), (bench.workspace, bench.out), (other, bench.workspace)):
        report = good(one, "--against", two)
        assert report["proof"]["against"] == str(two)
    assert f"every value as in {other}" in run("verify", bench.out, "--against", other).stdout


def test_different_values(bench: Bench, pair: tuple[Path, dict[str, torch.Tensor]]) -> None:
    other, model = pair
    changed = {name: tensor.clone() for name, tensor in model.items()}
    changed["embed.weight"][2, 3] += 0.5
    changed["embed.weight"][9, 3] += 0.25
    save_file(changed, other / "model.safetensors")
    for one, two in ((bench.out, other), (other, bench.out)):
        says = [
            f"embed.weight differs between {one} and {two}",
            "2 of 128 elements differ, the first at element [2, 3], by at most 0.5",
        ]
        error = refusal(verify(one, "--against", two), "ContradictionError", says=says, tensor="embed.weight")
        assert "replicas" not in error["try"]
    refusal(verify(bench.workspace, "--against", other), "ContradictionError", says=["embed.weight differs between"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.pop("up.weight"), "up.weight is only in"),
        (lambda model: model.update(more=torch.ones(1)), "more is only in"),
        (lambda model: model.update({"steps": model["steps"].int()}), "steps differs in type or shape"),
        (
            lambda model: model.update({"norm.weight": model["norm.weight"].reshape(2, 4)}),
            "norm.weight differs in type or shape",
        ),
    ],
)
def test_different_names_and_kinds(
    bench: Bench, pair: tuple[Path, dict[str, torch.Tensor]], change: Callable[[Any], object], said: str
) -> None:
    other, model = pair
    change(model)
    save_file(model, other / "model.safetensors")
    refusal(verify(bench.out, "--against", other), "ContradictionError", says=[said, "which of the two is right"])
    assert model_in(bench.out).keys() != model.keys() or said.endswith("shape")


def test_a_workspace_that_disagrees_with_itself(bench: Bench, pair: tuple[Path, dict[str, torch.Tensor]]) -> None:
    # Its own replicas differ: that is not a difference between the two.
    rewrite(bench.workspace, 2, lambda state: state["weight"]["norm.weight"].mul_(2))
    ended = verify(bench.workspace, "--against", bench.out)
    refusal(ended, "ContradictionError", says=["norm.weight: rank 2 holds different values than rank 0"], rank=2)
