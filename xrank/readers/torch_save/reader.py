"""Reads a file of ``torch.save`` with a whole model, or a folder with one such file.

Such files are ``model.pt`` of a training loop, ``epoch=0-step=2.ckpt`` of Lightning, or ``consolidated.00.pth``.
In a folder, names alone separate them from what trainers save beside models. torchtune saves a model in parts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from xrank.errors import IncompleteError, UsageError, XrankError
from xrank.formats.regular_file import open_regular
from xrank.formats.torch_archive import is_archive, read_archive
from xrank.plan.source import RecordedHash, StoredModel
from xrank.readers.base import Hints
from xrank.readers.hugging_face.weight_files import choose_tensors
from xrank.readers.torch_save.states import WholeState, describe_states, select_state
from xrank.stores import places
from xrank.words import list_text, plural

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

    def recognise(self, path: str) -> str | None:
        """Return None for a file of ``torch.save``, or a folder with one whose name may be a model's."""
        if places.is_file(path):
            if _ONE_OF_SEVERAL.fullmatch(os.path.basename(path)):
                return "by its name, one of several files"
            if len(_list_parts(path)) > 1:
                return "one of several parts; its folder is the model"
            return None if _is_saved(path) else "not a file of torch.save"
        if places.is_folder(path) and list_models(path):
            return None
        return "no model.pt, .pth or .ckpt in it, or several with numbers, which may be those of ranks"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        folder, names = (path, list_models(path)) if places.is_folder(path) else os.path.split(path)
        if isinstance(names, str):
            names = [names]
        _check_slices(folder or os.curdir, names)
        parts = [name for name in names if _PART.fullmatch(name)]
        if parts:
            return _read_parts(path, folder, parts, len(names) - len(parts), hints)
        if len(names) > 1:
            raise _make_choice_error(folder, names)
        state = select_state(read_archive(os.path.join(folder, names[0])), hints.part)
        model = describe_states(self.name, path, [state], hints)
        if _SLICE.fullmatch(names[0]):
            _check_width(state)
            return replace(model, hashes=_read_checklist(folder, names[0]))
        return model


def _read_checklist(folder: str, name: str) -> tuple[RecordedHash, ...]:
    """Return the MD5 of a file that Meta's ``checklist.chk`` beside it records, as md5sum writes it."""
    path = os.path.join(folder, "checklist.chk")
    if not places.is_present(path):
        return ()
    with open_regular(path) as file:
        text = file.read(0, min(file.nbytes, _MAX_CHECKLIST_NBYTES)).decode(errors="replace")
    found = re.search(rf"^([0-9a-f]{{32}}) [ *]{re.escape(name)}\r?$", text, re.MULTILINE)
    return () if found is None else (RecordedHash(os.path.join(folder, name), "md5", bytes.fromhex(found[1]), path),)


def _read_parts(path: str, folder: str, names: Sequence[str], num_others: int, hints: Hints) -> StoredModel:
    """Return the model of which each file holds some tensors; errors as in `Reader.read`."""
    numbers = {name: (int(found[1]), found[2]) for name in names if (found := _PART.fullmatch(name))}
    epochs = sorted({epoch for _, epoch in numbers.values()}, key=int)
    if len(epochs) > 1:
        raise UsageError(
            f"{folder} holds the models of {len(epochs)} epochs",
            file=folder,
            got=list_text(names, 10),
            want="the files of one epoch",
            next_step=f"copy all files of one epoch, such as hf_model_*_{epochs[-1]}.pt, and config.json into a "
            "folder of their own, and give its path",
        )
    present = {number for number, _ in numbers.values()}
    for number in range(1, max(present)):
        if number not in present:
            file = os.path.join(folder, f"hf_model_{number:04d}_{epochs[0]}.pt")
            raise IncompleteError(
                f"another file's name implies {os.path.basename(file)}, which is not in {folder}",
                file=file,
                got=list_text(names, 10),
                want=f"the parts 1 to {max(present)}",
                next_step="copy the missing file into the folder",
            )
    states = [select_state(read_archive(os.path.join(folder, name)), hints.part) for name in names]
    choose_tensors(folder, ((name, file) for state, file in zip(states, names, strict=True) for name in state.tensors))
    notes = [("left-out", f"{plural(num_others, 'file')} beside the model's own left out")] if num_others else []
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


def _list_parts(path: str) -> list[str]:
    """Return the files of the same epoch as a part of a model, itself included; nothing for another file."""
    own = _PART.fullmatch(os.path.basename(path))
    if own is None:
        return []
    names = places.list_names(os.path.dirname(path) or os.curdir)
    return [name for name in names if (found := _PART.fullmatch(name)) and found[2] == own[2]]


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
    return UsageError(
        f"{folder} holds {kind}", file=folder, got=list_text(names, 10), want="one model", next_step=next_step
    )


def _check_slices(folder: str, names: list[str]) -> None:
    """Refuse a slice of a model that Meta cut for several tensor-parallel ranks.

    Raises:
        UsageError: a file is one of several slices.
    """
    given = [name for name in names if _SLICE.fullmatch(name)]
    slices = sorted(name for name in places.list_names(folder) if _SLICE.fullmatch(name))
    if given and slices != ["consolidated.00.pth"]:
        raise _make_slice_error(os.path.join(folder, given[0]), list_text(slices, 10))


def _check_width(state: WholeState) -> None:
    """Refuse the first slice of a model whose other slices are not there: its heads do not fill the model's width.

    Raises:
        UsageError: the rows of the queries are a fraction of the width, which norms have (llama/model.py: Attention).
    """
    found = [state.tensors.get(name) for name in ("norm.weight", "layers.0.attention.wq.weight")]
    width, rows = (tensor.shape[0] if tensor is not None and tensor.shape else 0 for tensor in found)
    # Mistral's heads may be of another width, such as 32 of 128 in a model of 5,120: no fraction.
    if 0 < rows < width and width % rows == 0:
        got = f"{rows} rows of queries in a model of width {width}"
        raise _make_slice_error(state.archive.path, got)


def _make_slice_error(path: str, got: str) -> UsageError:
    return UsageError(
        f"{path} is one of several slices of a model",
        file=path,
        got=got,
        want="consolidated.00.pth alone: a model that is not sliced",
        next_step="gather the model in Hugging Face's form, or convert these files with transformers' "
        "convert_llama_weights_to_hf.py",
    )
