"""Reads files of torch.save: a whole model, a folder with one such file, or Hugging Face's pytorch_model.bin."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from types import MappingProxyType
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from xrank.dtypes import dtype
from xrank.errors import IncompleteError, UsageError, XrankError
from xrank.formats.pickles import InertRecord, is_extra_state, refuse_inert
from xrank.formats.torch_archive import (
    NAMES,
    ArchivedTensor,
    TorchArchive,
    is_archive,
    no_names_error,
    read_archive,
    walk_leaves,
)
from xrank.layout.stored_model import RecordedHash, StoredModel
from xrank.readers.base import Hints
from xrank.readers.hugging_face.folder import (
    check_placeholders,
    choose_tensors,
    is_one_of_several,
    list_files,
    note_left_out,
    read_index,
    stale_index_notes,
)
from xrank.readers.names import (
    ChosenPart,
    SavedTree,
    is_of_lightning,
    leads_to_model,
    part_details,
    part_notes,
    select_model,
)
from xrank.readers.placement import HeldTensor, pieces_of, whole
from xrank.readers.records import Records, read_start
from xrank.storage import places
from xrank.storage.regular_file import Origin, open_regular, quote
from xrank.words import list_text, plural

_Path: TypeAlias = tuple[str | int, ...]
_STEPS = ("global_step", "step", "iteration")


class WholeState(Struct, frozen=True, eq=False):
    """The model in one file."""

    archive: TorchArchive
    tensors: Mapping[str, ArchivedTensor]
    """By the names in its state dict."""
    others: tuple[str, ...]
    """Names of the values in its state dict that are not tensors."""
    part: ChosenPart | None
    """The model among the parts of a nested dict; None where the whole file is one state dict."""


def select_state(archive: TorchArchive, wanted: str | None) -> WholeState:
    """Return the model in a file; the argument `wanted` is that of `select_model`."""
    if not isinstance(archive.value, dict):
        refuse_inert(archive.value, archive.path)
        raise no_names_error(Origin(archive.path), type(archive.value).__name__)
    leaves = dict(walk_leaves(archive.value))
    tensors = {path: value for path, value in leaves.items() if isinstance(value, ArchivedTensor)}
    if wanted is None and all(len(path) == 1 for path in tensors):
        refuse_inert(archive.value, archive.path)
        own = {path[0]: tensor for path, tensor in tensors.items()}
        others = [".".join(map(str, path)) for path in leaves if path not in tensors]
        part = None
    else:
        paths = {".".join(map(str, path)): path for path in leaves}
        part = _select_part(archive, leaves, paths, wanted)
        own = {name if type(paths[flat][-1]) is str else 0: tensors[paths[flat]] for name, flat in part.tensors.items()}
        others = list(part.values)
    named = {name: tensor for name, tensor in own.items() if isinstance(name, str)}
    if len(named) < len(own):
        raise no_names_error(Origin(archive.path), "tensors with numbers")
    if not named:
        told = list_text([quote(name)[1:-1] for name in others], 3, empty="nothing")
        raise Origin(archive.path).usage("holds no tensor", told, "a dict of tensors by name", NAMES)
    return WholeState(archive, MappingProxyType(named), tuple(quote(name)[1:-1] for name in others), part)


def _select_part(
    archive: TorchArchive, leaves: Mapping[_Path, object], paths: Mapping[str, _Path], wanted: str | None
) -> ChosenPart:
    """Return the model in a nested dict; `paths` are the keys to each leaf by their text."""
    if len(paths) < len(leaves):
        raise Origin(archive.path).usage(
            "two of its values have one name",
            want="keys that are different when joined by dots",
            next_step="save only the model's state_dict()",
        )
    shapes = {name: leaf.shape for name, path in paths.items() if isinstance(leaf := leaves[path], ArchivedTensor)}
    values = [name for name in paths if name not in shapes]
    tree = SavedTree(archive.path, shapes, values, paths, lambda name: _nbytes(leaves[paths[name]]))
    # A whole module is an object. What lies beside it, such as averages, must not pass for the model.
    modules = [leaf for path, leaf in leaves.items() if isinstance(leaf, InertRecord) and leads_to_model(path)]
    try:
        part = select_model(tree, wanted)
    except UsageError:
        refuse_inert(modules, archive.path)
        raise
    if wanted is None and not leads_to_model(part.prefix):
        refuse_inert(modules, archive.path)
    kept = [flat for name, flat in part.values.items() if not is_extra_state(name)]
    refuse_inert([leaves[paths[flat]] for flat in kept], archive.path)
    return part


def describe_states(
    format_name: str, path: str, states: Sequence[WholeState], hints: Hints, notes: Sequence[tuple[str, str]] = ()
) -> StoredModel:
    """Return the model whose files have these states, each tensor whole in one of them."""
    records = Records()
    held: dict[str, HeldTensor] = {}
    for state in states:
        number = records.add_archive(state.archive)
        for name, tensor in state.tensors.items():
            held[name] = HeldTensor.from_archive(tensor, rank=0, file=state.archive.path, record=number(tensor.key))
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in held.items()}
    more = [*notes, *check_placeholders(kinds, {name: tensor.file for name, tensor in held.items()}, hints)]
    parts = [state.part for state in states if state.part is not None]
    for part in parts:
        more += part_notes(part)
    others = [name for state in states for name in state.others]
    if others:
        more.append(("left-out", f"{len(others)} values that are not tensors were left out: {list_text(others, 8)}"))
    more += records.notes()
    # In a nested dict, the step lies beside the model.
    beside = states[0].archive.value if len(states) == 1 and states[0].part is not None else None
    saved = beside if isinstance(beside, dict) else {}
    return StoredModel(
        format=format_name,
        path=path,
        files=tuple(records.files),
        records=records.table(),
        shards=tuple(pieces_of(name, [tensor], tensor.shape, [whole(tensor.shape)]) for name, tensor in held.items()),
        aliases=_aliases(held),
        step=next((saved[key] for key in _STEPS if type(saved.get(key)) is int), None),
        nbytes=records.nbytes,
        skipped_nbytes=sum(each.nbytes for part in parts for each in part.parts if not each.is_model),
        part=hints.part,
        notes=tuple(more),
        details=part_details(parts[0]) if parts else {},
        is_attribute=any(state.part is not None and is_of_lightning(state.archive.value) for state in states),
    )


def _nbytes(tensor: object) -> int:
    assert isinstance(tensor, ArchivedTensor)
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


_SUFFIXES = (".pt", ".pth", ".ckpt")
_SHARED_SUFFIXES = (".bin", ".th", ".tar")
"""Suffixes of other formats, too; torch's own examples save ``checkpoint.pth.tar``."""
_PART = re.compile(r"hf_model_(\d{4})_(\d+)\.pt")
"""A part of a model, with its number and epoch (torchtune/training/checkpointing/_checkpointer.py: save_checkpoint)."""
_ONE_OF_SEVERAL = re.compile(
    # A rank, a slice or a shard with a number; pieces of larger checkpoints of DeepSpeed, Megatron and torch DCP.
    r"(.*[^a-z])?(rank|shard|slice|part|tp|pp|ep|mp)[-_.]?\d+([^a-z0-9].*)?|.*\d+[-_]of[-_]\d+.*"
    r"|.*_states\.pt|model_optim_rng\.pt|model_rng\.pt|distrib_optim\.pt|common\.pt|meta\.pt|.*\.distcp",
    re.IGNORECASE,
)
_MAX_COMPARED = 16
_BESIDE = re.compile(
    # Files that trainers save beside a model: transformers, accelerate, Lightning, torchtune, verl.
    r"\..*|(optim|optimizer|scheduler|lr_scheduler|rng|rng_state|random_states|scaler|sampler|data|dataloader"
    r"|training_args|train_state|trainer_state|trainer|args|extra_state|custom_checkpoint|hparams|config|recipe_state)"
    r"s?([-_.\d].*)?",
    re.IGNORECASE,
)
_SLICE = re.compile(r"consolidated\.(\d\d)\.pth")
"""Meta's Llama: one file for each tensor-parallel rank (llama/generation.py: build)."""
_MAX_CHECKLIST_NBYTES = 1 << 16


