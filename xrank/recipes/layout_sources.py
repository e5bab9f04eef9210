"""Sources of layouts: a layout file, or the records in a workspace's states; a model folder is one piece."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial

from msgspec import Struct
from msgspec.structs import replace

from xrank.engine.holdings import Holdings, Survey, apply_layout, apply_pieces, compute_shapes, survey
from xrank.errors import LayoutError, UsageError, option
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_map import Companion, LayoutFile, to_text
from xrank.layout.notation import with_sizes
from xrank.layout.stored_model import StatedLayout, StoredModel, StoredShard
from xrank.layout.tensor_layout import free_size_names
from xrank.layout.tensor_name import compile_pattern, has_groups, parse_name
from xrank.readers.discovery import find_source
from xrank.recipes.decision import read_layouts
from xrank.recipes.found_source import BaseModel
from xrank.recipes.sources import read_source
from xrank.storage import places
from xrank.storage.places import rank_of

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
"""Names that match themselves as patterns, and little else."""


def survey_stored(stored: StoredModel) -> Survey:
    """Return the holdings of all ranks for a model that was read with `Hints.needs_layouts`."""
    stated = _collect_stated(stored)
    # Where names have dims, ranks use one local name for different tensors, so that these are drawn together.
    groups: dict[DeviceMesh, dict[str, StatedLayout]] = {}
    for name, stated_one in stated.items():
        if stated_one.pattern is not None and stated_one.companion is None:
            groups.setdefault(stated_one.mesh, {})[name] = stated_one
    known = {shard.name: shard for shard in stored.shards}
    drawn: dict[str, Holdings] = {}
    for mesh, group in groups.items():
        layouts = LayoutMap(mesh)
        layouts.update({str(one.pattern): one.layout for one in group.values()})
        of_group = [shard for name, shard in known.items() if name in group]
        found = survey(layouts, {s.name: s.shape for s in of_group}, dtypes={s.name: s.dtype for s in of_group})
        drawn.update((one.name, replace(one, rule=None)) for one in found.tensors)
    tensors = tuple(drawn.get(shard.name) or _draw(shard, stated.get(shard.name)) for shard in stored.shards)
    grids = dict.fromkeys(one.mesh for one in tensors if one.mesh is not None)
    names = ["mesh"] if len(grids) == 1 else [f"mesh {i}" for i in range(len(grids))]
    views = {f"view {one.layout.tree.view}": one.layout.view_mesh for one in tensors if one.layout is not None}
    told = {name: view for name, view in views.items() if view is not None}
    return Survey({**dict(zip(names, grids, strict=True)), **told}, {}, tensors)


def survey_pieces(stored: StoredModel) -> Survey:
    """Return the holdings of all ranks by a model's pieces, those that are lost too."""
    found = []
    for shard in stored.shards:
        lost = sorted(set(shard.rank[stored.records.is_lost(shard.record)].tolist()))
        found.append(replace(_draw(shard, None), lost=tuple(lost)))
    return Survey({}, {}, tuple(found))


def make_layout_map(stored: StoredModel) -> LayoutMap:
    """Return the recorded layouts as a map, for a file; names that differ only in numbers become one pattern."""
    stated = _collect_stated(stored)
    meshes = list(dict.fromkeys(one.mesh for one in stated.values()))
    # Meshes of other ranks, as some experts' are, have no place in a file with the first mesh.
    meshes = [mesh for mesh in meshes if mesh.ranks == meshes[0].ranks]
    stated = {name: one for name, one in stated.items() if one.mesh in meshes}
    rest = [shard for shard in stored.shards if shard.name not in stated and shard.name not in stored.aliases]
    inferred: dict[str, str] = {}
    if any(len({*shard.rank.tolist()}) > 1 for shard in rest):
        from xrank.recipes.inferred_layouts import infer_layouts  # most sources record their layouts

        mesh, inferred = infer_layouts(stored, rest, meshes[0] if meshes else None)
        meshes = meshes or [mesh]
    meshes = meshes or [DeviceMesh((1,), ("rank",))]
    layouts = LayoutMap(meshes[0])
    views = _views(meshes, stated.values(), layouts)
    rules: dict[str, TensorLayout | Companion] = {}
    texts: dict[str, TensorLayout | Companion] = {}
    for shard in stored.shards:
        one, text = stated.get(shard.name), inferred.get(shard.name)
        if text == "":  # a member of another one's flat buffer
            continue
        if one is None and shard.name in stored.aliases:
            layouts.aliases[shard.name] = stored.aliases[shard.name]
            continue
        layout = TensorLayout.parse(text) if text is not None else _file_layout(shard, one, meshes[0], views)
        if text is not None and text.startswith("flat("):
            rules[f"flat.{shard.name}"] = layout
        elif one is None or one.pattern is None:
            texts[shard.name] = layout
        else:
            rules[str(one.pattern)] = layout
    _fill(layouts, rules | _rules(texts))
    try:
        for shard in stored.shards:
            layouts.rule_for(shard.name), layouts.companion_rule_for(shard.name)
    except LayoutError:
        # A name is also a pattern for another name: escaped, each name matches itself alone.
        _fill(layouts, rules | {re.escape(name): layout for name, layout in texts.items()})
    return layouts


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
    largest = max(meshes, key=lambda mesh: mesh.size)
    found = ((name, _choose_layout(stated, largest)) for name, stated in stored.layouts.items())
    return {name: one for name, one in found if one is not None}


