"""Reads a Hugging Face folder of ``.bin`` files: whole tensors in state dicts of ``torch.save``.

The files: ``pytorch_model.bin``, or ``pytorch_model-0000<i>-of-0000<n>.bin`` with an index (transformers/utils:
WEIGHTS_NAME, WEIGHTS_INDEX_NAME), and accelerate's ``pytorch_model_fsdp.bin`` of FULL_STATE_DICT.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from math import prod

from xrank.dtypes import dtype
from xrank.errors import UsageError
from xrank.formats.inert_record import refuse_inert
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints
from xrank.readers.held_tensor import HeldTensor, pieces_of, whole
from xrank.readers.hugging_face.weight_files import (
    check_index,
    check_placeholders,
    is_one_of_several,
    list_files,
    read_index,
    stale_index_notes,
)
from xrank.readers.records import Records
from xrank.readers.wrapper_names import remove_wrapper_names
from xrank.words import list_text, plural

__all__ = ["BinFolderReader"]

_NAME = re.compile(r"pytorch_model(-\d{5}-of-\d{5}|_fsdp(_\d{1,5})?)?\.bin")
# accelerate/accelerator.py: save_state numbers the second model from 1: pytorch_model_1.bin, pytorch_model_fsdp_1.bin.
_BESIDE = re.compile(r"pytorch_model.*\.bin")
_WHOLE = "pytorch_model.bin"
_INDEX_NAME = "pytorch_model.bin.index.json"


class BinFolderReader:
    """The reader of ``pytorch_model.bin`` folders and files (`xrank.readers.base.Reader`)."""

    name = "bin"

    def recognise(self, path: str) -> str | None:
        """Return None for such a file, or a folder with one."""
        name = os.path.basename(path)
        if os.path.isfile(path) and _NAME.fullmatch(name):
            return "one of several files; its folder is the model" if is_one_of_several(name) else None
        if os.path.isdir(path) and any(map(_is_model_file, os.listdir(path))):
            return None
        return "no pytorch_model.bin or pytorch_model-<i>-of-<n>.bin in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        is_folder = os.path.isdir(path)
        folder = path if is_folder else os.path.dirname(path)
        index = read_index(folder, _INDEX_NAME, _WHOLE) if is_folder else None
        names = list_files(folder, _is_model_file, index) if is_folder else [os.path.basename(path)]
        if index is None:
            _check_one(folder, names)
        records = Records()
        held: dict[str, HeldTensor] = {}
        others: list[str] = []
        tensors: list[tuple[str, str]] = []
        for file in names:
            archive = read_archive(os.path.join(folder, file))
            number = records.add_archive(archive)
            for name, tensor in _tensors(archive, others).items():
                held[name] = HeldTensor.from_archive(tensor, rank=0, file=archive.path, record=number(tensor.key))
                tensors.append((name, file))
        check_index(folder, tensors, index)
        check_placeholders(
            {name: (tensor.dtype, tensor.shape) for name, tensor in held.items()},
            {name: tensor.file for name, tensor in held.items()},
            hints.shapes,
        )
        shards = tuple(pieces_of(name, [tensor], tensor.shape, [whole(tensor.shape)]) for name, tensor in held.items())
        aliases = _aliases(held)
        notes = stale_index_notes(folder, _INDEX_NAME, index) if is_folder else []
        notes += [] if index is None else [*index.notes(sum(_nbytes(t) for n, t in held.items() if n not in aliases))]
        if others:
            names_left = list_text(others, 8)
            notes.append(("left-out", f"{len(others)} values that are not tensors were left out: {names_left}"))
        beside = sorted(filter(_BESIDE.fullmatch, set(os.listdir(folder)) - set(names))) if is_folder else []
        if beside:
            text = f"{plural(len(beside), 'file')} beside the model's own left out, such as {beside[0]}"
            notes.append(("left-out", text))
        if records.bare:
            notes.append(("no-checksums", f"{len(records.bare)} files hold no checksums, {records.bare[0]} first"))
        found = StoredModel(
            format=self.name,
            path=path,
            files=tuple(records.files),
            records=records.table(),
            shards=shards,
            aliases=aliases,
            nbytes=records.nbytes,
            notes=tuple(notes),
        )
        return remove_wrapper_names(found, hints.shapes)


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


def _tensors(archive: TorchArchive, others: list[str]) -> Mapping[str, ArchivedTensor]:
    state = archive.value
    refuse_inert(state, archive.path)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise Origin(archive.path).corrupt(
            "is not a state dict", got=type(state).__name__, want="a dict of tensors by name"
        )
    found = {}
    for name, value in state.items():
        if isinstance(value, ArchivedTensor):
            found[name] = value
        elif isinstance(value, (dict, list, tuple)):
            raise Origin(archive.path).usage(
                f"is not a model's state dict: {quote(name)} is a {type(value).__name__}",
                want="tensors by name",
                next_step="save the model's state_dict() alone",
            )
        else:
            others.append(quote(name)[1:-1])
    return found


def _nbytes(tensor: HeldTensor) -> int:
    return prod(tensor.shape) * dtype(tensor.dtype).nbytes


def _aliases(held: Mapping[str, HeldTensor]) -> dict[str, str]:
    """Return tied name -> the first name of the same view of the same record."""
    first: dict[object, str] = {}
    found = {}
    for name, tensor in held.items():
        # Empty tensors share a storage of no bytes and are not tied by that.
        if 0 in tensor.shape:
            continue
        key = (tensor.record, tensor.dtype, tensor.shape, tensor.strides, tensor.storage_offset)
        owner = first.setdefault(key, name)
        if owner != name:
            found[name] = owner
    return found
