"""The notation's worked examples, one by one, with their numbers; local parts are told as the global elements held."""

import math

import pytest

from tests.layout.held_elements import PAD, compiled, elements, held, ranges, rows
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_map import companion_part, companion_shape, parse_companion
from xrank.layout.local_part import local_part
from xrank.layout.mesh_parts import flat_part
from xrank.layout.nests import addresses, size
from xrank.layout.tensor_name import name_table, parse_name
from xrank.recipes.recipe import pair

pytestmark = pytest.mark.quick


def names_held(name: str, layout: str, grid: str, group: int, **sizes: int) -> list[list[int]]:
    """Return, rank by rank, the global index in one group of each tensor that it holds, by rising local index."""
    mesh = DeviceMesh.parse_grid(grid)
    found = []
    for rank in mesh.ranks:
        pattern, whole = parse_name(name), TensorLayout.parse(layout, mesh)
        table = name_table(pattern, whole, mesh, mesh.coordinate(rank), sizes=sizes)
        found.append([] if table is None else [pattern.indices(new)[group] for _, new in table])
    return found


def test_1_columns_and_rows():
    assert ranges("[f/tp, h]", "tp=2", (8, 4)) == [[(0, 16)], [(16, 32)]]
    assert held("[h, f/tp]", "tp=2", (2, 4)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert held("[h] where tp=0", "tp=2", (3,)) == [[0, 1, 2], None]
    assert held("[h]", "tp=2", (3,)) == [[0, 1, 2], [0, 1, 2]]


def test_2_fsdp_over_tp():
    # Ranks in the order (dp, tp); one nest each.
    assert ranges("[f/tp/~dp, h]", "dp=2 tp=2", (8, 1)) == [[(0, 2)], [(4, 6)], [(2, 4)], [(6, 8)]]


def test_3_uneven():
    assert rows("[5/~dp]", "dp=4", (5,)) == [2, 2, 1, 0]
    assert rows("[5/=dp]", "dp=4", (5,)) == [2, 1, 1, 1]
    assert held("[5/dp{0,4,0,1}]", "dp=4", (5,)) == [[], [0, 1, 2, 3], [], [4]]
    with pytest.raises(LayoutError, match="3 sizes are listed for 4 ranks"):
        held("[5/dp{0,4,1}]", "dp=4", (5,))
    with pytest.raises(LayoutError, match="make 6 positions of 5"):
        held("[5/dp{0,4,1,1}]", "dp=4", (5,))


def test_4_vocabulary():
    assert rows("[pad(v, 128*tp)/tp, h]", "tp=4", (32003, 2)) == [8064] * 4
    last = compiled("[pad(v, 128*tp)/tp, h]", "tp=4", (32003, 2))[3]
    assert size(last.nests[0]) == 2 * 7811 and last.shape[0] - 7811 == 253
    assert last.nests[0].y + size(last.nests[0]) == 2 * 32003
    # Padded rank by rank instead.
    assert held("[pad(v/~tp, 4)]", "tp=3", (10,)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, PAD, PAD]]


QKV = "<q: r d | k: d | v: d>"


