"""A model with Megatron-core's own names, cut as a parallel run cuts it, has Megatron's logits in transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import embedding, rms_norm

from tests.recipes.families import FAMILIES, Family
from tests.recipes.families.checkpoints import write_checkpoint
from tests.recipes.families.family import NEXT, PICTURE, TOKENS, draw_weights
from tests.sampled import sampled
from xrank import gather_checkpoint

pytestmark = pytest.mark.timeout(120)


def load(family: Family, folder: Path) -> torch.nn.Module:
    import transformers

    if family.hugging_face is None:
        auto = getattr(transformers, family.auto_class)
        model, told = auto.from_pretrained(folder, output_loading_info=True)
        # transformers has no layers that predict further tokens.
        unexpected = [name for name in told["unexpected_keys"] if not is_of_next(family, name)]
        assert not told["missing_keys"] and not unexpected
        return model.eval()
    model = family.hugging_face(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if not is_of_next(family, name)})
    return model


def is_of_next(family: Family, name: str) -> bool:
    """Return whether a tensor is of a layer that predicts further tokens."""
    return name.startswith((f"model.layers.{family.config.get('num_hidden_layers')}.", "model.mtp_layers.", "mtp."))


def predict_next(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of the token after the next, at `NEXT`, by the arithmetic of inference engines.

    DeepSeek's, GLM's and Qwen's layer joins the next token's embedding to the hidden state, MiMo's the reverse
    (vllm/model_executor/models/deepseek_mtp.py, qwen3_next_mtp.py, mimo_mtp.py).
    """
    is_mimo = any("mtp_layers" in name for name in tensors)
    is_qwen = "mtp.fc.weight" in tensors
    last = model.model.layers[-1]
    prefix = "model.mtp_layers.0." if is_mimo else f"model.layers.{len(model.model.layers)}."
    own = {re.sub(r"^mtp\.(layers\.0\.)?", prefix, name): tensor for name, tensor in tensors.items()}
    own = {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    names = names if is_mimo else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm") if is_qwen else names
    token, hidden, project, final = (own.pop(f"{name}.weight") for name in names)
    if is_qwen:  # its norms are around zero
        token, hidden, final = token + 1, hidden + 1, final + 1
    epsilon = model.model.norm.eps if is_qwen else model.model.norm.variance_epsilon
    tokens = torch.tensor([TOKENS])
    state = rms_norm(model.model(tokens).last_hidden_state, hidden.shape, hidden, epsilon)
    embedded = embedding(tokens.roll(-1), own.pop("embed_tokens.weight", model.model.embed_tokens.weight))
    embedded = rms_norm(embedded, token.shape, token, epsilon)
    both = (state, embedded) if is_mimo else (embedded, state)
    head = own.pop("shared_head.head.weight", model.lm_head.weight)
    missing, unexpected = last.load_state_dict(fuse_experts(last, own), strict=False)
    assert not missing and not unexpected
    x = torch.cat(both, -1) @ project.T
    mask = torch.full((len(TOKENS), len(TOKENS)), float("-inf")).triu(1)[None, None]
    rotary = model.model.rotary_emb(x, torch.arange(len(TOKENS))[None])
    x = last(x, attention_mask=mask, position_embeddings=rotary)
    return (rms_norm(x, final.shape, final, epsilon) @ head.T)[0, NEXT]


def fuse_experts(layer: torch.nn.Module, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the layer's tensors in memory, where experts are one tensor, from those in files."""
    found = {name: tensor for name, tensor in own.items() if ".experts." not in name}
    fused = layer.state_dict().get("mlp.experts.gate_up_proj")
    if fused is not None:
        both = [[own[f"mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")] for e in range(len(fused))]
        found["mlp.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in both])
        found["mlp.experts.down_proj"] = torch.stack([down for _, _, down in both])
    return found


@pytest.mark.parametrize("name", sampled(FAMILIES, 3))
@pytest.mark.parametrize("kind", ["legacy", "dist"])
def test_logits_are_megatrons(tmp_path: Path, name: str, kind: str) -> None:
    family = FAMILIES[name]
    source = write_checkpoint(tmp_path / "ckpt", family, kind)
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(family.full_config()))
    assert gather_checkpoint(source, tmp_path / "out").source["recipe"] == family.recipe
    model = load(family, tmp_path / "out")
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, -1]
        if "next_logits" in family.recorded:
            tensors = load_file(tmp_path / "out" / "model.safetensors")
            if "mtp.fc.weight" in tensors:  # behind delta nets, rounding to float32 alone adds up to 1e-5
                model.set_experts_implementation("eager")
                model, tensors = model.double(), {key: tensor.double() for key, tensor in tensors.items()}
            found = predict_next(model, tensors)
            assert found.tolist() == pytest.approx(family.recorded["next_logits"], abs=1e-5)
        if "features" in family.recorded:
            picture = torch.from_numpy(draw_weights({"picture": PICTURE})["picture"])
            seen = model.get_image_features(pixel_values=picture).pooler_output
            assert seen.flatten().tolist() == pytest.approx(family.recorded["features"], abs=1e-5)
    expected = family.recorded["logits"]
    assert max(map(abs, expected)) > 0.5
    assert logits.tolist() == pytest.approx(expected, abs=1e-5)