class TorchSaveReader:
    """The reader of whole models that one ``torch.save`` wrote (`xrank.readers.base.Reader`)."""

    name = "torch-save"

    def recognize(self, path: str) -> str | None:
        """Return None for a file of ``torch.save``, or a folder with one whose name may be a model's."""
        if places.is_file(path):
            if _ONE_OF_SEVERAL.fullmatch(os.path.basename(path)):
                return "by its name, one of several files"
            own = _PART.fullmatch(os.path.basename(path))
            if own is not None:
                found = map(_PART.fullmatch, places.list_names(os.path.dirname(path) or os.curdir))
                if sum(other is not None and other[2] == own[2] for other in found) > 1:  # parts of one epoch
                    return "one of several parts; its folder is the model"
            return None if _is_saved(path) else "not a file of torch.save"
        if places.is_folder(path) and list_models(path):
            return None
        return "no model.pt, .pth or .ckpt in it, or several numbered ones, which may be one per rank"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        folder, names = (path, list_models(path)) if places.is_folder(path) else os.path.split(path)
        if isinstance(names, str):
            names = [names]
        # Meta cut a model of several slices for as many tensor-parallel ranks.
        given = [name for name in names if _SLICE.fullmatch(name)]
        slices = sorted(name for name in places.list_names(folder or os.curdir) if _SLICE.fullmatch(name))
        if given and slices != ["consolidated.00.pth"]:
            raise _make_slice_error(os.path.join(folder or os.curdir, given[0]), list_text(slices, 10))
        parts = [name for name in names if _PART.fullmatch(name)]
        if parts:
            return _read_parts(path, folder, parts, len(names) - len(parts), hints)
        if len(names) > 1:
            raise _make_choice_error(folder, names)
        state = select_state(read_archive(os.path.join(folder, names[0])), hints.part)
        model = describe_states(self.name, path, [state], hints)
        return replace(model, hashes=_check_slice(state, folder, names[0])) if given else model


