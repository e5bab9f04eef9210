"""Nemotron-H and Qwen 3 Next as Megatron-core makes them, with plain torch in place of kernels for GPUs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.functional import conv1d, silu, softplus

from tests.oracle.megatron_cores.core import Core
from tests.recipes.families import Family

__all__ = ["CORES"]


def _scan(
    zxbcdt: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dt_bias: torch.Tensor, decay: torch.Tensor,
    *, headdim: int, ngroups: int, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Return what mamba_ssm's mamba_split_conv1d_scan_combined does: the recurrence of Mamba 2, one step at a time.

    Args:
        zxbcdt: the projections side by side, [batch, length, rows].
        weight: of the convolution, [channels, width].
        bias: of the convolution.
        dt_bias: added to the step sizes.
        decay: of each head's state, a negative number.
        headdim: length of a head's input.
        ngroups: groups of heads, which share B and C.
        options: `D`, each head's weight of its input in its output, and those of the kernel alone.
    """
    assert options["activation"] == "silu" and not options["norm_before_gate"]
    heads = len(decay)
    inner = heads * headdim
    z, mixed, dt = zxbcdt.split([inner, len(weight), heads], dim=-1)
    mixed = conv1d(mixed.transpose(1, 2), weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    mixed = silu(mixed[..., : z.shape[1]].transpose(1, 2))
    x, to_state, from_state = mixed.split([inner, *[(len(weight) - inner) // 2] * 2], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    to_state, from_state = (
        part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2) for part in (to_state, from_state)
    )
    dt = softplus(dt + dt_bias)
    state = torch.zeros(len(x), heads, headdim, to_state.shape[-1])
    found = []
    for step in range(x.shape[1]):
        kept = torch.exp(dt[:, step] * decay)[..., None, None]
        added = (dt[:, step, :, None] * x[:, step])[..., None] * to_state[:, step, :, None]
        state = state * kept + added
        found.append((state * from_state[:, step, :, None]).sum(-1) + options["D"][:, None] * x[:, step])
    return torch.stack(found, dim=1).flatten(2) * silu(z)


class _GroupedNorm(torch.nn.Module):
    """mamba_ssm's RMSNorm of groups, whose gate the scan has applied."""

    def __init__(self, size: int, eps: float, group_size: int, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return torch.nn.functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


@contextmanager
def _kernels() -> Iterator[None]:
    """Let imports find the modules of kernels."""
    made = {name: ModuleType(name) for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")}
    for name, content in {
        "selective_state_update": {"selective_state_update": None},
        "layernorm_gated": {"RMSNorm": _GroupedNorm},
        "ssd_combined": {"mamba_split_conv1d_scan_combined": _scan, "mamba_chunk_scan_combined": None},
    }.items():
        module = made[f"mamba_ssm.ops.triton.{name}"] = ModuleType(name)
        module.__dict__.update(content)
    absent = {name: MagicMock() for name in ("triton", "triton.language") if name not in sys.modules}
    sys.modules.update({**made, **absent})
    yield
    for name in (*made, *absent):
        del sys.modules[name]


def _make_nemotron(family: Family, config: Any, gpt: dict[str, Any]) -> torch.nn.Module:
    with _kernels():
        from megatron.core.models.mamba.mamba_model import MambaModel
        from megatron.core.ssm import mamba_block, mamba_layer, mamba_mixer, mlp_layer
    mamba_block.TENorm = WrappedTorchNorm
    attention = ModuleSpec(
        SelfAttention,
        {"attn_mask_type": AttnMaskType.causal},
        SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    experts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    mixer = ModuleSpec(
        mamba_mixer.MambaMixer, submodules=mamba_mixer.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    )
    norm, add = WrappedTorchNorm, get_bias_dropout_add
    layers = mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            mamba_layer.MambaLayer, submodules=mamba_layer.MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=add)
        ),
        attention_layer=ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm, self_attention=attention, self_attn_bda=add
            ),
        ),
        mlp_layer=ModuleSpec(
            mlp_layer.MLPLayer, submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add)
        ),
        moe_layer=ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=experts, mlp_bda=add)
        ),
    )  # fmt: skip
    return MambaModel(
        config,
        ModuleSpec(mamba_block.MambaStack, submodules=layers),
        gpt["vocab_size"],
        gpt["max_sequence_length"],
        hybrid_override_pattern=family.full_args()["hybrid_override_pattern"],
    )


def _delta_nets(config: Any) -> Any:
    """Return Megatron's layers of mixed kinds, three of four with a delta net, whose norms no kernel computes."""
    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    spec = get_gpt_decoder_block_spec(config, False, normalization=config.normalization)
    net = ModuleSpec(
        gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear),
    )
    spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]  # equal layers share a specification
    for layer in spec.layer_specs[:3]:
        layer.submodules.self_attention = net
    return spec


_QWEN3_NEXT = Core(
    {
        "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 4,
        "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "attention_output_gate": True,
        "deterministic_mode": True, "moe_layer_freq": [1, 0, 1, 1], "moe_shared_expert_gate": True,
    },
    spec=_delta_nets,
    is_zero_centered=True,
)  # fmt: skip

CORES = {
    "nemotron-h": Core(
        {
            "mamba_num_heads": 4, "mamba_head_dim": 6, "mamba_num_groups": 2, "mamba_state_dim": 5,
            "activation_func": lambda x: torch.relu(x).square(), "moe_router_topk_scaling_factor": 2.5,
            "use_mamba_mem_eff_path": True,
        },
        make=_make_nemotron,
    ),
    "qwen3-next": _QWEN3_NEXT,
    "qwen3-next-mtp": _QWEN3_NEXT,
}  # fmt: skip
