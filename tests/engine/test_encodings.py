"""Encodings: bands of matrices to the tools' own bits, and back.

`RECORDED` is what the tools made of the matrices of `odd_values`, with a digest of the values that they gave back:
``python -m tests.oracle.test_encodings`` in the environment of ``make oracle`` writes it anew, and ``make oracle``
compares it with the tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash

import xrank
from xrank import dtypes
from xrank.engine import encodings
from xrank.engine.encodings import Encoding
from xrank.errors import ContradictionError

RECORDED = Path(__file__).with_name("recorded_encodings.json")
DTYPES = ("BF16", "F16", "F32")
WIDTHS = {
    "FP8_DYNAMIC": 37, "FP8_BLOCK": 131, "W8A8": 37, "W8A16": 128, "W4A16": 128, "NVFP4A16": 48, "MXFP4A16": 64,
    "MXFP8": 64, "DEEPSEEK_FP8": 131, "MODELOPT_FP8": 37, "MODELOPT_NVFP4": 48,
}  # fmt: skip
"""Encoding -> columns of its recorded matrices."""
_Array = npt.NDArray[Any]


def odd_values(dtype: str, columns: int, *, is_finite: bool = True) -> _Array:
    """Return seven rows of a type: plain numbers, zeros of both signs, the smallest and largest numbers, and ties."""
    kind = dtypes.numpy_dtype(dtype)
    bits = kind.itemsize * 8
    unsigned = np.dtype(f"u{kind.itemsize}")
    with np.errstate(all="ignore"):
        mixed = (np.arange(7 * columns, dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        plain = ((mixed >> np.uint64(40)).astype("f8") / 2**23 - 1) * 0.05
    values = plain.reshape(7, columns).astype("f4").astype(kind)
    words = values.view(unsigned)
    words[1] = (np.arange(columns) % 2).astype(unsigned) << (bits - 1)
    words[2] = np.arange(columns).astype(unsigned) % 23 | (np.arange(columns).astype(unsigned) % 2 << (bits - 1))
    infinity = np.array(np.inf, kind).view(unsigned)
    words[3, ::5] = infinity - 1
    words[3, ::10] |= unsigned.type(1 << (bits - 1))
    values[4] = (np.arange(columns) % 97 - 48).astype("f4") / 8  # 6 is the largest, as of fp4
    if not is_finite:
        words[5, 3], words[6, ::7] = infinity, infinity | unsigned.type(1 << (bits - 1))
    return values


def encode_in_bands(encoding: Encoding, values: _Array, band_rows: int) -> dict[str, _Array]:
    """Return all outputs of an array that is encoded by so many rows at a time, or by one block of them."""
    dtype = next(name for name in DTYPES if dtypes.numpy_dtype(name) == values.dtype)
    rows, columns = values.shape[-2:]
    flat = values.reshape(-1, columns)
    made: dict[int, list[tuple[int, _Array]]] = {}
    step = -(-band_rows // encoding.block_rows) * encoding.block_rows
    for matrix in range(0, len(flat), rows):
        starts = range(matrix, matrix + rows, step)
        bands = [flat[start : min(start + step, matrix + rows)] for start in starts]
        maximum = encodings.largest(map(encoding.measure, bands)) if encoding.is_shared else None
        for start, band in zip(starts, bands, strict=True):
            for index, first, part in encoding.encode(band, start, values.shape, maximum):
                made.setdefault(index, []).append((first, part.reshape(-1)))
    whole = {}
    for index, output in enumerate(encoding.outputs("weight", dtype, values.shape)):
        parts = sorted(made[index], key=lambda one: one[0])
        assert [first for first, _ in parts] == [sum(len(p) for _, p in parts[:i]) for i in range(len(parts))]
        whole[output.name] = np.concatenate([part for _, part in parts]).reshape(output.shape)
        assert whole[output.name].dtype == dtypes.numpy_dtype(output.dtype), output.name
    return whole


def as_array(tensor: torch.Tensor) -> _Array:
    """Return a tensor of any type as an array."""
    name = dtypes.by_torch_name(str(tensor.dtype).removeprefix("torch.")).name
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(dtypes.numpy_dtype(name)).reshape(tuple(tensor.shape))


def settle_nans(array: _Array) -> bytes:
    """Return the bytes of an array, all not-a-numbers alike: their signs depend on the place in the tools' vectors."""
    if array.dtype.kind in "iub":
        return array.tobytes()
    wide = array.astype("f4")
    with np.errstate(all="ignore"):
        return np.where(np.isnan(wide), np.float32(np.nan), wide).astype(array.dtype).tobytes()


def digest(array: _Array) -> str:
    """Return a digest of `settle_nans`."""
    return xxhash.xxh3_64_hexdigest(settle_nans(array))


