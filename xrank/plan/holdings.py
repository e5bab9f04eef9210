"""Holdings: which ranks hold which part of each tensor, by a layout map and the tensors' shapes; nothing is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.binding import checked_shape
from xrank.layout.companion import companion_part, companion_shape
from xrank.layout.flat import FlatPart, flat_of, flat_part
from xrank.layout.local_part import local_part
from xrank.layout.nests import Nest, canonical, size
from xrank.layout.tensor_name import NameTable, name_table
from xrank.plan.misfit import Misfit, find_misfit

__all__ = ["Holdings", "Share", "Survey", "held_by_layout", "held_by_pieces", "held_nbytes", "shared", "survey"]


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a tensor, and all ranks that hold just it."""

    ranks: tuple[int, ...]
    """Rising; replicas of each other where there are several."""
    nests: tuple[Nest, ...]
    """y is the row-major address in the tensor's global shape."""
    shape: tuple[int, ...] | None = None
    """Local shape, pads included; None where the part lies in a flat buffer or in a file."""
    num_pads: int = 0
    """Local elements that stand for none of the tensor's."""

    @property
    def num_elements(self) -> int:
        """Elements of the tensor in this part."""
        return sum(map(size, self.nests))


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who holds what of one tensor."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: str | None = None
    rule: str | None = None
    """The key of the layout map that decided; None without one."""
    layout: TensorLayout | None = None
    mesh: DeviceMesh | None = None
    text: str | None = None
    """The layout, or how it follows from another tensor's, as the layout file says it."""
    shares: tuple[Share, ...] = ()
    """By their lowest rank."""
    absent: tuple[int, ...] = ()
    """Ranks of the mesh that do not have the tensor at all."""
    sums: tuple[str, ...] = ()
    """Axes along which the ranks hold addends."""
    misfit: Misfit | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes by name that the shape does not tell."""
    problem: LayoutError | None = None
    """Why nothing more is known."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Who holds what of every tensor."""

    meshes: Mapping[str, DeviceMesh]
    """``"mesh"`` and ``"view NAME"``."""
    rules: Mapping[str, str]
    tensors: tuple[Holdings, ...]
    unmatched: tuple[str, ...] = ()
    """Tensors that no rule decides for."""
    unused: tuple[str, ...] = ()
    """Rules that decide for no tensor."""


def survey(
    layouts: LayoutMap, shapes: Mapping[str, Sequence[int]], *, dtypes: Mapping[str, str] | None = None
) -> Survey:
    """Return who holds what of the tensors with these global shapes; what is wrong is told, not raised.

    Args:
        layouts: how each is cut; with a mesh.
        shapes: global shape by name. A flat buffer's members are tensors like others.
        dtypes: safetensors name of the element type, by name.
    """
    compiler = _Compiler(layouts, {name: checked_shape(shape) for name, shape in shapes.items()})
    found = []
    for name, shape in compiler.shapes.items():
        start = Holdings(name, shape, (dtypes or {}).get(name), sizes=layouts.sizes)
        try:
            found.append(compiler.holdings(start))
        except LayoutError as error:
            error.tensor = name
            if not error.message.startswith(name):
                error.message = f"{name}: {error.message}"
            found.append(replace(start, rule=compiler.rules.get(name), problem=error))
    texts = {pattern: str(value) for pattern, value in (*layouts.items(), *layouts.companions.items())}
    meshes = {} if layouts.device_mesh is None else {"mesh": layouts.device_mesh}
    meshes.update((f"view {name}", view) for name, view in layouts.views.items())
    used = set(compiler.rules.values())
    return Survey(
        meshes,
        texts,
        tuple(found),
        tuple(one.name for one in found if one.rule is None and one.problem is None),
        tuple(rule for rule in texts if rule not in used),
    )


