"""Where layouts come from: a layout file, or what the states of a workspace record; a model folder is one piece."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from xrank.conversion.gather_plan import read_layouts
from xrank.errors import LayoutError, UsageError
from xrank.formats.rank_state import rank_of
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_file import LayoutFile, to_text
from xrank.layout.tensor_layout import free_size_names
from xrank.plan.holdings import Holdings, Survey, held_by_layout, held_by_pieces
from xrank.plan.source import StoredModel, StoredShard
from xrank.plan.survey import survey
from xrank.plan.told_shapes import told_shapes
from xrank.readers.base import Hints
from xrank.readers.discovery import find_source
from xrank.readers.rank_states import read_rank_state

__all__ = ["LayoutSource", "chosen", "file_text", "is_layout_file", "layouts_at", "read_source", "stored_at"]

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
"""Names that are patterns for themselves, and for little else."""


@dataclass(frozen=True, slots=True)
class LayoutSource:
    """Layouts found at a path, and who holds what by them."""

    path: str
    format: str
    survey: Survey
    layouts: LayoutMap | None
    """The content of a layout file; None for what ranks recorded."""
    notes: tuple[tuple[str, str], ...] = ()


def is_layout_file(path: str) -> bool:
    """Say whether a path is to be read as a layout file: a file that no rank and no model writer left."""
    name = os.path.basename(path)
    return os.path.isfile(path) and rank_of(name) is None and not name.endswith(".safetensors")


def read_source(path: str) -> LayoutSource:
    """Return the layouts at a path: a layout file's, drawn as far as it tells sizes, or those that a source records.

    Raises:
        LayoutError, UsageError, IncompleteError, CorruptError, ...: as the reader of what lies there.
    """
    if not is_layout_file(path):
        place, stored = stored_at(path)
        return LayoutSource(place, stored.format, _stored_survey(place, stored), None)
    layouts = read_layouts(path)
    shapes, untold = told_shapes(layouts)
    found = survey(layouts, shapes)
    # A rule whose sizes are not told decides for tensors that nobody has named.
    found = replace(found, unused=tuple(rule for rule in found.unused if rule not in untold))
    notes = tuple(
        ("no-shape", f"the rule {rule!r} = {found.rules[rule]} is not drawn: {reason}")
        for rule, reason in untold.items()
    )
    return LayoutSource(path, "layout file", found, layouts, notes)


def stored_at(path: str, layouts: LayoutMap | None = None) -> tuple[str, StoredModel]:
    """Return the source at a path, from metadata alone; where its ranks record no layouts, read by the given ones."""
    place, reader = find_source(path)
    try:
        return place, reader.read(place, Hints(needs_config=False))
    except LayoutError as error:
        if layouts is None:
            error.next_step = "describe it in a layout file, and run: xrank layout check FILE PATH"
            raise
        return place, reader.read(place, Hints(layouts=layouts, needs_config=False))


def chosen(found: Survey, pattern: str | None) -> Survey:
    """Return the survey of the tensors whose whole names a regular expression matches.

    Raises:
        UsageError: it is none, or matches no tensor.
    """
    if pattern is None:
        return found
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"--tensor is no regular expression: {error}",
            got=repr(pattern),
            next_step="escape what is meant as it stands",
        ) from None
    tensors = tuple(one for one in found.tensors if expression.fullmatch(one.name))
    if not tensors:
        raise UsageError(
            f"--tensor matches none of {len(found.tensors)} tensors",
            got=repr(pattern),
            want="a regular expression for whole names",
            next_step=f"name one, such as {found.tensors[0].name!r}" if found.tensors else "look without --tensor",
        )
    return replace(found, tensors=tensors, unmatched=tuple(n for n in found.unmatched if expression.fullmatch(n)))


def layouts_at(path: str) -> LayoutMap:
    """Return the layouts at a path as a map, for a file to start from or a comparison.

    Raises:
        LayoutError: ranks recorded what no layout file can say; else as `read_source`.
    """
    source = read_source(path)
    return source.layouts if source.layouts is not None else _map_of(source.survey)


def file_text(layouts: LayoutMap) -> str:
    """Return the text of the layout file that says a map."""
    rules = {rule: str(value) for rule, value in (*layouts.items(), *layouts.companions.items())}
    return to_text(LayoutFile(layouts.device_mesh, layouts.views, layouts.sizes, rules, layouts.aliases))


def _stored_survey(place: str, stored: StoredModel) -> Survey:
    recorded = _recorded(place) if stored.format == "workspace" else {}
    tensors = tuple(_stored_holdings(shard, recorded) for shard in stored.shards)
    grids = dict.fromkeys(one.mesh for one in tensors if one.mesh is not None)
    names = ["mesh"] if len(grids) == 1 else [f"mesh {i}" for i in range(len(grids))]
    return Survey(dict(zip(names, grids, strict=True)), {}, tensors)


def _stored_holdings(shard: StoredShard, recorded: Mapping[str, tuple[TensorLayout, DeviceMesh] | None]) -> Holdings:
    start = Holdings(shard.name, shard.shape, shard.dtype)
    known = recorded.get(shard.name)
    if known is not None:
        return held_by_layout(start, *known)
    held: dict[int, list[int]] = {}
    for row, rank in enumerate(shard.rank.tolist()):
        held.setdefault(rank, []).append(row)
    return held_by_pieces(start, {rank: tuple(shard.nests[row] for row in rows) for rank, rows in held.items()})


def _recorded(place: str) -> dict[str, tuple[TensorLayout, DeviceMesh] | None]:
    """Return name -> the layout and mesh that its ranks recorded; None where no one layout says what they recorded."""
    found: dict[str, dict[tuple[TensorLayout, DeviceMesh], None]] = {}
    meshes: dict[DeviceMesh, DeviceMesh] = {}
    for rank in sorted(rank for rank in map(rank_of, os.listdir(place)) if rank is not None):
        record = read_rank_state(place, rank).record
        if record is None:
            continue
        own = [DeviceMesh(shape, names, ranks) for names, shape, ranks in record.meshes]
        own = [meshes.setdefault(mesh, mesh) for mesh in own]
        for name, tensor in record.tensors.items():
            if tensor.layout is not None and tensor.mesh is not None:
                found.setdefault(name, {})[TensorLayout.parse(tensor.layout), own[tensor.mesh]] = None
    largest = max(meshes, key=lambda mesh: mesh.size, default=None)
    return {name: _one_of(list(pairs), largest) for name, pairs in found.items()}


def _one_of(
    pairs: Sequence[tuple[TensorLayout, DeviceMesh]], largest: DeviceMesh | None
) -> tuple[TensorLayout, DeviceMesh] | None:
    """Return the layout on the largest mesh where parts of it recorded one layout each, else the only one recorded.

    DTensors that some axis does not cut lie on sub-meshes without it: on the whole mesh these are replicas.
    """
    layout = pairs[0][0]
    if largest is not None and all(each == layout and _is_part(mesh, largest) for each, mesh in pairs):
        ranks = {rank for _, mesh in pairs for rank in mesh.ranks}
        if len(ranks) == largest.size:
            return layout, largest
    return pairs[0] if len(pairs) == 1 else None


@lru_cache(maxsize=4096)
def _is_part(mesh: DeviceMesh, of: DeviceMesh) -> bool:
    """Say whether every rank has the same place on a mesh as on another, along all axes of the first, of one length."""
    lengths = dict(zip(of.axis_names, of.shape, strict=True))
    return all(lengths.get(axis) == n for axis, n in zip(mesh.axis_names, mesh.shape, strict=True)) and all(
        rank in of and mesh.coordinate(rank).items() <= of.coordinate(rank).items() for rank in mesh.ranks
    )


def _map_of(found: Survey) -> LayoutMap:
    """Return recorded layouts as a map; names that differ in numbers alone become one pattern."""
    meshes = list(found.meshes.values()) or [DeviceMesh((1,), ("rank",))]
    layouts = LayoutMap(meshes[0])
    views = {mesh: f"view{i}" for i, mesh in enumerate(meshes) if i}
    for mesh, view in views.items():
        if mesh.ranks != meshes[0].ranks:
            raise LayoutError(
                "the ranks recorded meshes that no single layout file says",
                got=f"{meshes[0].grid} and {mesh.grid}, of different ranks or another order",
                want="meshes of the same ranks in one order",
                next_step="write the layout file by hand",
            )
        layouts.views[view] = mesh
    texts = _texts(found, meshes[0], views)
    layouts.update(_rules(texts))
    try:
        for name in texts:
            layouts.rule_for(name)
    except LayoutError:
        # A name that is a pattern for another as well: escaped, each stands for itself alone.
        layouts.clear()
        layouts.update({re.escape(name): layout for name, layout in texts.items()})
    return layouts


def _texts(found: Survey, mesh: DeviceMesh, views: Mapping[DeviceMesh, str]) -> dict[str, TensorLayout]:
    """Return name -> layout, in the words of a file."""
    texts: dict[str, TensorLayout] = {}
    for one in found.tensors:
        if one.layout is not None and one.mesh is not None:
            tree = one.layout.tree
            layout = one.layout if one.mesh == mesh else TensorLayout.from_tree(replace(tree, view=views[one.mesh]))
        elif len(one.shares) < 2:
            layout = TensorLayout.parse("[" + ", ".join(free_size_names(len(one.shape), mesh.axis_names)) + "]")
        else:
            raise LayoutError(
                f"{one.name}: its ranks recorded no layout that a file can say",
                tensor=one.name,
                got=f"{len(one.shares)} parts",
                next_step="write the layout file by hand",
            )
        texts[one.name] = layout
    return texts


def _rules(texts: Mapping[str, TensorLayout]) -> dict[str, TensorLayout]:
    kinds: dict[str, list[str]] = {}
    for name in texts:
        kinds.setdefault(re.sub(r"[0-9]+", "0", name), []).append(name)
    rules: dict[str, TensorLayout] = {}
    for names in kinds.values():
        pattern = re.sub(r"[0-9]+", "[0-9]+", names[0])
        # Dots stay as they are, which people can read; whatever else a pattern might mean keeps its names one by one.
        if len(names) > 1 and len({texts[name] for name in names}) == 1 and _PLAIN.fullmatch(names[0]):
            alike = re.compile(pattern)
            if sum(alike.fullmatch(name) is not None for name in texts) == len(names):
                rules[pattern] = texts[names[0]]
                continue
        rules.update((name if _PLAIN.fullmatch(name) else re.escape(name), texts[name]) for name in names)
    return rules
