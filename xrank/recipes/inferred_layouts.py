"""Layouts that a checkpoint's ranks do not record, found from the pieces of tensors and proven by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import permutations, product
from math import prod

import numpy as np

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.coverage import find_fault
from xrank.layout.local_part import LocalPart, local_part
from xrank.layout.mesh_parts import flat_part
from xrank.layout.nest_table import NestTable
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.layout.tensor_layout import free_size_names

_MAX_AXES = 3
_SAVED_ONCE = ("dcp", "megatron-dist")
"""Formats in which one rank alone saves a part that several ranks hold."""


def infer_layouts(
    stored: StoredModel, shards: Sequence[StoredShard], mesh: DeviceMesh | None
) -> tuple[DeviceMesh, dict[str, str]]:
    """Return a mesh and the rules of tensors without recorded layouts; the mesh is the given one, if any is recorded.

    Of several layouts by which ranks would have the same pieces, each tensor gets the one that fits most tensors.
    LayoutError if no mesh of up to three axes fits all of them.
    """
    # The ranks that saved anything; None where one rank alone saves a part that several have.
    saving = None if stored.format in _SAVED_ONCE else {rank for shard in shards for rank in shard.rank.tolist()}
    num_ranks = 1 + max((int(shard.rank.max()) for shard in shards if len(shard.rank)), default=0)
    num_ranks = max(num_ranks, stored.world_size or 1) if saving is None else num_ranks
    failed = ""
    for candidate in [mesh] if mesh is not None else _meshes(num_ranks):
        fits: dict[str, dict[tuple[object, ...], str]] = {}
        alike: dict[object, dict[tuple[object, ...], str]] = {}
        for shard in shards:
            key = shard.shape, shard.rank.tobytes(), shard.nests.y.tobytes(), shard.nests.loops.tobytes()
            if key not in alike:
                alike[key] = dict(_fitting(shard, candidate, saving))
            fits[shard.name] = alike[key] or dict(_flat([shard], candidate))
            if not fits[shard.name] and stored.format != "deepspeed":
                break
        for group in _flat_groups(shards) if stored.format == "deepspeed" else ():
            for rule in () if all(fits[one.name] for one in group) else _flat(group, candidate).values():
                fits.update((one.name, {("flat",): rule if one is group[0] else ""}) for one in group)
        failed = next((name for name, found in fits.items() if not found), "")
        if not failed:
            votes = Counter(key for found in fits.values() for key in found)
            return candidate, {name: found[max(found, key=votes.__getitem__)] for name, found in fits.items()}
    raise LayoutError(
        f"{failed}: no layout of up to {_MAX_AXES} axes gives ranks the pieces that they saved",
        tensor=failed,
        got=f"pieces of {num_ranks} ranks",
        next_step="write the layout file by hand",
    )


def _meshes(num_ranks: int) -> Iterator[DeviceMesh]:
    for count in range(1, _MAX_AXES + 1):
        for lengths in product((n for n in range(1, num_ranks + 1) if num_ranks % n == 0), repeat=count):
            if prod(lengths) == num_ranks and (count == 1 or 1 not in lengths):
                yield DeviceMesh(lengths, tuple(f"a{i}" for i in range(count)))


def _held(shard: StoredShard) -> dict[int, NestTable]:
    """Return rank -> its pieces; records of one rank may repeat a piece."""
    return {rank: shard.nests.take(np.flatnonzero(shard.rank == rank)) for rank in sorted({*shard.rank.tolist()})}


def _fitting(
    shard: StoredShard, mesh: DeviceMesh, saving: Collection[int] | None
) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield (axes by dim, rule) of the layouts by which the ranks have these pieces."""
    held, dims = _held(shard), range(len(shard.shape))
    ranks = held if saving is None else saving
    names = free_size_names(len(shard.shape), mesh.axis_names)
    places = [mesh.coordinate(rank) for rank in held]
    where = [axis for axis in mesh.axis_names if saving is not None and len({place[axis] for place in places}) == 1]
    where = [axis for axis in where if mesh.axis_length(axis) > 1]
    clause = f" where {', '.join(f'{axis}={places[0][axis]}' for axis in where)}" if where and held else ""
    free = [axis for axis in mesh.axis_names if axis not in where]
    num_parts = {1, max((len(table) for table in held.values()), default=1)}
    for used in (order for count in range(len(free) + 1) for order in permutations(free, count)):
        for cut in product(dims, repeat=len(used)):
            axes = [[axis for axis, dim in zip(used, cut, strict=True) if dim == d] for d in dims]
            for count in sorted(num_parts):
                terms = [_dim(*one, count) for one in zip(names, shard.shape, axes, strict=True)]
                rule = f"[{', '.join(filter(None, terms))}]{clause}"
                layout = TensorLayout.parse(rule)
                parts = ((rank, local_part(layout, mesh, mesh.coordinate(rank), shard.shape)) for rank in ranks)
                if None not in terms and all(_is_same(held.get(rank), part, prod(shard.shape)) for rank, part in parts):
                    yield tuple(map(tuple, axes)), rule


def _dim(name: str, size: int, axes: Sequence[str], count: int) -> str | None:
    cuts = "".join(f"/~{axis}" for axis in axes)
    if not axes or count == 1:
        return name + cuts
    if size % count:
        return None
    return f"<{' | '.join(f'p{i}: {size // count}{cuts}' for i in range(count))}>"  # projections side by side


def _is_same(table: NestTable | None, part: LocalPart | None, num_elements: int) -> bool:
    nests = () if part is None else part.nests
    if table is None or not nests:
        return table is None and not nests
    return find_fault(table, num_elements, NestTable.from_nests(nests)) is None


def _flat_groups(shards: Sequence[StoredShard]) -> list[list[StoredShard]]:
    """Return the tensors that lie in the same records, in the order in which they lie there."""
    groups: list[tuple[set[int], list[StoredShard]]] = []
    for shard in shards:
        own = {*shard.record.tolist()}
        joined = [group for group in groups if group[0] & own]
        groups = [group for group in groups if not group[0] & own]
        groups.append((own.union(*(g[0] for g in joined)), [one for g in joined for one in g[1]] + [shard]))

    def place(shard: StoredShard) -> tuple[int, int]:
        return min(zip(shard.rank.tolist(), shard.nests.x.tolist(), strict=True), default=(0, 0))

    return [sorted(group, key=place) for _, group in groups]


def _flat(group: Sequence[StoredShard], mesh: DeviceMesh) -> dict[tuple[object, ...], str]:
    """Return the rule of a flat buffer of these tensors, as ZeRO cuts them; empty if none fits."""
    members = ", ".join(f"{one.name} {list(one.shape)}" for one in group)
    shapes, held = {one.name: one.shape for one in group}, {one.name: _held(one) for one in group}
    pads = ("", "/~"), (f", pad {2 * mesh.size}", "/"), (f", pad {mesh.size}", "/")
    for pad, cut in pads if len(mesh.shape) == 1 else ():
        rule = f"flat({members}{pad}){cut}{mesh.axis_names[0]}"
        for rank in mesh.ranks:
            part = flat_part(TensorLayout.parse(rule), mesh, mesh.coordinate(rank), shapes)
            own = {} if part is None else {name: LocalPart((), nests) for name, nests in part.members.items()}
            if not all(_is_same(held[name].get(rank), own.get(name), prod(shape)) for name, shape in shapes.items()):
                break
        else:
            return {("flat",): rule}
    return {}
