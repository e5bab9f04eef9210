"""The config of the output, what a base model adds and demands, and tensors that are tied."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import Bench, refusal, run
from tests.commands.made_workspaces import CONFIG, assert_holds, leave, made_model, model_in, rewrite
from xrank.commands.verify import verify_model


def base_model(bench: Bench, model: dict[str, torch.Tensor] | None = None, config: Any = None) -> tuple[str, Path]:
    """Make a base model of these tensors (none: no weights) and config (none: no config.json)."""
    path = bench.folder / "base"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    if model:
        save_file(model, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text('{"tokens": []}')
    return "--base-model", path


def config_in(bench: Bench) -> Any:
    return json.loads((bench.out / "config.json").read_text())


def note_codes(report: dict[str, Any]) -> list[str]:
    return [note["code"] for note in report["notes"]]


# ---- whose config


def test_all_ranks_agree(bench: Bench) -> None:
    report = bench.succeeds(leave(bench.workspace))
    assert config_in(bench) == CONFIG
    assert report["output"]["companions"] == ["config.json"]
    assert report["notes"] == []


DISAGREEMENTS = {
    "a value deep inside": (
        lambda c: c["rope"].update(theta=1.0),
        ["disagree about config['rope']['theta']", "got   1.0 on rank 2", "10000.0"],
    ),
    "a key too few": (
        lambda c: c.pop("inner_width"),
        ["disagree about config['inner_width']", "got   nothing on rank 2", "4, as on rank 0"],
    ),
    "a key too many": (
        lambda c: c["rope"].update(extra=None),
        ["disagree about config['rope']['extra']", "got   None on rank 2", "nothing"],
    ),
    "a type": (
        lambda c: c.update(inner_width=8.0),
        ["disagree about config['inner_width']", "got   8.0 on rank 2", "4, as on rank 0"],
    ),
    "a key with dots": (
        lambda c: c.update({"a.b, as on rank 1": 1}),
        ["disagree about config['a.b, as on rank 1']", "got   1 on rank 2", "nothing"],
    ),
    "a key of two lines": (
        lambda c: c.update({"a\nb": {"": "\ud800"}}),
        [r"disagree about config['a\nb']", r"got   {'': '\ud800'} on rank 2"],
    ),
    "a number as a key": (lambda c: c.update({7: float("nan")}), ["disagree about config[7]", "got   nan on rank 2"]),
    "everything": (lambda c: c.clear(), ["disagree about config['inner_width']", "got   nothing on rank 2"]),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_disagree_about(bench: Bench, what: str) -> None:
    change, says = DISAGREEMENTS[what]
    model = leave(bench.workspace)
    rewrite(bench.workspace, 2, lambda state: change(state["config"]))
    says = ["ranks 0 and 2 disagree about config[", *says, "give --base-model (its config.json is used)"]
    bench.refused("ContradictionError", says=says, rank=2, file="rank_2_state.pth")
    # A base model without a config decides nothing, one with it does.
    bench.refused("ContradictionError", *base_model(bench, model), says=says)
    bench.succeeds(model, *base_model(bench, model, {"model_type": "base"}))
    assert config_in(bench) == {"model_type": "base"}
    shutil.rmtree(bench.out)
    leave(bench.workspace, ranks=[2])
    bench.succeeds(model)


@pytest.mark.parametrize("value", [{1, 2}, b"x", torch.ones(1), {1: 0, "a": 0}], ids=["set", "bytes", "tensor", "keys"])
def test_a_config_that_json_does_not_hold(bench: Bench, value: object) -> None:
    model = leave(bench.workspace)
    for rank in range(4):
        rewrite(bench.workspace, rank, lambda state: state["config"].update(extra=value))
    says = ["config cannot be written as config.json", "give --base-model"]
    bench.refused("UsageError", says=says, rank=0, file="rank_0_state.pth")
    bench.succeeds(model, *base_model(bench, model, {"model_type": "base"}))


def test_no_config_is_told(bench: Bench) -> None:
    report = bench.succeeds(leave(bench.workspace, config={}))
    assert note_codes(report) == ["no-config"]
    assert report["notes"][0]["message"].endswith(f"--out {bench.out} --json --overwrite")
    assert not (bench.out / "config.json").exists()


def test_a_config_beside_the_states_wins(bench: Bench) -> None:
    model = leave(bench.workspace)
    (bench.workspace / "config.json").write_text('{"model_type":   "beside"}')
    bench.succeeds(model, *base_model(bench, model, {"model_type": "base"}))
    assert (bench.out / "config.json").read_text() == '{"model_type":   "beside"}'


@pytest.mark.parametrize("text", ["{", "[]", "", "\xff"])
def test_a_config_that_is_none(bench: Bench, text: str) -> None:
    model = leave(bench.workspace)
    options = base_model(bench, model)
    (bench.folder / "base" / "config.json").write_bytes(text.encode("latin1"))
    bench.refused("CorruptError", *options, says=[str(bench.folder / "base" / "config.json")], file="config.json")
    bench.succeeds(model, *base_model(bench, model, CONFIG))


# ---- what a base model adds


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "giant"])
def test_a_config_that_no_one_should_read(bench: Bench, kind: str) -> None:
    """Opening a pipe would wait for ever, reading a device or a giant take all memory."""
    options = base_model(bench, leave(bench.workspace))
    path = bench.folder / "base" / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 33)
    says = "is too large for a config" if kind == "giant" else "is not a regular file"
    bench.refused("CorruptError", *options, says=[says], file="config.json")


def test_companions_are_copied_byte_for_byte(bench: Bench) -> None:
    model = leave(bench.workspace)
    report = bench.succeeds(model, *base_model(bench, model, {"b": 1, "a": 2}))
    for name in ("config.json", "tokenizer.json"):
        assert (bench.out / name).read_bytes() == (bench.folder / "base" / name).read_bytes()
    assert report["output"]["companions"] == ["config.json", "tokenizer.json"]
    assert report["proof"]["base_model"] == "names and shapes"
    manifest = json.loads((bench.out / "xrank_manifest.json").read_text())
    assert [companion["name"] for companion in manifest["companions"]] == ["config.json", "tokenizer.json"]


def test_a_base_model_without_weights_demands_nothing(bench: Bench) -> None:
    report = bench.succeeds(leave(bench.workspace), *base_model(bench, None, {"model_type": "base"}))
    assert report["proof"]["base_model"] is None
    assert config_in(bench) == {"model_type": "base"}
    (note,) = report["notes"]
    assert note["code"] == "base-model" and "names and shapes were not compared" in note["message"]


@pytest.mark.parametrize(
    "files", [[], ["tokenizer.json"], [".metadata", "__0_0.distcp"], ["checkpoint-2000/config.json"]]
)
def test_a_folder_that_is_no_base_model(bench: Bench, files: list[str]) -> None:
    leave(bench.workspace)
    folder = bench.folder / "base"
    folder.mkdir()
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("{}")
    says = [
        f"{folder} is not a base model: it contains neither",
        "got   " + (Path(files[0]).parts[0] if files else "an empty folder"),
    ]
    bench.refused("UsageError", "--base-model", folder, says=says)


def test_a_file_is_no_base_model(bench: Bench) -> None:
    model = leave(bench.workspace)
    _, folder = base_model(bench, model, {"model_type": "toy"})
    file = folder / "config.json"
    bench.refused("UsageError", "--base-model", file, says=[f"{file} is a file", f"that holds it: {folder}"])


def test_from_the_hugging_face_cache(bench: Bench) -> None:
    model = leave(bench.workspace)
    cache = bench.folder / "hub"
    options = ("gather", bench.workspace, "--out", bench.out, "--base-model", "acme/toy-1b", "--json")
    environ = {"HF_HUB_CACHE": str(cache)}
    ended = run(*options, environ=environ)
    refusal(ended, "UsageError", says=["acme/toy-1b is not in the local Hugging Face cache", "hf download acme/toy-1b"])
    snapshot = cache / "models--acme--toy-1b" / "snapshots" / "abc123"
    blobs = cache / "models--acme--toy-1b" / "blobs"
    (cache / "models--acme--toy-1b" / "refs").mkdir(parents=True)
    (cache / "models--acme--toy-1b" / "refs" / "main").write_text("abc123")
    base_model(bench, model, {"model_type": "cached"})
    shutil.copytree(bench.folder / "base", blobs)
    snapshot.mkdir(parents=True)
    for name in os.listdir(blobs):
        (snapshot / name).symlink_to(f"../../blobs/{name}")  # as the cache has them
    ended = run(*options, environ=environ)
    assert ended.exit_code == 0, ended.stderr
    assert_holds(bench.out, model)
    assert config_in(bench) == {"model_type": "cached"}
    assert not (bench.out / "config.json").is_symlink()


@pytest.mark.parametrize("name", ["../base", "a/b/c", "a--b", "", "/absent"])
def test_no_name_of_a_model(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(bench.folder)
    leave(bench.workspace)
    bench.refused("UsageError", "--base-model", name, says=["neither a folder nor a model's name", "organization/name"])


# ---- what a base model demands


def test_a_tensor_that_the_base_model_has_more(bench: Bench) -> None:
    model = leave(bench.workspace)
    options = base_model(bench, {**model, "mtp.head": torch.ones(2), "mtp.norm": torch.ones(2)}, CONFIG)
    says = ["mtp.head is in the base model but not in the source; likewise mtp.norm", "got   5 tensors", "--exclude"]
    bench.refused("ContradictionError", *options, says=says, tensor="mtp.head")
    # What the message advises works, and is told.
    report = bench.succeeds(model, *options, "--exclude", r"mtp\..*")
    assert report["output"]["excluded"] == ["mtp.head", "mtp.norm"]
    assert json.loads((bench.out / "xrank_manifest.json").read_text())["excluded"] == ["mtp.head", "mtp.norm"]


def test_a_tensor_that_the_base_model_lacks(bench: Bench) -> None:
    model = leave(bench.workspace)
    less = {name: tensor for name, tensor in model.items() if name != "up.weight"}
    options = base_model(bench, less, CONFIG)
    says = ["up.weight is not in the base model", "got   BF16 [12, 8]", "only the 4 names of"]
    bench.refused("ContradictionError", *options, says=says, tensor="up.weight")
    bench.succeeds(less, *options, "--exclude", "up.weight")


def test_a_tensor_of_another_shape(bench: Bench) -> None:
    model = leave(bench.workspace)
    options = base_model(bench, {**model, "up.weight": torch.ones(13, 8)}, CONFIG)
    says = ["up.weight does not have its shape in the base model", "got   [12, 8]", "[13, 8], as in"]
    bench.refused("ContradictionError", *options, says=says, tensor="up.weight")
    bench.succeeds(model, *base_model(bench, model, CONFIG))


def test_a_damaged_base_model(bench: Bench) -> None:
    model = leave(bench.workspace)
    options = base_model(bench, model, CONFIG)
    os.truncate(bench.folder / "base" / "model.safetensors", 100)
    bench.refused("CorruptError", *options, file="model.safetensors")


# ---- tied


TIED = {"model.embed_tokens.weight": "[v/tp, h]", "lm_head.weight": "[v/tp, h]"}


def tied_model(difference: float = 0.0) -> dict[str, torch.Tensor]:
    embedding = made_model()["embed.weight"]
    head = embedding.clone()
    head[3, 4] += difference
    return {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


@pytest.mark.parametrize("head", ["[v/tp, h]", "[v, h/tp]", "[v/tp, h/dp]"])
@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_tied_and_equal(bench: Bench, head: str, config: dict[str, Any]) -> None:
    model = leave(bench.workspace, tied_model(), layouts={**TIED, "lm_head.weight": head}, config=config)
    report = bench.succeeds({"model.embed_tokens.weight": model["model.embed_tokens.weight"]})
    assert report["output"]["tied"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    manifest = json.loads((bench.out / "xrank_manifest.json").read_text())
    assert manifest["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    # The head that was not written is the embedding: nothing of the workspace is missing from the model.
    for one, two in ((bench.workspace, bench.out), (bench.out, bench.workspace)):
        assert verify_model(one, against=two).ok
    leave(bench.workspace, {**model, "lm_head.weight": model["lm_head.weight"] + 1}, layouts=TIED, config=config)
    differs = verify_model(bench.workspace, against=bench.out)
    assert differs.exit_code == 4 and differs.error is not None and differs.error["tensor"] == "lm_head.weight"


@pytest.mark.parametrize("options", [[], ["--replicas", "pick"]], ids=["verify", "pick"])
def test_tied_and_different(bench: Bench, options: list[str]) -> None:
    # Never picked among: it is no replica, and leaving it out would lose a tensor.
    config = {"tie_word_embeddings": True}
    model = leave(bench.workspace, tied_model(0.5), layouts=TIED, config=config)
    says = [
        "lm_head.weight is tied to model.embed_tokens.weight",
        "1 of 64 elements differ",
        "element [3, 4]",
        "at most 0.5",
    ]
    bench.refused("ContradictionError", *options, says=says, tensor="model.embed_tokens.weight", rank=0)
    leave(bench.workspace, model, layouts=TIED, config={"tie_word_embeddings": False})
    bench.succeeds(model, *options)


def test_tied_and_of_another_kind(bench: Bench) -> None:
    model = tied_model()
    model["lm_head.weight"] = model["lm_head.weight"].double()
    leave(bench.workspace, model, layouts=TIED, config={"tie_word_embeddings": True})
    says = ["lm_head.weight is tied to", "differ in kind", "got   F64 [16, 8]", "F32 [16, 8]"]
    bench.refused("ContradictionError", says=says, tensor="lm_head.weight")


def test_tied_by_a_layout_file(bench: Bench) -> None:
    names = {"a": "[v, h]", "b": "[v, h]"}
    tensor = torch.rand(4, 4)
    leave(bench.workspace, {"a": tensor, "b": tensor}, layouts=names, recorded=False)
    path = bench.folder / "layout.toml"
    path.write_text('[mesh]\ngrid = "dp=2 tp=2"\n[tensors]\na = "[v, h]"\nb = "[v, h]"\n[alias]\nb = "a"\n')
    report = bench.succeeds({"a": tensor}, "--layout", path)
    assert report["output"]["tied"] == [["a", "b"]]


def test_a_tie_that_is_unclear_leaves_both(bench: Bench) -> None:
    model = {**tied_model(), "vision.embed_tokens.weight": torch.rand(4, 4)}
    layouts = {**TIED, "vision.embed_tokens.weight": "[v, h]"}
    leave(bench.workspace, model, layouts=layouts, config={"tie_word_embeddings": True})
    assert note_codes(bench.succeeds(model)) == ["tie-unclear"]


def test_a_base_model_without_the_head(bench: Bench) -> None:
    model = leave(bench.workspace, tied_model(), layouts=TIED)
    embedding = {"model.embed_tokens.weight": model["model.embed_tokens.weight"]}
    bench.succeeds(embedding, *base_model(bench, embedding, {"tie_word_embeddings": True}))
    assert list(model_in(bench.out)) == ["model.embed_tokens.weight"]
