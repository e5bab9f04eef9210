"""Every family from Hugging Face's files to a Megatron job of two tensor-parallel ranks, and back to the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.recipes.families import FAMILIES, Family
from tests.recipes.made_checkpoints import leave
from xrank import gather_checkpoint, reshard_checkpoint
from xrank.dialects.megatron.layouts import layout_of

pytestmark = pytest.mark.timeout(120)


def write_layout(file: Path, family: Family) -> Path:
    """Write the layout of a family's tensors over `tp`, experts cut by the same ranks."""
    args = family.full_args()
    is_gated = any(args.get(key) for key in ("swiglu", "quick_geglu", "gated_linear_unit"))
    rules = []
    for name, shape in family.recorded["shapes"].items():
        layout = layout_of(name, is_gated=is_gated)
        text = "[" + ", ".join("abc"[: len(shape)]) + "]" if layout is None else str(layout)
        rules.append(f'"{name}" = "{text.replace("/etp", "/tp")}"')
    file.write_text(f'[mesh]\ngrid = "tp={family.num_ways}"\n[tensors]\n' + "\n".join(rules))
    return file


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tensors = {key: torch.from_numpy(array) for key, array in family.weights().items()}
    gather_checkpoint(leave(tmp_path / "ws", tensors, family.full_config()), tmp_path / "hf")
    layout = write_layout(tmp_path / "layout.toml", family)
    reshard_checkpoint(tmp_path / "hf", layout, tmp_path / "job", recipe=family.recipe)
    held = torch.load(tmp_path / "job" / "rank_0_state.pth", weights_only=True)["weight"]
    assert held.keys() == tensors.keys()
    report = gather_checkpoint(tmp_path / "job", tmp_path / "again")
    assert report.source["recipe"] == family.recipe
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
