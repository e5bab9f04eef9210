"""An engine's Llama shape as engines cut and fuse it, with the loader that such engines have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["FusedEngine", "Sizes", "whole_shapes"]

_FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
}
_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a Llama."""

    hidden: int
    ffn: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head: int

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each projection."""
        kv = self.kv_heads * self.head
        return {"q": self.heads * self.head, "k": kv, "v": kv, "gate": self.ffn, "up": self.ffn}


def whole_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return Hugging Face name -> shape of the whole model."""
    hidden, rows = sizes.hidden, sizes.rows
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocab, hidden)}
    for i in range(sizes.layers):
        at = f"model.layers.{i}"
        for name, part in (("q", "q"), ("k", "k"), ("v", "v")):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows[part], hidden)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, rows["q"])
        for name in ("gate", "up"):
            shapes[f"{at}.mlp.{name}_proj.weight"] = (rows[name], hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, sizes.ffn)
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (sizes.vocab, hidden)}


class FusedEngine(nn.Module):
    """One tensor parallel rank: fused qkv and gate_up by rows, o and down by columns, a padded vocabulary.

    Key and value heads repeat on ranks where there are fewer of them than ranks.
    """

    def __init__(self, sizes: Sizes, rank: int, world_size: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.sizes, self.rank, self.world_size = sizes, rank, world_size
        self.vocab = -(-sizes.vocab // (8 * world_size)) * 8  # rows of this rank, with padding
        cut = {name: rows // (self._cuts(name)) for name, rows in sizes.rows.items()}
        self._cut = cut

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(sizes.layers):
            at = f"model.layers.{i}"
            shapes[f"{at}.self_attn.qkv_proj.weight"] = (cut["q"] + cut["k"] + cut["v"], sizes.hidden)
            shapes[f"{at}.self_attn.o_proj.weight"] = (sizes.hidden, cut["q"])
            shapes[f"{at}.mlp.gate_up_proj.weight"] = (cut["gate"] + cut["up"], sizes.hidden)
            shapes[f"{at}.mlp.down_proj.weight"] = (sizes.hidden, cut["gate"])
            shapes[f"{at}.input_layernorm.weight"] = (sizes.hidden,)
            shapes[f"{at}.post_attention_layernorm.weight"] = (sizes.hidden,)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            shapes[name] = (self.vocab, sizes.hidden)
        shapes["model.norm.weight"] = (sizes.hidden,)
        self.names = {name: name.replace(".", "_") for name in shapes}
        for name, shape in shapes.items():
            self.register_parameter(self.names[name], empty(*shape))

    def _cuts(self, part: str) -> int:
        return min(self.world_size, self.sizes.kv_heads) if part in "kv" else self.world_size

    def parameter(self, name: str) -> nn.Parameter:
        """Return a parameter by the engine's name."""
        found: nn.Parameter = getattr(self, self.names[name])
        return found

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill this rank's parameters from whole tensors, as vLLM's and SGLang's loaders do."""
        for name, loaded in weights:
            module = name.split(".")[-2]
            if module in _FUSED:
                fused, part = _FUSED[module]
                rows = self._cut[part]
                at = self.rank * self._cuts(part) // self.world_size
                target = self.parameter(name.replace(module, fused)).data
                start = 0
                for other in ("q", "k", "v") if fused == "qkv_proj" else ("gate", "up"):
                    if other == part:
                        break
                    start += self._cut[other]
                target.narrow(0, start, rows).copy_(loaded.narrow(0, at * rows, rows))
            elif module in _COLUMNS:
                target = self.parameter(name).data
                target.copy_(loaded.narrow(1, self.rank * target.shape[1], target.shape[1]))
            elif module in ("embed_tokens", "lm_head"):
                target = self.parameter(name).data
                first = min(self.rank * self.vocab, loaded.shape[0])
                rows = min(self.vocab, loaded.shape[0] - first)
                target[:rows].copy_(loaded[first : first + rows])
                target[rows:].fill_(0)
            else:
                self.parameter(name).data.copy_(loaded)
