"""config.json's quantization is held against the tensors, in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import xrank
from tests.cli.bench import run
from tests.commands.made_workspaces import assert_holds, model_in
from xrank.errors import ContradictionError

Tensors = dict[str, torch.Tensor]
SIZES = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 24, "num_hidden_layers": 1}
SIZES |= {"tie_word_embeddings": False}
LINEAR = "model.layers.0.mlp.up_proj.weight"


def make_llama() -> Tensors:
    shapes = {"model.embed_tokens": (24, 16), "model.norm": (16,), "lm_head": (24, 16)}
    shapes |= {f"model.layers.0.{n}_layernorm": (16,) for n in ("input", "post_attention")}
    shapes |= {f"model.layers.0.self_attn.{n}_proj": (16, 16) for n in "qkvo"}
    shapes |= {f"model.layers.0.mlp.{n}_proj": (32, 16) for n in ("gate", "up")}
    shapes |= {"model.layers.0.mlp.down_proj": (16, 32)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def quantize(kind: str) -> Tensors:
    """Return the tensors of a Llama whose linear layers are quantized."""
    made: Tensors = {}
    for name, tensor in make_llama().items():
        if "_proj" not in name:
            made[name] = tensor.bfloat16()
        elif kind == "fp8":
            made |= {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.rand(1, 1)}
        elif kind == "int8":
            made |= {name: tensor.to(torch.int8), f"{name}_scale": torch.rand(len(tensor), 1)}
        elif kind == "gptq":
            stem = name.removesuffix("weight")
            made |= {f"{stem}qweight": torch.ones(tensor.shape[1] // 8, len(tensor), dtype=torch.int32)}
            made |= {f"{stem}qzeros": torch.ones(1, len(tensor) // 8, dtype=torch.int32)}
            made |= {f"{stem}scales": torch.rand(1, len(tensor)), f"{stem}g_idx": torch.arange(tensor.shape[1]).int()}
        else:  # bitsandbytes keeps two weights in a byte, of uint8, or of the type that FSDP shards
            codes = torch.randint(1, 99, (tensor.numel() // 2, 1), dtype=torch.uint8)
            made |= {name: codes if kind == "nf4" else codes.view(-1).view(torch.bfloat16)[:, None]}
            made |= {f"{name}.absmax": torch.rand(4), f"{name}.quant_map": torch.rand(16)}
            made |= {f"{name}.quant_state.bitsandbytes__nf4": torch.ones(80, dtype=torch.uint8)}
    return made


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int8": {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": {}}},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 in bf16": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
}
SAVES = {
    "safetensors": lambda tensors, folder: save_file(tensors, folder / "model.safetensors"),
    "torch-save": lambda tensors, folder: torch.save(tensors, folder / "model.pt"),
    "dcp": lambda tensors, folder: dcp.save({"model": tensors}, checkpoint_id=str(folder), no_dist=True),
}
SCALES = ("_scale_inv", "_scale", "scales", "absmax")


def save(folder: Path, tensors: Tensors, config: dict[str, Any] | None, save: str = "safetensors") -> Path:
    folder.mkdir()
    SAVES[save](tensors, folder)
    values = SIZES if config is None else {**SIZES, "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", SAVES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_quantization_is_held_against_the_tensors(tmp_path: Path, kind: str, reader: str) -> None:
    tensors = quantize(kind)
    right = save(tmp_path / "right", tensors, CONFIGS[kind], reader)
    ended = run("gather", right, "--out", tmp_path / "out")
    assert ended.exit_code == 0, ended.stderr
    assert_holds(tmp_path / "out", tensors)
    # Without the declaration, transformers takes codes for weights, or finds none.
    bare = save(tmp_path / "bare", tensors, None, reader)
    ended = run("gather", bare, "--out", tmp_path / "never")
    assert ended.exit_code == 4 and "has no quantization_config" in ended.stderr
    assert f"put the model's config.json with its quantization_config into {bare}" in ended.stderr
    # Weights that are not quantized, under a config that says they are.
    plain = save(tmp_path / "plain", make_llama(), CONFIGS[kind], reader)
    ended = run("gather", plain, "--out", tmp_path / "never")
    assert ended.exit_code == 4 and f"quantized by {CONFIGS[kind]['quant_method']}, but none is" in ended.stderr
    # Codes without their scales.
    lost = {name: tensor for name, tensor in tensors.items() if not (LINEAR[:-6] in name and name.endswith(SCALES))}
    lost = {name: tensor for name, tensor in lost.items() if not name.startswith(f"{LINEAR}.")}
    ended = run("gather", save(tmp_path / "lost", lost, CONFIGS[kind], reader), "--out", tmp_path / "never")
    assert ended.exit_code == 3 and "no file holds the scales of this quantized tensor" in ended.stderr
    assert LINEAR[:-6] in ended.stderr and not (tmp_path / "never").exists()


@pytest.mark.parametrize("kind", ["nf4", "nf4 in bf16"])
def test_adapter_of_four_bit_weights_without_their_state_can_be_had(tmp_path: Path, kind: str) -> None:
    adapter = {f"model.layers.0.mlp.up_proj.lora_{n}.default.weight": torch.rand(s) for n, s in [("A", (2, 16))]}
    adapter |= {"model.layers.0.mlp.up_proj.lora_B.default.weight": torch.rand(32, 2)}
    tensors = {name: tensor for name, tensor in quantize(kind).items() if ".weight." not in name}
    tensors = {name.replace("up_proj.weight", "up_proj.base_layer.weight"): each for name, each in tensors.items()}
    source = save(tmp_path / "source", tensors | adapter, CONFIGS[kind])
    (source / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    ended = run("gather", source, "--out", tmp_path / "out")
    assert ended.exit_code == 3 and "no file holds the scales" in ended.stderr and "--include" in ended.stderr
    ended = run("gather", source, "--out", tmp_path / "out", "--include", ".*lora_.*")
    assert ended.exit_code == 0, ended.stderr
    (file,) = tmp_path.glob("out/**/adapter_model.safetensors")
    made = load_file(file)
    assert sorted(tensor.shape for tensor in made.values()) == [(2, 16), (32, 2)]


def test_other_declarations_and_other_models_pass(tmp_path: Path) -> None:
    fp8 = quantize("fp8")
    stated = save(tmp_path / "stated", fp8, None)
    (stated / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert run("gather", stated, "--out", tmp_path / "out1").exit_code == 0
    assert (tmp_path / "out1" / "hf_quant_config.json").exists()
    # Plain casts to float8 have no scales, and a program of the user's own knows of its quantization.
    cast = {name: each.to(torch.float8_e4m3fn) if "_proj" in name else each for name, each in make_llama().items()}
    assert run("gather", save(tmp_path / "cast", cast, None), "--out", tmp_path / "out2").exit_code == 0
    own = save(tmp_path / "own", fp8, None)
    (own / "config.json").write_text('{"model_type": "mine"}')
    ended = run("gather", own, "--out", tmp_path / "out3")
    assert ended.exit_code == 0 and "config.json has no quantization_config" in ended.stderr + ended.stdout
    # A method that no rule knows.
    odd = save(tmp_path / "odd", make_llama(), {"quant_method": "own"})
    ended = run("gather", odd, "--out", tmp_path / "out4")
    assert ended.exit_code == 0 and "no tensor shows it" in ended.stderr + ended.stdout


def test_live_models_are_held_against_their_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{key: value for key, value in SIZES.items() if key != "architectures"})
    module = transformers.LlamaForCausalLM(config)
    module.config.quantization_config = dict(CONFIGS["fp8"])
    with pytest.raises(ContradictionError, match="declares weights quantized by fp8, but none is"):
        xrank.export_model(module, tmp_path / "out")
    # A transform makes what the config declares.
    report = xrank.export_model(module, tmp_path / "out", transform=xrank.Quantization("fp8", (128, 128)))
    assert report.ok and model_in(tmp_path / "out")[LINEAR].dtype == torch.float8_e4m3fn
    del module.config.quantization_config
    report = xrank.export_model(module, tmp_path / "bare", transform=xrank.Quantization("fp8", (128, 128)))
    assert "quantization-not-declared" in dict(report.notes)
