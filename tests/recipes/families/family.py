"""One family of models: a tiny config.json, Megatron's arguments of the same model, and Megatron-core's own logits."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["LOGITS", "NEXT", "PICTURE", "TOKENS", "Family", "Shapes", "draw_weights"]

LOGITS = Path(__file__).with_name("logits")
"""By family: the shapes of Megatron-core 0.16.1's tensors, and its logits after `TOKENS`
(tests/oracle/forward_megatron.py)."""
TOKENS = (3, 1, 4, 15, 9, 2, 6)
NEXT = 3
"""Position whose logits of the token after the next are recorded; the last positions have no such token."""
PICTURE = (1, 3, 8, 8)
"""Shape of the picture whose features are recorded; `draw_weights` draws it."""
Shapes = Mapping[str, tuple[int, ...]]

# config.json's key -> Megatron's argument of the same size.
_ARGUMENTS = {
    "num_hidden_layers": "num_layers", "hidden_size": "hidden_size", "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads", "head_dim": "kv_channels", "moe_intermediate_size":
    "moe_ffn_hidden_size", "num_local_experts": "num_experts", "num_experts": "num_experts", "n_routed_experts":
    "num_experts", "num_experts_per_tok": "moe_router_topk", "q_lora_rank": "q_lora_rank", "kv_lora_rank":
    "kv_lora_rank", "qk_nope_head_dim": "qk_head_dim", "qk_rope_head_dim": "qk_pos_emb_head_dim", "v_head_dim":
    "v_head_dim", "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size", "n_layer": "num_layers",
    "n_embd": "hidden_size", "n_inner": "ffn_hidden_size", "n_head": "num_attention_heads", "n_positions":
    "max_position_embeddings", "rms_norm_eps": "norm_epsilon", "norm_eps": "norm_epsilon", "rope_theta": "rotary_base",
    "num_nextn_predict_layers": "mtp_num_layers", "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "n_group": "moe_router_num_groups", "topk_group": "moe_router_group_topk",
}  # fmt: skip
_COMMON = {
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_interleaved": False,
    "rotary_percent": 1.0, "apply_layernorm_1p": False, "add_bias_linear": False, "add_qkv_bias": False,
    "qk_layernorm": False, "group_query_attention": True,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        name: the recipe's name without ``megatron-``.
        config: options of transformers' config; `model_type` among them.
        args: arguments of Megatron's that differ from those of Llama, and that config.json does not determine.
        hugging_face: makes the model from its config where transformers has no class for it.
        num_ways: ranks of tensor parallelism that the tiny model is cut for.
        of: the name of the family whose recipe it has; None: its own.
        tower: returns the shapes of the vision tower beside the language model.
    """

    name: str
    config: Mapping[str, Any]
    args: Mapping[str, Any] = field(default_factory=dict)
    hugging_face: Callable[[Mapping[str, Any]], torch.nn.Module] | None = None
    num_ways: int = 2
    of: str | None = None
    tower: Callable[[], Shapes] | None = None

    @property
    def text(self) -> Mapping[str, Any]:
        """The options of the text model's config."""
        found: Mapping[str, Any] = self.config.get("text_config", self.config)
        return found

    @property
    def prefix(self) -> str:
        """The text before the language model's names."""
        return "" if self.tower is None else "language_model."

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads the model."""
        return "AutoModelForCausalLM" if self.tower is None else "AutoModelForImageTextToText"

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return f"megatron-{self.of or self.name}"

    @property
    def recorded(self) -> dict[str, Any]:
        """The content of the family's file of `LOGITS`."""
        content: dict[str, Any] = json.loads((LOGITS / f"{self.name}.json").read_text())
        return content

    def full_config(self) -> dict[str, Any]:
        """Return config.json in full, as a model of transformers saves it."""
        import transformers

        if self.hugging_face is not None:
            return dict(self.config)
        # transformers fills in the dicts of a config in place.
        options = {"bos_token_id": 1, "eos_token_id": 2, **copy.deepcopy(dict(self.config))}
        config = transformers.AutoConfig.for_model(**options)
        content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        return content

    def full_args(self) -> dict[str, Any]:
        """Return Megatron-LM's arguments, as a checkpoint has them."""
        config = self.text
        vocab = config["vocab_size"]
        heads = config.get("num_attention_heads", config.get("n_head"))
        groups = config.get("num_key_value_heads", heads)
        width = config.get("hidden_size", config.get("n_embd"))
        found = {
            **_COMMON,
            **{its: config[ours] for ours, its in _ARGUMENTS.items() if config.get(ours) is not None},
            "vocab_size": vocab, "padded_vocab_size": vocab, "num_query_groups": groups,
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        }  # fmt: skip
        found.setdefault("kv_channels", width // heads)
        rope = config.get("rope_parameters", {})
        found.setdefault("rotary_base", rope.get("rope_theta", 10000.0))
        if "n_shared_experts" in config:
            shared = config["n_shared_experts"] * config["moe_intermediate_size"]
            found["moe_shared_expert_intermediate_size"] = shared
        return {**found, **self.args}

    def weights(self) -> dict[str, np.ndarray]:
        """Return Megatron-core's tensors."""
        return draw_weights(self.recorded["shapes"])


def draw_weights(shapes: Shapes) -> dict[str, np.ndarray]:
    """Return numbers between -0.8 and 0.8, others for each name, so that two programs have the same without a file."""
    found = {}
    for name, shape in shapes.items():
        drawn = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).random(tuple(shape))
        found[name] = (drawn * 1.6 - 0.8).astype(np.float32)
    return found
