"""Reads a Hugging Face folder of ``.bin`` files: whole tensors in state dicts of ``torch.save``.

The files: ``pytorch_model.bin``, or ``pytorch_model-0000<i>-of-0000<n>.bin`` with an index (transformers/utils:
WEIGHTS_NAME, WEIGHTS_INDEX_NAME), and accelerate's ``pytorch_model_fsdp.bin`` of FULL_STATE_DICT.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from xrank.errors import UsageError
from xrank.formats.torch_archive import read_archive
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints
from xrank.readers.hugging_face.weight_files import (
    choose_tensors,
    is_one_of_several,
    list_files,
    read_index,
    stale_index_notes,
)
from xrank.readers.torch_save.states import describe_states, select_state, stored_nbytes
from xrank.stores import places
from xrank.words import list_text, plural

_NAME = re.compile(
    # torchtune/training/checkpointing/_utils.py: SHARD_FNAME.
    r"(diffusion_)?pytorch_model(-\d{5}-of-\d{5}|_fsdp(_\d{1,5})?)?\.bin|(ft-)?model-\d{5}-of-\d{5}\.bin"
)
# accelerate/accelerator.py: save_state numbers the second model from 1: pytorch_model_1.bin, pytorch_model_fsdp_1.bin.
_BESIDE = re.compile(r"(diffusion_)?pytorch_model.*\.bin")
_WHOLE = "pytorch_model.bin"
_INDEX_NAME = "pytorch_model.bin.index.json"


class BinFolderReader:
    """The reader of ``pytorch_model.bin`` folders and files (`xrank.readers.base.Reader`)."""

    name = "bin"

    def recognise(self, path: str) -> str | None:
        """Return None for such a file, or a folder with one."""
        name = os.path.basename(path)
        if places.is_file(path) and _NAME.fullmatch(name):
            return "one of several files; its folder is the model" if is_one_of_several(name) else None
        if places.is_folder(path) and any(map(_is_model_file, places.list_names(path))):
            return None
        return "no pytorch_model.bin or pytorch_model-<i>-of-<n>.bin in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        is_folder = places.is_folder(path)
        folder = path if is_folder else os.path.dirname(path)
        index = read_index(folder, _INDEX_NAME, _WHOLE) if is_folder else None
        names = list_files(folder, _is_model_file, index) if is_folder else [os.path.basename(path)]
        if index is None:
            _check_one(folder, names)
        states = [select_state(read_archive(os.path.join(folder, file)), hints.part) for file in names]
        held = ((name, file) for state, file in zip(states, names, strict=True) for name in state.tensors)
        place_of, notes = choose_tensors(folder, held, index)
        states = [
            replace(state, tensors={name: each for name, each in state.tensors.items() if place_of.get(name) == file})
            for state, file in zip(states, names, strict=True)
        ]
        notes += stale_index_notes(folder, _INDEX_NAME, index) if is_folder else []
        beside = sorted(filter(_BESIDE.fullmatch, set(places.list_names(folder)) - set(names))) if is_folder else []
        if beside:
            text = f"{plural(len(beside), 'file')} beside the model's own left out, such as {beside[0]}"
            notes.append(("left-out", text))
        model = describe_states(self.name, path, states, hints, notes)
        return model if index is None else replace(model, notes=(*model.notes, *index.notes(stored_nbytes(model))))


def _is_model_file(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _check_one(folder: str, names: Sequence[str]) -> None:
    """Refuse a folder with several files that are each a whole model."""
    models = [name for name in names if not is_one_of_several(name)]
    if len(models) > 1 or (models and len(names) > 1):
        raise UsageError(
            f"{folder} holds more than one model",
            file=folder,
            got=list_text(names, 10),
            want="one",
            next_step=f"give the path of one of them, such as {os.path.join(folder, models[0])}",
        )
