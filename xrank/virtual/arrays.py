"""Arrays: what differs between numpy's and torch's, so that nothing else of the cluster has to know which it has.

Both kinds are allowed everywhere, and a result is of the kind of what it was made from. Torch is never imported
before the user's own arrays bring it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from xrank import dtypes
from xrank.errors import UsageError
from xrank.virtual.array_spec import ArraySpec
from xrank.workspace.plain_memory import has_memory, kind_without_elements, row_major_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "Array",
    "ArrayKind",
    "bytes_of",
    "check_one_kind",
    "concatenate",
    "copy_of",
    "fold",
    "from_bytes",
    "kind_of",
    "mean_of",
    "nbytes_of",
    "reduce",
    "reshape",
    "spec_of",
    "split_at",
    "split_evenly",
    "split_lengths",
]

Array: TypeAlias = Any
"""A numpy array or a torch tensor in main memory."""

ArrayKind: TypeAlias = Literal["numpy", "torch"]

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}
"""Numpy's functions of two arrays, by reduction."""

_TORCH_FUNCTIONS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "prod": "mul"}

_TORCH_COMPUTES = frozenset(("F64", "F32", "F16", "BF16", "C64", "I64", "I32", "I16", "I8", "U8", "BOOL"))
"""Element types with which torch computes on a CPU; numpy and ml_dtypes compute with all."""


def kind_of(array: Array) -> ArrayKind:
    """Return whose array it is.

    Raises:
        UsageError: it is no array, or one that is more than its elements (a masked array, a DTensor), or not dense in
            main memory.
    """
    if type(array) is np.ndarray or isinstance(array, np.generic | np.memmap):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and type(array) in (torch.Tensor, torch.nn.Parameter):
        is_dense = array.device.type == "cpu" and kind_without_elements(array) is None
        if is_dense and has_memory(array):
            return "torch"
        got = "a tensor whose storage was freed" if is_dense else f"a {array.layout} tensor on {array.device}"
    else:
        got = f"{type(array).__module__}.{type(array).__qualname__}"
    raise UsageError(
        "virtual devices exchange plain arrays in main memory",
        got=got,
        want="a numpy array or a dense torch tensor on the CPU",
        next_step="give the array itself: numpy.asarray(x), tensor.cpu(), or dtensor.to_local()",
    )


def check_one_kind(arrays: Mapping[str, Array]) -> None:
    """Refuse arrays, told by name, of which some are numpy's and some torch's: nothing computes on both.

    Raises:
        UsageError: names the first that is of another kind than the first of all.
    """
    first = next(iter(arrays), "")
    for name, array in arrays.items():
        if kind_of(array) != kind_of(arrays[first]):
            raise UsageError(
                f"{name} is an array of another kind than {first}",
                tensor=name,
                got=kind_of(array),
                want=f"{kind_of(arrays[first])}, as {first}",
                next_step="give numpy arrays alone or tensors alone: torch.from_numpy(x), tensor.numpy()",
            )


def spec_of(array: Array) -> ArraySpec:
    """Return the shape and element type of an array.

    Raises:
        UsageError: as `kind_of`, or of an element type that `xrank.dtypes` has not.
    """
    if kind_of(array) == "torch":
        return ArraySpec(tuple(array.shape), dtypes.by_torch_name(str(array.dtype).removeprefix("torch.")).name)
    name = _numpy_names().get(array.dtype)
    if name is None:
        raise UsageError(
            f"virtual devices exchange no arrays of numpy's {array.dtype}",
            got=str(array.dtype),
            want="one of " + ", ".join(sorted(dtypes.DTYPES)) + ", in this machine's byte order",
            next_step="cast the array: array.astype('float64')",
        )
    return ArraySpec(array.shape, name)


def nbytes_of(array: Array) -> int:
    """Return the bytes of an array's elements."""
    return int(array.nbytes)


def copy_of(array: Array) -> Array:
    """Return a copy of one's own, its elements one after another; a tensor's has no gradient."""
    if kind_of(array) == "torch":
        import torch

        return array.detach().clone(memory_format=torch.contiguous_format)
    return np.array(array, order="C")


def reshape(array: Array, shape: Sequence[int]) -> Array:
    """Return the elements, row-major, in another shape; a view where that can be."""
    if kind_of(array) == "torch":
        return array.detach().reshape(tuple(shape))
    return np.asarray(array).reshape(tuple(shape))


def concatenate(arrays: Sequence[Array], dim: int) -> Array:
    """Return arrays of one kind joined along a dim, as a new array; the only one of a sequence is copied too."""
    if kind_of(arrays[0]) == "torch":
        import torch

        return torch.cat([array.detach() for array in arrays], dim)
    return np.concatenate(arrays, dim)


