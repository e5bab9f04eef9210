"""Element types: name, width, and their names in torch and numpy.

The name is that of safetensors headers (safetensors 0.8, ``safetensors/src/tensor.rs: enum Dtype``), which every output
uses.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from xrank.errors import UsageError

if TYPE_CHECKING:
    import numpy as np


class DType(Struct, frozen=True):
    """An element type."""

    name: str
    """Name in a safetensors header: ``"BF16"``."""
    nbytes: int
    """Width of one element in bytes."""
    torch_name: str
    """Attribute of torch: ``"bfloat16"``."""
    numpy_name: str
    """Attribute of numpy, or of ml_dtypes if numpy lacks it."""
    is_float: bool = False
    """Whether a cast of weights applies: plain floating point, not a quantized payload."""
    num_packed: int = 1
    """Values in one element: two in torch's ``float4_e2m1fn_x2``. Shapes count elements, headers count values."""


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("F64", 8, "float64", "float64", is_float=True),
        DType("F32", 4, "float32", "float32", is_float=True),
        DType("F16", 2, "float16", "float16", is_float=True),
        DType("BF16", 2, "bfloat16", "bfloat16", is_float=True),
        DType("F8_E4M3", 1, "float8_e4m3fn", "float8_e4m3fn"),
        DType("F8_E5M2", 1, "float8_e5m2", "float8_e5m2"),
        DType("F8_E8M0", 1, "float8_e8m0fnu", "float8_e8m0fnu"),
        DType("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", "float8_e4m3fnuz"),
        DType("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", "float8_e5m2fnuz"),
        # numpy has no such type; its bytes are copied and compared, and U8 keeps numpy's uint8.
        DType("F4", 1, "float4_e2m1fn_x2", "uint8", num_packed=2),
        DType("C64", 8, "complex64", "complex64"),
        DType("I64", 8, "int64", "int64"),
        DType("I32", 4, "int32", "int32"),
        DType("I16", 2, "int16", "int16"),
        DType("I8", 1, "int8", "int8"),
        DType("U64", 8, "uint64", "uint64"),
        DType("U32", 4, "uint32", "uint32"),
        DType("U16", 2, "uint16", "uint16"),
        DType("U8", 1, "uint8", "uint8"),
        DType("BOOL", 1, "bool", "bool"),
    )
}
"""All supported element types, by name."""

_BY_TORCH_NAME = {d.torch_name: d for d in DTYPES.values()}


def dtype(name: str) -> DType:
    """Return the element type of that safetensors name, or raise UsageError."""
    try:
        return DTYPES[name]
    except KeyError:
        raise unsupported(name) from None


def by_torch_name(name: str) -> DType:
    """Return the element type that torch calls ``torch.<name>``; UsageError if safetensors has none such."""
    try:
        return _BY_TORCH_NAME[name]
    except KeyError:
        raise unsupported(f"torch.{name}") from None


def unsupported(name: str) -> UsageError:
    """Return the error for an element type that safetensors does not have, or has in parts of a byte (F6)."""
    return UsageError(
        f"element type {name} is not supported",
        got=name,
        want="one of " + ", ".join(sorted(DTYPES)),
        next_step="cast the tensor before it is written, or leave it out",
    )


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy (or ml_dtypes) dtype of an element type."""
    import numpy as np

    numpy_name = DTYPES[name].numpy_name
    if hasattr(np, numpy_name):
        result: np.dtype[Any] = np.dtype(getattr(np, numpy_name))
        return result
    import ml_dtypes

    narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, numpy_name))
    return narrow
