"""Reads two models for a comparison, from metadata alone, with the LoRA adapters that belong to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from xrank.decisions.adapter_names import PREFIX, AdapterNames, find_adapter
from xrank.decisions.adapters import FOLDER, WEIGHTS_NAME, adapter_beside
from xrank.decisions.base_model import BaseModel
from xrank.decisions.found_source import FoundSource, read_found, read_source
from xrank.errors import ContradictionError, IncompleteError
from xrank.layout import LayoutMap
from xrank.plan.source import StoredModel, merge_models
from xrank.readers.discovery import find_source
from xrank.stores import places
from xrank.writers.manifest import MANIFEST_NAME, read_manifest

_APART = FOLDER + WEIGHTS_NAME


@dataclass(frozen=True, slots=True, eq=False)
class ComparedSide:
    """One of the two sides of a comparison."""

    path: str
    """Path of the side as the user named it."""
    source: FoundSource
    """The side under its own names; an adapter in a folder within is part of its model."""
    names: AdapterNames | None
    """Names of the adapter's tensors; None without an adapter."""
    adapter_place: str
    """Where the adapter's configuration is looked for."""
    manifest: Mapping[str, Any]
    """The side's manifest; empty without one."""
    notes: tuple[tuple[str, str], ...]
    """Notes on the parts of the side that are not compared."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {shard.name: shard.shape for shard in self.source.model.shards}

    def name_adapter_apart(self, other: ComparedSide) -> StoredModel:
        """Return the model with the adapter's tensors under PEFT's names and the base model's under its own names.

        In a folder that PEFT saved, a tensor trained whole has the base model's name, and trained biases of a whole
        model have two names. The other side shows which they are.
        """
        assert self.names is not None and other.names is not None
        theirs = set(other.names.saved.values())
        trained = {name: name for name in self.names.base if self.names.is_alone and name in theirs}
        renamed = {**self.names.base, **self.names.saved, **trained}
        copies = {} if self.names.is_alone else self.names.biases_of("all")
        model = self.source.model
        aliases = {renamed[name]: renamed[target] for name, target in model.aliases.items()}
        rows = [self.names.saved[name] for name in self.names.tokens.values()]
        kept = [name for name in rows if name in theirs]
        aliases |= {name: kept[0] for name in rows if len(kept) == 1 and name not in theirs}
        shards = [replace(shard, name=renamed[shard.name]) for shard in model.shards]
        shards += [replace(one, name=copies[one.name]) for one in model.shards if copies.get(one.name) in theirs]
        return self.with_tied(replace(model, shards=tuple(shards), aliases=aliases))

    def with_tied(self, model: StoredModel) -> StoredModel:
        """Return a model of this side with the names that its manifest records as tied and not written."""
        shards = {shard.name: shard for shard in model.shards}
        told = self.manifest.get("tied", {})
        tied = {name: target for name, target in told.items() if target in shards and name not in shards}
        aliases = (replace(shards[target], name=name) for name, target in tied.items())
        return replace(model, shards=(*model.shards, *aliases), aliases={**model.aliases, **tied})


@dataclass(frozen=True, slots=True, eq=False)
class _FoundSide:
    """A side before the contents of the other one are known."""

    path: str
    place: str
    source: FoundSource
    manifest: Mapping[str, Any]

    @property
    def tensor_names(self) -> list[str]:
        return [shard.name for shard in self.source.model.shards]

    @property
    def lists_adapter(self) -> bool:
        """Whether the manifest lists the adapter in the folder within."""
        return any(file["name"] == _APART for file in self.manifest.get("files", ()))

    @property
    def has_adapter_apart(self) -> bool:
        return places.is_folder(self.place) and places.is_file(os.path.join(self.place, _APART))


def read_sides(
    path: str,
    other_path: str,
    *,
    base: BaseModel | None = None,
    layouts: LayoutMap | None = None,
    part: str | None = None,
    world_size: int | None = None,
) -> tuple[ComparedSide, ComparedSide]:
    """Read both sides. An adapter in a folder within counts where a manifest lists it or the other side has one, too.

    Args:
        path: path of the first side.
        other_path: path of the other side.
        base: supplies metadata that either side does not record, as for `read_found`.
        layouts: supplies layouts that either side does not record.
        part: keys of the part of the first side to read.
        world_size: number of ranks that wrote the first side, where it records none.

    Raises:
        IncompleteError, ContradictionError, UsageError: as readers and `find_adapter`; or an adapter that a manifest
            lists is missing, or has tensors with names of the model.
    """
    wheres = [(each, find_source(each)) for each in (path, other_path)]
    manifests = [_manifest(where.path) for _, where in wheres]
    # Tensors that the other's manifest records as left out need no place.
    found = [
        _FoundSide(
            each,
            where.path,
            read_found(
                each,
                where,
                base=base,
                layouts=layouts,
                part=chosen,
                world_size=ranks,
                is_left_out=_make_exclusion(other),
            ),
            own,
        )
        for (each, where), own, other, chosen, ranks in zip(
            wheres, manifests, reversed(manifests), (part, None), (world_size, None), strict=True
        )
    ]
    shared = frozenset(found[0].tensor_names).intersection(found[1].tensor_names)
    has_one = [
        side.has_adapter_apart or find_adapter(side.tensor_names, side.source.model.path, shared) is not None
        for side in found
    ]
    sides = [_side(side, shared, other_has_one=has_one[1 - i]) for i, side in enumerate(found)]
    return sides[0], sides[1]


def _manifest(place: str) -> Mapping[str, Any]:
    path = os.path.join(place, MANIFEST_NAME)
    return read_manifest(path) if places.exists(path) else {}


def _make_exclusion(manifest: Mapping[str, Any]) -> Callable[[str], bool]:
    return frozenset(manifest.get("excluded", ())).__contains__


def _side(found: _FoundSide, own: Collection[str], *, other_has_one: bool) -> ComparedSide:
    source, place = found.source, found.place
    names: AdapterNames | None
    if found.lists_adapter or (found.has_adapter_apart and other_has_one):
        model, names = _with_adapter(found)
        source, place = replace(source, model=model), os.path.join(place, FOLDER)
    else:
        names = find_adapter(found.tensor_names, source.model.path, own)
    read = {os.path.relpath(file.path, found.place) for file in source.model.files}
    notes = tuple((code, f"{found.path}: {text}") for code, text in adapter_beside(found.place, read))
    return ComparedSide(found.path, source, names, place, found.manifest, notes)


def _with_adapter(found: _FoundSide) -> tuple[StoredModel, AdapterNames]:
    """Return a model together with the adapter in the folder within, and the names of each."""
    path = os.path.join(found.place, *_APART.split("/"))
    if not found.has_adapter_apart:
        raise IncompleteError(
            f"{_APART} is in the manifest and not in {found.place}",
            file=path,
            next_step="gather the model again, or copy the file again from a good copy",
        )
    adapter = read_source(path).model
    base = {name: name for name in found.tensor_names}
    saved = {shard.name: shard.name for shard in adapter.shards}
    for name in saved:
        if name in base:
            raise ContradictionError(
                f"{name} is in {found.path} and in {_APART} within",
                tensor=name,
                file=path,
                got="two tensors of this name",
                want="one",
                next_step="check that the files are those of one model",
            )
    marked = find_adapter(list(saved), path)
    marked = marked or AdapterNames(None, (), {}, {})
    # PEFT saves a tensor trained whole under the name of the tensor that it replaces.
    trained = {name.removeprefix(PREFIX): name for name in saved if name not in marked.saved}
    names = AdapterNames(None, marked.pairs, saved, base, trained, marked.tokens)
    return merge_models(found.source.model, adapter, ""), names
