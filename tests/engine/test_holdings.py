"""Who holds what of every tensor: shares, absent ranks and misfits, against what each rank is said to hold."""

from __future__ import annotations

import random

import pytest
from pytest import MonkeyPatch

from xrank.commands import check_layouts
from xrank.engine.holdings import Holdings, apply_layout, apply_pieces, sum_held_nbytes, survey
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_map import parse_companion
from xrank.layout.local_part import local_part
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest, addresses
from xrank.layout.tensor_name import name_table


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[f/tp/~dp, h]", (10, 3)),
        ("[f/~tp/~dp, h]", (3, 2)),
        ("[h] where dp=1", (4,)),
        ("[<q: (H d)/tp | k: (g d)/kvs | v: (g d)/kvs>] in kv", (8,)),
        ("[pad(v, 4*tp)/tp, h/~dp]", (10, 5)),
    ],
)
def test_shares_are_what_the_ranks_hold_equal_parts_together(text: str, shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh((3, 2), ("dp", "tp"), [5, 3, 1, 0, 2, 4])
    layout = TensorLayout.parse(text, mesh, {"kv": mesh.view("dp=3 kvs=1 rep=2")})
    sizes = {"H": 4, "g": 2, "d": 1} if "H" in text else {}
    one = apply_layout(Holdings("w", shape, sizes=sizes), layout, mesh)
    wanted: dict[object, list[int]] = {}
    absent = []
    for rank in sorted(mesh.ranks):
        part = local_part(layout, mesh, mesh.coordinate(rank), shape, sizes=sizes)
        if part is None:
            absent.append(rank)
        else:
            wanted.setdefault((part.nests, part.shape), []).append(rank)
    assert [((share.nests, share.shape), list(share.ranks)) for share in one.shares] == list(wanted.items())
    assert list(one.absent) == absent
    assert one.misfit is None
    local = {rank: share for share in one.shares for rank in share.ranks}
    held = sum_held_nbytes([one, one], lambda _: 3)
    assert held == {
        rank: 0 if rank in absent else 6 * (local[rank].num_elements + local[rank].num_pads) for rank in range(6)
    }


def test_bytes_beyond_what_an_array_counts_are_counted() -> None:
    mesh = DeviceMesh((2,), ("tp",))
    one = apply_layout(Holdings("w", (1 << 62,), "F64"), TensorLayout.parse("[f]", mesh), mesh)
    assert sum_held_nbytes([one] * 3, lambda _: 8) == {0: 3 << 65, 1: 3 << 65}


def test_the_first_misfit_is_what_counting_finds() -> None:
    rng = random.Random(3)
    kinds: dict[str | None, int] = {}
    for _ in range(400):
        cuts = sorted(rng.sample(range(1, 24), rng.randint(0, 4)))
        held = {
            rank: (Nest(0, low, ((high - low, 1, 1),)),)
            for rank, (low, high) in enumerate(zip([0, *cuts], [*cuts, 24], strict=True))
        }
        fault = rng.choice(("none", "moved", "dropped", "again", "strided"))
        rank = rng.choice(list(held))
        [(x, y, loops)] = held[rank]
        if fault == "moved":
            held[rank] = (Nest(x, max(0, y + rng.choice((-1, 1))), loops),)
        elif fault == "dropped":
            del held[rank]
        elif fault == "again":
            held[9] = held[rank]
        elif fault == "strided":
            held[9] = (Nest(0, 0, ((12, 1, 2),)),)
        one = apply_pieces(Holdings("w", (24,)), held)
        distinct = dict.fromkeys(nest for nests in held.values() for nest in nests)
        count: dict[int, int] = {}
        for nest in distinct:
            for _, address in addresses(nest):
                count[address] = count.get(address, 0) + 1
        wrong = [address for address in range(24) if count.get(address, 0) != 1]
        misfit = one.misfit
        kinds[None if misfit is None else misfit.kind] = kinds.get(None if misfit is None else misfit.kind, 0) + 1
        if max(count, default=0) >= 24:
            assert misfit is not None and misfit.kind == "outside"
            assert misfit.ranks == tuple(r for r, [nest] in sorted(held.items()) if max(count) in ys(nest))
        elif not wrong:
            assert misfit is None
        else:
            assert misfit is not None
            first = wrong[0]
            holders = [(rank, ys(nest)) for rank, [nest] in sorted(held.items()) if first in ys(nest)]
            if holders:
                assert (misfit.kind, misfit.ranks) == ("overlap", tuple(rank for rank, _ in holders))
                last = min(next(i for i in range(first, 25) if i + 1 not in places) for _, places in holders)
            else:
                assert (misfit.kind, misfit.ranks) == ("gap", ())
                last = min((address for address in count if address > first), default=24) - 1
            assert misfit.where == ("the whole tensor" if (first, last) == (0, 23) else f"elements {first}-{last}")
    assert kinds.keys() == {None, "gap", "overlap", "outside"}, kinds


def ys(nest: Nest) -> set[int]:
    return {y for _, y in addresses(nest)}


def test_tensors_named_by_their_dims_are_on_the_ranks_whose_tables_have_them() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("pp=2 dp=2 tp=2"))
    assert layouts.device_mesh is not None
    layouts.views["ep"] = layouts.device_mesh.view("pp=2 ep=2 etp=2")
    layouts["layers.{2 2/pp 1}.experts.{4/ep}.w"] = "[f/etp, h] in ep"
    layouts["layers.{4/~pp}.up"] = "[f/tp, h] where dp=last"
    shapes = {f"layers.{i}.experts.{e}.w": (4, 2) for i in range(4) for e in range(4)}
    layouts["layers.{4/~pp}.down"] = "[h, f/tp] where dp=0..1"
    shapes |= {f"layers.{i}.{name}": (4, 2) for i in range(4) for name in ("up", "down")}
    beyond = survey(layouts, {"layers.4.up": (4, 2)}).tensors[0]
    assert "the index 4 is beyond" in str(beyond.problem)
    found = survey(layouts, shapes)
    assert len(found.tensors) == 24
    for one in found.tensors:
        assert one.problem is None and one.misfit is None and one.mesh is not None and one.layout is not None
        name = layouts.name_of(one.rule or "")
        assert name is not None
        having = []
        for rank in one.mesh.ranks:
            table = name_table(name, one.layout, one.mesh, one.mesh.coordinate(rank))
            if table is not None and table.local_name(one.name) is not None:
                having.append(rank)
        assert sorted(rank for share in one.shares for rank in share.ranks) == having
        assert one.absent == tuple(rank for rank in one.mesh.ranks if rank not in having)
        assert len(one.shares) == 2


