"""Where parts lie: each branch of the decision, and what is refused."""

import numpy as np
import pytest

from tests.readers.placed_parts import held, part_of, whole_of
from xrank.errors import ContradictionError, CorruptError, IncompleteError, LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.readers.base import Hints
from xrank.readers.placement import place_all

ASSUMED = "; if two axes of the mesh split it, only a layout file gives their order"

pytestmark = pytest.mark.quick

TP2, TP4 = DeviceMesh.parse_grid("tp=2"), DeviceMesh.parse_grid("tp=4")
GRID = DeviceMesh.parse_grid("dp=2 tp=2")


def recorded(text, mesh, shape, ranks=None, **changes):
    """Return every rank's part as it would be held with its layout recorded."""
    ranks = mesh.ranks if ranks is None else ranks
    return [
        held(rank, part_of(text, mesh, rank, shape), layout=text, mesh=mesh, global_shape=shape, **changes)
        for rank in ranks
    ]


def layouts(text, mesh=None, pattern="w") -> Hints:
    layout_map = LayoutMap(mesh)
    layout_map[pattern] = text
    return Hints(layouts=layout_map)


def place(name, parts, hints, *, world_size):
    """Return where the parts of one tensor lie, and what was assumed of it."""
    placement = place_all({name: parts}.items, hints, world_size=world_size)
    (shard,) = placement.shards
    return shard, "; ".join(map(": ".join, placement.assumptions)) or None


def check(parts, hints=Hints(), *, shape, world_size=4, assumption=None):  # noqa: B008
    shard, said = place("w", parts, hints, world_size=world_size)
    assert (shard.name, shard.dtype, shard.shape) == ("w", "F32", shape)
    assert said == assumption
    counts = whole_of(shard, parts)
    assert (counts >= 1).all()
    return counts


# Recorded layouts


@pytest.mark.parametrize(
    "text", ["[a/tp, b]", "[a, b/tp]", "[a/tp/dp, b]", "[a/dp/tp, b]", "[a/tp, b/dp]", "[a/~dp/~tp, b]"]
)
def test_recorded_layouts(text):
    counts = check(recorded(text, GRID, (8, 4)), shape=(8, 4))
    assert (counts == (1 if "dp" in text else 2)).all()


def test_a_recorded_layout_of_a_mesh_in_another_order_of_ranks():
    mesh = DeviceMesh.parse_grid("dp=2 tp=2", [3, 1, 0, 2])
    check(recorded("[a/~tp/~dp]", mesh, (7,), ranks=[0, 1, 2, 3]), shape=(7,))


def test_uneven_and_empty_parts():
    parts = recorded("[a/~tp, b]", TP4, (5, 3))
    assert [h.shape for h in parts] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    check(parts, shape=(5, 3))
    check(recorded("[a/~tp, b]", TP4, (0, 3)), shape=(0, 3))


def test_scalars():
    check(recorded("[]", GRID, ()), shape=())
    check([held(0, np.array(0))], shape=(), world_size=1)


def test_a_global_shape_that_no_rank_recorded_is_the_sum():
    parts = recorded("[a/~dp, b/tp]", GRID, (5, 6))
    check([h.replaced(global_shape=None) for h in parts], shape=(5, 6))


def test_transposed_and_offset_storage():
    for strides in ("contiguous", "transposed", "spread"):
        parts = [
            held(rank, part_of("[a, b/tp]", TP2, rank, (5, 6)), layout="[a, b/tp]", mesh=TP2, storage=strides, offset=3)
            for rank in range(2)
        ]
        check(parts, shape=(5, 6), world_size=2)


def test_dims_of_one_may_have_any_stride():
    part = held(0, np.arange(4.0).reshape(1, 4, 1))
    check([part.replaced(strides=(99, 1, 0))], shape=(1, 4, 1), world_size=1)


def test_an_expanded_view_is_refused():
    part = held(1, np.zeros((3, 4)), layout="[a, b]", mesh=TP2).replaced(strides=(0, 1))
    with pytest.raises(CorruptError, match="expanded view") as caught:
        place("w", [held(0, np.zeros((3, 4)), layout="[a, b]", mesh=TP2), part], Hints(), world_size=2)
    assert (caught.value.tensor, caught.value.rank, caught.value.file) == ("w", 1, "rank_1")


