"""Forward passes of Megatron-core on CPU: ``forward_megatron.py OUT`` writes each family's shapes and last logits."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.recipes.megatron_weights import (
    DEEPSEEK_SIZES,
    GLM_SIZES,
    GPT2_SIZES,
    QWEN2_MOE_SIZES,
    SIZES,
    TOKENS,
    weights,
)

_LLAMA = {
    "ffn_hidden_size": SIZES["intermediate_size"], "num_query_groups": SIZES["num_key_value_heads"],
    "kv_channels": SIZES["head_dim"], "layernorm_epsilon": SIZES["rms_norm_eps"], "normalization": "RMSNorm",
    "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
}  # fmt: skip
_GPT2 = {"ffn_hidden_size": GPT2_SIZES["n_inner"], "activation_func": torch.nn.functional.gelu}
_EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none", "moe_layer_freq": [0, 1], "moe_router_pre_softmax": True,
}  # fmt: skip
_QWEN2_MOE = {
    **_LLAMA, **_EXPERTS, "kv_channels": 4, "add_qkv_bias": True, "moe_shared_expert_gate": True,
    "moe_ffn_hidden_size": QWEN2_MOE_SIZES["moe_intermediate_size"],
    "moe_shared_expert_intermediate_size": QWEN2_MOE_SIZES["shared_expert_intermediate_size"],
}  # fmt: skip
_GLM = {
    **_LLAMA, **_EXPERTS, "add_qkv_bias": True, "qk_layernorm": True,
    "moe_ffn_hidden_size": GLM_SIZES["moe_intermediate_size"],
    "moe_shared_expert_intermediate_size": 2 * GLM_SIZES["moe_intermediate_size"],
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": GLM_SIZES["routed_scaling_factor"],
}  # fmt: skip
_MLA = {
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim",
}  # fmt: skip
_DEEPSEEK_V3 = {
    **{key: value for key, value in _LLAMA.items() if key not in ("kv_channels", "num_query_groups")}, **_EXPERTS,
    **{key: DEEPSEEK_SIZES[its] for key, its in _MLA.items()}, "multi_latent_attention": True, "qk_layernorm": True,
    "rope_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0,
    "moe_ffn_hidden_size": DEEPSEEK_SIZES["moe_intermediate_size"],
    "moe_shared_expert_intermediate_size": 2 * DEEPSEEK_SIZES["moe_intermediate_size"],
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
_DEEPSEEK_V2 = {
    **_DEEPSEEK_V3, "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None, "moe_router_group_topk": None,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": {**_LLAMA, "kv_channels": 4, "add_qkv_bias": True},
    "qwen3": {**_LLAMA, "qk_layernorm": True},
    "gpt2": _GPT2,
    "qwen2_moe": _QWEN2_MOE,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v2_lite": {**_DEEPSEEK_V2, "q_lora_rank": None},
    "glm4_moe": _GLM,
}


def main(out: str) -> None:
    """Run every family."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{out}.store", rank=0, world_size=1)
    # Megatron asks CUDA for the device of its buffers and for a random state, which no dropout of 0 needs.
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # which it reads, but defines only beside Transformer Engine
    multi_latent_attention.HAVE_TE = False  # it is true beside a module whose layers are None
    _let_values_be_narrower_than_keys()
    parallel_state.initialize_model_parallel()
    Path(out).write_text(json.dumps({name: _run(name, options) for name, options in _FAMILIES.items()}))
    # The process group's threads need no end of their own.
    sys.stdout.flush()
    os._exit(0)


def _let_values_be_narrower_than_keys() -> None:
    """Give the attention without Transformer Engine the two options that latent attention passes."""
    made = DotProductAttention.__init__

    def make(self: Any, *, k_channels: int | None = None, v_channels: int | None = None, **options: Any) -> None:
        made(self, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = make


def _run(name: str, options: dict[str, Any]) -> dict[str, Any]:
    is_gpt2 = name == "gpt2"
    config = (MLATransformerConfig if "kv_lora_rank" in options else TransformerConfig)(
        num_layers=2, hidden_size=24, num_attention_heads=6, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, perform_initialization=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False, **options,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, False, normalization=options.get("normalization"))
    model = GPTModel(
        config,
        spec,
        vocab_size=48,
        max_sequence_length=19,
        rotary_percent=0.5 if name == "glm4_moe" else 1.0,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        share_embeddings_and_output_weights=is_gpt2,
    ).eval()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    saved = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items() if name in saved}
    model.load_state_dict({key: torch.from_numpy(array) for key, array in weights(shapes).items()}, strict=False)
    tokens = torch.tensor([TOKENS])
    later = torch.triu(torch.ones(1, 1, len(TOKENS), len(TOKENS), dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(tokens, torch.arange(len(TOKENS))[None], later)[0, -1]
    return {"shapes": shapes, "logits": [round(value, 6) for value in logits.tolist()]}


if __name__ == "__main__":
    main(sys.argv[1])
