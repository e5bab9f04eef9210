"""Encodings against llm-compressor, compressed-tensors, ModelOpt and transformers: 2,000 matrices each, bit for bit.

The tools' bits of a not-a-number depend on where it lies in a vector of the processor, and so do those of a block of an
MX format that contains one: of equal rows they make different ones. These are left out, all else is compared.

``python -m tests.oracle.test_encodings`` writes what `tests.engine.test_encodings` compares with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import compress_module, decompress_module
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor.entrypoints.model_free.lifecycle import (
    calibrate_weight,
    initialize_quantized_linear,
    validate_weight_for_quantization,
)
from llmcompressor.modifiers.quantization.calibration import (
    apply_calibration_status,
    freeze_module_quantization,
    initialize_observer,
    observe,
    update_qparams,
)
from llmcompressor.observers import FusionHandler
from modelopt.torch.export.quant_utils import from_quantized_weight, to_quantized_weight
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.engine.test_encodings import (
    RECORDED,
    WIDTHS,
    as_array,
    case_key,
    digest,
    encode_in_bands,
    odd_values,
    recorded_cases,
    same_bits,
    settle_nans,
)
from xrank import dtypes
from xrank.engine import encodings

pytestmark = pytest.mark.timeout(240)

COMPRESSED = ("FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "MXFP4A16", "MXFP8")
"""Schemes of which each row, or 128 of them, is quantized by itself."""
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_BATCH = 20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep torch from dividing small operations, which takes longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def as_tensor(array: Any) -> torch.Tensor:
    """Return an array as a tensor of the same type."""
    name = next(each for each in (*_TYPES, "F8_E4M3", "I8", "U8") if dtypes.numpy_dtype(each) == array.dtype)
    raw = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
    return raw.view(getattr(torch, dtypes.dtype(name).torch_name)).view(array.shape)


def compress(scheme: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors that model_free_ptq would write of a weight, and the values that they give."""
    chosen = preset_name_to_scheme(scheme, ["Linear"])
    validate_weight_for_quantization(weight, chosen, "weight")
    module = initialize_quantized_linear(weight, chosen, "cpu")
    calibrate_weight(module)
    compress_module(module)
    made = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    decompress_module(module)
    return made, module.weight.detach()