def _check_slice(state: WholeState, folder: str, name: str) -> tuple[RecordedHash, ...]:
    """Return the MD5 that Meta's ``checklist.chk`` beside a file records, as md5sum writes it.

    Refuse the first slice of a model whose other slices are not there: its heads do not fill the model's width.
    """
    found = [state.tensors.get(name) for name in ("norm.weight", "layers.0.attention.wq.weight")]
    width, rows = (tensor.shape[0] if tensor is not None and tensor.shape else 0 for tensor in found)
    # Mistral's heads may be of another width, such as 32 of 128 in a model of 5,120: no fraction.
    if 0 < rows < width and width % rows == 0:
        raise _make_slice_error(state.archive.path, f"{rows} rows of queries in a model of width {width}")
    path = os.path.join(folder, "checklist.chk")
    if not places.is_present(path):
        return ()
    text = read_start(path, _MAX_CHECKLIST_NBYTES).decode(errors="replace")
    line = re.search(rf"^([0-9a-f]{{32}}) [ *]{re.escape(name)}\r?$", text, re.MULTILINE)
    return () if line is None else (RecordedHash(os.path.join(folder, name), "md5", bytes.fromhex(line[1]), path),)


def _read_parts(path: str, folder: str, names: Sequence[str], num_others: int, hints: Hints) -> StoredModel:
    """Return the model of which each file holds some tensors; errors as in `Reader.read`."""
    numbers = {name: (int(found[1]), found[2]) for name in names if (found := _PART.fullmatch(name))}
    epochs = sorted({epoch for _, epoch in numbers.values()}, key=int)
    if len(epochs) > 1:
        raise Origin(folder).usage(
            f"contains the models of {len(epochs)} epochs",
            list_text(names, 10),
            "the files of one epoch",
            f"copy all files of one epoch, such as hf_model_*_{epochs[-1]}.pt, and config.json into a separate "
            f"folder, and give its path",
        )
    present = {number for number, _ in numbers.values()}
    missing = min(set(range(1, max(present))) - present, default=None)
    if missing is not None:
        name = f"hf_model_{missing:04d}_{epochs[0]}.pt"
        raise IncompleteError(
            f"the name of a different file implies {name}, which is missing in {folder}",
            file=os.path.join(folder, name),
            got=list_text(names, 10),
            want=f"the parts 1 to {max(present)}",
            next_step="copy the missing file into the folder",
        )
    states = [select_state(read_archive(os.path.join(folder, name)), hints.part) for name in names]
    choose_tensors(folder, ((name, file) for state, file in zip(states, names, strict=True) for name in state.tensors))
    notes = [("left-out", f"{plural(num_others, 'file')} next to the model's own left out")] if num_others else []
    return describe_states(TorchSaveReader.name, path, states, hints, notes)


def _is_saved(path: str) -> bool:
    try:
        with open_regular(path) as file:
            return is_archive(file)
    except (XrankError, OSError):
        return False


def list_models(folder: str) -> list[str]:
    """Return the entries of a folder that contain a model by their names; numbered ones may be those of ranks."""
    entries = sorted(places.list_names(folder))
    series = Counter(map(_remove_number, entries))
    return [
        name
        for name in entries
        if (name.endswith(_SUFFIXES) or (name.endswith(_SHARED_SUFFIXES) and _is_saved(os.path.join(folder, name))))
        and not _ONE_OF_SEVERAL.fullmatch(name)
        and not _BESIDE.fullmatch(name)
        and (series[_remove_number(name)] == 1 or _SLICE.fullmatch(name) or _PART.fullmatch(name))
    ]


