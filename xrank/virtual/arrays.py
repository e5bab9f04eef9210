"""Arrays of numpy and torch alike, and kernels: the computations on them that programs call by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from xrank import dtypes
from xrank.errors import LayoutError, UsageError
from xrank.ranks.memory import has_memory, kind_without_elements, row_major_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A shape and an element type; `dtype` is its name as in a safetensors header: ``"BF16"``."""

    shape: tuple[int, ...]
    dtype: str = "F32"

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * dtypes.dtype(self.dtype).nbytes

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def misfit(name: str, problem: str, found: ArraySpec, want: object) -> LayoutError:
    """Return the error for an array whose shape or element type does not fit the others'."""
    return LayoutError(f"{name} {problem}", tensor=name, got=str(found), want=str(want))


Array: TypeAlias = Any
"""A numpy array or a torch tensor in main memory."""

Arrays: TypeAlias = Sequence[Array]

Specs: TypeAlias = Sequence[ArraySpec]

ArrayKind: TypeAlias = Literal["numpy", "torch"]

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}
"""The binary function for each reduction, of numpy and of torch alike."""

_TORCH_COMPUTES = frozenset(("F64", "F32", "F16", "BF16", "C64", "I64", "I32", "I16", "I8", "U8", "BOOL"))
"""Element types that torch can compute with on a CPU; numpy and ml_dtypes compute with all types."""


def kind_of(array: Array) -> ArrayKind:
    """Return whether numpy or torch owns an array."""
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
        "virtual devices exchange only plain arrays in main memory",
        got=got,
        want="a numpy array or a dense torch tensor on the CPU",
        next_step="give the array itself: numpy.asarray(x), tensor.cpu(), or dtensor.to_local()",
    )


def check_one_kind(arrays: Mapping[str, Array]) -> None:
    """Check that named arrays are all numpy arrays or all tensors; no kernel computes on both."""
    first = next(iter(arrays), "")
    for name, array in arrays.items():
        if kind_of(array) != kind_of(arrays[first]):
            raise UsageError(
                f"{name} is a different kind of array than {first}",
                tensor=name,
                got=kind_of(array),
                want=f"{kind_of(arrays[first])}, as {first}",
                next_step="give only numpy arrays or only tensors: torch.from_numpy(x), tensor.numpy()",
            )


def spec_of(array: Array) -> ArraySpec:
    """Return the shape and element type of an array."""
    if kind_of(array) == "torch":
        kind = dtypes.by_torch_name(str(array.dtype).removeprefix("torch."))
        if kind.num_packed > 1:  # nothing computes with it
            raise dtypes.unsupported(kind.name)
        return ArraySpec(tuple(array.shape), kind.name)
    name = _numpy_names().get(array.dtype)
    if name is None:
        raise UsageError(
            f"virtual devices exchange no arrays of numpy's {array.dtype}",
            got=str(array.dtype),
            want="one of " + ", ".join(sorted(dtypes.DTYPES)) + ", in this machine's byte order",
            next_step="cast the array: array.astype('float64')",
        )
    return ArraySpec(array.shape, name)


def copy_of(array: Array) -> Array:
    """Return a contiguous copy; the copy of a tensor is detached."""
    if kind_of(array) == "torch":
        import torch

        return array.detach().clone(memory_format=torch.contiguous_format)
    return np.array(array, order="C")


def reshape(array: Array, shape: Sequence[int]) -> Array:
    """Return the elements in another shape, in row-major order; a view where possible."""
    if kind_of(array) == "torch":
        return array.detach().reshape(tuple(shape))
    return np.asarray(array).reshape(tuple(shape))


def concatenate(arrays: Sequence[Array], dim: int) -> Array:
    """Return a new array that joins arrays of one kind along a dim; a single array is copied."""
    if kind_of(arrays[0]) == "torch":
        import torch

        return torch.cat([array.detach() for array in arrays], dim)
    return np.concatenate(arrays, dim)


def split_lengths(length: int, count: int) -> tuple[int, ...]:
    """Return the lengths of parts as ``numpy.array_split`` cuts: they differ by at most 1, longer ones first."""
    short, num_longer = divmod(length, count)
    return (short + 1,) * num_longer + (short,) * (count - num_longer)


def split_evenly(array: Array, count: int, dim: int) -> tuple[Array, ...]:
    """Return views of `count` parts along a dim, with the lengths of `split_lengths`."""
    index: list[Any] = [slice(None)] * len(array.shape)
    parts = []
    start = 0
    for length in split_lengths(array.shape[dim], count):
        index[dim] = slice(start, start + length)
        parts.append(array[tuple(index)])
        start += length
    return tuple(parts)


