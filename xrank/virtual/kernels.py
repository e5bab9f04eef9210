"""Kernels: the computations that programs call by name.

    @kernel("relu")
    def relu(x: Array) -> Array: ...

A kernel receives its input arrays (all numpy, or all torch) and its options as keyword arguments. It returns an array,
or a tuple if the instruction has several outputs, of the same kind and with the instruction's shapes and element types.
It must not change its inputs; an output may be a view of one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod, sqrt
from typing import Any, TypeVar

import numpy as np

from xrank.errors import UsageError
from xrank.virtual.arrays import Array

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
def slice_dim(x: Array, *, dim: int, start: int, stop: int) -> Array:
    """Return a range of a dim."""
    return x[(slice(None),) * dim + (slice(start, stop),)]


@kernel("flatten")
def flatten(x: Array) -> Array:
    """Return all elements in one dim, row-major."""
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
def add_last(x: Array, bias: Array) -> Array:
    """Return x plus a bias along its last dim."""
    return x + bias


@kernel("relu")
def relu(x: Array) -> Array:
    """Return the larger of x and 0."""
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
def add(left: Array, right: Array) -> Array:
    """Return the sum."""
    return _as(left, left + right)


@kernel("stack")
def stack(*numbers: Array) -> Array:
    """Stack scalars into a vector."""
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