def compress_fused(weights: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return what model_free_ptq would write of weights that share NVFP4's global scale, as its converter does."""
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    modules = [initialize_quantized_linear(weight, scheme, "cpu") for weight in weights]
    for module in modules:
        initialize_observer(module, "weight")
        apply_calibration_status(module)
    FusionHandler.fuse([(module.weight_observer, module) for module in modules])
    observe(modules, base_name="weight")
    update_qparams(modules, base_name="weight")
    for module in modules:
        freeze_module_quantization(module)
        compress_module(module)
    return [dict(module.state_dict()) for module in modules]


def export_fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what ModelOpt would write of a weight in FP8, and the values that it gives."""
    scale = torch.maximum(weight.max().abs(), weight.min().abs()).float() / 448.0
    codes = to_quantized_weight(weight, scale, "fp8")
    return {"weight": codes, "weight_scale": scale}, from_quantized_weight(codes, scale, "fp8", weight.dtype)


def export_nvfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what ModelOpt would write of a weight in NVFP4, and the values that it gives."""
    whole = NVFP4QTensor.get_weights_scaling_factor_2(weight)
    scales, _ = NVFP4QTensor.get_weights_scaling_factor(weight, 16, whole)
    codes = to_quantized_weight(weight.clone(), scales, "nvfp4", whole, 16)
    held = NVFP4QTensor(weight.shape, weight.dtype, codes)
    values = held.dequantize(dtype=weight.dtype, scale=scales, double_scale=whole, block_sizes={-1: 16})
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": whole}, values


def cast_by_blocks(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what DeepGEMM's per_block_cast_to_fp8 makes of a weight, and its values as transformers decodes blocks."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(-1, 128, padded.shape[1] // 128, 128)
    scales = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    codes = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(padded.shape)
    grid = scales.view(blocks.shape[0], blocks.shape[2])
    values = Fp8Dequantize(None)._dequantize_one(codes, grid, weight.dtype)
    made = {"weight": codes[:rows, :columns].contiguous(), "weight_scale_inv": grid}
    return made, values[:rows, :columns]


def run_tool(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what the tool of an encoding makes of a weight, and the values that it gives back."""
    tools = {"MODELOPT_FP8": export_fp8, "MODELOPT_NVFP4": export_nvfp4, "DEEPSEEK_FP8": cast_by_blocks}
    return tools[name](weight) if name in tools else compress(name, weight)


def draw(random: np.random.Generator, shape: tuple[int, int], dtype: str, *, is_finite: bool = False) -> Any:
    """Return a matrix of one of ten kinds: of magnitudes like weights, or with values that are special."""
    kind = dtypes.numpy_dtype(dtype)
    unsigned = np.dtype(f"u{kind.itemsize}")
    largest = np.array(np.inf, kind).view(unsigned) - 1
    with np.errstate(all="ignore"):
        values = (random.standard_normal(shape) * 10 ** random.uniform(-4, 2)).astype("f4").astype(kind)
        some = random.integers(0, values.size, max(1, values.size // 20))
        flat, bits = values.reshape(-1), values.reshape(-1).view(unsigned)
        match random.integers(0, 10):
            case 1:
                flat[some] = 0.0
            case 2:
                flat[some] = -0.0
            case 3 if not is_finite:
                flat[some[0]] = np.inf * random.choice([-1, 1])
            case 4 if not is_finite:
                flat[some[0]] = np.nan
            case 5:
                bits[some] = largest
            case 6:  # subnormal numbers, and the next above them
                bits[:] = random.integers(0, 2 << ({"BF16": 7, "F16": 10, "F32": 23}[dtype]), values.size)
            case 7:
                flat[:] = 0.0
                flat[some[0]] = 1.0
            case 8:  # ties between codes
                flat[:] = (random.integers(-16, 17, values.size) / 4).astype("f4")
            case 9:  # all numbers
                bits[:] = random.integers(0, largest + 1, values.size)
                bits |= (random.integers(0, 2, values.size) << (8 * kind.itemsize - 1)).astype(unsigned)
    return values


def draw_batches(name: str, *, is_finite: bool = False) -> Iterator[list[Any]]:
    """Yield 100 lists of 20 matrices of one width and type."""
    random = np.random.default_rng([7, *name.encode()])
    high, width = getattr(encodings, name).block
    for number in range(2000 // _BATCH):
        columns = width * int(random.integers(1, 5)) if high == 1 and width else int(random.integers(1, 300))
        dtype = ("BF16", "BF16", "F16", "F32")[number % 4]
        rows = random.integers(1, 60, _BATCH)
        yield [draw(random, (int(each), columns), dtype, is_finite=is_finite) for each in rows]


def without_odd_groups(values: Any, array: Any) -> Any:
    """Return an output of an MX format, with zeros where a group of 32 values has a not-a-number."""
    left = array.copy()
    is_odd = np.isnan(values.astype("f4")).reshape(len(values), -1, 32).any(axis=2)
    left.reshape(*is_odd.shape, -1)[is_odd] = 0
    return left


def check(name: str, values: Any, theirs: dict[str, Any], their_values: Any) -> None:
    """Assert that outputs and decoded values are those of the tool."""
    encoding = getattr(encodings, name)
    dtype = next(each for each in _TYPES if dtypes.numpy_dtype(each) == values.dtype)
    made = encode_in_bands(encoding, values, 40)
    decoded = encoding.decode(list(made.values()), dtype)
    assert made.keys() == theirs.keys()
    for key, ours in (*made.items(), ("values", decoded)):
        other = their_values if key == "values" else theirs[key]
        if encoding.rule == "e8m0":
            ours, other = without_odd_groups(values, ours), without_odd_groups(values, other)
        assert same_bits(ours, other), (name, key, values.shape, dtype)


@pytest.mark.parametrize("name", COMPRESSED)
def test_matrices_are_compressed_as_by_model_free_ptq(name: str) -> None:
    high = getattr(encodings, name).block_rows
    for batch in draw_batches(name):
        # The tool takes a batch at once, each matrix with zeros up to a whole block.
        padded = [np.pad(each, ((0, -len(each) % high), (0, 0))) for each in batch]
        made, values = compress(name, as_tensor(np.concatenate(padded)))
        whole = {key: as_array(tensor) for key, tensor in made.items()}
        plain = as_array(values)
        top = 0
        for each, full in zip(batch, padded, strict=True):
            theirs = {}
            for key, array in whole.items():
                first, count = (top // high, len(full) // high) if key == "weight_scale" else (top, len(each))
                is_shape = key == "weight_shape"
                theirs[key] = np.array(each.shape) if is_shape else array[first : first + count]
            check(name, each, theirs, plain[top : top + len(each)])
            top += len(full)


@pytest.mark.parametrize("name", ["NVFP4A16", "MODELOPT_FP8", "MODELOPT_NVFP4", "DEEPSEEK_FP8"])
def test_matrices_are_quantized_as_by_the_tool(name: str) -> None:
    for batch in draw_batches(name, is_finite=name == "DEEPSEEK_FP8"):
        for each in batch:
            made, values = run_tool(name, as_tensor(each))
            check(name, each, {key: as_array(tensor) for key, tensor in made.items()}, as_array(values))


def test_a_global_scale_is_shared_as_by_model_free_ptq() -> None:
    encoding = encodings.NVFP4A16
    for batch in draw_batches("NVFP4A16", is_finite=True):
        fused = batch[:3]
        maximum = encodings.largest(map(encoding.measure, fused))
        for values, theirs in zip(fused, compress_fused([as_tensor(each) for each in fused]), strict=True):
            made = sorted(encoding.encode(values, 0, values.shape, maximum), key=lambda one: one[0])
            for key, (_, _, ours) in zip(("weight_packed", "weight_scale", "weight_global_scale"), made, strict=True):
                assert same_bits(ours, as_array(theirs[key])), (key, values.shape, values.dtype)


@pytest.mark.parametrize("dtype", _TYPES)
def test_gpt_oss_is_decoded_as_by_transformers(dtype: str) -> None:
    random = np.random.default_rng(4)
    for scales in (random.integers(0, 256, (2, 128, 4), np.uint8), np.arange(1024, dtype=np.uint8).reshape(2, 128, 4)):
        blocks = random.integers(0, 256, (2, 128, 4, 16), np.uint8)
        theirs = convert_moe_packed_tensors(as_tensor(blocks), as_tensor(scales), dtype=_TYPES[dtype])
        ours = encodings.GPT_OSS.decode([blocks.reshape(256, 64), scales.reshape(256, 4)], dtype)
        assert same_bits(ours, as_array(theirs.transpose(1, 2).reshape(256, 128)))


@pytest.mark.parametrize("dtype", _TYPES)
def test_blocks_of_deepseek_are_decoded_as_by_transformers(dtype: str) -> None:
    random = np.random.default_rng(5)
    codes = random.integers(0, 256, (384, 256), np.uint8).view(dtypes.numpy_dtype("F8_E4M3"))
    scales = (random.standard_normal((3, 2)) * 0.01).astype("f4")
    theirs = Fp8Dequantize(None)._dequantize_one(as_tensor(codes), as_tensor(scales), _TYPES[dtype])
    assert same_bits(encodings.DEEPSEEK_FP8.decode([codes, scales], dtype), as_array(theirs))


def record() -> dict[str, Any]:
    """Return what the tools make of the recorded matrices."""
    found = {}
    for name, dtype, is_finite in recorded_cases():
        made, values = run_tool(name, as_tensor(odd_values(dtype, WIDTHS[name], is_finite=is_finite)))
        names = [output.name for output in getattr(encodings, name).outputs("weight", dtype, (7, WIDTHS[name]))]
        assert {*names} == {*made}
        outputs = {key: settle_nans(as_array(made[key])).hex() for key in names}
        found[case_key(name, dtype, is_finite)] = {"outputs": outputs, "decoded": digest(as_array(values))}
    return found


def test_the_recorded_outputs_are_the_tools() -> None:
    assert json.loads(RECORDED.read_text()) == record()


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), indent=0) + "\n")
