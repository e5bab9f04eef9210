"""Reads the training state of a checkpoint: the model with its optimizer, and the values to continue with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from xrank.layout.training_state import TrainingState
from xrank.readers.base import Hints
from xrank.readers.dcp_states import read_dcp_state
from xrank.readers.discovery import find_source
from xrank.storage.regular_file import Origin

_READERS: Mapping[str, Callable[[str, Hints], TrainingState]] = {"dcp": read_dcp_state}
"""Format -> function that reads its training states."""


def read_training_state(path: str, *, part: str | None = None) -> TrainingState:
    """Return the training state of the checkpoint that a path means, from metadata and small values alone.

    The plan of a copy proves, as for a model, that each moment is there exactly once (`xrank.engine.planner`).

    Args:
        path: a checkpoint, or a folder around it, as for a gather.
        part: keys of the part that is the model, if there are several.

    Raises:
        UsageError: the checkpoint has no optimizer, or another one than Adam and AdamW.
        IncompleteError: a file, or a moment or step of a parameter, is missing.
        ContradictionError: files are of two steps, or shapes, groups and model do not fit each other.
        CorruptError, UnsafeError: a file is damaged or hostile.

    Example:
        >>> import torch, warnings
        >>> from torch.distributed import checkpoint
        >>> group = {"params": ["w"], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "decoupled_weight_decay": True}
        >>> moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
        >>> optimizer = {"state": {"w": moments}, "param_groups": [{**group, "amsgrad": False}]}
        >>> with warnings.catch_warnings(action="ignore"):
        ...     saved = checkpoint.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, checkpoint_id="step-3")
        >>> state = read_training_state("step-3")
        >>> state.optimizer, list(state.states["w"]), state.steps["w"]
        ('AdamW', ['exp_avg', 'exp_avg_sq'], 3.0)
    """
    place = find_source(path)
    for where, reader in ((place.path, place.reader), *place.others):
        if reader.name in _READERS:
            return _READERS[reader.name](where, Hints(part=part))
    raise Origin(place.path).usage(
        "holds no training state that is converted",
        f"the format {place.reader.name}",
        f"one of {', '.join(_READERS)}",
        "give the checkpoint of the trainer itself, with the optimizer's state",
    )