def fold(left: Array, right: Array, reduction: str) -> Array:
    """Reduce two arrays of one spec element by element, in their own element type.

    Integer sums wrap around; sums of bools are "or". A mean is computed as a sum, which `mean_of` divides at the end.
    """
    name = spec_of(left).dtype
    if kind_of(left) == "numpy":
        return _numpy_fold(left, right, reduction)
    if name in _TORCH_COMPUTES:
        import torch

        return getattr(torch, _UFUNCS[reduction])(left.detach(), right.detach())
    # torch has no CPU kernels for narrow types; numpy computes them with ml_dtypes on the same bytes.
    folded = _numpy_fold(_as_numpy(left), _as_numpy(right), reduction)
    return from_bytes(bytes_of(folded), spec_of(left), "torch")


def mean_of(total: Array, count: int) -> Array:
    """Divide a sum by the number of its addends."""
    if kind_of(total) == "numpy":
        with np.errstate(all="ignore"):
            return np.asarray(np.divide(total, np.full((), count, total.dtype)), total.dtype)
    spec = spec_of(total)
    if spec.dtype in _TORCH_COMPUTES:
        return total / count
    return from_bytes(bytes_of(mean_of(_as_numpy(total), count)), spec, "torch")


def reduce(arrays: Sequence[Array], reduction: str) -> Array:
    """Reduce arrays of one spec to one array, from left to right."""
    # A fold makes a new array; without one, the result would be the caller's own.
    total = copy_of(arrays[0]) if len(arrays) == 1 else arrays[0]
    for array in arrays[1:]:
        total = fold(total, array, reduction)
    return mean_of(total, len(arrays)) if reduction == "mean" else total


