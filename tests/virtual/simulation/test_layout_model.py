"""Models from layout files: their ranks' parts equal those that real ranks write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.virtual.simulation.made_layouts import llama
from tests.virtual.simulation.test_planned_bytes import left, written
from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.recipes.sources import read_source
from xrank.virtual.simulation.simulation import build_layout_model, read_layouts_on, survey_layouts


def test_the_pieces_are_those_that_real_ranks_left(tmp_path: Path) -> None:
    real = read_source(str(left(tmp_path))).model
    file = str(written(tmp_path))
    found, notes = survey_layouts(read_layouts_on(file, None), file, "F32")
    made = build_layout_model(found, file)
    assert notes == () and made.world_size == 4
    shards = {shard.name: shard for shard in real.shards}
    assert {shard.name for shard in made.shards} == set(shards)
    for shard in made.shards:
        other = shards[shard.name]
        assert (shard.dtype, shard.shape) == (other.dtype, other.shape)

        def pieces(one, records):
            nests = (one.nests[i] for i in range(len(one.nests)))
            return sorted(zip(one.rank.tolist(), nests, records.nbytes[one.record].tolist(), strict=True))

        assert pieces(shard, made.records) == pieces(other, real.records)
    # Records lie side by side in the file of their rank.
    for rank, file_ in enumerate(made.files):
        rows = np.flatnonzero(made.records.file == rank)
        ends = made.records.offset[rows] + made.records.nbytes[rows]
        assert made.records.offset[rows].tolist() == [0, *ends[:-1]] and ends[-1] == file_.nbytes


def test_another_mesh(tmp_path: Path) -> None:
    file = str(llama(tmp_path, "pp=1 dp=1 tp=1"))
    found, _ = survey_layouts(read_layouts_on(file, "pp=2 dp=4 tp=2"), file, "BF16")
    made = build_layout_model(found, file)
    assert made.world_size == 16 and len(made.files) == 16
    whole = build_layout_model(survey_layouts(read_layouts_on(file, None), file, "BF16")[0], file)
    assert whole.nbytes * 1.5 > made.nbytes >= whole.nbytes
    assert LayoutMap.read(file, mesh=DeviceMesh((1, 1, 1), ("pp", "dp", "tp"))) == LayoutMap.read(file)


def test_views_follow_the_mesh(tmp_path: Path) -> None:
    file = tmp_path / "views.toml"
    file.write_text('[mesh]\ngrid = "dp=2 tp=2"\nview.e = "ep=4"\n[tensors]\n"a" = "[8/ep] in e"\n')
    assert read_layouts_on(str(file), "dp=1 tp=4").views["e"].grid == "ep=4"
    with pytest.raises(LayoutError, match=r"a view of \[mesh\]") as caught:
        read_layouts_on(str(file), "dp=2 tp=4")
    assert "mesh=" in (caught.value.next_step or "")


@pytest.mark.parametrize(
    ("text", "mesh", "says"),
    [
        ('[mesh]\ngrid = "tp=2"\n[tensors]\n"a" = "[8/tp]"\n', "dp=2", "tp"),
        ('[mesh]\ngrid = "tp=2"\n[tensors]\n"a" = "[8/tp]"\n', "tp=3", "a"),
        ('[mesh]\ngrid = "tp=2"\n[tensors]\n"a" = "[8/tp]"\n', "tp:2", "cannot be read"),
        (
            '[mesh]\ngrid = "tp=2"\n[sizes]\ndp = 4\n[tensors]\n"a" = "[dp/tp]"\n',
            "dp=2 tp=2",
            "both a size and an axis",
        ),
        ('[mesh]\ngrid = "tp=2"\n[tensors]\n"a" = "[h/tp]"\n', None, "defines the size of no tensor"),
        ('[tensors]\n"a" = "[8, 8]"\n', None, "mesh"),
        ('[mesh]\ngrid = "tp=2"\n[tensors]\n"a" = "[8] sum(tp)"\n', None, "partial sums over tp"),
        ('[mesh]\ngrid = "a=2 b=2"\nview.e = "e=4"\n[tensors]\n"x" = "[8/e] in e where b=0"\n', None, "held by no"),
    ],
)
def test_invalid_layouts_are_refused(tmp_path: Path, text: str, mesh: str | None, says: str) -> None:
    file = tmp_path / "layout.toml"
    file.write_text(text)
    with pytest.raises(LayoutError, match=says) as raised:
        survey_layouts(read_layouts_on(str(file), mesh), str(file), "F32")
    assert "--toml" not in str(raised.value.next_step)  # layout show prints names of sizes without numbers


def test_layers_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """They were left out with a note, so that 2 of 242 tensors were planned."""
    file = tmp_path / "layout.toml"
    file.write_text('[mesh]\ngrid = "pp=2"\n[tensors]\n"layers.{80/pp}.up" = "[8, 8]"\n"norm" = "[8]"\n')
    assert len(survey_layouts(read_layouts_on(str(file), "pp=4"), str(file), "F32")[0].tensors) == 81
    with pytest.raises(LayoutError, match=r"'layers\.\{80/pp\}\.up' fits no tensor: .*80 is not divisible by 7"):
        survey_layouts(read_layouts_on(str(file), "pp=7"), str(file), "F32")


def test_ranks_with_gaps_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "layout.toml"
    file.write_text('[mesh]\ngrid = "tp=2"\nranks = [1, 2]\n[tensors]\n"a" = "[8/tp]"\n')
    found, _ = survey_layouts(read_layouts_on(str(file), None), str(file), "F32")
    with pytest.raises(UsageError, match="not numbered from 0"):
        build_layout_model(found, str(file))


def test_tensors_without_sizes_are_noted(tmp_path: Path) -> None:
    file = tmp_path / "layout.toml"
    file.write_text('[mesh]\ngrid = "tp=2"\n[tensors]\n"a" = "[8/tp]"\n"b" = "[n/tp]"\n')
    found, notes = survey_layouts(read_layouts_on(str(file), None), str(file), "F32")
    assert [one.name for one in found.tensors] == ["a"]
    assert [code for code, _ in notes] == ["no-shape"] and "'b'" in notes[0][1]
