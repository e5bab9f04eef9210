"""The training state of a checkpoint: the model, and what its optimizer keeps for each parameter.

All tensors are shards of one stored model, so that whatever proves, copies and lays out a model's tensors does the same
for the optimizer's. A table says which tensor is which parameter's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from xrank.layout.stored_model import StoredModel

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Tensors of Adam and AdamW, as torch/optim/adam.py names them; the last one with ``amsgrad`` alone."""
MASTER = "fp32_param"
"""The fp32 copy of a parameter that is trained in its place, as Megatron-LM names it."""


def state_name(parameter: str, kind: str) -> str:
    """Return the name of a parameter's tensor in the stored model: of one of `MOMENTS`, or of `MASTER`.

    Example:
        >>> state_name("norm.weight", "exp_avg")
        'optimizer.state.norm.weight.exp_avg'
    """
    return f"optimizer.state.{parameter}.{kind}"


class ParameterGroup(Struct, frozen=True):
    """Parameters that the optimizer treats alike."""

    parameters: tuple[str, ...]
    options: Mapping[str, Any]
    """Plain values by torch's names: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``amsgrad``, ``initial_lr`` ..."""


class LeftOut(Struct, frozen=True):
    """A value of the source that no tensor or group has: a random state, a data loader's position."""

    name: str
    """Keys or path in the source."""
    why: str
    path: str | None = None
    """The file, if the value is a file of its own, which a target of the same kind takes as it is."""


class TrainingState(Struct, frozen=True, eq=False):
    """A checkpoint to continue a training from, as its reader describes it, from metadata and small values alone."""

    stored: StoredModel
    """The model's tensors under its own names, and the optimizer's under those of `state_name`."""
    optimizer: str | None
    """Class of the optimizer: ``Adam`` or ``AdamW``; None if the source does not record whether weights decay by
    themselves or with the gradient."""
    states: Mapping[str, Mapping[str, str]]
    """Trained parameter -> kind -> name in `stored`. A parameter that was never stepped has no entry; it is in a group
    nevertheless."""
    steps: Mapping[str, float]
    """Number of steps of each parameter in `states`."""
    groups: tuple[ParameterGroup, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Further plain values by key, such as ``lr_scheduler`` and ``global_steps``."""
    others: tuple[str, ...] = ()
    """Names in `stored` of tensors that belong to neither, such as ``train_state.step``: their keys in the source."""
    left_out: tuple[LeftOut, ...] = ()