def test_a_companion_follows_from_the_tensor_whose_shape_or_name_fits() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("tp=2"))
    layouts["w[0-9]+"] = "[f/tp, h]"
    layouts["layers.{L}.w"] = "[f/tp, h]"
    layouts.companions["w[0-9]+_scale"] = parse_companion('scale("w[0-9]+", 4x4)')
    layouts.companions["layers.{L}.scale"] = parse_companion('scale("layers.{L}.w", 4x4)')
    layouts.sizes["L"] = 4
    layouts.companions["free"] = parse_companion("scale([h, f/tp], 4x4)")
    shapes = {"w0": (16, 8), "w1": (32, 8), "w1_scale": (8, 2), "w0_scale": (4, 2), "free": (4, 6)}
    # The layers' own: one of another's shape is refused though some layer has that.
    shapes |= {"layers.0.w": (16, 8), "layers.1.w": (16, 12), "layers.0.scale": (4, 2), "layers.1.scale": (4, 2)}
    found = {one.name: one for one in survey(layouts, shapes).tensors}
    assert [share.shape for share in found["w1_scale"].shares] == [(4, 2), (4, 2)]
    assert [share.shape for share in found["free"].shares] == [(4, 3), (4, 3)]
    assert [name for name, one in found.items() if one.problem or one.misfit] == ["layers.1.scale"]
    found = {one.name: one for one in survey(layouts, {"w0": (16, 8), "w1_scale": (8, 2)}).tensors}
    assert "does not determine the shape of its base" in str(found["w1_scale"].problem)


def test_a_check_makes_no_object_for_a_shard(monkeypatch: MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a million of these would be dear")

    monkeypatch.setattr(NestTable, "__getitem__", refused)
    monkeypatch.setattr("xrank.engine.holdings.Share", refused)
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=128 tp=8"))
    layouts["[0-9]+"] = "[(g/tp <q: 6 128 | k: 128 | v: 128>)/~dp, h]"
    layouts["flat"] = "flat(a [f], b [f, h/tp], pad 1024)/dp"
    layouts.companions["[0-9]+_scale"] = parse_companion('scale("[0-9]+", 8x1)')
    shapes: dict[str, tuple[int, ...]] = {"a": (1003,), "b": (1003, 16)}
    for i in range(3):
        shapes |= {str(i): (1024 * 64, 100 + i), f"{i}_scale": (1024 * 8, 100 + i)}
    report = check_layouts(layouts, shapes)
    assert report.ok, report.error
    assert len(report.details["ranks"]) == 1024
