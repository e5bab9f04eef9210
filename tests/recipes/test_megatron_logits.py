"""A model with Megatron-core's own names, cut as a parallel run cuts it, has Megatron's logits in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.recipes.families import FAMILIES, Family
from tests.recipes.families.checkpoints import write_checkpoint
from tests.recipes.families.family import TOKENS
from xrank import gather_checkpoint

pytestmark = pytest.mark.timeout(120)


def load(family: Family, folder: Path) -> torch.nn.Module:
    import transformers

    if family.hugging_face is None:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        return model.eval()
    from safetensors.torch import load_file

    model = family.hugging_face(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["legacy", "dist"])
def test_logits_are_megatrons(tmp_path: Path, name: str, kind: str) -> None:
    family = FAMILIES[name]
    source = write_checkpoint(tmp_path / "ckpt", family, kind)
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(family.full_config()))
    assert gather_checkpoint(source, tmp_path / "out").source["recipe"] == family.recipe
    with torch.no_grad():
        logits = load(family, tmp_path / "out")(torch.tensor([TOKENS])).logits[0, -1]
    expected = family.recorded["logits"]
    assert max(map(abs, expected)) > 0.5
    assert logits.tolist() == pytest.approx(expected, abs=1e-5)