def split_lengths(length: int, count: int) -> tuple[int, ...]:
    """Return the lengths of `count` parts as ``numpy.array_split`` cuts: they differ by at most 1, longer ones first.

    Where there is less than one element for each, the last parts are empty. (``torch.chunk`` cuts otherwise: all parts
    as long as the first, the last ones shorter or missing.)
    """
    short, num_longer = divmod(length, count)
    return (short + 1,) * num_longer + (short,) * (count - num_longer)


def split_at(array: Array, lengths: Sequence[int], dim: int) -> tuple[Array, ...]:
    """Return views of the parts that these lengths cut out of a dim, which they add up to."""
    assert sum(lengths) == array.shape[dim], (lengths, array.shape, dim)
    index: list[Any] = [slice(None)] * len(array.shape)
    parts = []
    start = 0
    for length in lengths:
        index[dim] = slice(start, start + length)
        parts.append(array[tuple(index)])
        start += length
    return tuple(parts)


def split_evenly(array: Array, count: int, dim: int) -> tuple[Array, ...]:
    """Return views of `count` parts along a dim, of the lengths of `split_lengths`."""
    return split_at(array, split_lengths(array.shape[dim], count), dim)


def fold(left: Array, right: Array, reduction: str) -> Array:
    """Return two arrays of one spec reduced to one, element by element, in their own element type.

    Sums of integers wrap around, those of bools are "or"; a mean is a sum here, and `mean_of` finishes it.
    """
    name = spec_of(left).dtype
    if kind_of(left) == "numpy":
        return _numpy_fold(left, right, reduction)
    if name in _TORCH_COMPUTES:
        import torch

        return getattr(torch, _TORCH_FUNCTIONS[reduction])(left.detach(), right.detach())
    folded = _numpy_fold(_as_numpy(left), _as_numpy(right), reduction)
    return from_bytes(bytes_of(folded), spec_of(left), "torch")


def mean_of(total: Array, count: int) -> Array:
    """Return a sum divided by how many were added."""
    if kind_of(total) == "numpy":
        with np.errstate(all="ignore"):
            return np.asarray(np.divide(total, np.full((), count, total.dtype)), total.dtype)
    spec = spec_of(total)
    if spec.dtype in _TORCH_COMPUTES:
        return total / count
    return from_bytes(bytes_of(mean_of(_as_numpy(total), count)), spec, "torch")


def reduce(arrays: Sequence[Array], reduction: str) -> Array:
    """Return arrays of one spec reduced to one, the first with the second, that with the third, and so on."""
    total = copy_of(arrays[0]) if len(arrays) == 1 else arrays[0]
    for array in arrays[1:]:
        total = fold(total, array, reduction)
    return mean_of(total, len(arrays)) if reduction == "mean" else total


def bytes_of(array: Array) -> Bytes:
    """Return the bytes of the elements, row-major: a view where the elements lie so, else of a copy."""
    if kind_of(array) == "torch":
        return row_major_bytes(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def from_bytes(content: Bytes, spec: ArraySpec, kind: ArrayKind) -> Array:
    """Return bytes as an array of a spec, without a copy; it lives as long as the memory under the bytes."""
    assert content.nbytes == spec.nbytes, (content.nbytes, spec)
    if kind == "torch":
        import torch

        dtype: torch.dtype = getattr(torch, dtypes.dtype(spec.dtype).torch_name)
        if not content.nbytes:
            # Numpy's strides of nothing may be 0, which torch does not view as wider elements.
            return torch.empty(spec.shape, dtype=dtype)
        return torch.from_numpy(content).view(dtype).reshape(spec.shape)
    return content.view(dtypes.numpy_dtype(spec.dtype)).reshape(spec.shape)


def with_length(spec: ArraySpec, dim: int, length: int) -> ArraySpec:
    """Return a spec with another length at one dim."""
    return ArraySpec((*spec.shape[:dim], length, *spec.shape[dim + 1 :]), spec.dtype)


def num_elements(spec: ArraySpec) -> int:
    """Return how many elements an array of a spec has."""
    return prod(spec.shape)


def _as_numpy(tensor: Array) -> Array:
    return from_bytes(bytes_of(tensor), spec_of(tensor), "numpy")


def _numpy_fold(left: Array, right: Array, reduction: str) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(getattr(np, _UFUNCS[reduction])(left, right))


@cache
def _numpy_names() -> dict[Any, str]:
    return {dtypes.numpy_dtype(name): name for name in dtypes.DTYPES}