def test_meshes_that_share_no_rank_hold_replicas():
    """Slices of a mesh: each row of a (dp, tp) mesh names its own two ranks."""
    columns = [DeviceMesh.parse_grid("tp=2", ranks) for ranks in ([0, 2], [1, 3])]
    for shape in ((6, 3), None):
        parts = [h for mesh in columns for h in recorded("[a/tp, b]", mesh, (6, 3))]
        parts = sorted((h.replaced(global_shape=shape) for h in parts), key=lambda h: h.rank)
        assert (check(parts, shape=(6, 3)) == 2).all()


def test_meshes_that_share_no_rank_must_agree_on_the_shape():
    columns = [DeviceMesh.parse_grid("tp=2", ranks) for ranks in ([0, 2], [1, 3])]
    parts = [*recorded("[a/tp]", columns[0], (6,)), *recorded("[a/tp]", columns[1], (8,))]
    with pytest.raises(ContradictionError, match="disagree about its global shape"):
        place("w", parts, Hints(), world_size=4)
    parts = [h.replaced(global_shape=None) for h in parts]
    with pytest.raises(ContradictionError, match="does not have the shape") as caught:
        place("w", parts, Hints(), world_size=4)
    assert (caught.value.rank, caught.value.got, caught.value.tensor) == (1, "[4]", "w")


def test_a_rank_outside_the_mesh_holds_nothing():
    check(recorded("[a/tp]", TP2, (6,)), shape=(6,), world_size=9)


# Disagreement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "BF16"}, "disagree about its dtype"),
        ({"global_shape": (16, 4)}, "disagree about its global shape"),
        ({"global_shape": None}, "disagree about its global shape"),
        ({"layout": "[a, b/tp]"}, "disagree about its layout or mesh"),
        ({"layout": "[x/tp, b]"}, "disagree about its layout or mesh"),
        ({"mesh": DeviceMesh.parse_grid("tp=2 dp=2")}, "disagree about its layout or mesh"),
        ({"mesh": DeviceMesh.parse_grid("tp=2", [2, 3])}, "disagree about its layout or mesh"),
        ({"mesh": None}, "does not contain it"),
        ({"mesh": DeviceMesh.parse_grid("tp=2", [0, 1])}, "does not contain it"),
        ({"layout": None}, "some ranks recorded a layout and some did not"),
    ],
)
def test_ranks_that_disagree(change, message):
    parts = recorded("[a/tp, b]", GRID, (8, 4))
    parts[2] = parts[2].replaced(**change)
    with pytest.raises(ContradictionError, match=message) as caught:
        place("w", parts, Hints(), world_size=4)
    assert (caught.value.tensor, caught.value.rank, caught.value.file) == ("w", 2, "rank_2")
    assert caught.value.got
    assert caught.value.want


def test_a_part_of_another_shape_than_its_layout_gives():
    parts = recorded("[a/tp, b]", TP2, (8, 4))
    parts[1] = parts[1].replaced(shape=(3, 4))
    with pytest.raises(ContradictionError, match="rank 1's part") as caught:
        place("w", parts, Hints(), world_size=2)
    assert (caught.value.got, caught.value.tensor, caught.value.file) == ("[3, 4]", "w", "rank_1")
    assert caught.value.want.startswith("[4, 4], by [a/tp, b] of [8, 4]")


def test_a_rank_of_the_mesh_that_holds_nothing():
    with pytest.raises(IncompleteError, match="rank 2 of its mesh holds no part") as caught:
        place("w", recorded("[a/tp, b]", GRID, (8, 4), ranks=[0, 1, 3]), Hints(), world_size=4)
    assert (caught.value.tensor, caught.value.rank) == ("w", 2)
    assert (caught.value.got, caught.value.want) == ("parts on ranks 0-1, 3", "parts on ranks 0-3")


@pytest.mark.parametrize("text", ["[a/tp", "", "[a/ep, b]", "[a/tp]", "[3, b/tp]"])
def test_a_recorded_layout_that_is_none(text):
    parts = [h.replaced(layout=text) for h in recorded("[a/tp, b]", TP2, (8, 4))]
    with pytest.raises(LayoutError) as caught:
        place("w", parts, Hints(), world_size=2)
    assert str(caught.value).startswith("w: ")
    assert (caught.value.tensor, caught.value.rank, caught.value.file) == ("w", 0, "rank_0")