def _choose_layout(stated: Sequence[StatedLayout], largest: DeviceMesh) -> StatedLayout | None:
    """Return the layout on the largest mesh if its sub-meshes all state the same layout, else the only one stated.

    A DTensor that an axis does not cut lies on sub-meshes without that axis. On the whole mesh, these are replicas.
    """
    first = stated[0]
    bare = replace(first.layout.tree, where=(), sums=(), view=None)
    is_whole = not any(first.layout.cut_axes) and first.layout.tree == bare
    if len(stated) == 1 and is_whole and set(first.mesh.ranks) == set(largest.ranks):
        return replace(first, mesh=largest)  # every rank has the whole tensor, whatever the axis names are
    if first.layout.tree.view is None and all(
        replace(each, mesh=first.mesh) == first and _is_part(each.mesh, largest) for each in stated
    ):
        ranks = {rank for each in stated for rank in each.mesh.ranks}
        if len(ranks) == largest.size:
            return replace(first, mesh=largest)
    return first if len(stated) == 1 else None


@lru_cache(maxsize=4096)
def _is_part(mesh: DeviceMesh, of: DeviceMesh) -> bool:
    """Return whether a mesh's axes have equal lengths on another, and its ranks equal coordinates along these axes."""
    lengths = dict(zip(of.axis_names, of.shape, strict=True))
    return all(lengths.get(axis) == n for axis, n in zip(mesh.axis_names, mesh.shape, strict=True)) and all(
        rank in of and mesh.coordinate(rank).items() <= of.coordinate(rank).items() for rank in mesh.ranks
    )


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
    return TensorLayout.parse("[" + ", ".join(free_size_names(len(shard.shape), mesh.axis_names)) + "]")


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


class LayoutSource(Struct, frozen=True):
    """Layouts at a path, and the part of each tensor on each rank by them."""

    path: str
    format: str
    survey: Survey
    as_map: Callable[[], LayoutMap]
    """Returns the layouts as a map, for a file to start from."""
    notes: tuple[tuple[str, str], ...] = ()


def is_layout_file(path: str) -> bool:
    """Return whether a path is a layout file: a file that neither a rank nor a model writer wrote."""
    name = os.path.basename(path)
    return places.is_file(path) and rank_of(name) is None and not name.endswith(".safetensors")


def read_layout_source(path: str) -> LayoutSource:
    """Read the layouts at a path: a layout file's, drawn as far as it has sizes, or those that a source records."""
    if not is_layout_file(path):
        place, stored = read_stored(path)
        return LayoutSource(place, stored.format, survey_stored(stored), partial(make_layout_map, stored))
    layouts = read_layouts(path)
    shapes, untold = compute_shapes(layouts)
    found = survey(layouts, shapes)
    # A rule without sizes is not unused: it decides for tensors that the file does not name.
    found = replace(found, unused=tuple(rule for rule in found.unused if rule not in untold))
    notes = tuple(
        ("no-shape", f"the rule {rule!r} = {found.rules[rule]} is not drawn: {reason}")
        for rule, reason in untold.items()
    )
    return LayoutSource(path, "layout file", found, lambda: layouts, notes)


def read_stored(path: str, layouts: LayoutMap | None = None, base: BaseModel | None = None) -> tuple[str, StoredModel]:
    """Read the source at a path, only its metadata; `layouts` and `base` serve where its ranks record no layouts."""
    where = find_source(path)
    try:
        return where.path, read_source(path, where, for_layouts=True).model
    except LayoutError as error:
        if layouts is None and base is None:
            error.advise("describe it in a layout file, and run: xrank layout check FILE PATH")
            raise
        return where.path, read_source(path, where, base=base, layouts=layouts, for_layouts=True).model


def filter_tensors(found: Survey, pattern: str | None) -> Survey:
    """Return the survey of the tensors whose whole names a regular expression matches."""
    if pattern is None:
        return found
    try:
        expression = compile_pattern(pattern)
    except ValueError as error:
        raise UsageError(
            f"{option('tensor')} must be a regular expression: {error}",
            got=repr(pattern),
            next_step="escape characters that are meant literally",
        ) from None
    tensors = tuple(one for one in found.tensors if expression.fullmatch(one.name))
    if not tensors:
        first = f"name one, such as {found.tensors[0].name!r}" if found.tensors else f"leave {option('tensor')} out"
        problem = f"{option('tensor')} matches none of {len(found.tensors)} tensors"
        raise UsageError(problem, got=repr(pattern), want="a regular expression for whole names", next_step=first)
    return replace(found, tensors=tensors, unmatched=tuple(n for n in found.unmatched if expression.fullmatch(n)))


def layouts_at(path: str, layouts: LayoutMap | None = None, base: BaseModel | None = None) -> LayoutMap:
    """Return the layouts at a path as a map, for a file to start from or a comparison."""
    return read_layouts(path) if is_layout_file(path) else make_layout_map(read_stored(path, layouts, base)[1])


def with_numbers(layouts: LayoutMap) -> LayoutMap:
    """Return the map with numbers in place of the names that its sizes define, as ranks record it."""
    found = LayoutMap(layouts.device_mesh)
    found.views.update(layouts.views)
    found.aliases.update(layouts.aliases)
    names = {
        rule: str(parse_name(rule).with_sizes(layouts.sizes)) if has_groups(rule) else rule
        for rule in (*layouts, *layouts.companions)
    }
    for rule, layout in layouts.items():
        found[names[rule]] = None if layout is None else layout.with_sizes(layouts.sizes)
    for rule, companion in layouts.companions.items():
        base = None if companion.base is None else with_sizes(companion.base, layouts.sizes)
        of = None if companion.of is None else names[companion.of]
        found.companions[names[rule]] = replace(companion, of=of, base=base)
    return found


def file_text(layouts: LayoutMap) -> str:
    """Return a map as the text of a layout file."""
    rules = {rule: str(value) for rule, value in (*layouts.items(), *layouts.companions.items())}
    return to_text(LayoutFile(layouts.device_mesh, layouts.views, layouts.sizes, rules, layouts.aliases))
