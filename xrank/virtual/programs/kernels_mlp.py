"""Kernels of training: the squared error, sums of gradients, and the steps of optimizers.

Types of 16 bits are computed in float32 and rounded once; optimizer states stay in float32.
"""

from __future__ import annotations

import sys
from math import sqrt

import numpy as np

from xrank.virtual.channels.channel import Array
from xrank.virtual.programs.kernels import kernel
from xrank.virtual.programs.kernels_dense import widen


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
