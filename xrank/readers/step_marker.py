"""Finds the step's folder that a trainer's marker names among several steps: verl's and SkyRL's."""

from __future__ import annotations

import os
import re

from xrank.errors import IncompleteError
from xrank.formats.regular_file import open_regular, quote
from xrank.stores import places

# verl/utils/checkpoint/checkpoint_manager.py: get_checkpoint_tracker_filename; skyrl_train/trainer.py.
_MARKERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
_STEP = re.compile(r"global_step_\d{1,18}", re.ASCII)
_MAX_NBYTES = 64


def find_marked_step(path: str) -> str | None:
    """Return the folder that a marker names; None without such folders or a marker.

    Raises:
        CorruptError: the marker is not a number.
        IncompleteError: the folder is missing.
    """
    entries = places.list_names(path) if places.is_folder(path) else []
    steps = sorted((e for e in entries if _STEP.fullmatch(e)), key=lambda entry: int(entry[12:]))
    # Megatron has a marker of the same name, beside folders with other names.
    marker = next((os.path.join(path, name) for name in _MARKERS if name in entries), None)
    if not steps or marker is None:
        return None
    with open_regular(marker) as file:
        text = file.read(0, min(file.nbytes, _MAX_NBYTES)).decode("latin1").strip()
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
            raise file.origin.corrupt("is not a step marker", got=quote(text), want="a number")
    folder = os.path.join(path, f"global_step_{int(text)}")
    if not places.is_folder(folder):
        raise IncompleteError(
            f"{marker} names global_step_{int(text)}, which is missing",
            file=marker,
            got=", ".join(steps[-5:]),
            want=f"global_step_{int(text)}",
            next_step="copy that folder here, or give the path of the step's folder that you want",
        )
    return folder
