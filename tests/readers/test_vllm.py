"""vLLM's sharded_state, cut as its layers cut: gathers and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.verify import verify_model
from xrank.errors import ContradictionError, IncompleteError, LayoutError, UsageError, XrankError
from xrank.readers.vllm import VllmReader
from xrank.testing.reader_contract import ReaderContract, SampleSource, whole

CONFIG: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def made_model(config: Mapping[str, Any] = CONFIG, seed: int = 0) -> Tensors:
    """A Qwen2 as Hugging Face names it, with biases of queries, keys and values."""
    random = torch.Generator().manual_seed(seed)
    hidden, rows = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]

    def rand(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=random) + 0.5).bfloat16()

    found = {"model.embed_tokens.weight": rand(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}{name}.weight": rand(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, size in (("q", hidden), ("k", kv), ("v", kv)):
            found |= {
                f"{at}self_attn.{name}_proj.weight": rand(size, hidden),
                f"{at}self_attn.{name}_proj.bias": rand(size),
            }
        found[f"{at}self_attn.o_proj.weight"] = rand(hidden, hidden)
        found |= {f"{at}mlp.{name}_proj.weight": rand(rows, hidden) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = rand(hidden, rows)
    found["model.norm.weight"] = rand(hidden)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = rand(config["vocab_size"], hidden)
    return found


def parameters_of(model: Tensors, rank: int, tp_size: int, num_kv_heads: int) -> Tensors:
    """Return a rank's parameters, as vLLM's layers load them (model_executor/layers/linear.py)."""
    replicas = max(1, tp_size // num_kv_heads)

    def share(tensor: torch.Tensor, dim: int = 0, count: int = tp_size, place: int = rank) -> torch.Tensor:
        return tensor.chunk(count, dim)[place].clone()

    found: Tensors = {}
    for name, tensor in model.items():
        module = name.rpartition(".")[0]
        if module in ("model.embed_tokens", "lm_head"):
            rows = -(-len(tensor) // 64) * 64
            found[name] = share(torch.cat((tensor, torch.zeros(rows - len(tensor), tensor.shape[1]).bfloat16())))
        elif module.endswith("q_proj"):
            k, v = (model[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            kv = [share(each, 0, tp_size // replicas, rank // replicas) for each in (k, v)]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat((share(tensor), *kv))
            found[f"{module.removesuffix('q_proj')}attn._k_scale"] = torch.tensor(1.0)
        elif module.endswith("gate_proj"):
            up = model[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat((share(tensor), share(up)))
        elif module.endswith(("o_proj", "down_proj")):
            found[name] = share(tensor, 1)
        elif not module.endswith(("k_proj", "v_proj", "up_proj")):
            found[name] = tensor
    return found


def write_state(
    folder: Path, model: Tensors, tp_size: int, config: Mapping[str, Any] = CONFIG, num_parts: int = 1
) -> None:
    """Write a folder as `ShardedStateLoader.save_model` and the program around it do."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(tp_size):
        own = parameters_of(model, rank, tp_size, config["num_key_value_heads"])
        if config["tie_word_embeddings"]:
            own["lm_head.weight"] = own.pop("model.embed_tokens.weight")
        names = sorted(own)
        for part in range(num_parts):
            chosen = {name: own[name].contiguous() for name in names[part::num_parts]}
            save_file(chosen, folder / f"model-rank-{rank}-part-{part}.safetensors")


def gathered(source: Path, out: Path) -> Tensors:
    gather_checkpoint(source, out)
    return load_file(out / "model.safetensors")


def assert_same(got: Tensors, want: Tensors) -> None:
    assert sorted(got) == sorted(want)
    assert not [name for name in want if not torch.equal(got[name], want[name])]


class TestVllm(ReaderContract):
    reader = VllmReader()
    frameworks = ("torch", "vllm")
    unseen: ClassVar = {
        "a bit of a tensor flipped": "safetensors files hold no checksums",
    }

    def make(self, folder: Path) -> SampleSource:
        model = made_model()
        write_state(folder / "state", model, 2)
        return SampleSource(folder / "state", {name: whole(tensor) for name, tensor in model.items()})


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"vocab_size": 130}])
def test_ranks(tmp_path, tp_size, changes):
    config = {**CONFIG, **changes}
    model = made_model(config)
    write_state(tmp_path / "state", model, tp_size, config, num_parts=3)
    assert_same(gathered(tmp_path / "state", tmp_path / "out"), model)
    verify_model(tmp_path / "out", against=tmp_path / "state")
    shown = inspect_source(tmp_path / "state")
    assert (shown.details["problems"], shown.source["world_size"]) == ([], tp_size)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_a_tied_embedding_has_its_own_name(tmp_path):
    config = {**CONFIG, "tie_word_embeddings": True}
    write_state(tmp_path / "state", made_model(config), 2, config)
    assert_same(gathered(tmp_path / "state", tmp_path / "out"), made_model(config))


