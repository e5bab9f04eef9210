"""States with a LoRA adapter in them, named as PEFT names them, and what ought to become of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.commands.made_workspaces import leave

P = "base_model.model."
ATTENTION, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
RANK, ALPHA = 4, 10
BASE = {
    "model.embed_tokens.weight": "[v/tp, h]",
    f"{ATTENTION}.weight": "[a/tp/~dp, h]",  # rows, cut twice: no replica
    f"{ATTENTION}.bias": "[a/tp]",
    f"{DOWN}.weight": "[h, f/tp]",  # columns
    "model.norm.weight": "[h]",
}
ADAPTER = {
    f"{ATTENTION}.lora_A.default.weight": "[r, h]",
    f"{ATTENTION}.lora_B.default.weight": "[a/tp, r]",
    f"{DOWN}.lora_A.default.weight": "[r, f/tp]",
    f"{DOWN}.lora_B.default.weight": "[h/~dp, r]",
}


def base_model(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the base model, under its own names."""
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (16, 8),
        f"{ATTENTION}.weight": (12, 8),
        f"{ATTENTION}.bias": (12,),
        f"{DOWN}.weight": (8, 20),
        "model.norm.weight": (8,),
    }
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def adapter(dtype: torch.dtype = torch.float32, seed: int = 1, rank: int = RANK) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors, under PEFT's names without its prefix."""
    random = torch.Generator().manual_seed(seed)
    shapes = dict(zip(ADAPTER, [(rank, 8), (12, rank), (rank, 20), (8, rank)], strict=True))
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def wrapped(base: Mapping[str, Any], lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return both under the names that a PEFT model's state has, in its order."""
    adapted = {name.partition(".lora_")[0] for name in lora}
    found = {}
    for name, value in base.items():
        module, _, leaf = name.rpartition(".")
        found[f"{P}{module}.base_layer.{leaf}" if module in adapted else P + name] = value
    return {**found, **{P + name: value for name, value in lora.items()}}


def leave_adapted(
    folder: Path,
    base: Mapping[str, torch.Tensor] | None = None,
    lora: Mapping[str, torch.Tensor] | None = None,
    *,
    layouts: Mapping[str, str] | None = None,
    meta: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Let four ranks leave a PEFT model's state; return base and adapter.

    Args:
        folder: the workspace.
        base: under its own names.
        lora: under PEFT's, without prefix.
        layouts: of tensors that the defaults do not know, under those names.
        meta: content of verl's ``lora_train_meta.json``; None: rank and alpha of this module.
        **more: of `leave`.
    """
    base = base_model() if base is None else dict(base)
    lora = adapter() if lora is None else dict(lora)
    known = {**BASE, **ADAPTER, **(layouts or {})}
    cuts = wrapped({name: known.get(name, "[...]") for name in base}, {name: known[name] for name in lora})
    leave(folder, wrapped(base, lora), layouts=cuts, **more)
    write_json(folder / "lora_train_meta.json", {"r": RANK, "lora_alpha": ALPHA} if meta is None else meta)
    return base, lora


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a JSON file; return its path."""
    path.write_text(json.dumps(content))
    return path


def added(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale * B @ A in float32, the products added up one after the other; not rounded yet."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    left, right = b.to(wide), a.to(wide)
    total = left[:, :1] * right[0]
    for k in range(1, len(right)):
        total = total + left[:, k : k + 1] * right[k]
    return weight.to(wide) + total * scale


def merged(
    base: Mapping[str, torch.Tensor],
    lora: Mapping[str, torch.Tensor],
    scale: float = ALPHA / RANK,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Return the model that a merge ought to write; of that type, or of what each weight is stored as."""
    found = {}
    for name, weight in base.items():
        a = lora.get(f"{name.removesuffix('.weight')}.lora_A.default.weight")
        b = lora.get(f"{name.removesuffix('.weight')}.lora_B.default.weight")
        value = weight if a is None or b is None else added(weight, a, b, scale)
        found[name] = value.to(dtype or weight.dtype)
    return found


def saved_names(lora: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors as PEFT's folder names them."""
    return {P + name.replace(".default", ""): value for name, value in lora.items()}
