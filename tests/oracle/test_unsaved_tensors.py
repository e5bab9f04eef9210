"""Tensors that `save_pretrained` leaves out and `from_pretrained` computes: gathers, exports and loads agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import MarianConfig, MarianMTModel

import xrank
from xrank.recipes.ties import list_unsaved


@pytest.mark.parametrize("embeddings", [{}, {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 40}])
def test_gather_and_export_of_marian_agree_with_transformers(tmp_path: Path, embeddings: dict[str, int]) -> None:
    torch.manual_seed(0)
    sizes = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in [("layers", 1), ("ffn_dim", 24)]}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 20}
    model = MarianMTModel(MarianConfig(vocab_size=36, d_model=16, pad_token_id=35, **sizes, **embeddings)).eval()
    model.save_pretrained(tmp_path / "saved")
    want = load_file(tmp_path / "saved" / "model.safetensors")
    raw = tmp_path / "raw"
    raw.mkdir()
    torch.save(model.state_dict(), raw / "model.pt")
    (raw / "config.json").write_bytes((tmp_path / "saved" / "config.json").read_bytes())
    report = xrank.gather_checkpoint(raw, tmp_path / "gathered")
    assert "embed_positions" in dict(report.notes)["not-saved"]
    xrank.export_model(model, tmp_path / "exported")
    for name in ("gathered", "exported"):
        made = load_file(tmp_path / name / "model.safetensors")
        assert made.keys() == want.keys() and all(torch.equal(made[key], want[key]) for key in want)
    # Each is the other's base model, and so is a folder with all tensors.
    xrank.gather_checkpoint(raw, tmp_path / "again", base_model=tmp_path / "exported")
    xrank.export_model(model, tmp_path / "once more", base_model=tmp_path / "gathered")
    xrank.verify_model(tmp_path / "gathered", against=raw)
    loaded, tokens = MarianMTModel.from_pretrained(tmp_path / "gathered").eval(), torch.arange(5)[None]
    other = MarianMTModel(model.config).eval()
    xrank.load_model(other, tmp_path / "exported")
    with torch.no_grad():
        logits = model(tokens, decoder_input_ids=tokens).logits
        assert torch.equal(loaded(tokens, decoder_input_ids=tokens).logits, logits)
        assert torch.equal(other(tokens, decoder_input_ids=tokens).logits, logits)


def test_table_is_that_of_transformers() -> None:
    assert list_unsaved({"architectures": ["MarianMTModel"]}) == tuple(MarianMTModel._keys_to_ignore_on_save)
