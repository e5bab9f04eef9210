"""Reads the training state of a checkpoint: the model with its optimizer, and the values to continue with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from xrank.errors import UsageError
from xrank.formats.torch_archive import read_archive
from xrank.layout.training_state import LeftOut, TrainingState
from xrank.readers.adam_states import why_not_plain
from xrank.readers.base import Hints
from xrank.readers.dcp import MODEL_FOLDER
from xrank.readers.dcp_states import read_dcp_state
from xrank.readers.deepspeed.states import read_deepspeed_state
from xrank.readers.discovery import find_source
from xrank.readers.megatron.states import read_megatron_state
from xrank.readers.records import read_object
from xrank.storage import places
from xrank.storage.regular_file import Origin

_READERS: Mapping[str, Callable[[str, Hints], TrainingState]] = {
    "dcp": read_dcp_state,
    "deepspeed": read_deepspeed_state,
    "megatron-dist": read_megatron_state,
}
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
            state = _READERS[reader.name](where, Hints(part=part))
            around, name = os.path.split(places.absolute(where))
            return _add_files(state, around if MODEL_FOLDER.fullmatch(name) else where)
    raise Origin(place.path).usage(
        "contains no training state that can be converted",
        f"the format {place.reader.name}",
        f"one of {', '.join(_READERS)}",
        "give the checkpoint of the trainer itself, with the optimizer's state",
    )


def find_training_state(path: str, *, part: str | None = None) -> TrainingState | None:
    """Return what `read_training_state` does; None if the checkpoint has no optimizer."""
    try:
        return read_training_state(path, part=part)
    except UsageError as error:
        if "contains no optimizer" in error.message or "contains no training state" in error.message:
            return None
        raise


_FILES = {
    ("rng_state", "random_states"): "random states of ranks",
    ("sampler", "dl_state_dict"): "positions of data loaders",
    ("custom_checkpoint",): "an object of the training script",
    ("trainer_state.json",): "the trainer's log and counters",
}
"""How the name of a file of accelerate or transformers' Trainer begins -> what it is."""
_VALUES = {"scheduler.pt": "lr_scheduler", "scheduler.bin": "lr_scheduler", "scaler.pt": "scaler"}
_MAX_LOG_NBYTES = 1 << 26


def _add_files(state: TrainingState, folder: str) -> TrainingState:
    """Return a state with what accelerate and transformers' Trainer write beside the model and the optimizer."""
    values, left_out = dict(state.values), [*state.left_out]
    for name in sorted(places.list_names(folder)):
        path = os.path.join(folder, name)
        why = next((why for starts, why in _FILES.items() if name.startswith(starts)), None)
        if name in _VALUES:
            value = read_archive(path).value
            why = why_not_plain(value)
            values |= {} if why else {_VALUES[name]: value}
        if why and places.is_file(path):
            left_out.append(LeftOut(name, why, path))
    path = os.path.join(folder, "trainer_state.json")
    steps, done = read_object(path, _MAX_LOG_NBYTES).get("global_step"), max(state.steps.values())
    if type(steps) is int:
        values["global_steps"] = steps
        # Trainers count the steps that a loss scaler skips.
        if done > steps or (done < steps and "scaler" not in values and not values.get("skipped_steps")):
            problem, want = "belongs to a different step than the optimizer", f"{done:.0f} steps of Adam"
            raise Origin(path).contradiction(problem, f"global_step {steps}", want)
    return replace(state, values=values, left_out=tuple(left_out))