def test_pipeline_stages(tmp_path):
    config = {**CONFIG, "num_hidden_layers": 2}
    model = made_model(config)
    write_state(tmp_path / "state", model, 2, config)
    for rank in range(2):
        file = tmp_path / "state" / f"model-rank-{rank}-part-0.safetensors"
        own = load_file(file)
        file.unlink()
        last = {name for name in own if name.startswith(("model.layers.1.", "model.norm", "lm_head"))}
        for stage in range(2):
            chosen = {name: tensor for name, tensor in own.items() if (name in last) == bool(stage)}
            save_file(chosen, file.with_name(f"model-pp-{stage}-tp-{rank}-part-0.safetensors"))
    assert_same(gathered(tmp_path / "state", tmp_path / "out"), model)
    (tmp_path / "state" / "model-pp-1-tp-0-part-0.safetensors").unlink()
    refused(tmp_path / "state", IncompleteError, "rank 2 of 4")
    (tmp_path / "state" / "model-pp-1-tp-1-part-0.safetensors").unlink()
    refused(tmp_path / "state", IncompleteError)


# ---- refusals


def refused(source: Path, kind: type[XrankError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        gather_checkpoint(source, source.parent / "refused")
    error = caught.value
    assert type(error) is kind and error.next_step and not (source.parent / "refused").exists()
    assert "remove" not in error.next_step and "delete" not in error.next_step
    text = f"{error} | {error.got} | {error.want} | {error.next_step}"
    assert not [word for word in words if word not in text], text


def test_missing_files(tmp_path):
    write_state(tmp_path / "state", made_model(), 4, num_parts=3)
    kept = {file.name: file.read_bytes() for file in (tmp_path / "state").glob("*.safetensors")}
    for names, words in (
        (["model-rank-1-part-1"], ["rank 1", "part 1"]),
        (["model-rank-1-part-2"], ["rank 1", "a part of it is missing"]),
        ([f"model-rank-2-part-{part}" for part in range(3)], ["rank 2 of 4"]),
        ([f"model-rank-3-part-{part}" for part in range(3)], ["3 ranks"]),
        ([f"model-rank-{rank}-part-{part}" for rank in (2, 3) for part in range(3)], []),
    ):
        for name in names:
            (tmp_path / "state" / f"{name}.safetensors").unlink()
        refused(tmp_path / "state", IncompleteError, *words)
        for name, content in kept.items():
            (tmp_path / "state" / name).write_bytes(content)
    for rank in range(4):
        (tmp_path / "state" / f"model-rank-{rank}-part-2.safetensors").unlink()
    refused(tmp_path / "state", ContradictionError, "no file holds any of it")


@pytest.mark.parametrize(("changes", "kind"), [
    ({"num_attention_heads": 2}, IncompleteError),
    ({"num_key_value_heads": 4}, IncompleteError),
    ({"num_key_value_heads": 1}, ContradictionError),
    ({"head_dim": 4}, IncompleteError),
    ({"head_dim": 1}, ContradictionError),
    ({"vocab_size": 65}, IncompleteError),
    ({"vocab_size": 200}, IncompleteError),
    ({"num_hidden_layers": 2}, IncompleteError),
    ({"intermediate_size": 13}, IncompleteError),
    ({"hidden_size": 16}, XrankError),
    ({"num_attention_heads": None}, LayoutError),
    ({"model_type": "phi3"}, LayoutError),
    ({"model_type": None}, LayoutError),
])  # fmt: skip
def test_configs_that_do_not_fit(tmp_path, changes, kind):
    write_state(tmp_path / "state", made_model(), 2)
    (tmp_path / "state" / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if kind is not XrankError:
        refused(tmp_path / "state", kind)
    with pytest.raises(XrankError):
        gather_checkpoint(tmp_path / "state", tmp_path / "refused")


def test_without_a_config(tmp_path):
    write_state(tmp_path / "state", made_model(), 2)
    shutil.move(tmp_path / "state" / "config.json", tmp_path / "kept.json")
    refused(tmp_path / "state", LayoutError, "config.json", str(tmp_path / "state"))


def test_a_copied_rank(tmp_path):
    state = tmp_path / "state"
    write_state(state, made_model(), 2)
    shutil.copy(state / "model-rank-0-part-0.safetensors", state / "model-rank-1-part-0.safetensors")
    refused(state, ContradictionError, "is a copy of rank 0's")


def test_files_of_two_saves(tmp_path):
    write_state(tmp_path / "state", made_model(), 2)
    write_state(tmp_path / "other", made_model(seed=1), 2)
    name = "model-rank-1-part-0.safetensors"
    shutil.copy(tmp_path / "other" / name, tmp_path / "state" / name)
    refused(tmp_path / "state", ContradictionError, "layernorm")  # replicas differ
    shutil.copy(tmp_path / "other" / name, tmp_path / "state" / "model-pp-0-tp-0-part-0.safetensors")
    refused(tmp_path / "state", ContradictionError, "with and without pipeline stages")


def test_what_kernels_have_reordered(tmp_path):
    """As vLLM leaves it on a CPU, which packs linear layers, and of experts on any GPU."""
    write_state(tmp_path / "state", made_model(), 1)
    file = tmp_path / "state" / "model-rank-0-part-0.safetensors"
    whole_state = load_file(file)
    save_file({name: tensor for name, tensor in whole_state.items() if "_proj." not in name}, file)
    refused(tmp_path / "state", UsageError, "no linear layer", "Hugging Face folder that the engine loaded")
    experts = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    save_file({**whole_state, experts: torch.rand(2, 4, 8)}, file)
    refused(tmp_path / "state", UsageError, experts, "depends on the GPU")
