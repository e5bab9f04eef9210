"""What ranks tell of a live model, made one: records are views of their memories, replicas and ties are found."""

from __future__ import annotations

import json

import pytest
import torch

from xrank.engine.hf_folder import lay_out
from xrank.engine.planner import make_plan
from xrank.errors import ContradictionError, IncompleteError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.readers.live.models import LiveModel, local_model, read_ranks
from xrank.recipes.decision import select
from xrank.recipes.options import GatherOptions

MESH = DeviceMesh((2, 2), ("dp", "tp"))


def cut_map(**layouts: str) -> LayoutMap:
    made = LayoutMap(MESH)
    for name, text in layouts.items():
        made[name] = text
    return made


def told(parts: list[dict[str, torch.Tensor]], layouts: LayoutMap | None = None, ranks=None) -> list[str]:
    ranks = range(len(parts)) if ranks is None else ranks
    return [
        local_model(part, layouts=layouts, rank=rank, world_size=max(ranks) + 1).describe()
        for rank, part in zip(ranks, parts, strict=True)
    ]


def planned(live: LiveModel):
    outputs = select(live.stored, GatherOptions(), None, None, {}).outputs
    return make_plan(live.stored, lay_out(outputs, 1 << 30))


def test_records_are_views_and_files_are_memories() -> None:
    parts = [{"w": torch.rand(2, 3), "n": torch.ones(3)} for _ in range(4)]
    live = read_ranks(told(parts, cut_map(w="[f/tp/~dp, h]")))
    assert live.rank.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and live.view.tolist() == [0, 1] * 4
    assert live.stored.records.file.tolist() == live.rank.tolist()
    assert [file.path for file in live.stored.files] == [f"the memory of rank {rank}" for rank in range(4)]
    assert live.stored.records.nbytes.tolist() == [24, 12] * 4 and live.stored.nbytes == 4 * 36
    tensors = {tensor.output.name: tensor for tensor in planned(live).tensors}
    assert tensors["w"].output.shape == (8, 3) and len(tensors["w"].replicas) == 0
    # What no rule says a cut of is whole on each rank that has it.
    assert tensors["n"].output.shape == (3,) and tensors["n"].replicas.rank.tolist() == [1, 2, 3]


def test_stages_hold_tensors_of_their_own() -> None:
    live = read_ranks(told([{"a": torch.ones(2)}, {"b": torch.ones(3)}]))
    assert {tensor.output.name: tensor.copies.rank.tolist() for tensor in planned(live).tensors} == {"a": [0], "b": [1]}


def test_ranks_of_a_group_have_their_own_numbers() -> None:
    mesh = DeviceMesh((2,), ("tp",), (1, 3))
    layouts = LayoutMap(mesh)
    layouts["w"] = "[f/tp, h]"
    live = read_ranks(told([{"w": torch.ones(2, 2)}] * 2, layouts, (1, 3)), ranks=(1, 3))
    assert live.rank.tolist() == [1, 3] and live.stored.records.file.tolist() == [0, 1]
    assert next(iter(planned(live).tensors)).output.shape == (4, 2)


def test_a_tie_is_one_view_under_two_names_on_every_rank() -> None:
    def part() -> dict[str, torch.Tensor]:
        shared = torch.rand(4, 2)
        return {"embed": shared, "head": shared, "other": shared.clone()}

    live = read_ranks(told([part(), part()]))
    assert live.stored.aliases == {"head": "embed"}
    apart = part()
    apart["head"] = apart["head"].clone()
    assert read_ranks(told([part(), apart])).stored.aliases == {}


def test_a_tie_is_one_in_whatever_order_ranks_have_its_names() -> None:
    def aliases(*ranks: str) -> dict[str, str]:
        """Each rank's names, those of one view in one word."""
        parts = [{name: t for word in rank.split() for t in [torch.ones(2)] for name in word} for rank in ranks]
        return read_ranks(told(parts)).stored.aliases

    assert aliases("ab c", "c ba") == aliases("ab c", "ba") == {"b": "a"}
    assert aliases("cab", "bca", "abc") == {"a": "c", "b": "c"}
    assert aliases("a", "ba") == aliases("ba", "a") == {"b": "a"}  # of a stage that has one of them
    assert aliases("abc", "a b c") == {} and aliases("abc", "c ba") == {"b": "a"}
    assert aliases("abc", "ab", "b") == {"a": "b", "c": "b"}


def test_a_rank_of_the_mesh_that_holds_nothing_is_missed() -> None:
    parts: list[dict[str, torch.Tensor]] = [{"w": torch.rand(2, 3)} for _ in range(4)]
    parts[2] = {}
    with pytest.raises(IncompleteError) as caught:
        planned(read_ranks(told(parts, cut_map(w="[f/tp/~dp, h]"))))
    assert caught.value.tensor == "w" and "2" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "what"),
    [({"w": torch.rand(2, 3).double()}, "dtype"), ({"w": torch.rand(2, 4)}, "shape"), ({"w": torch.rand(3)}, "shape")],
)
def test_ranks_that_disagree_are_named(change: dict[str, torch.Tensor], what: str) -> None:
    parts = [{"w": torch.rand(2, 3)} for _ in range(2)]
    parts[1] = change
    with pytest.raises(ContradictionError) as caught:
        planned(read_ranks(told(parts)))
    assert caught.value.tensor == "w" and what in f"{caught.value} {caught.value.got}"


def test_ranks_that_get_the_same_layouts_as_advised() -> None:
    parts = [{"w": torch.rand(2, 3)} for _ in range(2)]
    rows, columns = (LayoutMap(DeviceMesh((2,), ("tp",))) for _ in range(2))
    rows["w"], columns["w"] = "[f/tp, h]", "[f, h/tp]"
    texts = [told(parts, rows)[0], told(parts, columns)[1]]
    with pytest.raises(ContradictionError, match="ranks 0 and 1 disagree about its layout or mesh") as caught:
        read_ranks(texts)
    assert caught.value.next_step == "write the same model, of one run and step and with the same layouts, on all ranks"
    assert next(iter(planned(read_ranks(told(parts, rows))).tensors)).output.shape == (4, 3)


def test_a_rank_that_takes_itself_for_another_is_refused() -> None:
    texts = told([{"w": torch.ones(2)}, {"w": torch.ones(2)}])
    with pytest.raises(ContradictionError, match="rank 0 describes itself as rank 1"):
        read_ranks(texts[::-1])
    with pytest.raises(ContradictionError, match="rank 1 describes itself as rank 0"):
        read_ranks(texts, ranks=(1, 2))


def test_what_is_told_is_small_and_plain() -> None:
    text = told([{f"layers.{i}.w": torch.ones(100, 100) for i in range(1000)}])[0]
    assert len(text) < 150_000 and json.loads(text)["views"] == [40_000] * 1000
