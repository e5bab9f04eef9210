"""Kernels of dense layers: products, biases, relu and the layout of blocks; for numpy arrays and torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from xrank.virtual.channels.channel import Array
from xrank.virtual.programs.kernels import kernel


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
