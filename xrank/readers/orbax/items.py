"""Finds the trees of arrays in a folder of Orbax: the folder itself, or the items of a step.

``Checkpointer.save(path)`` makes a tree. ``CheckpointManager`` makes a folder for each step, in which each item has a
folder: ``default``, ``items`` or a name of the trainer's (orbax/checkpoint/checkpoint_manager.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xrank.errors import AGAIN, IncompleteError, UsageError, option
from xrank.formats.entries import Entry
from xrank.formats.regular_file import Origin, open_regular, quote
from xrank.formats.zarr_array import MANIFEST
from xrank.readers.saved_keys import is_left_out
from xrank.stores import places
from xrank.words import list_text

TREE = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
# orbax/checkpoint/path/step.py: step_prefix, step_format_fixed_length.
_STEP_NAME = re.compile(r"(?:(?:.*[_-])?(?:step|checkpoint|ckpt|iter)[_-])?(\d{1,18})")
_TREE_NAMES = frozenset({TREE, MANIFEST, "_sharding", "array_metadatas"})
"""Names of which a tree has at least one, even if others were not copied."""
_PROCESS = re.compile(r"(?:ocdbt\.)?process_(\d{1,9})")
_UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the name that a folder has until the save is complete (orbax/checkpoint/_src/path/atomicity.py)."""
_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
"""Types of leaves without a value (orbax/checkpoint/_src/metadata/empty_values.py)."""
_SEQUENCE = 1
"""``key_type`` of an index (orbax/checkpoint/_src/metadata/tree.py: KeyType)."""
_INDEX = re.compile(r"(?a:-?\d{1,18})")
_MAX_NBYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class TreeLeaf:
    """A leaf of a saved tree."""

    keys: tuple[str | int, ...]
    is_array: bool

    @property
    def name(self) -> str:
        """The array's name in its store."""
        return ".".join(map(str, self.keys))


def explain_mismatch(path: str) -> str | None:
    """Return None if a path is a tree of Orbax or a step with one, otherwise the reason why not."""
    if not places.is_folder(path):
        return "not a folder"
    folder = places.absolute(path)
    # An item of an unfinished step may be finished itself.
    if any(_UNFINISHED in os.path.basename(each) for each in (folder, os.path.dirname(folder))):
        return "a save that Orbax has not finished"
    if _is_tree(path) or _find_items(path):
        return None
    return "no _METADATA of Orbax, and no step with an item that has one"


@dataclass(frozen=True, slots=True)
class ChosenTree:
    """The tree of a folder that is read."""

    folder: str
    part: str | None
    """Keys of the part in the tree that the caller chose, joined by dots."""
    step: int | None
    others: tuple[str, ...] = ()
    """Items of the same step that are left out."""


def choose_tree(path: str, part: str | None) -> ChosenTree:
    """Return the tree to read: the folder itself, or the only item of a step that may be the model.

    Args:
        path: a folder that `explain_mismatch` accepts.
        part: keys that the caller chose, joined by dots; with several items, the first is an item's name.

    Raises:
        UsageError: several items may be the model, or the part names none of them.
    """
    folder = places.absolute(path)
    if _is_tree(path):
        above = os.path.dirname(folder)
        step = _read_step(above) if _is_step(above) else None
        return ChosenTree(path, part, _read_step(folder) if step is None else step)
    items = _find_items(path)
    names = [name for name in items if len(items) == 1 or not is_left_out(name)]
    if part is not None and len(items) > 1:
        names = [name for name in items if f"{part}.".startswith(f"{name}.")]
        if names:
            part = part.removeprefix(max(names, key=len)).removeprefix(".") or None
            names = [max(names, key=len)]
    if len(names) != 1:
        raise UsageError(
            f"{path}: {len(names) or 'none'} of its items may be the model",
            file=path,
            got=list_text(items, 12),
            want="one",
            next_step=f"choose one: {' or '.join(option('part', name) for name in [*items][:12])}",
        )
    others = tuple(name for name in items if name != names[0])
    return ChosenTree(items[names[0]], part, _read_step(folder), others)


def _find_items(path: str) -> Mapping[str, str]:
    """Return the folder of each item of a step that is a tree of arrays."""
    if not _is_step(path):
        return {}
    folders = {name: os.path.join(path, name) for name in sorted(places.list_names(path))}
    return {name: folder for name, folder in folders.items() if _is_tree(folder)}


def _is_step(path: str) -> bool:
    return places.is_file(os.path.join(path, _STEP))


def _read_step(folder: str) -> int | None:
    """Return the step in a folder's name: ``5``, ``00000005``, ``checkpoint_5``."""
    found = _STEP_NAME.fullmatch(os.path.basename(folder))
    return None if found is None else int(found[1])


def _is_tree(path: str) -> bool:
    if not places.is_folder(path):
        return False
    names = places.list_names(path)
    return not _TREE_NAMES.isdisjoint(names) or any(name.startswith("ocdbt.process_") for name in names)


def find_world_size(folder: str) -> int | None:
    """Return the number of processes that wrote a tree; None if their names show none."""
    found = [_PROCESS.fullmatch(name) for name in places.list_names(folder)]
    own = os.path.join(folder, "array_metadatas")
    if places.is_folder(own):
        found += [_PROCESS.fullmatch(name) for name in places.list_names(own)]
    return max((int(match[1]) + 1 for match in found if match is not None), default=None)


def read_leaves(folder: str) -> Sequence[TreeLeaf]:
    """Return the leaves of a tree, without empty ones.

    Raises:
        IncompleteError: the tree's metadata is missing.
        CorruptError: it is damaged.
    """
    path = os.path.join(folder, TREE)
    if not places.is_present(path):
        raise IncompleteError(
            f"{path} is missing: the checkpoint was not copied whole, or Orbax has not finished it",
            file=path,
            got=f"{len(places.list_names(folder))} other files and folders",
            want=TREE,
            next_step=f"copy the checkpoint whole from where it was written, then {AGAIN}; or take another step",
        )
    origin = Origin(path)
    with open_regular(path) as file:
        if file.nbytes > _MAX_NBYTES:
            raise origin.corrupt("is too large", got=f"{file.nbytes:,} bytes", want=f"at most {_MAX_NBYTES:,}")
        text = file.read(0, file.nbytes)
    tree = Entry.parse(text, lambda fault: origin.corrupt("is not the metadata of a tree of Orbax", got=fault))
    leaves = [_read_leaf(entry) for _, entry in tree["tree_metadata"].items()]
    found = [leaf for leaf in leaves if leaf is not None]
    names = [leaf.name for leaf in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise origin.corrupt(f"names the array {quote(twice)} twice", got=quote(twice), want="each name once")
    return found


def _read_leaf(entry: Entry) -> TreeLeaf | None:
    keys = tuple(_read_key(part["key"], part["key_type"].value) for part in entry["key_metadata"].entries())
    kind = entry["value_metadata"]["value_type"].text()
    return None if kind in _EMPTY else TreeLeaf(keys, is_array=kind != "string")


def _read_key(key: Entry, kind: object) -> str | int:
    """Return a key of a tree; Orbax writes an index as a text or a number."""
    if kind != _SEQUENCE:
        return key.text()
    text = str(key.value) if type(key.value) is int and abs(key.value) < 1 << 63 else key.text()
    if not _INDEX.fullmatch(text):
        key.refuse("an index")
    return int(text)