def same_bits(one: _Array, other: _Array) -> bool:
    """Return whether two arrays agree in type, shape and all bits but those of not-a-numbers."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and settle_nans(one) == settle_nans(other)


def recorded_cases() -> list[tuple[str, str, bool]]:
    """Return encoding, type and whether all values are finite of each recorded matrix."""
    finite_only = ("DEEPSEEK_FP8",)  # as xrank refuses the others
    cases = [(name, dtype, is_finite) for name in WIDTHS for dtype in DTYPES for is_finite in (True, False)]
    return [case for case in cases if case[2] or case[0] not in finite_only]


def case_key(name: str, dtype: str, is_finite: bool) -> str:
    """Return the key of a recorded matrix."""
    return f"{name} {dtype} {'finite' if is_finite else 'infinite'}"


@pytest.mark.parametrize(("name", "dtype", "is_finite"), recorded_cases())
def test_outputs_and_values_are_those_of_the_tool(name: str, dtype: str, is_finite: bool) -> None:
    encoding: Encoding = getattr(encodings, name)
    expected = json.loads(RECORDED.read_text())[case_key(name, dtype, is_finite)]
    values = odd_values(dtype, WIDTHS[name], is_finite=is_finite)
    for band_rows in (1, 3, 7):
        made = encode_in_bands(encoding, values, band_rows)
        assert {key: settle_nans(array).hex() for key, array in made.items()} == expected["outputs"]
    decoded = encoding.decode(list(made.values()), dtype)
    assert digest(decoded) == expected["decoded"]


@pytest.mark.parametrize("shape", [(300, 200), (2, 70, 64), (1, 1), (3, 40_000)])
@pytest.mark.parametrize("blocks", ["tensor", "channel", (128, 128), (3, 5)])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_bands_have_the_bits_of_quantization(dtype: Any, blocks: Any, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    values.reshape(-1)[::7] = 0.0
    whole = xrank.Quantization(dtype, blocks)
    expected = whole("weight", values)
    encoding = encodings.fp32_encoding(dtype, blocks, whole.name_scales(""))
    for band_rows in (1, 17, 1000):
        made = encode_in_bands(encoding, as_array(values), band_rows)
        assert list(made) == list(expected)
        for name, tensor in expected.items():
            assert same_bits(made[name], as_array(tensor)), name


def test_fp32_arithmetic_is_that_of_deepgemm_and_vllm() -> None:
    """The functions that they have in torch, for a matrix of whole blocks."""
    values = torch.randn((256, 384), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    blocks = values.view(2, 128, 3, 128)
    scales = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    codes = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(256, 384)
    made = encode_in_bands(encodings.DEEPSEEK_FP8, as_array(values), 128)
    assert same_bits(made["weight"], as_array(codes))
    assert same_bits(made["weight_scale_inv"], as_array(scales.view(2, 3)))
    largest = values.float().abs().amax(dim=1, keepdim=True)
    made = encode_in_bands(encodings.fp32_encoding("int8", "channel", "_scale"), as_array(values), 100)
    assert same_bits(made["weight"], as_array((values.float() * (127 / largest)).round().to(torch.int8)))
    assert same_bits(made["weight_scale"], as_array(largest / 127))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("blocks", ["tensor", "channel", (2, 2)])
def test_values_that_are_not_finite_have_no_scale_in_fp32(blocks: Any, value: float) -> None:
    encoding = encodings.fp32_encoding("fp8", blocks, "_scale")
    values = np.array([[1.0, 2.0], [3.0, value]], "f4")
    with pytest.raises(ContradictionError, match=r"^up\.weight has values that are not finite"):
        encoding.encode(values, 0, (2, 2), encoding.measure(values), name="up.weight")


def test_the_largest_of_bands_is_nan_if_one_is() -> None:
    bands = np.array([[[1.0, -3.0]], [[2.0, np.nan]], [[0.0, -0.0]]], dtypes.numpy_dtype("BF16"))
    measured = [encodings.NVFP4A16.measure(band) for band in bands]
    assert (measured[0], measured[2]) == (3.0, 0.0)
    assert encodings.largest(measured[::2]) == 3.0
    assert encodings.largest([]) == 0.0
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        assert np.isnan(encodings.largest(measured[i] for i in order))


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "FP8_BLOCK", "DEEPSEEK_FP8", "W4A16", "NVFP4A16", "MXFP8"])
def test_any_rows_are_decoded(name: str) -> None:
    encoding: Encoding = getattr(encodings, name)
    values = np.random.default_rng(1).standard_normal((300, 512), "f4").astype(dtypes.numpy_dtype("BF16"))
    parts = list(encode_in_bands(encoding, values, 300).values())
    whole = encoding.decode(parts, "BF16")
    for top, bottom in ((0, 1), (5, 260), (128, 129), (250, 300)):
        high = encoding.block_rows
        near = [parts[0][top:bottom], parts[1][top // high : -(-bottom // high)], *parts[2:]]
        assert same_bits(encoding.decode(near, "BF16", skipped_rows=top % high), whole[top:bottom])


def test_a_block_has_the_bits_that_it_has_alone() -> None:
    """Also in rows too long for one tile, and where rows lie apart."""
    values = np.random.default_rng(2).standard_normal((4, 70_016), "f4").astype(dtypes.numpy_dtype("BF16"))
    for encoding in (encodings.MXFP4A16, encodings.W4A16):
        size = encoding.block[1]
        made = encode_in_bands(encoding, values[:, : 70_016 // size * size], 2)
        for left in (0, 32_768, 65_536):
            alone = encode_in_bands(encoding, np.ascontiguousarray(values[1:2, left : left + size]), 1)
            assert made["weight_scale"][1, left // size] == alone["weight_scale"][0, 0]
            packed = made["weight_packed"][1]
            per_code = 70_016 // size * size // len(packed)
            assert (packed[left // per_code : (left + size) // per_code] == alone["weight_packed"][0]).all()
    assert same_bits(
        encode_in_bands(encodings.FP8_DYNAMIC, values, 4)["weight"][::2],
        encode_in_bands(encodings.FP8_DYNAMIC, values[::2], 1)["weight"],
    )


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("FP8_DYNAMIC", (3, 5), None),
        ("FP8_BLOCK", (3, 5), None),
        ("FP8_BLOCK", (2, 3, 5), None),
        ("W4A16", (3, 200), "200 columns, not a multiple of 128"),
        ("NVFP4A16", (3, 40), "40 columns, not a multiple of 16"),
        ("NVFP4A16", (2, 3, 48), "3 dims, not 2"),
        ("MXFP8", (32,), "shape [32], not a matrix"),
        ("W8A8", (0, 4), "shape [0, 4], not a matrix"),
    ],
)
def test_a_shape_that_does_not_fit_is_described(name: str, shape: Sequence[int], expected: str | None) -> None:
    assert getattr(encodings, name).misfit(shape) == expected


def test_outputs_have_the_tools_names_types_and_shapes() -> None:
    outputs = {
        name: [(one.name, one.dtype, one.shape) for one in getattr(encodings, name).outputs("w", "F16", (300, 256))]
        for name in ("FP8_BLOCK", "W4A16", "NVFP4A16", "MXFP4A16", "MODELOPT_NVFP4", "DEEPSEEK_FP8", "MODELOPT_FP8")
    }
    assert outputs == {
        "FP8_BLOCK": [("w", "F8_E4M3", (300, 256)), ("w_scale", "F16", (3, 2))],
        "W4A16": [("w_packed", "I32", (300, 32)), ("w_scale", "F16", (300, 2)), ("w_shape", "I64", (2,))],
        "NVFP4A16": [
            ("w_packed", "U8", (300, 128)), ("w_scale", "F8_E4M3", (300, 16)), ("w_global_scale", "F32", (1,)),
        ],
        "MXFP4A16": [("w_packed", "U8", (300, 128)), ("w_scale", "U8", (300, 8))],
        "MODELOPT_NVFP4": [("w", "U8", (300, 128)), ("w_scale", "F8_E4M3", (300, 16)), ("w_scale_2", "F32", ())],
        "DEEPSEEK_FP8": [("w", "F8_E4M3", (300, 256)), ("w_scale_inv", "F32", (3, 2))],
        "MODELOPT_FP8": [("w", "F8_E4M3", (300, 256)), ("w_scale", "F32", ())],
    }  # fmt: skip


@pytest.mark.parametrize("name", list(WIDTHS))
def test_errors_of_bands_add_up_to_those_of_the_whole(name: str) -> None:
    encoding: Encoding = getattr(encodings, name)
    values = np.random.default_rng(3).standard_normal((256, 256), "f4").astype(dtypes.numpy_dtype("BF16"))
    maximum = encoding.measure(values)
    found = encodings.EncodingError()
    for top in (0, 128):
        band = values[top : top + 128]
        made = encoding.encode(band, top, values.shape, maximum)
        found += encodings.errors_of(encoding, band, made, maximum)
    parts = list(encode_in_bands(encoding, values, 256).values())
    plain = values.astype("f8")
    errors = abs(encoding.decode(parts, "BF16").astype("f8") - plain)
    assert found.mean == pytest.approx(errors.sum() / abs(plain).sum(), rel=1e-5)
    assert found.largest == pytest.approx(errors.max() / abs(plain).max(), rel=1e-5)
    assert 0 < found.mean < 0.2


def test_gpt_oss_has_a_scale_beyond_the_largest_power() -> None:
    """The scale 2**128, which fp32 does not have, times 0.5 is a number of it."""
    made = encodings.GPT_OSS.decode([np.full((1, 16), 0x10, np.uint8), np.array([[255]], np.uint8)], "F32")
    assert made[0, :2].tolist() == [0.0, 2.0**127]
