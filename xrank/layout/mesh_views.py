"""Several factorings of the same ranks: views by name, and Megatron's order strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh

MEGATRON_ORDER = "tp-cp-ep-dp-pp"
"""Megatron's default: tensor-parallel ranks are adjacent (megatron/core/parallel_state.py: RankGenerator)."""


@dataclass(frozen=True, slots=True)
class MeshViews:
    """One world of ranks with several factorings; a layout belongs to one of them.

    Args:
        main: the main factoring.
        others: (name, mesh) of each view, with the same ranks in the same order.

    Raises:
        LayoutError: a view has other ranks, or a name occurs twice.

    Example:
        >>> mesh = DeviceMesh((2, 2), ("dp", "tp"))
        >>> MeshViews(mesh, (("expert", mesh.view("ep=4")),)).view("expert").grid
        'ep=4'
    """

    main: DeviceMesh
    others: tuple[tuple[str, DeviceMesh], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.others]
        for name, mesh in self.others:
            if names.count(name) > 1:
                raise LayoutError(f"the view {name!r} occurs twice", want="each name once")
            if mesh.ranks != self.main.ranks:
                raise LayoutError(
                    f"the view {name!r} does not have the same ranks as the mesh {self.main.grid!r}",
                    got=f"{mesh.grid!r}, {mesh.size} ranks",
                    want=f"its {self.main.size} ranks, in their order",
                )

    def view(self, name: str) -> DeviceMesh:
        """Return the view with this name."""
        for known, mesh in self.others:
            if known == name:
                return mesh
        raise LayoutError(
            f"there is no view {name!r}", got=repr(name), want=f"one of {[known for known, _ in self.others]}"
        )

    def having(self, *axes: str) -> DeviceMesh:
        """Return the mesh with all of these axes: the main mesh, or else the only view that has them.

        Raises:
            LayoutError: no mesh or several views have them.
        """
        wanted = set(axes)
        if wanted <= set(self.main.axis_names):
            return self.main
        found = [(name, mesh) for name, mesh in self.others if wanted <= set(mesh.axis_names)]
        if len(found) != 1:
            raise LayoutError(
                f"{'several views have' if found else 'no view has'} the axes {sorted(wanted)}",
                got=str([name for name, _ in found] or [mesh.grid for mesh in (self.main, *self._meshes())]),
                want="one view with all of them",
            )
        return found[0][1]

    def _meshes(self) -> tuple[DeviceMesh, ...]:
        return tuple(mesh for _, mesh in self.others)


def mesh_from_order(order: str, lengths: Mapping[str, int], ranks: Sequence[int] | None = None) -> DeviceMesh:
    """Return the mesh of an order such as ``"tp-dp-pp"``: the first name varies fastest, as in Megatron.

    Axes of length 1 that the order omits are outermost.

    Raises:
        LayoutError: the order names an axis twice or an unknown one, or omits one that is longer than 1.
    """
    names = order.lower().split("-")
    for name in names:
        if name not in lengths or names.count(name) > 1:
            raise LayoutError(
                f"the order {order!r} names {name!r} {'twice' if name in lengths else ', which has no length'}",
                got=repr(name),
                want=f"each of {list(lengths)} once",
            )
    for name, length in lengths.items():
        if name not in names:
            if length != 1:
                raise LayoutError(
                    f"the order {order!r} leaves out {name!r}, which has {length} places",
                    got=f"{name}={length}",
                    want=f"{name!r} in the order",
                )
            names.append(name)
    # In an order the first name varies fastest, in a mesh the last one.
    names.reverse()
    return DeviceMesh([lengths[name] for name in names], names, ranks)


def megatron_views(
    world_size: int,
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    pp: int = 1,
    etp: int | None = None,
    order: str = MEGATRON_ORDER,
    ranks: Sequence[int] | None = None,
) -> MeshViews:
    """Return Megatron's two factorings of a world: the main one for dense weights, the view "expert" for experts.

    The main mesh has the axes tp, cp, dp, pp; the view has etp, ep, edp, pp at the corresponding places in the order
    (parallel_state.py: initialize_model_parallel, decoder_rank_generator and expert_decoder_rank_generator). The
    data-parallel lengths follow from the size of the world.

    Args:
        world_size: the number of ranks.
        tp: tensor parallel ranks of dense weights.
        cp: context parallel ranks.
        ep: expert parallel ranks.
        pp: pipeline stages.
        etp: tensor parallel ranks inside an expert; None: as tp.
        order: the axes, fastest first.
        ranks: the ranks, if not 0, 1, 2, ...

    Raises:
        LayoutError: the lengths do not divide the world, or the two factorings have different pipeline stages.
    """
    etp = tp if etp is None else etp
    names = order.lower().split("-")
    # Both factorings divide the same ranks: dense weights ignore ep, experts ignore cp.
    dp = _remaining(world_size, {"tp": tp, "cp": cp, "pp": pp})
    edp = _remaining(world_size, {"etp": etp, "ep": ep, "pp": pp})
    main = mesh_from_order(
        "-".join(name for name in names if name != "ep"), {"tp": tp, "cp": cp, "dp": dp, "pp": pp}, ranks
    )
    renamed = {"tp": "etp", "dp": "edp"}
    expert = mesh_from_order(
        "-".join(renamed.get(name, name) for name in names if name != "cp"),
        {"etp": etp, "ep": ep, "edp": edp, "pp": pp},
        ranks,
    )
    if ep > 1 and "ep" not in names:
        raise LayoutError(f"the order {order!r} leaves out 'ep', which has {ep} places", want="'ep' in the order")
    # Experts of a layer are on the stage of its dense weights, so both meshes must agree on the stages.
    if set(map(frozenset, main.groups("pp"))) != set(map(frozenset, expert.groups("pp"))):
        raise LayoutError(
            f"in the order {order!r} dense weights and experts have different pipeline stages",
            got=f"ranks {list(main.groups('pp')[0])} and {list(expert.groups('pp')[0])}",
            want="the same groups along 'pp'",
            next_step="put pp last in the order",
        )
    return MeshViews(main, (("expert", expert),))


def _remaining(world_size: int, lengths: Mapping[str, int]) -> int:
    taken = prod(lengths.values())
    if min(lengths.values()) < 1 or world_size < 1 or world_size % taken:
        product = " ".join(f"{name}={length}" for name, length in lengths.items())
        raise LayoutError(
            f"{world_size} ranks do not divide by {product}",
            got=f"{world_size} ranks",
            want=f"a multiple of {taken}" if taken > 0 else "lengths of 1 or more",
        )
    return world_size // taken
