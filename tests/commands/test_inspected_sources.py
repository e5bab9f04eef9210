"""What ``xrank inspect`` prints of a source: words and sizes for people, a row for each rank, where its config is."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.cli.bench import Bench, run
from tests.commands.made_workspaces import CONFIG, leave, leave_plain


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
    assert rows(step)["config"] == "none; gather with --base-model, or put a config.json into its folder"
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
    assert "The exit code is 0 even with problems" in " ".join(run("inspect", "--help").stdout.split())


LLAMA = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama() -> dict[str, torch.Tensor]:
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        **{f"{layer}self_attn.{name}_proj.weight": (4, 4) for name in "qkvo"},
        **{f"{layer}mlp.{name}_proj.weight": (6, 4) for name in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": (4, 6),
        f"{layer}input_layernorm.weight": (4,),
        f"{layer}post_attention_layernorm.weight": (4,),
        "model.norm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    return {name: torch.full(shape, number + 1.0) for number, (name, shape) in enumerate(shapes.items())}


def leave_problem(folder: Path, problem: str) -> None:
    """Write a source that a gather takes, or one with a problem."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "float32"}))
    state = llama()
    if problem == "no tensor":
        state = {}
    elif problem == "a wrong size in config.json":
        (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 9}))
    elif problem == "a tensor lacks":
        del state["model.layers.0.mlp.up_proj.weight"]
    elif problem == "a name with a control character":
        state["model.\x1b[2Jname"] = torch.ones(2)
    elif problem == "a step up in a name":
        state["../name"] = torch.ones(2)
    elif problem == "a placeholder":
        state["model.norm.weight"] = torch.empty(0)
    elif problem == "half of an adapter":
        state["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(2, 4)
    elif problem == "a cut JSON file":
        (folder / "tokenizer_config.json").write_text('{"a": ')
    elif problem == "an adapter beside the model":
        state |= {
            f"model.layers.0.self_attn.q_proj.lora_{half}.default.weight": torch.ones(shape)
            for half, shape in (("A", (2, 4)), ("B", (4, 2)))
        }
    elif problem == "another model in another form":
        torch.save({**state, "lm_head.weight": torch.zeros(8, 4)}, folder / "pytorch_model.bin")
    elif problem == "an equal model in another form":
        torch.save(state, folder / "pytorch_model.bin")
    if problem == "a missing shard":
        save_file(state, folder / "model-00001-of-00002.safetensors")
    else:
        save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_tied_tensors_that_are_stored_apart_are_compared(tmp_path: Path, form: str, is_equal: bool) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    state = llama()
    if is_equal:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    if form == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder, no_dist=True)
    gathered = run("gather", folder, "--out", tmp_path / "out", "--json")
    found = json.loads(run("inspect", folder, "--json").stdout)["problems"]
    assert gathered.exit_code == (0 if is_equal else 4)
    error = json.loads(gathered.stdout)["error"]
    assert [each["message"] for each in found] == ([] if is_equal else [error["message"]])


@pytest.mark.parametrize(
    "problem",
    [
        "none",
        "no tensor",
        "a wrong size in config.json",
        "a tensor lacks",
        "a name with a control character",
        "a step up in a name",
        "a placeholder",
        "half of an adapter",
        "a cut JSON file",
        "an adapter beside the model",
        "another model in another form",
        "an equal model in another form",
        "a missing shard",
    ],
)
def test_inspect_shows_no_problem_only_where_a_gather_would_succeed(tmp_path: Path, problem: str) -> None:
    leave_problem(tmp_path / "source", problem)
    gathered = run("gather", tmp_path / "source", "--out", tmp_path / "out", "--dry-run", "--json")
    error = json.loads(gathered.stdout)["error"]
    found = json.loads(run("inspect", tmp_path / "source", "--json").stdout)["problems"]
    assert [(each["exit_code"], each["message"]) for each in found] == (
        [] if gathered.exit_code == 0 else [(gathered.exit_code, error["message"])]
    )
    assert (gathered.exit_code == 0) == (
        problem in ("none", "an adapter beside the model", "an equal model in another form")
    )
