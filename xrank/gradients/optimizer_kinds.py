"""Optimizers that cannot step parts of parameters: known by their class, or found by a trial step on eight numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from xrank.errors import UsageError
from xrank.gradients.optimizer_twins import make_twin

_MIXING = frozenset({"Adafactor", "Muon", "LAMB", "Lamb", "LARS", "Lars", "Shampoo", "DistributedShampoo", "SOAP"})
"""Classes whose step of an element depends on others of its parameter: norms, factored moments, orthogonal updates."""
_UNFIT = {
    "LBFGS": "it runs the backward inside its step, and those gradients would not be exchanged",
    "SparseAdam": "it takes sparse gradients, and those in buffers are dense",
}
_TOLERANCE = 1e-9
"""Relative, in float64: a step that works by element differs by rounding at most."""


class PartOfParameter(Protocol):
    """The part of an `OwnedSlice` that a check reads."""

    @property
    def name(self) -> str:
        """Name of the parameter."""

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other elements of the parameter."""

    @property
    def is_cut(self) -> bool:
        """Whether the part is flat."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""

    @property
    def model(self) -> Any:
        """The wrapped model, whose plan has a rank."""


def check_class(optimizer: torch.optim.Optimizer, slices: Iterable[PartOfParameter]) -> None:
    """Check by the optimizer's class whether it can step these slices; in its constructor, too.

    Raises:
        UsageError: it mixes elements of a parameter, of which this rank holds a part; or it needs a closure or sparse
            gradients.
    """
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    for kind in kinds:
        if kind in _UNFIT:
            raise UsageError(f"{kind} cannot step shards: {_UNFIT[kind]}", got=kind, want="an optimizer such as AdamW")
    mixing = next((kind for kind in kinds if kind in _MIXING), None)
    if mixing is not None:
        _refuse(mixing, slices)


def check_optimizer(optimizer: torch.optim.Optimizer, slices: Sequence[PartOfParameter]) -> None:
    """Check whether an optimizer can step these slices: by its class, then by a trial for those of other libraries.

    An optimizer whose step cannot be tried, since its constructor sets more than torch's, passes the trial.

    Raises:
        UsageError: as in `check_class`.
    """
    check_class(optimizer, slices)
    kind = type(optimizer).__name__
    for is_flat in (False, True):
        parts = [one for one in slices if one.is_part and one.is_cut == is_flat]
        if parts and _mixes_elements(optimizer, is_flat=is_flat):
            _refuse(kind, parts)


def _refuse(kind: str, slices: Iterable[PartOfParameter]) -> None:
    part = next((one for one in slices if one.is_part), None)
    if part is not None:
        raise UsageError(
            f"{part.name}: {kind} steps an element by the others of its parameter, and this rank holds a part",
            tensor=part.name,
            rank=part.model.plan.rank,
            got=f"{kind}, and a slice of shape {list(part.shape)}",
            want="an optimizer that works element by element, or whole parameters",
            next_step="use AdamW for cut parameters; use_distributed_optimizer=False leaves those whole that tp "
            "does not cut",
        )


def _mixes_elements(optimizer: torch.optim.Optimizer, *, is_flat: bool) -> bool:
    """Return whether steps of two halves of a matrix differ from steps of the whole, with the optimizer's settings."""
    drawn = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = _try_steps(optimizer, *drawn)
    again = _try_steps(optimizer, *drawn)
    if whole is None or again is None or not torch.equal(whole, again):
        return False  # it cannot be tried, or it is random
    halves = [drawn[:, :2], drawn[:, 2:]]
    stepped = [_try_steps(optimizer, *(half.flatten(1) if is_flat else half)) for half in halves]
    if any(half is None for half in stepped):
        return True  # it steps matrices only
    found = torch.cat([half.flatten() for half in stepped if half is not None])
    return not torch.allclose(found, whole.flatten(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _try_steps(optimizer: torch.optim.Optimizer, values: torch.Tensor, *gradients: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter after a step with each gradient; None if the optimizer raises."""
    parameter = torch.nn.Parameter(values.clone())
    # A warm-up may begin with a rate of 0, and a step that changes nothing shows nothing.
    twin = make_twin(optimizer, [{**optimizer.param_groups[0], "lr": 0.1, "params": [parameter]}])
    with torch.random.fork_rng(devices=[]):
        for gradient in gradients:
            parameter.grad = gradient.clone()
            try:
                twin.step()
            except Exception:  # of an optimizer's own code
                return None
    return parameter.detach()
