"""Decoded weights have the bits that compressed-tensors, transformers and ModelOpt give for the same folder.

Codes are random bits and scales random numbers, with zeros, subnormals, infinities and not-a-numbers among them, in the
tensors and under the config that each tool has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer, FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import xrank
from tests.oracle.quantized_folders import MODELOPT_SCHEMES, SCHEMES, quantize_by_modelopt, quantize_folder
from tests.oracle.quantized_models import MODELS, make_model, read_tensors
from xrank.recipes.schemes import IGNORED

pytestmark = pytest.mark.timeout(600)

Tensors = dict[str, torch.Tensor]
FORMATS = {
    "FP8_DYNAMIC": "float-quantized", "FP8_BLOCK": "float-quantized", "W8A8": "int-quantized",
    "W8A16": "pack-quantized", "W4A16": "pack-quantized", "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized", "MXFP8": "mxfp8-quantized",
}  # fmt: skip
SHAPES = ((128, 128), (256, 384), (1, 256), (300, 512), (77, 1024))
SEEDS = range(20)


def make_bits(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def make_scales(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return scales of all magnitudes that a type has, a few of them odd."""
    if dtype == torch.uint8:
        return make_bits(*shape)
    if dtype == torch.float8_e4m3fn:
        return make_bits(*shape).view(dtype)
    exponents = torch.randint(-40, 36, shape) if dtype != torch.float16 else torch.randint(-7, 5, shape)
    found = (torch.randn(shape) * 10.0 ** exponents.double()).to(dtype)
    odd = torch.tensor([0.0, -0.0, float("inf"), float("nan")], dtype=dtype)
    is_odd = torch.rand(shape) < 0.02
    return torch.where(is_odd, odd[torch.randint(0, 4, shape)], found)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare all bits, but those of not-a-numbers, whose sign and payload depend on the place in a tensor there."""
    assert got.dtype == want.dtype and got.shape == want.shape
    kind = {2: torch.int16, 4: torch.int32}[got.itemsize]
    differ = (got.view(kind) != want.contiguous().view(kind)) & ~(got.isnan() & want.isnan())
    assert not differ.any(), (got[differ][:8], want[differ][:8], int(differ.sum()))


def dequantize(folder: Path, tensors: Tensors, config: dict[str, Any], dtype: str = "keep") -> Tensors:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    xrank.gather_checkpoint(folder, folder.with_name("out"), dequantize=True, dtype=dtype, overwrite=True)
    return load_file(folder.with_name("out") / "model.safetensors")


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", FORMATS)
def test_compressed_tensors(tmp_path: Path, scheme: str, scale_dtype: torch.dtype) -> None:
    known = preset_name_to_scheme(scheme, ["Linear"])
    known.format = FORMATS[scheme]
    config = QuantizationConfig(config_groups={"group_0": known}, format=FORMATS[scheme]).to_dict()
    compressor = BaseCompressor.get_value_from_registry(known.format)
    made, want = Tensors(), Tensors()
    for seed in SEEDS:
        torch.manual_seed(seed)
        rows, columns = SHAPES[seed % len(SHAPES)]
        zeros = {"weight": torch.zeros(rows, columns, dtype=torch.bfloat16)}
        wide = {"W8A8": torch.int8}.get(scheme, torch.float8_e4m3fn)
        codes: Tensors = {"weight": make_bits(rows, columns).view(wide)}
        if "A16" in scheme:
            packed = make_bits(rows, columns // (1 if scheme == "W8A16" else 2))
            codes = {"weight_packed": packed.view(torch.int32) if FORMATS[scheme] == "pack-quantized" else packed}
        if FORMATS[scheme] == "pack-quantized":
            codes["weight_shape"] = torch.tensor(zeros["weight"].shape)
        if scheme == "NVFP4A16":
            codes["weight_global_scale"] = torch.rand(1) * 10.0 ** float(torch.randint(-3, 6, ()))
        group = known.weights.group_size
        shape = {"channel": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}.get(
            str(getattr(known.weights.strategy, "value", known.weights.strategy)), (rows, columns // (group or 1))
        )
        stored = {"NVFP4A16": torch.float8_e4m3fn, "MXFP4A16": torch.uint8, "MXFP8": torch.uint8}
        codes["weight_scale"] = make_scales(*shape, dtype=stored.get(scheme, scale_dtype))
        name = f"model.layers.{seed}.mlp.up_proj"
        made |= {f"{name}.{last}": tensor for last, tensor in codes.items()}
        want[f"{name}.weight"] = compressor.decompress(dict(codes), known)["weight"]
    got = dequantize(tmp_path / "q", made, {"quantization_config": config, "dtype": "bfloat16"})
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        # As its own converter, and transformers, which cast what fp32 scales give.
        assert_same(got[name], tensor.bfloat16() if tensor.dtype == torch.float32 else tensor)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_blocks_as_transformers_and_deepseek_have_them(tmp_path: Path, scale_dtype: torch.dtype, dtype: str) -> None:
    made, want, kind = Tensors(), Tensors(), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    for seed in SEEDS:
        torch.manual_seed(seed)
        rows, columns = ((128, 256), (384, 128), (256, 1024))[seed % 3]
        codes = make_bits(rows, columns).view(torch.float8_e4m3fn)
        scales = make_scales(rows // 128, columns // 128, dtype=scale_dtype)
        name = f"model.layers.{seed}.mlp.up_proj.weight"
        made |= {name: codes, f"{name}_scale_inv": scales}
        want[name] = Fp8Dequantize(None)._dequantize_one(codes, scales, kind)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    got = dequantize(tmp_path / "q", made, config, dtype)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same(got[name], tensor)


def test_gpt_oss_as_transformers_has_it(tmp_path: Path) -> None:
    made, want = Tensors(), Tensors()
    for seed in SEEDS:
        torch.manual_seed(seed)
        experts, rows, groups = ((2, 96, 3), (4, 64, 2), (1, 320, 8))[seed % 3]
        blocks, scales = make_bits(experts, rows, groups, 16), make_bits(experts, rows, groups)
        name = f"model.layers.{seed}.mlp.experts.down_proj"
        made |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        want[name] = convert_moe_packed_tensors(blocks, scales)
    got = dequantize(tmp_path / "q", made, {"quantization_config": {"quant_method": "mxfp4"}})
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same(got[name], tensor)


@pytest.mark.parametrize("dtype", ["keep", "fp16", "fp32"])
@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_modelopt(tmp_path: Path, algorithm: str, dtype: str) -> None:
    kind = {"keep": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    made, want = Tensors(), Tensors()
    for seed in SEEDS:
        torch.manual_seed(seed)
        rows, columns = SHAPES[seed % len(SHAPES)]
        name, scale = f"model.layers.{seed}.mlp.up_proj.weight", torch.rand(()) * 10.0 ** float(seed % 7 - 5)
        if algorithm == "FP8":
            codes = make_bits(rows, columns).view(torch.float8_e4m3fn)
            made |= {name: codes, f"{name}_scale": scale}
            want[name] = FP8QTensor(codes.shape, kind, codes).dequantize(kind, scale=scale)
        else:
            codes, scales = make_bits(rows, columns // 2), make_scales(rows, columns // 16, dtype=torch.float8_e4m3fn)
            made |= {name: codes, f"{name}_scale": scales, f"{name}_scale_2": scale}
            known = NVFP4QTensor(torch.Size((rows, columns)), kind, codes)
            want[name] = known.dequantize(kind, scale=scales, double_scale=scale, block_sizes={-1: 16})
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
    got = dequantize(tmp_path / "q", made, config, dtype)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same(got[name], tensor)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the folders of models, each made once."""
    return tmp_path_factory.mktemp("plain")


