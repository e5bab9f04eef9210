"""Small models of many kinds, each with the inputs of a whole batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

BATCH = 4

Kind = tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]

_TEXT = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NO_DROPOUT = {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0, "activation_dropout": 0.0, "attn_pdrop": 0.0,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 48, (BATCH, 7))
    labels = ids.clone()
    labels[0, :4] = -100  # ranks ignore different numbers of targets
    return {"input_ids": ids, "labels": labels}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 5, (BATCH,))}


def _of(config: str, model: str, options: dict[str, Any], inputs: Callable[[], dict[str, torch.Tensor]]) -> Kind:
    def make() -> nn.Module:
        made = getattr(transformers, config)(**options)
        return getattr(transformers, model)(made)

    return make, inputs


def _text(name: str, **options: Any) -> Kind:
    return _of(f"{name}Config", f"{name}ForCausalLM", {**_TEXT, **_NO_DROPOUT, **options}, tokens)


def _image(name: str, **options: Any) -> Kind:
    return _of(f"{name}Config", f"{name}ForImageClassification", {**_NO_DROPOUT, "num_labels": 5, **options}, images)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}


class UNet(nn.Module):
    """Down, up, a skip connection, group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.inner_norm = nn.GroupNorm(2, 8), nn.GroupNorm(4, 16)
        self.up, self.outlet = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = functional.silu(self.norm(self.inlet(pixel_values)))
        y = self.up(functional.silu(self.inner_norm(self.down(x))))
        restored = self.outlet(torch.cat([x, y], 1))
        return {"loss": functional.mse_loss(restored, pixel_values)}


class LowRank(nn.Module):
    """A frozen linear layer with an adapter, as LoRA's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


def make_adapted() -> nn.Module:
    model = _text("Llama")[0]().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model


KINDS: dict[str, Kind] = {
    "llama": _text("Llama"),
    "qwen3-moe": _text("Qwen3Moe", **_EXPERTS),
    "mixtral": _text("Mixtral", num_local_experts=4),
    "gpt-oss": _text("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=4),
    "gemma3": _of("Gemma3TextConfig", "Gemma3ForCausalLM", {**_TEXT, **_NO_DROPOUT, "head_dim": 4}, tokens),
    "phi3": _text("Phi3"),
    "olmo2": _text("Olmo2"),
    "falcon": _text("Falcon", bias=True),
    "bloom": _of("BloomConfig", "BloomForCausalLM",
                 {"vocab_size": 48, "hidden_size": 16, "n_layer": 2, "n_head": 4, **_NO_DROPOUT}, tokens),
    "opt": _text("OPT", ffn_dim=24, word_embed_proj_dim=16),
    "gpt2": _of("GPT2Config", "GPT2LMHeadModel",
                {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, **_NO_DROPOUT}, tokens),
    "mamba": _of("MambaConfig", "MambaForCausalLM",
                 {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, tokens),
    "bert": _of("BertConfig", "BertForMaskedLM", {**_TEXT, **_NO_DROPOUT}, tokens),
    "t5": _of("T5Config", "T5ForConditionalGeneration",
              {"vocab_size": 48, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
               "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}, tokens),
    "vit": _image("ViT", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                  image_size=32, patch_size=8),
    "resnet": _image("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    "convnext": _image("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.0),
    "swin": _image("Swin", image_size=32, patch_size=4, embed_dim=8, depths=[2], num_heads=[2], window_size=4,
                   drop_path_rate=0.0),
    "whisper": _of(
        "WhisperConfig", "WhisperForConditionalGeneration",
        {"vocab_size": 48, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8,
         "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None, **_NO_DROPOUT},
        lambda: {"input_features": torch.randn(BATCH, 8, 32), "labels": torch.randint(3, 48, (BATCH, 7))},
    ),
    "wav2vec2": _of(
        "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification",
        {**_NO_DROPOUT, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24,
         "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 3, "layerdrop": 0.0,
         "final_dropout": 0.0, "feat_proj_dropout": 0.0, "mask_time_prob": 0.0, "classifier_proj_size": 8},
        lambda: {"input_values": torch.randn(BATCH, 400), "labels": torch.randint(0, 3, (BATCH,))},
    ),
    "u-net": (UNet, images),
    "lora": (make_adapted, tokens),
}  # fmt: skip
