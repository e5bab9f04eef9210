"""Finds the files of a checkpoint's model among the files of all its items, one per item and rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from xrank.errors import AGAIN, ContradictionError, IncompleteError, UsageError, XrankError
from xrank.formats.regular_file import open_regular
from xrank.readers.advice import ONE_SAVE
from xrank.readers.fsdp.file_names import RankFiles
from xrank.readers.torch_checkpointing.metadata import METADATA, ItemMetadata, SavedMetadata, read_metadata
from xrank.stores import places
from xrank.words import list_text, ranks_text

# checkpoint_layout.py: default_torch_layout_info; schema.py: ItemSpec.layout for safetensors.
_FILE = re.compile(r"(.+)_(0|[1-9]\d{0,8})\.(pt|safetensors)")
_MODEL = "model"
_NO_MODEL = re.compile(r"(?i).*(optim|sched|step|rng|loader|dataset|config|epoch|train_state).*")
"""Names of items that trainers save beside a model."""
_TORCH, _SAFETENSORS = "TorchSerialization", "SafetensorsSerialization"
_KINDS = {"pt": _TORCH, "safetensors": _SAFETENSORS}
# The first keys of metadata.pkl, by which other programs' files of that name are told apart.
_MARK = b"nested_path_to_metadata"
_MAX_MARK_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of the item that is the model."""

    item: str
    listed: RankFiles
    are_safetensors: bool
    metadata: ItemMetadata | None
    """How its tensors were cut; None if the checkpoint was saved without a resharder for the item."""
    others: tuple[str, ...]
    """Other items that may be models, such as averaged weights."""


def explain_mismatch(path: str) -> str | None:
    """Return None if a folder is such a checkpoint, or a file belongs to an item besides its model; else the reason."""
    if not places.is_folder(path):
        match = _FILE.fullmatch(os.path.basename(path))
        if match is None or explain_mismatch(os.path.dirname(places.absolute(path))) is not None:
            return "no file of a torch_checkpointing checkpoint"
        if _NO_MODEL.fullmatch(match[1]):
            return "an optimizer's or a trainer's own state"
        return "one rank's file; its folder is the checkpoint" if match[1] == _MODEL else None
    names = places.list_names(path)
    if METADATA in names and _is_metadata(os.path.join(path, METADATA)):
        return None
    # Without metadata only the names of the files show the format, and others number their files from 1, or by steps.
    if f"{_MODEL}_0.pt" in names or (f"{_MODEL}_0.safetensors" in names and f"{_MODEL}.safetensors" not in names):
        return None
    return f"no {METADATA} with files of ranks, and no {_MODEL}_0.pt"


def _is_metadata(path: str) -> bool:
    try:
        with open_regular(path) as file:
            return _MARK in file.read(0, min(file.nbytes, _MAX_MARK_NBYTES))
    except XrankError:
        return False


