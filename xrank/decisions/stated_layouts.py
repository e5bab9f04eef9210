"""The holdings of a stored model by the layouts that its ranks recorded, and the layout map that states the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.companion import Companion
from xrank.layout.tensor_layout import free_size_names
from xrank.plan.holdings import Holdings, Survey, apply_layout, apply_pieces, survey
from xrank.plan.source import StatedLayout, StoredModel, StoredShard

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
"""Names that match themselves as patterns, and little else."""


def survey_stored(stored: StoredModel) -> Survey:
    """Return the holdings of all ranks for a model that was read with `Hints.needs_layouts`."""
    stated = _collect_stated(stored)
    drawn = _draw_by_names(stored.shards, stated)
    tensors = tuple(drawn.get(shard.name) or _draw(shard, stated.get(shard.name)) for shard in stored.shards)
    grids = dict.fromkeys(one.mesh for one in tensors if one.mesh is not None)
    names = ["mesh"] if len(grids) == 1 else [f"mesh {i}" for i in range(len(grids))]
    views = {f"view {one.layout.tree.view}": one.layout.view_mesh for one in tensors if one.layout is not None}
    told = {name: view for name, view in views.items() if view is not None}
    return Survey({**dict(zip(names, grids, strict=True)), **told}, {}, tensors)


def make_layout_map(stored: StoredModel) -> LayoutMap:
    """Return the recorded layouts as a map, for a file; names that differ only in numbers become one pattern.

    Raises:
        LayoutError: no single layout file can express the layouts.
    """
    stated = _collect_stated(stored)
    meshes = list(dict.fromkeys(one.mesh for one in stated.values())) or [DeviceMesh((1,), ("rank",))]
    layouts = LayoutMap(meshes[0])
    views = _views(meshes, stated.values(), layouts)
    rules: dict[str, TensorLayout | Companion] = {}
    texts: dict[str, TensorLayout | Companion] = {}
    for shard in stored.shards:
        one = stated.get(shard.name)
        layout = _file_layout(shard, one, meshes[0], views)
        (texts if one is None or one.pattern is None else rules)[_key(shard.name, one)] = layout
    _fill(layouts, rules | _rules(texts))
    try:
        for shard in stored.shards:
            layouts.rule_for(shard.name), layouts.companion_rule_for(shard.name)
    except LayoutError:
        # A name is also a pattern for another name: escaped, each name matches itself alone.
        _fill(layouts, rules | {re.escape(name): layout for name, layout in texts.items()})
    return layouts


def _key(name: str, stated: StatedLayout | None) -> str:
    return name if stated is None or stated.pattern is None else str(stated.pattern)


def _fill(layouts: LayoutMap, rules: Mapping[str, TensorLayout | Companion]) -> None:
    layouts.clear()
    layouts.companions.clear()
    for rule, value in rules.items():
        if isinstance(value, Companion):
            layouts.companions[rule] = value
        else:
            layouts[rule] = value


def _collect_stated(stored: StoredModel) -> dict[str, StatedLayout]:
    """Return name -> the layout that its ranks recorded, where one layout covers all of them."""
    meshes = dict.fromkeys(one.mesh for found in stored.layouts.values() for one in found)
    if not meshes:
        return {}
    largest = max(meshes, key=_size)
    found = {name: _choose_layout(stated, largest) for name, stated in stored.layouts.items()}
    return {name: one for name, one in found.items() if one is not None}


def _size(mesh: DeviceMesh) -> int:
    return mesh.size


def _choose_layout(stated: Sequence[StatedLayout], largest: DeviceMesh) -> StatedLayout | None:
    """Return the layout on the largest mesh if its sub-meshes all state the same layout, else the only one stated.

    A DTensor that an axis does not cut lies on sub-meshes without that axis. On the whole mesh, these are replicas.
    """
    first = stated[0]
    if len(stated) == 1 and _is_whole(first.layout) and set(first.mesh.ranks) == set(largest.ranks):
        return replace(first, mesh=largest)  # every rank has the whole tensor, whatever the axis names are
    if first.layout.tree.view is None and all(
        replace(each, mesh=first.mesh) == first and _is_part(each.mesh, largest) for each in stated
    ):
        ranks = {rank for each in stated for rank in each.mesh.ranks}
        if len(ranks) == largest.size:
            return replace(first, mesh=largest)
    return first if len(stated) == 1 else None


def _is_whole(layout: TensorLayout) -> bool:
    return not any(layout.cut_axes) and layout.tree == replace(layout.tree, where=(), sums=(), view=None)


@lru_cache(maxsize=4096)
def _is_part(mesh: DeviceMesh, of: DeviceMesh) -> bool:
    """Return whether a mesh's axes have equal lengths on another, and its ranks equal coordinates along these axes."""
    lengths = dict(zip(of.axis_names, of.shape, strict=True))
    return all(lengths.get(axis) == n for axis, n in zip(mesh.axis_names, mesh.shape, strict=True)) and all(
        rank in of and mesh.coordinate(rank).items() <= of.coordinate(rank).items() for rank in mesh.ranks
    )


