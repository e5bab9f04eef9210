"""Ranks that disagree: about what a tensor is, where its parts lie, or what it holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.cli.bench import Bench
from tests.commands.made_workspaces import (
    copied,
    leave,
    leave_plain,
    made_model,
    record,
    rewrite,
    rewrite_record,
    state_of,
)
from xrank.formats.rank_state import RankRecord, TensorRecord
from xrank.readers import placement

State = dict[str, Any]


def weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    def alter(state: State) -> None:
        state["weight"][name] = change(state["weight"][name]).clone()

    return alter


def recorded(name: str, **fields: Any) -> Callable[[State], None]:
    """Change what a state records of one tensor."""

    def alter(state: State) -> None:
        found = RankRecord.from_json(state["xrank"], file="made")
        tensors = {**found.tensors, name: replace(found.tensors[name], **fields)}
        state["xrank"] = replace(found, tensors=tensors).to_json()

    return alter


def meshes(*made: Any) -> Callable[[State], None]:
    def alter(state: State) -> None:
        found = RankRecord.from_json(state["xrank"], file="made")
        state["xrank"] = replace(found, meshes=made).to_json()

    return alter


DISAGREEMENTS = {
    "a shape": (
        weight("embed.weight", lambda part: part[:, :6]),
        ["embed.weight: ", "(8, 8)", "(8, 6)", "equal sizes"],
    ),
    "a number of dims": (
        weight("embed.weight", lambda part: part.reshape(8, 2, 4)),
        ["embed.weight: ", "got   3 dims", "2 dims"],
    ),
    "a dtype": (
        weight("embed.weight", lambda part: part.double()),
        ["embed.weight: ranks 0 and 3 disagree about its dtype", "got   F64 on rank 3", "F32, as on rank 0"],
    ),
    "a global shape": (
        recorded("norm.weight", shape=(16,)),
        ["norm.weight: ranks 0 and 3 disagree about its global shape", "(16,) on rank 3", "(8,), as on rank 0"],
    ),
    "a layout": (
        recorded("embed.weight", layout="[v/dp, h]"),
        ["embed.weight: ranks 0 and 3 disagree", "got   [v/dp, h] on dp=2 tp=2", "[v/tp, h] on dp=2 tp=2"],
    ),
    "whether there is a layout": (
        recorded("embed.weight", layout=None, mesh=None),
        ["embed.weight: some ranks recorded a layout", "no layout on rank 3", "[v/tp, h], as on ranks 0-2"],
    ),
    "the mesh's shape": (
        meshes((("dp", "tp"), (1, 4), (0, 1, 2, 3))),
        [
            "embed.weight: ranks 0 and 3 disagree about its layout or mesh",
            "on dp=1 tp=4",
            "[v/tp, h] on dp=2 tp=2",
        ],
    ),
    "the mesh's order": (
        meshes((("dp", "tp"), (2, 2), (0, 2, 1, 3))),
        ["embed.weight: ranks 0 and 3 disagree about its layout or mesh", "0, 2, 1, 3"],
    ),
    "the mesh's axes": (
        meshes((("tp", "dp"), (2, 2), (0, 1, 2, 3))),
        ["embed.weight: ranks 0 and 3 disagree about its layout or mesh", "on tp=2 dp=2", "on dp=2 tp=2"],
    ),
    "being in the mesh": (
        meshes((("dp", "tp"), (2, 1), (0, 2))),
        ["embed.weight: the mesh that rank 3 recorded does not contain it", "a mesh of ranks 0, 2", "with rank 3"],
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_disagree_about(bench: Bench, what: str) -> None:
    change, says = DISAGREEMENTS[what]
    model = leave(bench.workspace)
    good = copied(bench.workspace)
    rewrite(bench.workspace, 3, change)
    tensor = says[0].partition(":")[0]
    bench.refused("ContradictionError", says=says, rank=3, tensor=tensor, file="rank_3_state.pth")
    shutil.rmtree(bench.workspace)
    shutil.copytree(good, bench.workspace)
    bench.succeeds(model)


@pytest.mark.parametrize(
    ("layout", "axes", "shape", "kind", "says"),
    [
        ("[a/", ("x",), (8,), "LayoutError", ["a layout cannot be read: the text ends", "an axis"]),
        ("[a/y]", ("x",), (8,), "LayoutError", ["has no axis 'y'", "one of ['x']"]),
        ("[a/x, b]", ("x",), (8,), "LayoutError", ["does not fit the shape (8,)", "2 dims"]),
        ("[a/x]", ("x",), (9,), "LayoutError", ["9 is not divisible by 2", "a multiple of 2"]),
        ("[a/x]", ("x",), (10,), "ContradictionError", ["rank 0's part does not have the shape", "got   [4]", "[5]"]),
        ("[a/x]", ("x y",), (8,), "LayoutError", ["axis name 'x y'", "a letter"]),
        ("[a/x]", ("x\x1b[31m",), (8,), "LayoutError", ["axis name 'x\\x1b[31m'"]),
    ],
)
def test_layouts_that_do_not_fit(
    bench: Bench, layout: str, axes: tuple[str, ...], shape: tuple[int, ...], kind: str, says: list[str]
) -> None:
    def leave_both(layout: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        for rank in range(2):
            told = {"a.weight": TensorRecord(layout, 0, shape)}
            text = record(rank, 2, told, meshes=((axes, (2,), (0, 1)),))
            leave_plain(bench.workspace, rank, {"a.weight": torch.arange(4.0) + 4 * rank}, xrank=text)

    leave_both(layout, axes, shape)
    bench.refused(kind, says=says, rank=0, file="rank_0_state.pth")
    leave_both("[a/x]", ("x",), (8,))
    bench.succeeds({"a.weight": torch.arange(8.0)})


# ---- replicas


def test_replicas_that_differ(bench: Bench) -> None:
    model = leave(bench.workspace)

    def drift(state: State) -> None:
        state["weight"]["embed.weight"][3, 2] += 0.25
        state["weight"]["embed.weight"][5, 1] -= 1.5

    rewrite(bench.workspace, 2, drift)
    says = [
        "embed.weight: rank 2 holds different values than rank 0",
        "got   2 of 64 elements differ, the first at element [3, 2], by at most 1.5",
        "--replicas pick, which takes the lowest rank's",
    ]
    bench.refused(
        "ContradictionError", says=says, rank=2, tensor="embed.weight", file="rank_2_state.pth",
        index_range="element [3, 2]",
    )  # fmt: skip
    report = bench.succeeds(model, "--replicas", "pick")
    said = "embed.weight: rank 2 differs in 2 elements; the lowest rank's were used"
    assert [note["message"] for note in report["notes"] if note["code"] == "replicas-differ"] == [said]
    manifest = json.loads((bench.out / "xrank_manifest.json").read_text())
    assert ["replicas-differ", said] in manifest["notes"]
    shutil.rmtree(bench.out)
    leave(bench.workspace, ranks=[2])
    bench.succeeds(model)


def test_a_replica_that_is_not_a_number(bench: Bench) -> None:
    leave(bench.workspace)
    rewrite(bench.workspace, 2, lambda state: state["weight"]["embed.weight"][3, 2].fill_(torch.nan))
    bench.refused("ContradictionError", says=["1 of 64 elements differ, the first at element [3, 2]", "NaN"], rank=2)


def test_replicas_of_integers(bench: Bench) -> None:
    leave(bench.workspace)
    rewrite(bench.workspace, 3, lambda state: state["weight"]["steps"][2].add_(1))
    bench.refused(
        "ContradictionError", says=["steps: rank 3 holds different values", "1 of 3 elements", "by at most 1"], rank=3
    )


def test_equal_bits_are_asked_for_not_equal_values(bench: Bench) -> None:
    # -0.0 == 0.0, but a model is its bytes; a NaN of the same bits is the same.
    whole = {"norm.weight": torch.tensor([0.0, torch.nan, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])}
    leave(bench.workspace, whole)
    bench.succeeds(whole)
    shutil.rmtree(bench.out)
    rewrite(bench.workspace, 1, lambda state: state["weight"]["norm.weight"][0].neg_())
    bench.refused("ContradictionError", says=["norm.weight: rank 1", "1 of 8 elements differ"], rank=1)


# ---- the proof itself


def test_an_overlap(bench: Bench) -> None:
    # Two meshes that each hold the whole, in different parts: which copy is meant cannot be told.
    whole = torch.arange(16.0).reshape(4, 4)
    both = ((("x",), (2,), (0, 1)), (("y",), (2,), (2, 3)))

    def leave_cut(rank: int, by_columns: bool) -> None:
        part = whole.chunk(2, int(by_columns))[rank % 2].clone()
        told = TensorRecord("[a, b/y]" if by_columns else f"[a/{'xy'[rank // 2]}, b]", rank // 2, (4, 4))
        leave_plain(bench.workspace, rank, {"a.weight": part}, xrank=record(rank, 4, {"a.weight": told}, meshes=both))

    for rank in range(4):
        leave_cut(rank, by_columns=rank >= 2)
    says = [
        "a.weight, from element [0, 0] on: held twice, by ranks 0, 2",
        f"rank 0 in {state_of(bench.workspace, 0)}, rank 2 in {state_of(bench.workspace, 2)}",
        "every element exactly once",
    ]
    bench.refused("ContradictionError", says=says, tensor="a.weight", rank=2, index_range="element [0, 0]")
    for rank in (2, 3):
        leave_cut(rank, by_columns=False)
    bench.succeeds({"a.weight": whole})


def test_a_hole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every rank of the mesh is asked for before; without that the proof has to find what is missing.
    model = leave(bench.workspace)
    good = copied(bench.workspace)
    for rank in range(4):
        rewrite(bench.workspace, rank, recorded("up.weight", shape=(12, 8)))
    rewrite(bench.workspace, 1, lambda state: state["weight"].pop("up.weight"))
    with monkeypatch.context() as blind:
        blind.setattr(placement, "check_meshes", lambda name, placed: None)
        says = [
            "up.weight, rows 6-8: no rank wrote these elements",
            "got   pieces of ranks 0, 2-3",
            "every element exactly once",
        ]
        bench.refused("IncompleteError", says=says, tensor="up.weight", index_range="rows 6-8")
    shutil.rmtree(bench.workspace)
    shutil.copytree(good, bench.workspace)
    bench.succeeds(model)


def test_a_part_past_the_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # A wrong nest is no metadata fault but a bug of ours; the proof stands between it and the output.
    model = leave(bench.workspace)
    shifted = placement.local_part

    def local_part(*arguments: Any, **named: Any) -> Any:
        part = shifted(*arguments, **named)
        return replace(part, nests=tuple(nest._replace(y=nest.y + 8) for nest in part.nests))

    placement._place_alike.cache_clear()
    with monkeypatch.context() as wrong:
        wrong.setattr(placement, "local_part", local_part)
        bench.refused("ContradictionError", says=["a rank holds elements outside the tensor"], rank=0)
    placement._place_alike.cache_clear()
    bench.succeeds(model)


# ---- names


@pytest.mark.parametrize(
    "name",
    ["../evil", "a/../../b", "..", "a\\..\\b", "a\0b", "a\x1b[31mred", "a\x9b31m", "a\rb", "a\nb", "a\x7fb", "a\ud800"],
)
@pytest.mark.parametrize("placed", [True, False], ids=["placed", "not placed"])
def test_names_that_are_none(bench: Bench, name: str, placed: bool) -> None:
    def leave_named(name: str) -> None:
        told = {name: TensorRecord("[a]", 0, (4,))} if placed else {}
        for rank in range(2):
            text = record(rank, 2, told, meshes=((("x",), (2,), (0, 1)),))
            leave_plain(bench.workspace, rank, {name: torch.ones(4)}, xrank=text)

    leave_named(name)
    escaped = name.encode("unicode_escape").decode() if not name.isprintable() else name
    # Bench.refused sees to it that no control character is printed raw.
    error = bench.refused("UnsafeError" if placed else "LayoutError", says=[] if "\\" in name else [escaped])
    assert error["tensor"] == name
    verbose = bench.gather("-v")
    assert verbose.exit_code == (4 if placed else 2)
    assert not [c for c in verbose.stderr if c != "\n" and not c.isprintable()]
    if placed:
        leave_named("a")
        bench.succeeds({"a": torch.ones(4)})


@pytest.mark.parametrize("name", ["layers.0.naïve weight", "100%s", "a\u202eb", "x" * 5000, "{0}", "tensor..weight"])
def test_names_that_are_unusual(bench: Bench, name: str) -> None:
    leave_plain(bench.workspace, 0, {name: torch.ones(4)})
    bench.succeeds({name: torch.ones(4)})


def test_a_name_that_safetensors_keeps_for_itself(bench: Bench) -> None:
    leave_plain(bench.workspace, 0, {"__metadata__": torch.ones(4)})
    bench.refused("UsageError", says=["__metadata__: safetensors reserves this name"], tensor="__metadata__")


def test_every_error_of_a_tensor_names_the_others_too(bench: Bench) -> None:
    leave(bench.workspace, made_model(), recorded=False)
    error = bench.refused(
        "LayoutError", says=["embed.weight: no layout is recorded", "likewise up.weight, down.weight"]
    )
    assert error["got"].endswith("likewise up.weight, down.weight, norm.weight, steps")


def test_rewriting_a_record_alone_changes_nothing(bench: Bench) -> None:
    # What the tests above do to a state is what makes it refused, not that they do it.
    model = leave(bench.workspace)
    for rank in range(4):
        rewrite_record(bench.workspace, rank)
    bench.succeeds(model)
