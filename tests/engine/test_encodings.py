"""Encodings: bands of matrices to the tools' own bits, and back."""

from __future__ import annotations

import pytest
import torch

import xrank
from xrank.engine import encodings
from xrank.engine.encodings import Encoding


def encode_in_bands(encoding: Encoding, values: torch.Tensor, band_rows: int) -> dict[str, torch.Tensor]:
    """Return all outputs of a tensor that is encoded by so many rows at a time, or one block of them."""
    dtype = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[values.dtype]
    outputs = encoding.outputs("weight", dtype, values.shape)
    rows, columns = values.shape[-2:]
    flat = values.reshape(-1, columns)
    made: dict[int, list[tuple[int, torch.Tensor]]] = {}
    step = -(-band_rows // encoding.block_rows) * encoding.block_rows
    for matrix in range(0, len(flat), rows):
        starts = range(matrix, matrix + rows, step)
        bands = [flat[start : min(start + step, matrix + rows)] for start in starts]
        maximum = encodings.largest(map(encoding.measure, bands)) if encoding.is_shared else None
        for start, band in zip(starts, bands, strict=True):
            for index, first, part in encoding.encode(band, start, values.shape, maximum):
                made.setdefault(index, []).append((first, part.reshape(-1)))
    whole = {}
    for index, output in enumerate(outputs):
        parts = sorted(made[index], key=lambda one: one[0])
        assert [first for first, _ in parts] == [sum(len(p) for _, p in parts[:i]) for i in range(len(parts))]
        whole[output.name] = torch.cat([part for _, part in parts]).reshape(output.shape)
        assert xrank.dtypes.by_torch_name(str(whole[output.name].dtype).removeprefix("torch.")).name == output.dtype
    return whole


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors agree in type, shape and all bits."""
    kinds = [(tensor.dtype, tensor.shape) for tensor in (one, other)]
    return kinds[0] == kinds[1] and torch.equal(
        *(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    )


@pytest.mark.parametrize("shape", [(300, 200), (2, 70, 64), (1, 1)])
@pytest.mark.parametrize("blocks", ["tensor", "channel", (128, 128), (3, 5)])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_bands_have_the_bits_of_quantization(dtype: str, blocks: object, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    values.reshape(-1)[::7] = 0.0
    whole = xrank.Quantization(dtype, blocks)  # type: ignore[arg-type]
    expected = whole("weight", values)
    encoding = encodings.fp32_encoding(dtype, blocks, whole.name_scales(""))  # type: ignore[arg-type]
    for band_rows in (1, 17, 1000):
        made = encode_in_bands(encoding, values, band_rows)
        assert list(made) == list(expected)
        for name, tensor in expected.items():
            assert same_bits(made[name], tensor), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("blocks", ["tensor", "channel", (2, 2)])
def test_values_that_are_not_finite_have_no_scale_in_fp32(blocks: object, value: float) -> None:
    encoding = encodings.fp32_encoding("fp8", blocks, "_scale")  # type: ignore[arg-type]
    values = torch.tensor([[1.0, 2.0], [3.0, value]])
    maximum = encoding.measure(values)
    with pytest.raises(xrank.errors.ContradictionError, match=r"^up\.weight has values that are not finite"):
        encoding.encode(values, 0, (2, 2), maximum, name="up.weight")


def test_the_largest_of_bands_is_nan_if_one_is() -> None:
    encoding = encodings.FP8_DYNAMIC
    bands = [torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, float("nan")]]), torch.tensor([[0.0, 0.0]])]
    measured = [encoding.measure(band) for band in bands]
    assert measured[0] == 3.0
    assert encodings.largest(measured[::2]) == 3.0
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        assert encodings.largest(measured[i] for i in order) != encodings.largest(measured[i] for i in order)
    assert encodings.largest([]) == 0.0


@pytest.mark.parametrize(
    ("encoding", "scales_shape"), [(encodings.FP8_DYNAMIC, (300, 1)), (encodings.FP8_BLOCK, (3, 2))]
)
def test_scales_have_the_type_of_the_values(encoding: Encoding, scales_shape: tuple[int, int]) -> None:
    codes, scales = encoding.outputs("a.weight", "F16", (300, 130))
    assert (codes.name, codes.dtype, codes.shape) == ("a.weight", "F8_E4M3", (300, 130))
    assert (scales.name, scales.dtype, scales.shape) == ("a.weight_scale", "F16", scales_shape)
