"""Parts of a decoder, as tensor and pipeline parallel ranks hold them before ModelOpt merges them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from modelopt.torch.export.model_config import (
    LAYERNORM_RMS,
    LINEAR_COLUMN,
    LINEAR_ROW,
    AttentionConfig,
    DecoderLayerConfig,
    EmbeddingConfig,
    LayernormConfig,
    LinearConfig,
    MLPConfig,
    ModelConfig,
    QKVConfig,
)

__all__ = ["FORMATS", "NUM_STAGES", "TENSOR_PARALLEL", "Sizes", "flattened", "made_part"]

TENSOR_PARALLEL = 2
NUM_STAGES = 2
FORMATS = (None, "fp8", "fp8_pc_pt", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4")
"""Not nvfp4_awq: its merge ends in an AttributeError in ModelOpt itself (quant_utils.py:resmooth_and_get_scale)."""
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the whole model; every one but the layers is cut by tensor parallelism in some weight."""

    num_layers: int = 4
    hidden: int = 64
    ffn: int = 96
    vocab: int = 160


def made_part(
    rank: int, quantization: str | None, sizes: Sizes | None = None, *, as_in_training: bool = False
) -> ModelConfig:
    """Return what one rank holds; ranks count through tensor parallelism first, as ModelOpt has them.

    Args:
        rank: of the world.
        quantization: one of `FORMATS`.
        sizes: of the whole model.
        as_in_training: whether weights and biases are parameters that are slices of larger tensors.
    """
    return _Maker(rank, quantization, sizes or Sizes(), as_in_training).model()


class _Maker:
    """Makes one rank's part; what all tensor parallel ranks must agree on, they draw from the same generator."""

    def __init__(self, rank: int, quantization: str | None, sizes: Sizes, as_in_training: bool) -> None:
        self.stage = rank // TENSOR_PARALLEL
        self.quantization = quantization
        self.sizes = sizes
        self.as_in_training = as_in_training
        self._own = torch.Generator().manual_seed(1000 + rank)
        self._agreed = torch.Generator().manual_seed(self.stage)

    def model(self) -> ModelConfig:
        hidden, vocab = self.sizes.hidden, self.sizes.vocab
        model = ModelConfig(
            architecture="MadeForCausalLM",
            quantization=self.quantization,
            dtype="bfloat16",
            vocab_size=vocab,
            tensor_parallel=TENSOR_PARALLEL,
            pipeline_parallel=NUM_STAGES,
            layers=[self.layer(number) for number in range(self.sizes.num_layers // NUM_STAGES)],
        )
        if self.stage == 0:
            model.vocab_embedding = EmbeddingConfig(self.weight(vocab // TENSOR_PARALLEL, hidden))
            model.ln_embed = self.layernorm()
        if self.stage == NUM_STAGES - 1:
            model.ln_f = self.layernorm()
            model.lm_head = self.linear(LINEAR_COLUMN, vocab, hidden)
        return model

    def layer(self, number: int) -> DecoderLayerConfig:
        """Return a layer with q, k and v apart and no biases, or one with them joined, biases and a gate.

        Not all in one: ModelOpt's own gather refuses a config of some forty tensors. It leaves 2 KB beside each, and
        after its segment's last used byte there may be no more than 64 KB (miniz.c: mz_zip_reader_locate_header_sig).
        """
        hidden, ffn = self.sizes.hidden, self.sizes.ffn
        is_joined = number % 2 == 1
        layer = DecoderLayerConfig(
            decoder_type="llama",
            input_layernorm=self.layernorm(),
            attention=AttentionConfig(dense=self.linear(LINEAR_ROW, hidden, hidden, has_bias=is_joined)),
            post_layernorm=self.layernorm(),
            mlp=MLPConfig(
                fc=self.linear(LINEAR_COLUMN, ffn, hidden, has_bias=is_joined),
                proj=self.linear(LINEAR_ROW, hidden, ffn, has_bias=is_joined),
                hidden_act="silu",
            ),
            num_attention_heads=4,
            max_position_embeddings=4096,
            rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": None},
            longrope_scaling_short_factors=[1.0, 1.0 + number / 3],
            layer_types=["attention"],
        )
        if is_joined:
            layer.attention.qkv = self.linear(LINEAR_COLUMN, 3 * hidden, hidden, has_bias=True)
            layer.attention.k_cache_scaling_factor, layer.attention.v_cache_scaling_factor = self.scale(), self.scale()
            layer.mlp.gate = self.linear(LINEAR_COLUMN, ffn, hidden)
        else:
            layer.attention.qkv = QKVConfig(*(self.linear(LINEAR_COLUMN, hidden, hidden) for _ in "qkv"))
            layer.mlp_replacing_linear = LinearConfig(weight=self.agreed(hidden, hidden), tp=False)
        return layer

    def linear(self, kind: str, num_rows: int, num_columns: int, has_bias: bool = False) -> LinearConfig:
        """Return this rank's half of a linear layer, with the scales that its format has."""
        is_column = kind == LINEAR_COLUMN
        if is_column:
            num_rows //= TENSOR_PARALLEL
        else:
            num_columns //= TENSOR_PARALLEL
        config = LinearConfig(self.quantization, kind, self.weight(num_rows, num_columns))
        if has_bias:
            config.bias = self.weight(num_rows) if is_column else self.agreed(num_rows).to(torch.bfloat16)
        match self.quantization:
            case "fp8":
                config.activation_scaling_factor, config.weights_scaling_factor = self.scale(), self.scale()
            case "fp8_pc_pt":
                config.weights_scaling_factor = self.scale(num_rows)
            case "int8_sq":
                config.activation_scaling_factor = self.scale()
                config.weights_scaling_factor = self.scale(num_rows)
                config.prequant_scaling_factor = self.agreed(num_columns) if is_column else self.scale(num_columns)
            case "int4_awq" | "w4a8_awq":
                config.awq_block_size = _BLOCK_SIZE
                config.weights_scaling_factor = self.scale(num_rows, num_columns // _BLOCK_SIZE)
                config.prequant_scaling_factor = self.scale(num_columns)
            case "nvfp4":
                config.awq_block_size = _BLOCK_SIZE
                scales = self.scale(num_rows, num_columns // _BLOCK_SIZE)
                config.weights_scaling_factor = scales.to(torch.float8_e4m3fn)
        if self.quantization in ("w4a8_awq", "nvfp4"):
            config.activation_scaling_factor, config.weights_scaling_factor_2 = self.scale(), self.scale()
        return config

    def layernorm(self) -> LayernormConfig:
        return LayernormConfig(self.agreed(self.sizes.hidden), layernorm_type=LAYERNORM_RMS, eps=1e-6)

    def weight(self, *shape: int) -> torch.Tensor:
        weight = torch.randn(shape, generator=self._own).to(torch.bfloat16)
        if self.as_in_training:
            weight = torch.nn.Parameter(torch.stack([weight, weight], dim=-1)[..., 0])
        return weight

    def scale(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._own) + 0.5

    def agreed(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._agreed) + 0.5


def flattened(value: Any, name: str = "model") -> dict[str, Any]:
    """Return every leaf of a config tree by its place; of a tensor its dtype, shape and bytes."""
    if dataclasses.is_dataclass(value):
        parts = vars(value)
    elif isinstance(value, dict | list):
        parts = dict(value.items() if isinstance(value, dict) else enumerate(value))
    elif isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return {name: (value.dtype, value.shape, raw.numpy().tobytes())}
    else:
        return {name: value}
    leaves = {name: type(value)}
    for key, part in parts.items():
        leaves |= flattened(part, f"{name}.{key}")
    return leaves