class _Compiler:
    """Finds each tensor's rule, and compiles what every rank holds by it."""

    def __init__(self, layouts: LayoutMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.layouts, self.shapes = layouts, shapes
        self.rules: dict[str, str] = {}
        """Name -> the rule that decided."""
        self._sizes = tuple(layouts.sizes.items())
        self._tables: dict[tuple[str, int], NameTable | None] = {}
        self._flats: dict[str, dict[int, FlatPart]] = {}
        self._members: dict[str, list[str]] = {}
        for rule, layout in layouts.items():
            flat = None if layout is None else flat_of(layout)
            for member in () if flat is None else flat.members:
                self._members.setdefault(member.name, []).append(rule)

    def holdings(self, start: Holdings) -> Holdings:
        """Return who holds what of one tensor; without a rule where none decides."""
        name = start.name
        rule, member_of = self.layouts.rule_for(name), self._members.get(name, [])
        companion = self.layouts.companion_rule_for(name)
        if rule is None and companion is None and not member_of and name in self.layouts.aliases:
            rule = self.layouts.rule_for(self.layouts.aliases[name])
        deciding = [each for each in (rule, companion, *member_of) if each is not None]
        if len(deciding) > 1:
            raise LayoutError(
                f"{name}: several rules decide for it", got=str(deciding), want="one", next_step="keep one of them"
            )
        if not deciding:
            return start
        self.rules[name] = deciding[0]
        if companion is not None:
            return self._companion(replace(start, rule=companion))
        layout = self.layouts[deciding[0]]
        assert layout is not None
        start = replace(start, rule=deciding[0], layout=layout, mesh=self._mesh(layout), text=str(layout))
        if member_of:
            return self._flat(start, layout)
        if self.layouts.name_of(deciding[0]) is not None and name not in self.layouts.aliases:
            return self._named(start, layout)
        return _with(start, *_compiled(layout, self._mesh(layout), start.shape, self._sizes))

    def _mesh(self, layout: TensorLayout) -> DeviceMesh:
        mesh = layout.device_mesh or self.layouts.device_mesh
        if mesh is None:
            raise LayoutError(
                "nothing says the mesh of its ranks",
                got=str(layout),
                next_step='add a table like [mesh] with grid = "dp=2 tp=2" to the layout file',
            )
        return mesh

    def _named(self, start: Holdings, layout: TensorLayout) -> Holdings:
        """A tensor whose leading dims stand in its name: only ranks that hold its index have it."""
        mesh = self._mesh(layout)
        shares, _, sums, _ = _compiled(layout, mesh, start.shape, self._sizes)
        having = {rank for rank in mesh.ranks if self._has(start, layout, mesh, rank)}
        kept = []
        for share in shares:
            ranks = tuple(rank for rank in share.ranks if rank in having)
            if ranks:
                kept.append(replace(share, ranks=ranks))
        absent = _absent(mesh, kept)
        return _with(start, tuple(kept), absent, sums, _misfit_of(kept, start.shape))

    def _has(self, start: Holdings, layout: TensorLayout, mesh: DeviceMesh, rank: int) -> bool:
        key = start.rule or "", rank
        if key not in self._tables:
            name = self.layouts.name_of(key[0])
            assert name is not None
            self._tables[key] = name_table(name, layout, mesh, mesh.coordinate(rank), sizes=self.layouts.sizes)
        table = self._tables[key]
        return table is not None and table.local_name(start.name) is not None

    def _flat(self, start: Holdings, layout: TensorLayout) -> Holdings:
        mesh, flat = self._mesh(layout), flat_of(layout)
        assert flat is not None
        is_last = flat.members[-1].name == start.name
        found: dict[tuple[tuple[Nest, ...], int], list[int]] = {}
        sums: tuple[str, ...] = ()
        for rank, part in self._flat_parts(start.rule or "", layout, mesh).items():
            # The buffer's padding comes after the last member, and is told with it.
            pads = part.size - sum(size(nest) for nests in part.members.values() for nest in nests) if is_last else 0
            sums = part.sums
            if part.members[start.name] or pads:
                found.setdefault((part.members[start.name], pads), []).append(rank)
        shares = [Share(tuple(sorted(ranks)), nests, None, pads) for (nests, pads), ranks in found.items()]
        shares.sort(key=lambda share: share.ranks)
        return _with(start, tuple(shares), _absent(mesh, shares), sums, _misfit_of(shares, start.shape))

    def _flat_parts(self, rule: str, layout: TensorLayout, mesh: DeviceMesh) -> dict[int, FlatPart]:
        if rule not in self._flats:
            parts = {
                rank: flat_part(layout, mesh, mesh.coordinate(rank), self.shapes, sizes=self.layouts.sizes)
                for rank in mesh.ranks
            }
            self._flats[rule] = {rank: part for rank, part in parts.items() if part is not None}
        return self._flats[rule]

    def _companion(self, start: Holdings) -> Holdings:
        companion = self.layouts.companions[start.rule or ""]
        text = str(companion)
        if companion.of is not None:
            layout = self.layouts[companion.of]
            assert layout is not None
            bases = {
                shape
                for name, shape in self.shapes.items()
                if self.layouts.rule_for(name) == companion.of and _follows(companion_shape, companion, shape, start)
            }
        else:
            assert companion.base is not None
            layout = TensorLayout.from_tree(companion.base)
            if self.layouts.device_mesh is not None:
                layout = layout.with_mesh(self.layouts.device_mesh, self.layouts.views)
            factors = companion.blocks or tuple(
                companion.factor if i == companion.dim else 1 for i in range(len(start.shape))
            )
            bases = {tuple(n * factor for n, factor in zip(start.shape, factors, strict=True))}
        if len(bases) != 1:
            raise LayoutError(
                f"{start.name}: no single shape of its base follows from {text}",
                got=f"{list(start.shape)}; bases {sorted(map(list, bases))[:4]}",
                want="one tensor, or several of one shape, that it belongs to",
                next_step="give the base's rule for these tensors alone",
            )
        mesh, base = self._mesh(layout), bases.pop()
        parts = {
            rank: companion_part(companion, layout, mesh, mesh.coordinate(rank), base, sizes=self.layouts.sizes)
            for rank in mesh.ranks
        }
        shares = shared({rank: (part.nests, part.shape) for rank, part in parts.items() if part is not None})
        start = replace(start, mesh=mesh, text=text)
        return _with(start, shares, _absent(mesh, shares), layout.tree.sums, _misfit_of(shares, start.shape))


def _follows(shape_of: Callable[..., tuple[int, ...]], companion: object, base: tuple[int, ...], of: Holdings) -> bool:
    try:
        return shape_of(companion, base) == of.shape
    except LayoutError:
        return False


@lru_cache(maxsize=1024)
def _compiled(
    layout: TensorLayout, mesh: DeviceMesh, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[tuple[Share, ...], tuple[int, ...], tuple[str, ...], Misfit | None]:
    parts = {rank: local_part(layout, mesh, mesh.coordinate(rank), shape, sizes=dict(sizes)) for rank in mesh.ranks}
    shares = shared({rank: (part.nests, part.shape) for rank, part in parts.items() if part is not None})
    return shares, _absent(mesh, shares), layout.tree.sums, _misfit_of(shares, shape)


def shared(
    held: Mapping[int, tuple[tuple[Nest, ...], tuple[int, ...] | None]], *, by_place: bool = False
) -> tuple[Share, ...]:
    """Return rank -> (nests, local shape) as shares: ranks that hold the same stand together.

    Args:
        held: what each rank holds.
        by_place: leave out where the elements lie on the rank, which differs in files.
    """
    if by_place:
        held = {rank: (tuple(_placed(nest) for nest in nests), shape) for rank, (nests, shape) in held.items()}
    found: dict[tuple[tuple[Nest, ...], tuple[int, ...] | None], list[int]] = {}
    for rank, part in sorted(held.items()):
        found.setdefault(part, []).append(rank)
    return tuple(
        Share(tuple(ranks), nests, shape, 0 if shape is None else math.prod(shape) - sum(map(size, nests)))
        for (nests, shape), ranks in found.items()
    )


def _placed(nest: Nest) -> Nest:
    y_side = canonical(Nest(nest.y, nest.y, tuple((n, stride, stride) for n, _, stride in nest.loops)))
    return Nest(0, y_side.y, tuple((n, 0, stride) for n, _, stride in y_side.loops))


def _absent(mesh: DeviceMesh, shares: Iterable[Share]) -> tuple[int, ...]:
    having = {rank for share in shares for rank in share.ranks}
    return tuple(rank for rank in sorted(mesh.ranks) if rank not in having)


def _with(
    start: Holdings,
    shares: tuple[Share, ...],
    absent: tuple[int, ...],
    sums: tuple[str, ...],
    misfit: Misfit | None,
) -> Holdings:
    return replace(start, shares=shares, absent=absent, sums=sums, misfit=misfit)


def _misfit_of(shares: Iterable[Share], shape: tuple[int, ...]) -> Misfit | None:
    return find_misfit([(share.ranks, share.nests) for share in shares], shape)


def held_by_layout(start: Holdings, layout: TensorLayout, mesh: DeviceMesh) -> Holdings:
    """Return who holds what of a tensor by a layout that its ranks recorded.

    Raises:
        LayoutError: the layout does not fit mesh and shape.
    """
    found = _compiled(layout, mesh, start.shape, tuple(start.sizes.items()))
    return _with(replace(start, layout=layout, mesh=mesh, text=str(layout)), *found)


def held_by_pieces(start: Holdings, held: Mapping[int, tuple[Nest, ...]]) -> Holdings:
    """Return who holds what of a tensor by rank -> nests, whose y sides count alone."""
    shares = shared({rank: (nests, None) for rank, nests in held.items()}, by_place=True)
    return _with(start, shares, (), (), _misfit_of(shares, start.shape))


def held_nbytes(tensors: Iterable[Holdings], width: Callable[[str | None], int]) -> dict[int, int]:
    """Return rank -> what it holds of all tensors, pads included; `width` says an element's by its type."""
    found: dict[int, int] = {}
    for one in tensors:
        for share in one.shares:
            held = (share.num_elements + share.num_pads) * width(one.dtype)
            for rank in share.ranks:
                found[rank] = found.get(rank, 0) + held
        for rank in one.absent:
            found.setdefault(rank, 0)
    return dict(sorted(found.items()))
