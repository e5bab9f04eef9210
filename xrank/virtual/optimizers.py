"""Optimizers of the virtual cluster: the step from gradients to new parameters, by torch's formulas.

An optimizer has some arrays for each parameter, its states, cut as the parameter; some also count their steps. Before
the first step the states are zero, and are not passed. States of 16-bit parameters are float32, because squares of
small gradients underflow in 16 bits; torch's own optimizers keep 16-bit states for such parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, SupportsFloat

from xrank import dtypes
from xrank.errors import UsageError
from xrank.virtual.builder import ProgramBuilder, Value


class Optimizer(ABC):
    """The update rule of parameters; one instance serves all parameters, because it contains only numbers."""

    counts_steps: ClassVar[bool] = False
    """Whether the optimizer stores the number of steps."""

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """Names of the arrays that it keeps for each parameter."""

    @abstractmethod
    def step(
        self, builder: ProgramBuilder, parameter: Value, gradient: Value, states: Sequence[Value], count: Value | None
    ) -> tuple[Value, ...]:
        """Write the step of one parameter; return the new parameter and its new states.

        Args:
            builder: builder of the devices that have the parameter.
            parameter: the parameter before the step.
            gradient: the gradient summed over all rows, cut as the parameter.
            states: the states before the step, in the order of `states`; empty in the first step.
            count: the number of steps including this one; None if `counts_steps` is False.
        """


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: ``v = momentum * v + g``, then ``w = w - learning_rate * v``.

    Args:
        learning_rate: factor of the step.
        momentum: factor of the old velocity in the next step; 0 means no velocity.
    """

    learning_rate: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.learning_rate)
        _check_part("momentum", self.momentum)

    @property
    def states(self) -> tuple[str, ...]:
        """The velocity, if the momentum is not 0."""
        return ("velocity",) if self.momentum else ()

    def step(
        self, builder: ProgramBuilder, parameter: Value, gradient: Value, states: Sequence[Value], count: Value | None
    ) -> tuple[Value, ...]:
        """Write the step."""
        velocity = gradient
        if self.momentum:
            velocity = _state(builder, "momentum", (gradient, *states), momentum=self.momentum)
        new = _like(builder, "descend", (parameter, velocity), learning_rate=self.learning_rate)
        return (new, velocity) if self.momentum else (new,)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba): steps along the mean of gradients, over the root of the mean of their squares.

    Args:
        learning_rate: factor of the step.
        betas: factors of the old means in the next step.
        epsilon: added to the root.
    """

    counts_steps: ClassVar[bool] = True

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_rate(self.learning_rate)
        for beta in self.betas:
            _check_part("beta", beta)

    @property
    def states(self) -> tuple[str, ...]:
        """The two means."""
        return ("mean", "square")

    def step(
        self, builder: ProgramBuilder, parameter: Value, gradient: Value, states: Sequence[Value], count: Value | None
    ) -> tuple[Value, ...]:
        """Write the step."""
        assert count is not None
        first, second = self.betas
        old_mean, old_square = ((states[0],), (states[1],)) if states else ((), ())
        mean = _state(builder, "moving_mean", (gradient, *old_mean), beta=first)
        square = _state(builder, "moving_square", (gradient, *old_square), beta=second)
        new = _like(
            builder,
            "adam",
            (parameter, mean, square, count),
            learning_rate=self.learning_rate,
            first=first,
            second=second,
            epsilon=self.epsilon,
        )
        return new, mean, square


def state_dtype(dtype: str) -> str:
    """Return the element type of the states of a parameter."""
    return dtype if dtypes.dtype(dtype).nbytes >= 4 else "F32"


def _state(builder: ProgramBuilder, kernel: str, inputs: Sequence[Value], **options: float) -> Value:
    """Call a kernel that returns a state; its first input is the gradient."""
    first = inputs[0]
    dtype = state_dtype(first.dtype)
    return builder.compute(kernel, inputs, first.shape, first.sharding, dtype=dtype, options=lambda _: dict(options))


def _like(builder: ProgramBuilder, kernel: str, inputs: Sequence[Value], **options: float) -> Value:
    """Call a kernel whose output has the shape and type of its first input."""
    first = inputs[0]
    return builder.compute(kernel, inputs, first.shape, first.sharding, options=lambda _: dict(options))


def _check_rate(value: float) -> None:
    if not isinstance(value, SupportsFloat) or not isfinite(value):
        raise UsageError("the learning rate of an optimizer must be a number", got=repr(value), want="such as 0.01")


def _check_part(what: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UsageError(f"the {what} of an optimizer is out of range", got=repr(value), want="0 or more, below 1")
