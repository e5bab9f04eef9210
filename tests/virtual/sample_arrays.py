"""Arrays of both kinds and every element type, and how to compare them whatever they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

NUMPY_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "C64": np.complex64,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = tuple(NUMPY_DTYPES)
REDUCIBLE = tuple(name for name in NAMES if name != "F8_E8M0")  # an exponent alone: nothing computes with it


def made(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Return an array of numbers that are not alike, without NaN, different for each seed."""
    rng = np.random.default_rng(seed)
    if dtype == "BOOL":
        return np.asarray(rng.integers(0, 2, shape), np.bool_)
    if dtype[0] in "IU":
        return np.asarray(rng.integers(-99, 99, shape)).astype(NUMPY_DTYPES[dtype])
    values = np.asarray(rng.standard_normal(shape)) * 2
    if dtype == "F8_E8M0":
        return np.asarray(np.exp2(rng.integers(-3, 4, shape)), np.float64).astype(NUMPY_DTYPES[dtype])
    return np.asarray(values + 1j * values[::-1] if dtype == "C64" and values.ndim else values).astype(
        NUMPY_DTYPES[dtype]
    )


def of_kind(array: np.ndarray, kind: str) -> np.ndarray | torch.Tensor:
    """Return the array, or the tensor with the same bytes."""
    if kind == "numpy":
        return array
    name = next(name for name, dtype in NUMPY_DTYPES.items() if array.dtype == dtype)
    raw = torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8)[: array.nbytes]
    return raw.clone().view(TORCH_DTYPES[name]).reshape(array.shape)


def plain(array: object) -> tuple[str, tuple[int, ...], str, bytes]:
    """Return all there is to an array, to be compared."""
    if isinstance(array, torch.Tensor):
        assert not array.requires_grad
        name = next(name for name, dtype in TORCH_DTYPES.items() if array.dtype == dtype)
        raw = array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return "torch", tuple(array.shape), name, raw
    assert type(array) is np.ndarray, type(array)
    name = next(name for name, dtype in NUMPY_DTYPES.items() if array.dtype == dtype)
    return "numpy", array.shape, name, array.tobytes()