def find_model_files(path: str) -> ModelFiles:
    """Return the files of a checkpoint's model, or of the item to which a given file belongs.

    Raises:
        UsageError: several items may be the model, or it was saved as JSON or as bytes.
        IncompleteError: a rank's file is missing.
        ContradictionError: there are files of another save.
        CorruptError, UnsafeError, LayoutError: as `read_metadata`.
    """
    folder = path if places.is_folder(path) else os.path.dirname(places.absolute(path))
    metadata = read_metadata(folder)
    items = _list_items(folder)
    item = _choose_item(path, folder, items, metadata)
    saved = metadata.items.get(item) if metadata is not None else None
    skipped = tuple(
        os.path.join(folder, name) for key, files in items.items() if key != item for name in files.values()
    )
    if metadata is None or saved is None:
        by_rank = {rank: os.path.join(folder, name) for rank, name in sorted(items[item].items())}
        kinds = {_KINDS[file.rpartition(".")[2]] for file in by_rank.values()}
        # Other items may have been saved on ranks whose file of the model is missing.
        world_size = max((rank + 1 for files in items.values() for rank in files), default=1)
        listed = RankFiles(folder, by_rank, metadata.world_size if metadata is not None else world_size, skipped)
    else:
        by_rank = {rank: os.path.join(folder, name) for rank, (name, _) in sorted(saved.files.items())}
        kinds = {kind for _, kind in saved.files.values()}
        listed = RankFiles(folder, by_rank, metadata.world_size, skipped)
        _check_presence(listed)
        _check_others(listed, items.get(item, {}))
    listed.check(listed.world_size or 1)
    if len(kinds) > 1 or not kinds <= {_TORCH, _SAFETENSORS}:
        raise UsageError(
            f"the item {item} of {folder} was not saved as one kind of tensor files",
            file=folder,
            got=", ".join(sorted(map(str, kinds))),
            want=f"{_TORCH} or {_SAFETENSORS} on all ranks",
            next_step="load it with torch_checkpointing and save it in one layout",
        )
    others = tuple(other for other in items if other != item and not _NO_MODEL.fullmatch(other))
    return ModelFiles(item, listed, kinds == {_SAFETENSORS}, saved, others)


def _list_items(folder: str) -> dict[str, dict[int, str]]:
    """Return item -> rank -> name of the file, by the names of the files.

    Raises:
        ContradictionError: a rank has two files of one item.
    """
    items: dict[str, dict[int, str]] = {}
    for name in sorted(places.list_names(folder)):
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        own = items.setdefault(match[1], {})
        other = own.setdefault(int(match[2]), name)
        if other != name:
            raise ContradictionError(
                f"{name} and {other} are files of the same item and rank, so they are from two saves",
                file=os.path.join(folder, name),
                rank=int(match[2]),
                got=f"{other} and {name}",
                want="one of them",
                next_step=ONE_SAVE,
            )
    return items


def _choose_item(path: str, folder: str, items: Mapping[str, Mapping[int, str]], metadata: SavedMetadata | None) -> str:
    match = _FILE.fullmatch(os.path.basename(path)) if path != folder else None
    if match is not None:
        return match[1]
    known = dict.fromkeys([*(metadata.items if metadata is not None else ()), *items])
    found = [_MODEL] if _MODEL in known else [item for item in known if not _NO_MODEL.fullmatch(item)]
    if len(found) == 1:
        return found[0]
    file = next((name for item in found for name in items.get(item, {}).values()), None)
    raise UsageError(
        f"{folder} contains {len(found) or 'no'} items that may be the model",
        file=folder,
        got=list_text(known, 10),
        want=f"an item {_MODEL}, or a single other one",
        next_step=f"give the path of a file of the item, such as {os.path.join(folder, file)}"
        if file
        else f"save the model as the item {_MODEL}",
    )


def _check_presence(listed: RankFiles) -> None:
    missing = [rank for rank, file in listed.by_rank.items() if not places.is_present(file)]
    if missing:
        file = listed.by_rank[missing[0]]
        name = os.path.relpath(file, listed.folder)
        raise IncompleteError(
            f"rank {missing[0]} of {listed.world_size} left no {name} in {listed.folder}",
            rank=missing[0],
            file=file,
            got=f"no files of {ranks_text(missing)}",
            want=f"files of all {listed.world_size} ranks, as in {METADATA}",
            next_step=f"copy the file from the node of rank {missing[0]}, then {AGAIN}",
        )


def _check_others(listed: RankFiles, named: Mapping[int, str]) -> None:
    beyond = sorted(set(named) - set(listed.by_rank))
    if beyond:
        raise ContradictionError(
            f"{named[beyond[0]]} belongs to rank {beyond[0]}, but {METADATA} records {listed.world_size} ranks",
            rank=beyond[0],
            file=os.path.join(listed.folder, named[beyond[0]]),
            got=ranks_text([*named]),
            want=f"ranks 0 to {(listed.world_size or 1) - 1}",
            next_step=ONE_SAVE,
        )