def test_5_grouped_query_attention():
    sizes = {"g": 4, "r": 2, "d": 3}
    h, whole = 5, 4 * 4 * 3
    megatron = compiled(f"[g/tp {QKV}, h]", "tp=2", (whole, h), **sizes)
    assert [len(part.nests) for part in megatron] == [3, 3]
    assert [part.shape for part in megatron] == [(24, 5)] * 2
    vllm = "[<q: (g r d)/tp | k: (g d)/tp | v: (g d)/tp>, h]"
    # Their global orders differ, so it is the checkpoint's own names (q, k, v) that both are told in.
    for tp, equal in ((2, False), (4, True)):
        assert (by_projection(f"[g/tp {QKV}]", tp, sizes) == by_projection(vllm[:-4] + "]", tp, sizes)) == equal
    # FSDP over either, cut anywhere: five ranges of twelve rows of each of two ranks.
    text = f"[(g/tp {QKV})/~dp, h]"
    parts = held(text, "dp=5 tp=2", (whole, h), **sizes)
    assert sorted(x for part in parts for x in part) == list(range(whole * h))
    assert [len(part) // h for part in parts] == [5, 5, 5, 5, 5, 5, 5, 5, 4, 4]
    assert held(text, "dp=5 tp=2", (whole, 1), **sizes)[2] == [5, 6, 7, 8, 9]
    assert all(len(part.nests) <= 3 for part in compiled(text, "dp=5 tp=2", (whole, h), **sizes))


def by_projection(text: str, tp: int, sizes: dict[str, int]) -> list[list[tuple]]:
    """Return, rank by rank, what each row is: the projection, and the row in it."""
    g, r, d = sizes["g"], sizes["r"], sizes["d"]
    if text.startswith("[g/tp"):
        rows_of = [
            row
            for i in range(g)
            for row in (
                [("q", i * r * d + j) for j in range(r * d)]
                + [("k", i * d + j) for j in range(d)]
                + [("v", i * d + j) for j in range(d)]
            )
        ]
    else:
        rows_of = [(part, j) for part, n in (("q", g * r * d), ("k", g * d), ("v", g * d)) for j in range(n)]
    return [[rows_of[x] for x in part] for part in held(text, f"tp={tp}", (len(rows_of),), **sizes)]


def test_6_gate_and_up():
    assert held("[<gate: f/tp | up: f/tp>]", "tp=2", (8,)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert held("[f/tp <gate: 1 | up: 1>]", "tp=2", (8,)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert held("[<gate: f | up: f>/tp]", "tp=4", (8,)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert held("[<gate: f/tp | up: f/tp>]", "tp=4", (8,)) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_7_replicas_of_kv_heads():
    main = DeviceMesh((8,), ("tp",))
    layout = TensorLayout.parse("[kv/kvs d, h] in kv", main, {"kv": main.view("kvs=4 rep=2")})
    first = [
        local_part(layout, main, main.coordinate(rank), (4 * 3, 2), sizes={"d": 3}).nests[0].y // 6 for rank in range(8)
    ]
    assert first == [0, 0, 1, 1, 2, 2, 3, 3]
    # In a fused tensor q has no replicas and k and v have: the ranks' nests say so one by one.
    main = DeviceMesh((4,), ("tp",))
    text = "[<q: (H d)/tp | k: (g d)/kvs | v: (g d)/kvs>] in kv"
    layout = TensorLayout.parse(text, main, {"kv": main.view("kvs=2 rep=2")})
    parts = [local_part(layout, main, main.coordinate(r), (8,), sizes={"H": 4, "g": 2, "d": 1}) for r in range(4)]
    assert [[nest.y for nest in part.nests] for part in parts] == [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]


def test_8_experts():
    main = DeviceMesh.parse_grid("pp=2 dp=2 tp=2")
    views = {"expert": main.view("pp=2 edp=1 ep=2 etp=2")}
    text = "[e/ep, <gate: f/etp | up: f/etp>, h] in expert"
    layout = TensorLayout.parse(text, main, views)
    parts = {r: local_part(layout, main, main.coordinate(r), (4, 8, 1)) for r in main.ranks}
    assert parts[0].shape == (2, 4, 1)
    assert elements(parts[3]) == [
        16 + x for x in (2, 3, 6, 7, 10, 11, 14, 15)
    ]  # experts 2 and 3, second half of each part
    assert all(parts[r] == parts[r + 4] for r in range(4))  # both stages
    dense = TensorLayout.parse("[f/tp, h]", main, views)
    assert local_part(dense, main, main.coordinate(3), (8, 1)).nests[0].y == 4
    # By name, and dealt out in turn.
    name = parse_name("mlp.experts.{e/ep}.w1")
    small = TensorLayout.parse("[f/etp, h] in expert", main, views)
    tables = [name_table(name, small, main, main.coordinate(r), sizes={"e": 4}) for r in (0, 3)]
    assert tables[1].global_name("mlp.experts.1.w1") == "mlp.experts.3.w1"
    assert tables[0].local_name("mlp.experts.3.w1") is None
    assert held("[(e1 e2/ep), h]", "ep=2", (6, 1), e2=2) == [[0, 2, 4], [1, 3, 5]]


def test_9_pipeline_stages():
    # Even virtual stages.
    assert names_held("layers.{V P/pp n}.w", "[h]", "pp=2", 0, V=2, P=2, n=2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    # Uneven stages, and uneven inside a chunk too.
    uneven = names_held("layers.{<a: 6/pp | b: 4/pp>}.w", "[h]", "pp=2", 0)
    assert uneven == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9]]
    inside = names_held("layers.{<a: 7/pp{3,4} | b: 5/pp{4,1}>}.w", "[h]", "pp=2", 0)
    assert inside == [[0, 1, 2, 7, 8, 9, 10], [3, 4, 5, 6, 11]]
    # The embedding on the first stage, the head on the last, tied by an alias of the layout map.
    assert held("[v, h] where pp=0", "pp=3", (2, 1)) == [[0, 1], None, None]
    assert held("[v, h] where pp=last", "pp=3", (2, 1)) == [None, None, [0, 1]]
    assert held("[h] where pp=1..2", "pp=4", (1,)) == [None, [0], [0], None]
    layouts = LayoutMap(DeviceMesh((3,), ("pp",)))
    layouts["embed"] = "[v, h] where pp=0"
    layouts.aliases["head"] = "embed"
    assert layouts.diff(LayoutMap(layouts.device_mesh)).aliases[0].old == "embed"


def test_10_flat_buffers():
    mesh = DeviceMesh((4,), ("dp",))
    layout = TensorLayout.parse('flat(q "[64,64]", b "[64]", n "[7]", pad 4)/dp', mesh)
    shapes = {"q": (64, 64), "b": (64,), "n": (7,)}
    parts = [flat_part(layout, mesh, {"dp": at}, shapes) for at in range(4)]
    assert [part.size for part in parts] == [1042] * 4  # 4167 -> 4168
    on = {name: [at for at in range(4) if parts[at].members[name]] for name in shapes}
    assert on == {"q": [0, 1, 2, 3], "b": [3], "n": [3]}
    assert parts[3].members["b"][0][:2] == (4096 - 3126, 0) and size(parts[3].members["b"][0]) == 64
    assert parts[3].members["n"][0][:2] == (4160 - 3126, 0)
    assert sum(size(nest) for part in parts for nests in part.members.values() for nest in nests) == 4167


def test_10_flat_buffers_over_tp():
    mesh = DeviceMesh.parse_grid("dp=3 tp=2")
    layout = TensorLayout.parse('flat(w "[6, 8/tp]", b "[8/tp]", pad 3)/dp', mesh)
    seen: dict[str, list[int]] = {"w": [], "b": []}
    for rank in mesh.ranks:
        part = flat_part(layout, mesh, mesh.coordinate(rank), {"w": (6, 8), "b": (8,)})
        assert part.size == 10  # 24 + 4 local elements of each tp rank, padded to 30
        for name, nests in part.members.items():
            seen[name] += [y for nest in nests for _, y in addresses(nest)]
    assert sorted(seen["w"]) == list(range(48)) and sorted(seen["b"]) == list(range(8))
    # ZeRO-3 pads each parameter to the ranks, ZeRO-2 each group to twice as many.
    three = TensorLayout.parse("flat(w [n], pad dp)/dp", DeviceMesh((4,), ("dp",)))
    two = TensorLayout.parse("flat(w [n], b [m], pad 2*dp)/dp", DeviceMesh((4,), ("dp",)))
    assert flat_part(three, three.device_mesh, {"dp": 3}, {"w": (10,)}).size == 3
    assert flat_part(two, two.device_mesh, {"dp": 0}, {"w": (10,), "b": (3,)}).size == 4


def test_11_blocks_of_scales():
    mesh = DeviceMesh((8,), ("tp",))
    scale = parse_companion('scale("w", 128x128)')
    assert companion_shape(scale, (1536, 256)) == (12, 2)
    even = TensorLayout.parse("[f/tp, h]", mesh)
    with pytest.raises(LayoutError, match="192 is not a multiple of 128"):
        companion_part(scale, even, mesh, {"tp": 0}, (1536, 256))
    aligned = TensorLayout.parse("[f/=tp%128, h]", mesh)
    weights = [local_part(aligned, mesh, {"tp": at}, (1536, 256)) for at in range(8)]
    scales = [companion_part(scale, aligned, mesh, {"tp": at}, (1536, 256)) for at in range(8)]
    assert [part.shape[0] for part in weights] == [256] * 4 + [128] * 4
    assert [part.shape for part in scales] == [(2, 2)] * 4 + [(1, 2)] * 4
    assert [part.nests[0].y for part in scales] == [0, 4, 8, 12, 16, 18, 20, 22]
    # A refusal names both numbers too where the cut itself is even in blocks.
    with pytest.raises(LayoutError, match="192 positions on each of 8 ranks are not a multiple of 128"):
        held("[f/tp%128]", "tp=8", (1536,))


def test_11_blocks_of_a_dim_that_a_rank_holds_whole():
    # Turns of gate and up are nests of single rows; where no rank cuts them, a block of rows is one all the same.
    mesh = DeviceMesh((2,), ("tp",))
    turns = TensorLayout.parse("[f <gate: 1 | up: 1>, h/tp]", mesh)
    part = companion_part(parse_companion('scale("w", 4x2)'), turns, mesh, {"tp": 1}, (10, 8))
    assert part.shape == (3, 2) and [y for nest in part.nests for _, y in addresses(nest)] == [2, 3, 6, 7, 10, 11]
    with pytest.raises(LayoutError, match="not a multiple of 4"):
        cut = TensorLayout.parse("[f/tp <gate: 1 | up: 1>, h]", mesh)
        companion_part(parse_companion('scale("w", 4x2)'), cut, mesh, {"tp": 1}, (12, 8))


def test_12_packed_elements():
    mesh = DeviceMesh((4,), ("tp",))
    layout = TensorLayout.parse("[in/tp, out]", mesh)
    packed = parse_companion("packed([in/tp, out], dim=0, 8)")
    scale = parse_companion("scale([in/tp, out], 128x1)")
    assert companion_shape(packed, (4096, 16)) == (512, 16)
    for at in range(4):
        assert local_part(layout, mesh, {"tp": at}, (4096, 16)).shape == (1024, 16)
        part = companion_part(packed, layout, mesh, {"tp": at}, (4096, 16))
        assert part.shape == (128, 16) and part.nests[0].y == at * 128 * 16
        assert companion_part(scale, layout, mesh, {"tp": at}, (4096, 16)).shape == (8, 16)
    with pytest.raises(LayoutError, match="dim 0 of 4100 is not a multiple of 8"):
        companion_shape(packed, (4100, 16))


def test_13_addends():
    part = compiled("[h, r] sum(tp)", "tp=2", (4, 2))[1]
    assert part.sums == ("tp",) and part.shape == (4, 2)
    with pytest.raises(LayoutError, match="two roles"):
        TensorLayout.parse("[h/tp] sum(tp)")


def test_notation_gotcha_a_split_binds_tighter_than_a_product():
    tighter = held("[g r/tp]", "tp=2", (8,), r=4)
    grouped = held("[(g r)/tp]", "tp=2", (8,), r=4)
    assert tighter == [[0, 1, 4, 5], [2, 3, 6, 7]] and grouped == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_every_example_is_whole_on_some_ranks():
    """The elements of each example's tensor are all held, and held once but for replicas."""
    for text, grid, shape, sizes in (
        ("[pad(v, 128*tp)/tp, h]", "tp=4", (3203, 2), {}),
        (f"[(g/tp {QKV})/~dp, h]", "dp=3 tp=2", (48, 2), {"g": 4, "r": 2, "d": 3}),
        ("[f/tp <gate: 1 | up: 1>, h]", "dp=2 tp=2", (8, 3), {}),
        ("[f/=tp%128, h]", "tp=8", (1536, 1), {}),
    ):
        seen = [x for part in held(text, grid, shape, **sizes) for x in part if x != PAD]
        counts = {seen.count(x) for x in range(0, math.prod(shape), 97)}
        assert set(seen) == set(range(math.prod(shape))) and len(counts) == 1, text


def test_14_rope_order():
    pairing = pair("[n half two, h]", {"q": "[n two half, h]"}, {"n": 2, "half": 2, "two": 2, "h": 1})["q"]
    assert pairing.nest.loops == ((2, 4, 4), (2, 2, 1), (2, 1, 2))
    assert [y for _, y in sorted(addresses(pairing.nest))] == [0, 2, 1, 3, 4, 6, 5, 7]
