"""The reader of Orbax: a tree of arrays in zarr, in one OCDBT store or in a folder for each array."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from xrank.errors import AGAIN, ContradictionError, IncompleteError
from xrank.formats.zarr_array import ZarrArray
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints
from xrank.readers.model_parts import ModelPart, SavedTree, part_details, part_notes, select_model
from xrank.readers.orbax.chunks import ChosenArray
from xrank.readers.orbax.items import (
    TREE,
    ChosenTree,
    choose_tree,
    explain_mismatch,
    find_world_size,
    read_leaves,
)
from xrank.readers.orbax.pieces import locate
from xrank.readers.orbax.stores import ArrayStore, open_store, read_array
from xrank.readers.saved_keys import is_left_out
from xrank.words import list_text, plural

_VARIABLES = "params."
"""Flax keeps a module's variables by collection: MaxText's parameters lie under ``params.params``."""


class OrbaxReader:
    """The reader of Orbax's checkpoints (`xrank.readers.base.Reader`)."""

    name = "orbax"

    def recognise(self, path: str) -> str | None:
        """Return None for a tree of Orbax, or for a step with one."""
        return explain_mismatch(path)

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of the model lies; errors as in `Reader.read`."""
        chosen = choose_tree(path, hints.part)
        store = open_store(chosen.folder)
        saved = _read_tree(chosen.folder, store)
        tree = SavedTree(
            os.path.join(chosen.folder, TREE),
            {name: array.shape for name, array in saved.arrays.items()},
            saved.values,
            saved.paths,
            lambda name: saved.arrays[name].nbytes,
        )
        part = select_model(tree, chosen.part)
        arrays = [ChosenArray(name, key, saved.arrays[key]) for name, key in _strip_variables(part.tensors).items()]
        pieces = locate(store, arrays)
        kept_nbytes = sum(one.array.nbytes for one in arrays)
        return StoredModel(
            format=self.name,
            path=path,
            files=pieces.files,
            records=pieces.records,
            shards=pieces.shards,
            world_size=find_world_size(chosen.folder),
            part=hints.part,
            step=chosen.step,
            nbytes=int(pieces.records.stored_nbytes.sum()) + sum(map(len, pieces.records.inline.values())),
            skipped_nbytes=sum(array.nbytes for array in saved.arrays.values()) - kept_nbytes,
            notes=tuple(_notes(part, chosen)),
            details={**part_details(part), "chunks": _describe_grids(arrays)},
        )


@dataclass(frozen=True, slots=True)
class _SavedArrays:
    """All leaves of a tree, by their names in the store."""

    arrays: Mapping[str, ZarrArray]
    paths: Mapping[str, tuple[str | int, ...]]
    values: Sequence[str]
    """Leaves that are not arrays."""


def _read_tree(folder: str, store: ArrayStore) -> _SavedArrays:
    """Return the leaves of a tree.

    Raises:
        IncompleteError: an array that the metadata names is missing, and belongs to no optimizer.
        ContradictionError: the metadata lacks the name of an array.
        CorruptError, UsageError: as `read_leaves` and `read_array`.
    """
    leaves = read_leaves(folder)
    found = {leaf.name: read_array(store, leaf.name) if leaf.is_array else None for leaf in leaves}
    for leaf in leaves:
        if leaf.is_array and found[leaf.name] is None and not is_left_out(str(leaf.keys[0] if leaf.keys else "")):
            raise IncompleteError(
                f"{leaf.name}: {TREE} names this array, and {folder} does not contain it",
                tensor=leaf.name,
                file=folder,
                got="no .zarray and no zarr.json of it",
                want=f"all arrays that {TREE} names",
                next_step=f"copy the checkpoint whole from where it was written, then {AGAIN}",
            )
    unnamed = next((name for name in store.arrays() if name not in found), None)
    if unnamed is not None:
        raise ContradictionError(
            f"{unnamed}: {folder} contains this array, and {TREE} does not name it",
            tensor=unnamed,
            file=os.path.join(folder, TREE),
            got=f"{plural(len(found), 'name')} in {TREE}",
            want="the names of all arrays",
            next_step=f"copy the checkpoint again from where it was written, then {AGAIN}; or take another step",
        )
    return _SavedArrays(
        {name: array for name, array in found.items() if array is not None},
        {leaf.name: leaf.keys for leaf in leaves},
        [leaf.name for leaf in leaves if found[leaf.name] is None],
    )


def _strip_variables(tensors: Mapping[str, str]) -> dict[str, str]:
    """Return name -> name in the store, without the key of Flax's parameters if all names begin with it."""
    found = dict(tensors)
    while found and all(name.startswith(_VARIABLES) for name in found):
        found = {name.removeprefix(_VARIABLES): flat for name, flat in found.items()}
    return found


def _notes(part: ModelPart, chosen: ChosenTree) -> list[tuple[str, str]]:
    notes = part_notes(part)
    if chosen.others:
        notes.append(("left-out", f"other items of the step were left out: {list_text(chosen.others)}"))
    if part.values:
        notes.append(("left-out", f"values that are not arrays were left out: {list_text(sorted(part.values), 3)}"))
    notes.append(("no-checksums", "Orbax records no checksums of chunks; not all damage inside one can be seen"))
    return notes


def _describe_grids(chosen: Sequence[ChosenArray]) -> dict[str, str]:
    """Return the number of chunks in each dim, by families of names."""
    grids: dict[str, Counter[str]] = {}
    for one in chosen:
        grid = " x ".join(map(str, one.array.grid)) if prod(one.array.grid) > 1 else "whole"
        grids.setdefault(re.sub(r"\d+", "#", one.name), Counter())[grid] += 1
    return {family: ", ".join(sorted(counts)) for family, counts in sorted(grids.items())}
