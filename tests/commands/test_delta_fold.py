"""Folded versions: one delta that makes of the first base what all of them make, without that base."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xrank
from tests.cli.bench import run
from tests.commands.applied_deltas import apply_version, read_index, read_model
from tests.commands.test_delta import save
from xrank.errors import ContradictionError, CorruptError, UsageError

SIZES = {"a.weight": 0, "b.weight": 5, "c.weight": 1 << 10, "d.weight": (1 << 20) + 7}


def chain(folder: Path, changes: list[dict[str, Any]], **options: Any) -> list[Path]:
    """Make models and the versions between them; return the models and the versions."""
    values = {name: torch.arange(size).byte() for name, size in SIZES.items()}
    models = [save(folder / "model-0", values)]
    for number, change in enumerate(changes, 1):
        values = {name: tensor.clone() for name, tensor in values.items()}
        for name, places in change.items():
            for place, added in places:
                if SIZES[name]:
                    values[name][place % SIZES[name]] += added
        models.append(save(folder / f"model-{number}", values))
        xrank.make_delta(models[-2], models[-1], folder / "chain" / f"weight_v{number:06d}", **options)
    return models


changes = st.dictionaries(
    st.sampled_from([*SIZES]),
    st.lists(st.tuples(st.sampled_from([0, 1, 1000, 1 << 20, -1]), st.sampled_from([1, 128, 255])), max_size=4),
)


@given(st.lists(changes, min_size=1, max_size=4), st.sampled_from(["xor", "overwrite"]))
@settings(max_examples=25)
def test_one_version_makes_what_all_make(changed, encoding: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = chain(Path(folder), changed, encoding=encoding, step=9)
        out = Path(folder) / "folded" / f"weight_v{len(changed):06d}"
        report = xrank.fold_deltas(Path(folder) / "chain", out)
        found, base = read_model(models[-1]), read_model(models[0])
        assert apply_version(out, base, may_be_equal=encoding == "overwrite") == found
        first, last = (
            read_index(Path(folder) / "chain" / f"weight_v{number:06d}")["metadata"] for number in (1, len(changed))
        )
        facts = read_index(out)["metadata"]
        own = {**last["xrank"], "base_state": first["xrank"]["base_state"]}
        assert facts == {**last, "base_version": "000000", "xrank": own}
        assert (report.details.version, report.details.base_version) == (len(changed), 0)
        if encoding == "xor":
            assert len(read_index(out)["weight_map"]) == sum(base[name] != found[name] for name in SIZES)
            for path in (out, Path(folder) / "chain" / f"weight_v{len(changed):06d}"):
                xrank.gather_checkpoint(path, f"{path}-whole", base_model=models[0])
                assert read_model(Path(f"{path}-whole")) == found


TWICE = [{"c.weight": [(1, 1)]}, {"c.weight": [(1, 255)], "d.weight": [(9, 3)]}]


def test_what_has_changed_back_is_not_in_it(tmp_path: Path) -> None:
    models = chain(tmp_path, TWICE)
    done = run("delta", "fold", *sorted((tmp_path / "chain").iterdir()), "-o", tmp_path / "folded" / "weight_v000002")
    assert done.exit_code == 0
    assert "1 of 2 tensors" in done.stdout
    assert [*read_index(tmp_path / "folded" / "weight_v000002")["weight_map"]] == ["d.weight"]
    assert apply_version(tmp_path / "folded" / "weight_v000002", read_model(models[0])) == read_model(models[2])


def test_what_cannot_be_folded(tmp_path: Path) -> None:
    models = chain(tmp_path, [*TWICE, TWICE[1]])
    versions = sorted((tmp_path / "chain").iterdir())
    out = tmp_path / "folded" / "weight_v000003"
    with pytest.raises(UsageError, match="weight_v000003 cannot be folded") as caught:
        xrank.fold_deltas([versions[0], versions[2]], out)
    assert caught.value.got == "changes of version 2"
    with pytest.raises(UsageError, match="weight_v000007 cannot be folded"):
        xrank.fold_deltas(versions, tmp_path / "folded" / "weight_v000007")
    xrank.make_delta(models[2], models[3], versions[2], encoding="overwrite", overwrite=True)
    with pytest.raises(UsageError, match="weight_v000003 cannot be folded") as caught:
        xrank.fold_deltas(versions, out)
    assert "xrank delta make BASE" in str(caught.value.next_step)
    xrank.make_delta(models[0], models[3], versions[2], overwrite=True)
    with pytest.raises(ContradictionError, match="changes to different weights"):
        xrank.fold_deltas(versions, out)
    whole = tmp_path / "chain" / "weight_v000004"
    xrank.save_model({"c.weight": torch.ones(3)}, whole)
    with pytest.raises(UsageError, match="weight_v000004 cannot be folded"):
        xrank.fold_deltas([versions[0], whole], tmp_path / "folded" / "weight_v000004")
    assert not (tmp_path / "folded").exists() or not list((tmp_path / "folded").iterdir())


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_flipped_bit(tmp_path: Path, encoding: str) -> None:
    chain(tmp_path, [{"c.weight": [(1, 1)]}, {"c.weight": [(2, 9)]}], encoding=encoding)
    path = tmp_path / "chain" / "weight_v000001" / "model-00000-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"c\.weight: its changes contradict"):
        xrank.fold_deltas(tmp_path / "chain", tmp_path / "folded" / "weight_v000002")
