"""What all ranks hold, compiled at once, against what `local_part` says of each."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.plain_meaning import whole
from tests.layout.test_plain_meaning import made_case
from tests.sampled import count_of
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.layout_map import companion_part, parse_companion
from xrank.layout.local_part import LocalPart, local_part
from xrank.layout.mesh_parts import MeshParts, flat_mesh_parts, flat_part, mesh_parts
from xrank.layout.nests import Nest, size

MANY = "<" + " | ".join(f"p{i}: 1" for i in range(130)) + ">"
"""A dim of which every rank has 130 nests."""


def parts_by_rank(found: MeshParts) -> dict[int, tuple[tuple[Nest, ...], tuple[int, ...] | None, int]]:
    """Return rank -> (nests, local shape, pads) of the arrays."""
    nests: list[list[Nest]] = [[] for _ in found.local_sizes]
    for row, part in enumerate(found.owner.tolist()):
        nests[part].append(found.nests[row])
    shapes = [None] * len(nests) if found.shapes is None else [tuple(shape) for shape in found.shapes.tolist()]
    kinds = list(zip(map(tuple, nests), shapes, found.num_pads.tolist(), strict=True))
    assert found.owner.tolist() == sorted(found.owner.tolist())
    assert found.ranks.tolist() == sorted(set(found.ranks.tolist()))
    return {rank: kinds[part] for rank, part in zip(found.ranks.tolist(), found.part.tolist(), strict=True)}


def check_same(layout: TensorLayout, mesh: DeviceMesh, shape: tuple[int, ...], sizes: dict[str, int]) -> MeshParts:
    found = mesh_parts(layout, mesh, shape, sizes=sizes)
    wanted: dict[int, LocalPart] = {}
    for rank in mesh.ranks:
        part = local_part(layout, mesh, mesh.coordinate(rank), shape, sizes=sizes)
        if part is not None:
            wanted[rank] = part
    held = parts_by_rank(found)
    assert held.keys() == wanted.keys(), str(layout)
    for rank, part in wanted.items():
        nests, local_shape, num_pads = held[rank]
        assert (nests, local_shape) == (part.nests, part.shape), (str(layout), shape, rank)
        assert num_pads == _product(part.shape) - sum(map(size, nests))
    first = {part: min(r for r, p in zip(found.ranks, found.part, strict=True) if p == part) for part in found.part}
    assert found.first_ranks.tolist() == [first[part] for part in range(len(found.local_sizes))]
    return found


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for n in shape:
        found *= n
    return found


def check_random(integer) -> None:
    made, mesh, layout = made_case(integer)
    names = {**made.names, **made.lengths}
    shape = tuple(whole(dim, names) for dim in layout.dims)
    if integer(0, 1):
        ranks = list(mesh.ranks)
        random.Random(integer(0, 99)).shuffle(ranks)
        mesh = DeviceMesh(mesh.shape, mesh.axis_names, [3 * rank + 1 for rank in ranks])
        layout = TensorLayout.from_dims(layout.dims, mesh)
    check_same(layout, mesh, shape, made.names)


def test_random_layouts_hold_what_each_rank_is_said_to_hold():
    rng = random.Random(20261122)
    for _ in range(500):
        check_random(rng.randint)


@given(st.data())
@settings(max_examples=count_of(60), deadline=None)
def test_layouts_that_hypothesis_makes_hold_what_each_rank_is_said_to_hold(data):
    check_random(lambda low, high: data.draw(st.integers(low, high)))


@pytest.mark.parametrize(
    ("text", "shape", "num_parts"),
    [
        ("[f/tp/~dp, h]", (29 * 4, 6), 24),
        ("[f/tp, h]", (8, 6), 4),
        ("[h]", (8,), 1),
        ("[]", (), 1),
        ("[f/~tp/~dp]", (5,), 24),
        ("[f/~tp, h/~dp]", (0, 7), 24),
        ("[f/tp, h] where dp=1..2, pp=last", (8, 6), 4),
        ("[f/tp, h] sum(dp)", (8, 6), 4),
        ("[h] where dp=last", (8,), 1),
        ("[(g/tp <q: 2 3 | k: 3 | v: 3>)/~dp, h]", (8 * 12, 5), 24),
        ("[<gate: f/tp | up: f/tp>/~dp, h]", (48, 5), 24),
        ("[h, <gate: f/tp | up: f/tp>/~dp]", (5, 48), 24),
        ("[<q: (H d)/tp | k: (g d)/kvs | v: (g d)/kvs>] in kv", (16,), 4),
        ("[e/ep, f/edp] in expert", (6, 8), 24),
        ("[e/ep, f/tp] in expert where pp=0", (6, 8), 6),
        ("[pad(f, 16*tp)/tp, h/dp]", (37, 12), 24),
        ("flat(w [6, 8/tp], b [8/tp], pad 6)/dp", (56,), 24),
    ],
)
def test_clauses_views_and_fused_parts(text: str, shape: tuple[int, ...], num_parts: int) -> None:
    mesh = DeviceMesh.parse_grid("pp=2 dp=6 tp=4")
    views = {
        "kv": mesh.view("pp=2 dp=6 kvs=2 rep=2"),
        "expert": DeviceMesh.parse_grid("edp=4 ep=6 pp=2", [(rank * 5) % 48 for rank in range(48)]),
    }
    layout = TensorLayout.parse(text, mesh, views)
    found = check_same(layout, mesh, shape, {"H": 8, "g": 4, "d": 1} if "H" in text else {})
    # Ranks that differ along other axes alone share a part.
    assert len(found.local_sizes) == num_parts


def test_a_rank_that_no_place_of_where_has_is_left_out_and_so_may_all_be() -> None:
    mesh = DeviceMesh.parse_grid("tp=4")
    layout = TensorLayout.parse("[f] in half where tp=0, u=1", mesh, {"half": mesh.view("u=2 v=2")})
    assert len(check_same(layout, mesh, (4,), {}).ranks) == 0


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[f/tp, h]", (7, 2)),
        ("[f/~tp/dp, h]", (10, 2)),
        ("[f/tp%3]", (8,)),
        ("[f/tp{1,2,3,4}]", (11,)),
        ("[f/tp{1,2,3}]", (6,)),
        ("[(x y)/tp]", (8,)),
        ("[f/tp]", (8, 2)),
        ("[f/cp]", (8,)),
        ("[3037000500 3037000500]", (3037000500**2,)),
        ("[<a: 9000000000000000000 | b: 9000000000000000000>/tp]", (18 * 10**18,)),
        ("[pad(f, 9000000000000000000*2)]", (8,)),
        ("[f/dp, h]", (1 << 62, 2)),
        ("[pad(2 3, 5) 9000000000000000000]", (6 * 9 * 10**18,)),
        (f"[{MANY} {MANY}]", (130 * 130,)),
        (f"[<a: {MANY} | b: {MANY} {MANY}>]", (130 * 131,)),
    ],
)
def test_what_is_refused_of_a_rank_is_refused_of_all_in_the_same_words(text: str, shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh.parse_grid("dp=2 tp=4")
    layout = TensorLayout.parse(text)
    raised = []
    for call in (
        lambda: [local_part(layout, mesh, mesh.coordinate(rank), shape) for rank in mesh.ranks],
        lambda: mesh_parts(layout, mesh, shape),
    ):
        try:
            call()
            raised.append(None)
        except LayoutError as error:
            raised.append((error.message, error.got, error.want))
    assert raised[0] is not None
    assert raised[1] == raised[0]


def test_more_elements_than_addresses_are_refused_and_the_last_address_is_not() -> None:
    mesh = DeviceMesh.parse_grid("tp=2")
    most = (1 << 63) - 1
    check_same(TensorLayout.parse("[f/~tp, h]", mesh), mesh, (most, 1), {})
    check_same(TensorLayout.parse("[7 f/~tp]", mesh), mesh, (most // 7 * 7,), {"f": most // 7})
    # Each part alone may be as long as that, on ranks of its own.
    text = f"[<a: pad(1/tp{{1,0}}, {most}) | b: pad(1/tp{{0,1}}, {most})>]"
    check_same(TensorLayout.parse(text, mesh), mesh, (2,), {})
    with pytest.raises(LayoutError, match="more elements than addresses"):
        mesh_parts(TensorLayout.parse("[f/~tp, h]", mesh), mesh, (most, 2))


def test_flat_buffers_member_by_member() -> None:
    rng = random.Random(7)
    for _ in range(60):
        mesh = DeviceMesh((rng.randint(1, 4), rng.randint(1, 3)), ("dp", "tp"))
        tp = mesh.axis_length("tp")
        shapes = {"w": (rng.randint(0, 5), tp * rng.randint(1, 3)), "b": (tp * rng.randint(1, 3),), "n": (3,)}
        layout = TensorLayout.parse(f"flat(w [a, b/tp], b [c/tp], n [d], pad {rng.randint(1, 9)})/~dp", mesh)
        found = {name: parts_by_rank(parts) for name, parts in flat_mesh_parts(layout, mesh, shapes).items()}
        assert list(found) == ["w", "b", "n"]
        for rank in mesh.ranks:
            part = flat_part(layout, mesh, mesh.coordinate(rank), shapes)
            assert part is not None
            pads = part.size - sum(size(nest) for nests in part.members.values() for nest in nests)
            for name, nests in part.members.items():
                own_pads = pads if name == "n" else 0
                got = found[name].get(rank)
                assert got == ((nests, None, own_pads) if nests or own_pads else None)


def test_companions_of_all_ranks_are_those_of_each() -> None:
    rng = random.Random(11)
    texts = (
        "[f/tp, h]",
        "[f/=tp%4, h/~dp%2]",
        "[h, f/~tp/~dp]",
        "[f/tp, h] where dp=1",
        "[3 f/tp, h]",
        "[<gate: f/tp | up: f/tp>, h/~dp]",
        "[<a: 1 | b: 3 | c: 3 | d: f>, h]",
        "[f/~tp h, 4]",
        "[f]",
        "[f] where dp=0, tp=last",
        "[pad(f, 8)/tp, h]",
        "[<a: pad(4, 3) | b: f>, h]",
        "[3 pad(f, 6), h]",
    )
    outcomes = {True: 0, False: 0}
    for _ in range(600):
        mesh = DeviceMesh((2, rng.randint(1, 3)), ("dp", "tp"))
        text = rng.choice(texts)
        layout = TensorLayout.parse(text, mesh)
        names = {"f": 4 * rng.randint(1, 6) * mesh.size, "h": rng.choice((4, 8, 7))}
        shape = tuple(whole(dim, names) for dim in layout.dims)
        blocks = "x".join(str(rng.choice((1, 2, 4, 3))) for _ in shape)
        text = rng.choice(
            (f"scale([f], {blocks})", f"packed([f], dim={rng.randrange(len(shape))}, {rng.choice((2, 4))})")
        )
        companion = parse_companion(text)
        try:
            parts = {
                rank: companion_part(companion, layout, mesh, mesh.coordinate(rank), shape, sizes=names)
                for rank in mesh.ranks
            }
        except LayoutError as error:
            with pytest.raises(LayoutError) as refused:
                mesh_parts(layout, mesh, shape, sizes=names, companion=companion)
            assert (refused.value.next_step, refused.value.want) == (error.next_step, error.want)
            outcomes[False] += 1
            continue
        found = parts_by_rank(mesh_parts(layout, mesh, shape, sizes=names, companion=companion))
        held = {rank: (part.nests, part.shape) for rank, part in parts.items() if part is not None}
        assert {rank: kind[:2] for rank, kind in found.items()} == held, (str(layout), shape, text)
        outcomes[True] += 1
    assert min(outcomes.values()) > 100, outcomes


def test_arrays_of_parts_give_back_what_they_were_made_of() -> None:
    a, b = (Nest(0, 0, ((3, 1, 1),)),), (Nest(0, 3, ((2, 2, 1),)), Nest(1, 9))
    found = MeshParts.from_held({5: (a, (3,), 3), 2: (b, (4,), 4), 9: (a, (3,), 3), 7: ((), (0,), 0)})
    assert parts_by_rank(found) == {2: (b, (4,), 1), 5: (a, (3,), 0), 7: ((), (0,), 0), 9: (a, (3,), 0)}
    some = found.select(found.ranks > 5)
    assert parts_by_rank(some) == {7: ((), (0,), 0), 9: (a, (3,), 0)}
    assert len(some.local_sizes) == 2 and len(some.nests) == 1
    assert parts_by_rank(found.select(found.ranks > 9)) == {}