def _draw_by_names(shards: Sequence[StoredShard], stated: Mapping[str, StatedLayout]) -> dict[str, Holdings]:
    """Return the holdings of tensors whose names have dims: ranks use one local name for different tensors."""
    groups: dict[DeviceMesh, dict[str, StatedLayout]] = {}
    for shard in shards:
        one = stated.get(shard.name)
        if one is not None and one.pattern is not None and one.companion is None:
            groups.setdefault(one.mesh, {})[shard.name] = one
    known = {shard.name: shard for shard in shards}
    drawn: dict[str, Holdings] = {}
    for mesh, names in groups.items():
        layouts = LayoutMap(mesh)
        layouts.update({str(one.pattern): one.layout for one in names.values()})
        shapes = {name: known[name].shape for name in names}
        found = survey(layouts, shapes, dtypes={name: known[name].dtype for name in names})
        drawn.update((one.name, replace(one, rule=None)) for one in found.tensors)
    return drawn


def _draw(shard: StoredShard, stated: StatedLayout | None) -> Holdings:
    start = Holdings(shard.name, shard.shape, shard.dtype)
    if stated is not None and stated.companion is None:
        return apply_layout(start, stated.layout, stated.mesh)
    held: dict[int, list[int]] = {}
    for row, rank in enumerate(shard.rank.tolist()):
        held.setdefault(rank, []).append(row)
    found = apply_pieces(start, {rank: tuple(shard.nests[row] for row in rows) for rank, rows in held.items()})
    return found if stated is None else replace(found, mesh=stated.mesh, text=str(stated.companion))


def _views(meshes: Sequence[DeviceMesh], stated: Iterable[StatedLayout], layouts: LayoutMap) -> dict[DeviceMesh, str]:
    """Add all meshes but the first to the map as views of it, and return their names."""
    views: dict[DeviceMesh, str] = {}
    own = [(one.layout.view_mesh, one.layout.tree.view) for one in stated if one.layout.view_mesh is not None]
    for mesh, name in dict.fromkeys([*own, *((mesh, None) for mesh in meshes[1:])]):
        if mesh.ranks != meshes[0].ranks:
            raise LayoutError(
                "the ranks recorded meshes that no single layout file says",
                got=f"{meshes[0].grid} and {mesh.grid}, of different ranks or another order",
                want="meshes of the same ranks in one order",
                next_step="write the layout file by hand",
            )
        if mesh != meshes[0] and mesh not in views:
            free = (text for text in (name, *(f"view{i}" for i in range(1, len(views) + 2))) if text is not None)
            views[mesh] = next(text for text in free if text not in layouts.views)
            layouts.views[views[mesh]] = mesh
    return views


def _file_layout(
    shard: StoredShard, stated: StatedLayout | None, mesh: DeviceMesh, views: Mapping[DeviceMesh, str]
) -> TensorLayout | Companion:
    """Return a tensor's layout as a file with that mesh and these views states it."""
    if stated is not None:
        own = stated.layout.view_mesh or stated.mesh
        tree = replace(stated.layout.tree, view=None if own == mesh else views[own])
        if stated.companion is not None:
            return replace(stated.companion, base=tree)
        return TensorLayout.from_tree(tree)
    if len(set(shard.rank.tolist())) < 2:
        return TensorLayout.parse("[" + ", ".join(free_size_names(len(shard.shape), mesh.axis_names)) + "]")
    raise LayoutError(
        f"{shard.name}: its ranks recorded no layout that a file can say",
        tensor=shard.name,
        got=f"{len(set(shard.rank.tolist()))} parts",
        next_step="write the layout file by hand",
    )


def _rules(texts: Mapping[str, TensorLayout | Companion]) -> dict[str, TensorLayout | Companion]:
    kinds: dict[str, list[str]] = {}
    for name in texts:
        kinds.setdefault(re.sub(r"[0-9]+", "0", name), []).append(name)
    rules: dict[str, TensorLayout | Companion] = {}
    for names in kinds.values():
        pattern = re.sub(r"[0-9]+", "[0-9]+", names[0])
        # Dots stay unescaped, for readable patterns. Names with other special characters get one rule each.
        if len(names) > 1 and len({texts[name] for name in names}) == 1 and _PLAIN.fullmatch(names[0]):
            alike = re.compile(pattern)
            if sum(alike.fullmatch(name) is not None for name in texts) == len(names):
                rules[pattern] = texts[names[0]]
                continue
        rules.update((name if _PLAIN.fullmatch(name) else re.escape(name), texts[name]) for name in names)
    return rules
