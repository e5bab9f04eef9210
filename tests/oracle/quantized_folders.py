"""Quantized folders as other tools make them of a model folder: llm-compressor, DeepSeek's function, ModelOpt."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.oracle.quantized_models import read_tensors
from tests.recipes.families import Family

__all__ = ["MODELOPT_SCHEMES", "SCHEMES", "quantize_by_modelopt", "quantize_folder"]

SCHEMES = (
    "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "NVFP4A16", "MXFP4A16", "MXFP8", "DEEPSEEK_FP8",
)  # fmt: skip
MODELOPT_SCHEMES = {"FP8": "FP8_PER_CHANNEL_PER_TOKEN_CFG", "NVFP4": "W4A16_NVFP4_CFG"}
"""Scheme of xrank's -> the name of ModelOpt's configuration: those without scales of activations."""
_DEEPSEEK_CONFIG = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
"""As config.json of deepseek-ai/DeepSeek-V3 has it; the modules that stay are named beside it."""


def quantize_folder(model: Path, out: Path, scheme: str, ignore: Sequence[str]) -> None:
    """Write the folder of a quantized model.

    Stacks of experts stay: llm-compressor cuts rows of them in halves, whatever it ignores, and GPT-OSS has columns of
    gate and up in turns there (llmcompressor/entrypoints/model_free/converter.py:split_fused_moe_experts).

    Args:
        model: the folder of a model in floating point.
        out: the folder to make.
        scheme: one of `SCHEMES`.
        ignore: modules that stay in floating point: names, or expressions after ``re:``.
    """
    if scheme == "DEEPSEEK_FP8":
        _quantize_as_deepseek(model, out, ignore)
        return
    quantize = _load_llm_compressor()
    tensors = read_tensors(model)
    stacks = {name: tensor for name, tensor in tensors.items() if re.search("gate_up_proj$|down_proj$", name)}
    if not stacks:
        quantize(model, out, scheme=scheme, ignore=list(ignore), device="cpu")
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        shutil.copytree(model, place, ignore=shutil.ignore_patterns("*.safetensors*"))
        rest = {name: tensor for name, tensor in tensors.items() if name not in stacks}
        save_file(rest, place / "model.safetensors", {"format": "pt"})
        quantize(place, out, scheme=scheme, ignore=list(ignore), device="cpu")
    save_file({**read_tensors(out), **stacks}, out / "model.safetensors", {"format": "pt"})


@functools.cache
def _load_llm_compressor() -> Any:
    with open(os.devnull, "w") as silent, contextlib.redirect_stderr(silent):  # it greets, and shows bars
        import llmcompressor
        import loguru
    loguru.logger.remove()
    return llmcompressor.model_free_ptq


def _quantize_as_deepseek(model: Path, out: Path, ignore: Sequence[str]) -> None:
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*", "*.manifest*"))
    made = {}
    for name, tensor in read_tensors(model).items():
        module, _, last = name.rpartition(".")
        if last != "weight" or tensor.ndim != 2 or any(_matches(module, pattern) for pattern in ignore):
            made[name] = tensor
        else:
            made[name], made[f"{name}_scale_inv"] = cast_blocks(tensor)
    save_file(made, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {**_DEEPSEEK_CONFIG, "modules_to_not_convert": list(ignore)}
    (out / "config.json").write_text(json.dumps(config))


def _matches(module: str, pattern: str) -> bool:
    is_expression = pattern.startswith("re:")
    return re.match(pattern[3:], module) is not None if is_expression else module == pattern


def cast_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of a matrix and the scales of its blocks, by the arithmetic of DeepSeek's DeepGEMM.

    Magnitudes and scales are in float32, no block counts as smaller than 1e-4, and values are multiplied by the scale's
    reciprocal (deep_gemm/utils/math.py:per_block_cast_to_fp8).
    """
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    rows, columns = (range(0, size, 128) for size in weight.shape)
    scales = torch.empty(len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = weight[row : row + 128, column : column + 128].float()
            scales[i, j] = block.abs().max().clamp(min=1e-4) / 448.0
            codes[row : row + 128, column : column + 128] = (block * (1.0 / scales[i, j])).to(codes.dtype)
    return codes, scales


def quantize_by_modelopt(family: Family, model: Path, out: Path, scheme: str) -> None:
    """Write the folder that ModelOpt exports of a model, without data: scales of the weights alone.

    Args:
        family: which model.
        model: the folder of the model in floating point.
        out: the folder to make.
        scheme: one of `MODELOPT_SCHEMES`.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    loaded = getattr(transformers, family.auto_class).from_pretrained(model, dtype="auto")
    mtq.quantize(loaded, getattr(mtq, MODELOPT_SCHEMES[scheme]), None)
    export_hf_checkpoint(loaded, export_dir=out)
