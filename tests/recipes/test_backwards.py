"""Recipes read backwards: a Hugging Face folder becomes the states of a Megatron job, and gathers to itself again."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.cli.bench import run
from tests.recipes.made_checkpoints import as_megatron, as_torchtitan, saved, tiny
from xrank import NFSWorkspace, gather_checkpoint, inspect, reshard_checkpoint
from xrank.errors import ContradictionError, IncompleteError, UsageError

pytestmark = pytest.mark.timeout(120)

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_tp2_pp2.toml"
SIZES = {"num_hidden_layers": 4, "vocab_size": 300}


@cache
def model_of(family: str, **changes: Any) -> torch.nn.Module:
    return tiny(family, **{**SIZES, **changes})


def folder_of(folder: Path, family: str, **changes: Any) -> Path:
    model_of(family, **changes).save_pretrained(folder)
    return folder


def layout_of(folder: Path, *changes: tuple[str, str]) -> Path:
    """Return the example with a tiny model's sizes."""
    text = EXAMPLE.read_text()
    for name, size in {"L": 4, "r": 3, "d": 8, "e": 4}.items():
        text = re.sub(rf"^{name} = \d+", f"{name} = {size}", text, flags=re.MULTILINE)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "layout.toml"
    file.write_text(text)
    return file


def weights(workspace: Path, rank: int) -> dict[str, torch.Tensor]:
    return torch.load(workspace / f"rank_{rank}_state.pth", weights_only=True)["weight"]


def assert_same_model(out: Path, folder: Path) -> None:
    found, expected = (safetensors.torch.load_file(place / "model.safetensors") for place in (out, folder))
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    for name in ("config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("llama", "megatron-llama"), ("qwen3", "megatron-qwen3"), ("mixtral", "megatron-mixtral")],
)
def test_there_and_back(tmp_path: Path, family: str, recipe: str) -> None:
    folder, layout = folder_of(tmp_path / "hf", family), layout_of(tmp_path)
    ended = run("reshard", folder, "--recipe", recipe, "--layout", layout, "--out", tmp_path / "ws")
    assert ended.exit_code == 0, ended.stderr
    assert len(list((tmp_path / "ws").glob("rank_*_state.pth"))) == 8
    report = gather_checkpoint(tmp_path / "ws", tmp_path / "out")
    assert report.source["recipe"] == recipe
    assert_same_model(tmp_path / "out", folder)
    # What a gather made comes back byte for byte, weights and all.
    reshard_checkpoint(tmp_path / "out", layout, tmp_path / "ws2", recipe=recipe)
    gather_checkpoint(tmp_path / "ws2", tmp_path / "again")
    files = ("model.safetensors", "config.json")
    assert [(tmp_path / "again" / name).read_bytes() for name in files] == [
        (tmp_path / "out" / name).read_bytes() for name in files
    ]


def test_the_states_are_megatrons(tmp_path: Path) -> None:
    whole = as_megatron(model_of("mixtral"), vocab=512)
    reshard_checkpoint(
        folder_of(tmp_path / "hf", "mixtral"), layout_of(tmp_path), tmp_path / "ws", recipe="megatron-mixtral"
    )
    num_compared = 0
    for rank in range(8):
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        for name, tensor in weights(tmp_path / "ws", rank).items():
            layer = re.match(r"decoder\.layers\.(\d+)\.", name)
            expert = re.search(r"local_experts\.(\d+)\.", name)
            full = name
            if layer:
                full = full.replace(layer[0], f"decoder.layers.{int(layer[1]) + 2 * pp}.")
            if expert:
                full = full.replace(expert[0], f"local_experts.{int(expert[1]) + 2 * dp}.")
            if "linear_fc1" in name:
                expected = torch.cat([half.chunk(2)[tp] for half in whole[full].chunk(2)])
            elif "word_embeddings" in name or "output_layer" in name or "linear_qkv" in name:
                expected = whole[full].chunk(2)[tp].clone()
            elif "linear_fc2" in name or "linear_proj" in name:
                expected = whole[full].chunk(2, dim=1)[tp]
            else:
                expected = whole[full]
            if "word_embeddings" in name or "output_layer" in name:
                expected[max(0, 300 - 256 * tp) :] = 0  # padding
            assert torch.equal(tensor, expected), (rank, name)
            num_compared += 1
    assert num_compared == 8 * (2 * 5 + 2 * 4) + 4 * 1 + 4 * 2


def test_virtual_stages(tmp_path: Path) -> None:
    layout = layout_of(tmp_path, ("{L/pp}", "{V P/pp n}"), ("L = 4", "V = 2\nP = 2\nn = 1"))
    folder = folder_of(tmp_path / "hf", "mixtral")
    reshard_checkpoint(folder, layout, tmp_path / "ws", recipe="megatron-mixtral")
    norm = "decoder.layers.1.input_layernorm.weight"  # of stage 1 the second: layer 3
    assert torch.equal(
        weights(tmp_path / "ws", 4)[norm],
        saved(model_of("mixtral"))[norm.replace("decoder", "model").replace("1", "3")],
    )
    gather_checkpoint(tmp_path / "ws", tmp_path / "out")
    assert_same_model(tmp_path / "out", folder)