def test_local_shapes_that_make_no_global_one_name_tensor_and_rank():
    parts = [h.replaced(global_shape=None) for h in recorded("[a/tp, b]", GRID, (8, 4))]
    parts[3] = parts[3].replaced(shape=(5, 4))
    with pytest.raises(ContradictionError, match=r"w: ranks 1 and 3 hold the same part") as caught:
        place("w", parts, Hints(), world_size=4)
    assert (caught.value.tensor, caught.value.rank, caught.value.file) == ("w", 3, "rank_3")


# A layout file


def plain(text, mesh, shape):
    return [held(rank, part_of(text, mesh, rank, shape)) for rank in sorted(mesh.ranks)]


def test_a_layout_file_places_plain_tensors():
    for text in ("[a/tp, b]", "[a, b/~dp/tp]", "[a/dp, b/tp]"):
        check(plain(text, GRID, (6, 8)), layouts(text, GRID), shape=(6, 8))


def test_a_layout_of_its_own_mesh_needs_no_other():
    layout_map = LayoutMap()
    layout_map["w"] = TensorLayout.parse("[a/tp]", TP2)
    check(plain("[a/tp]", TP2, (6,)), Hints(layouts=layout_map), shape=(6,), world_size=2)


def test_a_layout_file_and_the_base_models_shape():
    hints = Hints(layouts=layouts("[a/~dp, b]", GRID).layouts, shapes={"w": (5, 2)})
    check(plain("[a/~dp, b]", GRID, (5, 2)), hints, shape=(5, 2))
    with pytest.raises(ContradictionError, match="does not have the shape"):
        place("w", plain("[a/~dp, b]", GRID, (5, 2)), Hints(layouts=hints.layouts, shapes={"w": (9, 2)}), world_size=4)


def test_a_layout_file_without_a_mesh():
    with pytest.raises(LayoutError, match=r"no \[mesh\]") as caught:
        place("w", plain("[a/tp]", TP2, (6,)), layouts("[a/tp]"), world_size=2)
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(("mesh", "given", "rank"), [(TP4, TP2, 2), (TP2, TP4, None)])
def test_a_layout_file_of_another_mesh(mesh, given, rank):
    with pytest.raises(LayoutError, match="mesh does not match") as caught:
        place("w", plain("[a/tp]", mesh, (8,)), layouts("[a/tp]", given), world_size=mesh.size)
    assert (caught.value.tensor, caught.value.rank) == ("w", rank)


def test_a_layout_file_for_more_ranks_than_hold_the_tensor():
    with pytest.raises(IncompleteError, match="rank 2 of its mesh"):
        place("w", plain("[a/tp]", TP2, (8,)), layouts("[a/tp]", TP4), world_size=4)


def test_a_layout_file_that_does_not_fit_names_the_tensor():
    with pytest.raises(LayoutError, match=r"^w: ") as caught:
        place("w", plain("[a/tp]", TP2, (8,)), layouts("[a/tp, b]", TP2), world_size=2)
    assert caught.value.tensor == "w"


def test_a_layout_that_is_recorded_and_given():
    parts = recorded("[a/tp]", TP2, (8,))
    check(parts, layouts("[a/tp]", TP2), shape=(8,), world_size=2)
    for given in (layouts("[a/~tp]", TP2), layouts("[a/tp]", DeviceMesh.parse_grid("tp=2", [1, 0]))):
        with pytest.raises(LayoutError, match="differs from the layout file") as caught:
            place("w", parts, given, world_size=2)
        assert caught.value.tensor == "w"


def test_what_is_recorded_on_a_part_of_the_files_mesh():
    grid = DeviceMesh.parse_grid("dp=2 tp=2")
    parts = recorded("[a/dp]", grid.submesh(tp=0), (8,))
    check(parts, layouts("[a/dp]", grid), shape=(8,), world_size=4)  # as FSDP2 over TP records a norm
    other_order, other_axes = DeviceMesh.parse_grid("dp=2 tp=2", [0, 2, 1, 3]), DeviceMesh.parse_grid("x=2 y=2")
    for given in (layouts("[a/dp]", other_order), layouts("[a/tp]", grid), layouts("[a/x]", other_axes)):
        with pytest.raises(LayoutError, match="differs from the layout file"):
            place("w", parts, given, world_size=4)