def make_plain(root: Path, name: str) -> Path:
    if not (root / name).exists():
        make_model(name).save_pretrained(root / name)
    return root / name


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "deepseek-v3"])
def test_folders_of_llm_compressor(plain: Path, tmp_path: Path, name: str, scheme: str) -> None:
    model, folder, out = make_plain(plain, name), tmp_path / "q", tmp_path / "out"
    quantize_folder(model, folder, scheme, IGNORED)
    if scheme == "DEEPSEEK_FP8":
        converter = FP8BlockDequantizer.from_pretrained(str(folder))
    else:
        converter = CompressedTensorsDequantizer(str(folder))
    want = converter.process(read_tensors(folder))
    xrank.gather_checkpoint(folder, out, dequantize=True)
    got = read_tensors(out)
    assert got.keys() == want.keys() == read_tensors(model).keys()
    for each, tensor in want.items():
        assert_same(got[each], tensor)
    assert json.loads((out / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    filled = {key: torch.zeros_like(tensor) for key, tensor in loaded.items()}
    xrank.load_model(filled, folder)
    assert all(torch.equal(filled[key], tensor) for key, tensor in loaded.items())


@pytest.mark.parametrize("config", [*MODELOPT_SCHEMES.values(), "FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"])
def test_folders_of_modelopt(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    monkeypatch.setitem(MODELOPT_SCHEMES, config, config)  # the others have scales of activations
    model, folder, out = make_plain(plain, "llama"), tmp_path / "q", tmp_path / "out"
    quantize_by_modelopt(MODELS["llama"], model, folder, config)
    report = xrank.gather_checkpoint(folder, out, dequantize=True)
    got, stored, want = read_tensors(out), read_tensors(folder), read_tensors(model)
    assert got.keys() == want.keys()
    assert any(code == "dequantized" for code, _ in report.notes)
    for name, tensor in got.items():
        scale, codes = stored.get(f"{name}_scale"), stored[name]
        if scale is None:
            assert_same(tensor, codes)
        elif "FP8" in config:
            scale = scale[:, None] if scale.ndim == 1 else scale
            assert_same(tensor, FP8QTensor(codes.shape, tensor.dtype, codes).dequantize(tensor.dtype, scale=scale))
        else:
            known, second = NVFP4QTensor(tensor.shape, tensor.dtype, codes), stored[f"{name}_scale_2"]
            made = known.dequantize(tensor.dtype, scale=scale, double_scale=second, block_sizes={-1: 16})
            assert_same(tensor, made)
    assert not (out / "hf_quant_config.json").exists()


def test_gpt_oss_loads_as_transformers_dequantizes_it(tmp_path: Path) -> None:
    folder, out = tmp_path / "q", tmp_path / "out"
    model = make_model("gpt-oss")
    model.save_pretrained(folder)
    made = Tensors()
    for name, tensor in read_tensors(folder).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            made[f"{name}_blocks"] = make_bits(experts, rows, columns // 32, 16)
            made[f"{name}_scales"] = torch.randint(110, 125, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            made[name] = tensor
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    xrank.gather_checkpoint(folder, out, dequantize=True)
    decoded = transformers.Mxfp4Config(dequantize=True)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=decoded)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for name, tensor in wanted.state_dict().items():
        assert_same(loaded.state_dict()[name], tensor)
    tokens = torch.arange(12)[None]
    assert torch.equal(wanted(tokens).logits, loaded(tokens).logits)