def bytes_of(array: Array) -> Bytes:
    """Return the bytes of the elements in row-major order: a view of a contiguous array, otherwise a copy."""
    if kind_of(array) == "torch":
        return row_major_bytes(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def from_bytes(content: Bytes, spec: ArraySpec, kind: ArrayKind) -> Array:
    """Return an array over these bytes, without a copy; it is valid as long as the memory of the bytes."""
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


def _as_numpy(tensor: Array) -> Array:
    return from_bytes(bytes_of(tensor), spec_of(tensor), "numpy")


def _numpy_fold(left: Array, right: Array, reduction: str) -> Array:
    # As in torch, overflow and division by zero give inf and nan without a warning.
    with np.errstate(all="ignore"):
        return np.asarray(getattr(np, _UFUNCS[reduction])(left, right))


@cache
def _numpy_names() -> dict[Any, str]:
    return {dtypes.numpy_dtype(name): name for name in dtypes.DTYPES}


_KERNELS: dict[str, Callable[..., Any]] = {}

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(name: str) -> Callable[[_F], _F]:
    """Return a decorator that registers a function as a kernel.

    Raises:
        UsageError: another function has this name.

    >>> @kernel("example.double")
    ... def double(x):
    ...     return 2 * x
    >>> find_kernel("example.double")(21)
    42
    """

    def register(function: _F) -> _F:
        known = _KERNELS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise UsageError(
                f"two kernels are named {name!r}",
                got=f"{function.__module__}.{function.__qualname__}",
                want=f"{known.__module__}.{known.__qualname__} alone",
                next_step="choose another name",
            )
        _KERNELS[name] = function
        return function

    return register


def find_kernel(name: str) -> Callable[..., Any]:
    """Return the kernel of that name."""
    try:
        return _KERNELS[name]
    except KeyError:
        raise UsageError(
            f"unknown kernel {name!r}",
            got=repr(name),
            want=f"one of {sorted(_KERNELS)}",
            next_step="import the module that registers it before the run",
        ) from None


@kernel("matmul")
def matmul(left: Array, right: Array, *, form: str = "nn") -> Array:
    """Return a product: nn (..., k) by (k, n), nt (..., n) by (k, n) transposed, tn (..., k) transposed by (..., n).

    Elements of 16 bits or fewer are multiplied and summed in float32, and rounded once.
    """
    dtype = left.dtype
    left, right = widen(left), widen(right)
    if form == "tn":
        product = _matrix(left).T @ _matrix(right)
    else:
        product = _matrix(left) @ (right.T if form == "nt" else right)
        product = product.reshape((*left.shape[:-1], product.shape[-1]))
    return cast(product, dtype)


@kernel("slice")
def _slice(x: Array, *, dim: int, start: int, stop: int) -> Array:
    return x[(slice(None),) * dim + (slice(start, stop),)]


@kernel("flatten")
def _flatten(x: Array) -> Array:
    return x.reshape(-1)


@kernel("tile")
def tile(x: Array, *, shape: Sequence[int], starts: Sequence[Sequence[int]], shapes: Sequence[Sequence[int]]) -> Array:
    """Assemble an array from blocks, which are flat in `x` one after another; a block has a start and a shape."""
    whole = np.empty(shape, x.dtype) if isinstance(x, np.ndarray) else x.new_empty(tuple(shape))
    position = 0
    for start, block in zip(starts, shapes, strict=True):
        place = tuple(slice(low, low + size) for low, size in zip(start, block, strict=True))
        whole[place] = x[position : position + prod(block)].reshape(tuple(block))
        position += prod(block)
    return whole


@kernel("add_last")
def _add_last(x: Array, bias: Array) -> Array:
    return x + bias


@kernel("relu")
def _relu(x: Array) -> Array:
    return np.maximum(x, x.dtype.type(0)) if isinstance(x, np.ndarray) else x.clamp(min=0)


@kernel("relu_backward")
def relu_backward(x: Array, gradient: Array) -> Array:
    """Return the gradient of relu's input from that of its output; as in torch, it is 0 where x is 0."""
    if isinstance(x, np.ndarray):
        return np.where(x > 0, gradient, gradient.dtype.type(0))
    return gradient * (x > 0)


@kernel("column_sum")
def column_sum(x: Array) -> Array:
    """Return the sum over all dims but the last."""
    return cast(_matrix(widen(x)).sum(0), x.dtype)


def _matrix(x: Array) -> Array:
    # Explicit number of rows: numpy and torch cannot infer -1 for a matrix without columns.
    return x.reshape((prod(x.shape[:-1]), x.shape[-1]))


def widen(x: Array) -> Array:
    """Convert narrow floats to float32: numpy would round every partial sum, and its product of them is slow."""
    if isinstance(x, np.ndarray):
        # numpy reports kind "V" for narrow floats of ml_dtypes, so exclude integers and bools instead.
        return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def cast(x: Array, dtype: Any) -> Array:
    """Convert an array to another element type of its kind."""
    return x.astype(dtype, copy=False) if isinstance(x, np.ndarray) else x.to(dtype)


@kernel("squared_error")
def squared_error(output: Array, target: Array, *, size: int) -> Array:
    """Return the sum of squared differences divided by `size`, which may count more elements than these."""
    difference = widen(output) - widen(target)
    return _as(output, (difference * difference).sum() / size)


@kernel("squared_error_gradient")
def squared_error_gradient(output: Array, target: Array, *, size: int) -> Array:
    """Return the gradient of `squared_error` with respect to the output."""
    return _as(output, (widen(output) - widen(target)) * (2 / size))


@kernel("add")
def _add(left: Array, right: Array) -> Array:
    return _as(left, left + right)


@kernel("stack")
def _stack(*numbers: Array) -> Array:
    return np.stack(numbers) if isinstance(numbers[0], np.ndarray) else sys.modules["torch"].stack(numbers)


@kernel("count")
def count(like: Array, *number: Array) -> Array:
    """Return `number` plus 1, or 1 without a number, as an array of the kind of `like`."""
    value = int(number[0]) + 1 if number else 1
    return np.array(value, np.int64) if isinstance(like, np.ndarray) else sys.modules["torch"].tensor(value)


@kernel("momentum")
def momentum(gradient: Array, *velocity: Array, momentum: float) -> Array:
    """Return the next velocity; in the first step, the gradient."""
    return velocity[0] * momentum + widen(gradient) if velocity else widen(gradient)


@kernel("descend")
def descend(parameter: Array, velocity: Array, *, learning_rate: float) -> Array:
    """Return a parameter after a step along its velocity."""
    return _as(parameter, widen(parameter) - widen(velocity) * learning_rate)


@kernel("moving_mean")
def moving_mean(gradient: Array, *mean: Array, beta: float) -> Array:
    """Return the moving mean updated by a gradient; it starts at 0."""
    new = widen(gradient) * (1 - beta)
    return mean[0] * beta + new if mean else new


@kernel("moving_square")
def moving_square(gradient: Array, *square: Array, beta: float) -> Array:
    """Return the moving mean of squares updated by a gradient; it starts at 0."""
    wide = widen(gradient)
    new = wide * wide * (1 - beta)
    return square[0] * beta + new if square else new


@kernel("adam")
def adam(
    parameter: Array,
    mean: Array,
    square: Array,
    steps: Array,
    *,
    learning_rate: float,
    first: float,
    second: float,
    epsilon: float,
) -> Array:
    """Return a parameter after a step of Adam; the means include this step's gradient (as in torch.optim.Adam)."""
    number = int(steps)
    root = np.sqrt(square) if isinstance(square, np.ndarray) else square.sqrt()
    # The means began at 0; dividing by the share of gradients in them takes that out.
    divisor = root / sqrt(1 - second**number) + epsilon
    return _as(parameter, widen(parameter) - mean / divisor * (learning_rate / (1 - first**number)))


def _as(like: Array, x: Array) -> Array:
    """Convert to the element type of `like`; numpy returns scalars for sums and wider floats for narrow ones."""
    return np.asarray(x, like.dtype) if isinstance(like, np.ndarray) else x.to(like.dtype)