def test_a_rule_for_other_tensors_is_no_rule():
    hints = Hints(layouts=layouts("[a/tp]", TP2, "other").layouts, shapes={"w": (8,)})
    check(
        plain("[a/tp]", TP2, (8,)),
        hints,
        shape=(8,),
        world_size=2,
        assumption="w: split along dim 0 over ranks 0-1 in rank order" + ASSUMED,
    )


# One rank, base shapes, nothing


def test_one_rank_holds_everything():
    check([held(0, np.arange(6.0).reshape(2, 3))], shape=(2, 3), world_size=1)
    check([held(0, np.arange(6.0).reshape(2, 3), storage="transposed", offset=2)], shape=(2, 3), world_size=1)
    check([held(0, np.zeros((0, 3)))], shape=(0, 3), world_size=1)


def test_whole_on_every_rank():
    parts = [held(rank, np.arange(6.0).reshape(2, 3)) for rank in (0, 1, 3)]
    counts = check(parts, Hints(shapes={"w": (2, 3)}), shape=(2, 3), assumption="w: whole on ranks 0-1, 3")
    assert (counts == 3).all()


def test_whole_on_one_of_several_ranks_is_no_assumption():
    check([held(2, np.arange(6.0).reshape(2, 3))], Hints(shapes={"w": (2, 3)}), shape=(2, 3))
    check([held(2, np.array(0))], Hints(shapes={"w": ()}), shape=())


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(2, 2), (3, 1), (4, 0), (1, 1, 2), (0, 3, 1)])
def test_one_cut_dim_in_rank_order(dim, lengths):
    shape = [3, 2, 5]
    shape[dim] = sum(lengths)
    whole = np.arange(np.prod(shape), dtype=float).reshape(shape)
    starts = np.cumsum([0, *lengths])
    parts = [
        held(2 * i, whole.take(range(starts[i], starts[i + 1]), axis=dim), storage="transposed")
        for i in range(len(lengths))
    ]
    ranks = ", ".join(str(2 * i) for i in range(len(lengths)))
    counts = check(
        parts,
        Hints(shapes={"w": tuple(shape)}),
        shape=tuple(shape),
        world_size=9,
        assumption=f"w: split along dim {dim} over ranks {ranks} in rank order" + ASSUMED,
    )
    assert (counts == 1).all()


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 4), (2, 4), (2, 4), (2, 4)],  # twice: who holds what?
        [(2, 2), (2, 2), (2, 2), (2, 2)],  # two dims
        [(4, 4), (2, 4), (2, 4)],  # whole and parts
        [(1, 4), (2, 4)],  # too few rows
        [(2, 4), (2, 3)],
        [(4, 5)],
        [(16,)],  # flattened
        [(2, 4), (8,)],
    ],
)
def test_shapes_that_leave_no_single_way(shapes):
    parts = [held(rank, np.zeros(shape)) for rank, shape in enumerate(shapes)]
    with pytest.raises(LayoutError, match="several splits, or none") as caught:
        place("w", parts, Hints(shapes={"w": (4, 4)}), world_size=4)
    assert (caught.value.tensor, caught.value.rank, caught.value.file) == ("w", 0, "rank_0")
    assert "layouts=" in caught.value.next_step


def test_without_any_hint_nothing_is_guessed():
    parts = [held(rank, np.zeros((2, 2))) for rank in (0, 2)]
    with pytest.raises(LayoutError, match="unknown how it is split over ranks 0, 2") as caught:
        place("w", parts, Hints(shapes={"other": (4, 2)}), world_size=3)
    assert (caught.value.tensor, caught.value.rank, caught.value.got) == ("w", 0, "plain tensors of shape [2, 2]")
    with pytest.raises(LayoutError, match="unknown how it is split over rank 1"):
        place("w", [held(1, np.zeros(2))], Hints(), world_size=2)
