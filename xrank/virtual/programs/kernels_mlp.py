"""Kernels of training: the squared error, sums of gradients, and the steps of optimizers.

What has 16 bits is computed with in float32 and rounded once; what an optimizer keeps stays in float32.
"""

from __future__ import annotations

import sys
from math import sqrt

import numpy as np

from xrank.virtual.channels.channel import Array
from xrank.virtual.programs.kernels import kernel
from xrank.virtual.programs.kernels_dense import widened

__all__ = [
    "adam",
    "add",
    "count",
    "descend",
    "momentum",
    "moving_mean",
    "moving_square",
    "squared_error",
    "squared_error_gradient",
    "stack",
]


@kernel("squared_error")
def squared_error(output: Array, target: Array, *, size: int) -> Array:
    """Return the sum of squared differences over a number of elements, which may be more than these."""
    difference = widened(output) - widened(target)
    return _as(output, (difference * difference).sum() / size)


@kernel("squared_error_gradient")
def squared_error_gradient(output: Array, target: Array, *, size: int) -> Array:
    """Return the gradient of `squared_error` by the output."""
    return _as(output, (widened(output) - widened(target)) * (2 / size))


@kernel("add")
def add(left: Array, right: Array) -> Array:
    """Return the sum."""
    return _as(left, left + right)


@kernel("stack")
def stack(*numbers: Array) -> Array:
    """Return arrays of no dim as one of one dim."""
    return np.stack(numbers) if isinstance(numbers[0], np.ndarray) else sys.modules["torch"].stack(numbers)


@kernel("count")
def count(like: Array, *number: Array) -> Array:
    """Return the whole number after this one, or 1 where there is none yet, as an array of the kind of `like`."""
    value = int(number[0]) + 1 if number else 1
    return np.array(value, np.int64) if isinstance(like, np.ndarray) else sys.modules["torch"].tensor(value)


@kernel("momentum")
def momentum(gradient: Array, *velocity: Array, momentum: float) -> Array:
    """Return the velocity of the next step; without one before, the gradient."""
    return velocity[0] * momentum + widened(gradient) if velocity else widened(gradient)


@kernel("descend")
def descend(parameter: Array, velocity: Array, *, learning_rate: float) -> Array:
    """Return a parameter after a step along a velocity."""
    return _as(parameter, widened(parameter) - widened(velocity) * learning_rate)


@kernel("moving_mean")
def moving_mean(gradient: Array, *mean: Array, beta: float) -> Array:
    """Return the mean with a gradient in it; it was 0 where none is given."""
    new = widened(gradient) * (1 - beta)
    return mean[0] * beta + new if mean else new


@kernel("moving_square")
def moving_square(gradient: Array, *square: Array, beta: float) -> Array:
    """Return the mean of squares with a gradient's in it; it was 0 where none is given."""
    wide = widened(gradient)
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
    """Return a parameter after a step of Adam, by means that hold this step's gradient (as torch.optim.Adam)."""
    number = int(steps)
    root = np.sqrt(square) if isinstance(square, np.ndarray) else square.sqrt()
    divisor = root / sqrt(1 - second**number) + epsilon
    return _as(parameter, widened(parameter) - mean / divisor * (learning_rate / (1 - first**number)))


def _as(like: Array, x: Array) -> Array:
    """Return an array of the element type of another; numpy makes scalars of sums, and wide floats of narrow ones."""
    return np.asarray(x, like.dtype) if isinstance(like, np.ndarray) else x.to(like.dtype)
