"""Dequantization: folders of quantized weights become floating-point models, decoded where they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import xrank
from tests.cli.bench import run
from xrank.errors import ContradictionError, IncompleteError, UsageError

Tensors = dict[str, torch.Tensor]
HIDDEN, INNER = 192, 320
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 24,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
UP = "model.layers.0.mlp.up_proj.weight"


def make_llama() -> Tensors:
    shapes = {"model.embed_tokens": (24, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (24, HIDDEN)}
    shapes |= {f"model.layers.0.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    shapes |= {f"model.layers.0.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {f"model.layers.0.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
    shapes |= {"model.layers.0.mlp.down_proj": (HIDDEN, INNER)}
    torch.manual_seed(1)
    return {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def quantize_blocks(plain: Tensors) -> tuple[Tensors, Tensors]:
    """Return a model as DeepSeek quantizes it, and with its values in fp32."""
    made, want = Tensors(), Tensors()
    for name, tensor in plain.items():
        if "_proj" not in name:
            made[name] = want[name] = tensor
            continue
        rows, columns = tensor.shape
        codes, scales = tensor.to(torch.float8_e4m3fn), torch.rand(-(-rows // 128), -(-columns // 128))
        made |= {name: codes, f"{name}_scale_inv": scales}
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        want[name] = codes.float() * wide  # DeepSeek-V3/inference/kernel.py: weight_dequant
    return made, want


def save(folder: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    values = CONFIG if quantization is None else {**CONFIG, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def assert_equal(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp32", "fp16"])
def test_a_gather_writes_the_values_that_deepseek_computes(tmp_path: Path, dtype: str) -> None:
    made, want = quantize_blocks(make_llama())
    source, out = save(tmp_path / "quantized", made, DEEPSEEK), tmp_path / "out"
    report = xrank.gather_checkpoint(source, out, dequantize=True, dtype=dtype)
    kind = {"keep": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[dtype]
    assert_equal(load_file(out / "model.safetensors"), {name: tensor.to(kind) for name, tensor in want.items()})
    config = json.loads((out / "config.json").read_text())
    assert config == {**CONFIG, "torch_dtype": str(kind).removeprefix("torch.")}
    assert any(code == "dequantized" and "7 quantized weights" in text for code, text in report.notes)
    assert xrank.verify_model(out).num_tensors == len(want)
    opened = xrank.open_checkpoint(source, dequantize=True, dtype=dtype)
    assert torch.equal(opened[UP], want[UP].to(kind))


def test_the_command_dequantizes_and_copies_without_the_option(tmp_path: Path) -> None:
    made, want = quantize_blocks(make_llama())
    source = save(tmp_path / "quantized", made, DEEPSEEK)
    run("gather", source, "-o", tmp_path / "plain", "--dequantize")
    assert torch.equal(load_file(tmp_path / "plain/model.safetensors")[UP], want[UP].bfloat16())
    run("gather", source, "-o", tmp_path / "copy")
    assert_equal(load_file(tmp_path / "copy/model.safetensors"), made)
    again = xrank.gather_checkpoint(tmp_path / "plain", tmp_path / "again", dequantize=True)
    assert ("dequantized", "no tensor is quantized, and all are taken as they are") in again.notes


def test_a_module_gets_values_for_floating_point_and_codes_for_codes(tmp_path: Path) -> None:
    made, want = quantize_blocks(make_llama())
    source = save(tmp_path / "quantized", made, DEEPSEEK)
    for kind in (torch.bfloat16, torch.float32):
        module = {name: torch.zeros_like(tensor, dtype=kind) for name, tensor in want.items()}
        report = xrank.load_model(module, source)
        assert_equal(module, {name: tensor.to(kind) for name, tensor in want.items()})
        assert any(code == "dequantized" for code, _ in report.notes)
    codes = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    assert not any(code == "dequantized" for code, _ in xrank.load_model(codes, source).notes)
    assert_equal({n: t.view(torch.uint8) for n, t in codes.items()}, {n: t.view(torch.uint8) for n, t in made.items()})


def test_what_does_not_fit_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    made, _ = quantize_blocks(make_llama())
    scale, out = f"{UP}_scale_inv", tmp_path / "out"

    def refused(tensors: Tensors, quantization: dict[str, Any] | None, kind: type[xrank.XrankError]) -> str:
        with pytest.raises(kind) as found:
            xrank.gather_checkpoint(save(tmp_path / "wrong", tensors, quantization), out, dequantize=True)
        assert not out.exists()
        return str(found.value)

    assert scale in refused({n: t for n, t in made.items() if n != scale}, DEEPSEEK, IncompleteError)
    assert UP in refused({n: t for n, t in made.items() if n != UP}, DEEPSEEK, IncompleteError)
    assert scale in refused(made | {scale: torch.rand(3, 1)}, DEEPSEEK, ContradictionError)
    assert "_proj" in refused(made, {**DEEPSEEK, "weight_block_size": [64, 64]}, ContradictionError)
    assert "nothing states how" in refused(made, None, UsageError)
    assert "gptq" in refused(made, {"quant_method": "gptq", "bits": 4}, UsageError)