@pytest.mark.parametrize(
    ("family", "recipe", "made", "changes"),
    [
        ("qwen2", "megatron-qwen2", as_megatron, {"tie_word_embeddings": True}),
        ("qwen3_moe", "megatron-qwen3-moe", as_megatron, {}),
        ("qwen2_moe", "megatron-qwen2-moe", as_megatron, {}),
        ("glm4_moe", "megatron-glm4-moe", as_megatron, {}),
        ("deepseek_v3", "megatron-deepseek-v3", as_megatron, {}),
        ("deepseek_v2", "megatron-deepseek-v2", as_megatron, {}),
        ("deepseek_v2_lite", "megatron-deepseek-v2-lite", as_megatron, {}),
        ("mistral", "megatron-mistral", as_megatron, {}),
        ("llama", "megatron-llama", as_megatron, {"attention_bias": True, "mlp_bias": True}),
        ("gpt2", "megatron-gpt2", as_megatron, {}),
        ("llama", "torchtitan-llama3", as_torchtitan, {}),
    ],
)
def test_all_families_backwards(tmp_path: Path, family: str, recipe: str, made: Any, changes: dict[str, Any]) -> None:
    folder = folder_of(tmp_path / "hf", family, **changes)
    layout = tmp_path / "layout.toml"
    theirs = made(model_of(family, **changes))
    rules = (f'"{name}" = "[{", ".join("abc"[: tensor.ndim])}]"' for name, tensor in theirs.items())
    layout.write_text('[mesh]\ngrid = "r=1"\n[tensors]\n' + "\n".join(rules))
    reshard_checkpoint(folder, layout, tmp_path / "ws", recipe=recipe)
    held = weights(tmp_path / "ws", 0)
    assert held.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(held[name], tensor)] == []
    report = gather_checkpoint(tmp_path / "ws", tmp_path / "out")
    assert report.source["recipe"] == recipe
    assert_same_model(tmp_path / "out", folder)


def test_forwards_too(tmp_path: Path) -> None:
    theirs = as_megatron(model_of("llama"), vocab=512)
    NFSWorkspace(tmp_path / "ws", rank=0, world_size=1, run_id="run").write_configs_and_weights({}, theirs)
    folder = folder_of(tmp_path / "hf", "llama")
    one = tmp_path / "one.toml"
    one.write_text(
        '[mesh]\ngrid = "r=2"\n[tensors]\n'
        + "\n".join(f'"{n}" = "[{"n/~r, m" if t.ndim == 2 else "n"}]"' for n, t in saved(model_of("llama")).items())
    )
    reshard_checkpoint(tmp_path / "ws", one, tmp_path / "new", recipe="megatron-llama", base_model=folder)
    assert weights(tmp_path / "new", 1)["model.embed_tokens.weight"].shape == (150, 24)  # the padding is gone
    gather_checkpoint(tmp_path / "new", tmp_path / "out")
    assert_same_model(tmp_path / "out", folder)
    with pytest.raises(UsageError, match="needs the size 'v', which is unknown"):
        reshard_checkpoint(tmp_path / "ws", one, tmp_path / "no", recipe="megatron-llama")


def test_a_head_with_more_rows_than_config_says_is_not_padded(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", "llama")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 300', '"vocab_size": 299'))
    with pytest.raises(ContradictionError, match=r"embed_tokens\.weight does not fit|lm_head\.weight does not fit"):
        reshard_checkpoint(folder, layout_of(tmp_path), tmp_path / "ws", recipe="megatron-llama")


def test_what_does_not_fit_backwards(tmp_path: Path) -> None:
    folder, layout = folder_of(tmp_path / "hf", "qwen3"), layout_of(tmp_path)
    with pytest.raises(UsageError, match="the recipe does not fit") as caught:
        reshard_checkpoint(folder, layout, tmp_path / "ws", recipe="megatron-llama")
    assert "model.layers.0.self_attn.q_norm.weight" in str(caught.value.got)
    with pytest.raises(UsageError, match="no recipe is called own"):
        reshard_checkpoint(folder, layout, tmp_path / "ws", recipe="own")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(IncompleteError, match=r"linear_qkv\.weight"):
        reshard_checkpoint(folder, layout, tmp_path / "ws", recipe="megatron-qwen3")


def test_routers_stay_in_float32(tmp_path: Path) -> None:
    reshard_checkpoint(
        folder_of(tmp_path / "hf", "mixtral"),
        layout_of(tmp_path),
        tmp_path / "ws",
        recipe="megatron-mixtral",
        dtype="bf16",
    )
    held = weights(tmp_path / "ws", 0)
    assert {name for name, tensor in held.items() if tensor.dtype == torch.float32} == {
        f"decoder.layers.{i}.mlp.router.weight" for i in range(2)
    }


def test_sizes_that_config_json_lacks_are_noted(tmp_path: Path) -> None:
    model = tiny("llama")
    torch.save(as_torchtitan(model), tmp_path / "model.pt")
    whole = model.config.to_dict()
    for config, lacking in ((whole, []), ({k: v for k, v in whole.items() if k != "hidden_size"}, ["hidden_size"])):
        (tmp_path / "config.json").write_text(json.dumps(config, default=str))
        report = gather_checkpoint(tmp_path / "model.pt", tmp_path / f"out-{len(lacking)}")
        told = [text for code, text in report.notes if code == "config-keys"]
        assert told == [
            f"config.json has no {key} ({whole[key]}): transformers takes its own defaults instead" for key in lacking
        ]


def test_an_inspection_offers_no_command_that_ends_with_the_same_refusal(tmp_path: Path) -> None:
    torch.save(as_torchtitan(tiny("llama")), tmp_path / "model.pt")
    details = inspect(tmp_path / "model.pt").details
    (problem,) = details["problems"]
    assert problem["type"] == "UsageError" and problem["want"] == "one recipe"
    assert details["commands"] == []
    with pytest.raises(UsageError):
        gather_checkpoint(tmp_path / "model.pt", tmp_path / "out", salvage=True)