def has_parts(folder: str) -> bool:
    """Return whether files of a folder are parts of a model, none of which is one by itself."""
    return sum(_PART.fullmatch(name) is not None for name in places.list_names(folder)) > 1


def _remove_number(name: str) -> str:
    return re.sub(r"[-_.]\d+((?:\.[a-z]\w*)+)$", r"\1", name)


def _make_choice_error(folder: str, names: Sequence[str]) -> UsageError:
    """Return the error for several files; those without a tensor in common may be parts of one model."""
    held: Counter[str] = Counter()
    for name in names[:_MAX_COMPARED]:
        with suppress(XrankError):
            held.update(select_state(read_archive(os.path.join(folder, name)), None).tensors.keys())
    one = f"give the path of one of them, such as {os.path.join(folder, names[0])}"
    if held and max(held.values()) > 1:
        kind, next_step = "more than one model", one
    else:
        kind = "several files without a tensor in common, which may be parts of one model or several models"
        next_step = f"save parts of one model with one torch.save; if each is a model, {one}"
    return Origin(folder).usage(f"holds {kind}", list_text(names, 10), "one model", next_step)


def _make_slice_error(path: str, got: str) -> UsageError:
    return Origin(path).usage(
        "is one of several slices of a model",
        got,
        "only consolidated.00.pth: a model that is not sliced",
        "gather the model in Hugging Face's form, or convert these files with transformers' "
        "convert_llama_weights_to_hf.py",
    )


_NAME = re.compile(
    # torchtune/training/checkpointing/_utils.py: SHARD_FNAME.
    r"(diffusion_)?pytorch_model(-\d{5}-of-\d{5}|_fsdp(_\d{1,5})?)?\.bin|(ft-)?model-\d{5}-of-\d{5}\.bin"
)
# accelerate/accelerator.py: save_state numbers the second model from 1: pytorch_model_1.bin, pytorch_model_fsdp_1.bin.
_BESIDE_BIN = re.compile(r"(diffusion_)?pytorch_model.*\.bin")
_WHOLE = "pytorch_model.bin"
_INDEX_NAME = "pytorch_model.bin.index.json"


class BinFolderReader:
    """The reader of ``pytorch_model.bin`` folders and files (`xrank.readers.base.Reader`)."""

    name = "bin"

    def recognize(self, path: str) -> str | None:
        """Return None for such a file, or a folder with one."""
        name = os.path.basename(path)
        if places.is_file(path) and _NAME.fullmatch(name):
            return "one of several files; its folder is the model" if is_one_of_several(name) else None
        if places.is_folder(path) and any(map(_NAME.fullmatch, places.list_names(path))):
            return None
        return "no pytorch_model.bin or pytorch_model-<i>-of-<n>.bin in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        is_folder = places.is_folder(path)
        folder = path if is_folder else os.path.dirname(path)
        index = read_index(folder, _INDEX_NAME, _WHOLE) if is_folder else None
        names = list_files(folder, _NAME.fullmatch, index) if is_folder else [os.path.basename(path)]
        models = [name for name in names if not is_one_of_several(name)]
        if index is None and models and len(names) > 1:
            step = f"give the path of one of them, such as {os.path.join(folder, models[0])}"
            raise Origin(folder).usage("contains more than one model", list_text(names, 10), "one", step)
        states = [select_state(read_archive(os.path.join(folder, file)), hints.part) for file in names]
        held = ((name, file) for state, file in zip(states, names, strict=True) for name in state.tensors)
        place_of, notes = choose_tensors(folder, held, index)
        states = [
            replace(state, tensors={name: each for name, each in state.tensors.items() if place_of.get(name) == file})
            for state, file in zip(states, names, strict=True)
        ]
        if is_folder:
            notes += stale_index_notes(folder, _INDEX_NAME, index)
            notes += note_left_out(filter(_BESIDE_BIN.fullmatch, set(places.list_names(folder)) - set(names)))
        model = describe_states(self.name, path, states, hints, notes)
        if index is None:
            return model
        # An index counts each tied tensor once.
        nbytes = sum(prod(s.shape) * dtype(s.dtype).nbytes for s in model.shards if s.name not in model.aliases)
        return replace(model, notes=(*model.notes, *index.notes(nbytes)))
