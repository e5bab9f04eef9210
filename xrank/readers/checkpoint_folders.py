"""Finds the folders of one checkpoint in which its config may lie: its weights' folder, the user's path, its root."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from xrank.errors import XrankError
from xrank.formats.regular_file import open_regular
from xrank.stores import places

# deepspeed/runtime/engine.py: _save_checkpoint; megatron/training/checkpointing.py: get_checkpoint_tracker_filename;
# verl/utils/checkpoint/checkpoint_manager.py; skyrl_train/trainer.py.
_MARKERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
_TAG = re.compile(r"[\w.-]{1,255}")
_MAX_NBYTES = 256

# transformers/trainer_utils.py: PREFIX_CHECKPOINT_DIR.
_TRAINER_STEP = re.compile(r"checkpoint-[0-9]+")
# accelerate/utils/fsdp_utils.py: save_fsdp_model; torch/distributed/checkpoint/_hf_utils.py: SHARDED_DIR_NAME;
# verl/utils/checkpoint/checkpoint_manager.py: get_dist_checkpoint_path, for Megatron's part.
_PART = re.compile(r"pytorch_model_fsdp(_[0-9]+)?|sharded|dist_ckpt")
_SHARDED = "sharded"
EXPORT_FOLDER = "huggingface"
"""Subfolder for the config, and perhaps the whole model, that verl and SkyRL write beside the ranks' files."""


def find_checkpoint_folders(asked: str, place: str) -> tuple[str, ...]:
    """Return the folders in which a checkpoint's companions may lie, those nearest to its weights first.

    The order: the folder that a marker in the source names, the source, each parent up to the user's path, and the
    checkpoint's root, recognised by a marker or a name. Each is followed by its subfolder ``huggingface``.

    Args:
        asked: the user's path: a file, or a folder at or above the source.
        place: the source.
    """
    folder = place if places.is_folder(place) else _parent(place)
    found = [*_find_marked(folder), folder]
    while _is_below(found[-1], asked):
        found.append(_parent(found[-1]))
    above = _parent(folder)
    if _is_root(above, os.path.basename(places.absolute(folder))):
        found.append(above)
    return tuple(dict.fromkeys(inner for own in found for inner in (own, os.path.join(own, EXPORT_FOLDER))))


def _find_marked(folder: str) -> Iterator[str]:
    """Yield the folders with the weights that markers name; never one outside `folder`."""
    for marker in _MARKERS:
        try:
            with open_regular(os.path.join(folder, marker)) as file:
                text = file.read(0, min(file.nbytes, _MAX_NBYTES)).decode().strip()
        except (XrankError, OSError, ValueError):
            continue  # the format's reader reports a damaged marker
        names = [text]
        if text.isdecimal():
            # Megatron's marker contains a number for iter_0000010; verl's and SkyRL's one for global_step_10.
            names = [f"iter_{int(text):07d}", f"global_step_{int(text)}"]
        for name in names:
            path = os.path.join(folder, name)
            if _TAG.fullmatch(name) and name not in (".", "..") and places.is_folder(path):
                yield path
    if places.is_folder(os.path.join(folder, _SHARDED)):
        yield os.path.join(folder, _SHARDED)


def _is_below(folder: str, asked: str) -> bool:
    return places.absolute(folder).startswith(os.path.join(places.absolute(asked), ""))


def _is_root(above: str, name: str) -> bool:
    is_marked = any(places.is_file(os.path.join(above, marker)) for marker in _MARKERS)
    is_step = _TRAINER_STEP.fullmatch(os.path.basename(places.absolute(above))) is not None
    return is_marked or is_step or _PART.fullmatch(name) is not None


def _parent(path: str) -> str:
    """Return the parent folder, spelled as in the user's path if possible."""
    head, name = os.path.split(path.rstrip(os.sep))
    if name in ("", os.curdir, os.pardir):
        return os.path.dirname(places.absolute(path))
    return head or os.curdir


def nbytes_below(folder: str) -> int:
    """Return the bytes of all files in a folder."""
    total = 0
    for place, _, names in places.walk(folder):
        for name in names:
            # A companion file may be a dangling link, or removed meanwhile.
            with suppress(OSError):
                total += places.nbytes_of(os.path.join(place, name))
    return total
