"""Whether a source has the names and shapes that a base model tells, its tensors as a gather would write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xrank.decisions.adapter_names import find_adapter
from xrank.decisions.base_model import BaseModel, check_against
from xrank.decisions.selection import embedding_of
from xrank.plan.output import OutputTensor
from xrank.plan.source import StoredModel

__all__ = ["check_source", "not_compared"]


def check_source(base: BaseModel, model: StoredModel, config: Mapping[str, Any] | None) -> str | None:
    """Check a source's names and shapes; return what was checked, in words; None where `not_compared` says why not.

    Args:
        base: the base model.
        model: under the names that a gather would write.
        config: says whether the head is tied.

    Raises:
        ContradictionError: as `check_against`.
    """
    names = [shard.name for shard in model.shards]
    if find_adapter(names, model.path, base.tensors) is not None:
        return None  # what its tensors are called depends on what becomes of it
    tied = {name for name in names if name in model.aliases or embedding_of(name, names, config) is not None}
    outputs = [OutputTensor(s.name, s.dtype, s.shape) for s in model.shards if s.name not in tied]
    return check_against(base, outputs, set(), tied)


def not_compared(base: BaseModel, path: str) -> tuple[str, str]:
    """Return the note on a source of which nothing was compared with a base model.

    Args:
        base: the base model.
        path: of the source.
    """
    if not base.tensors:
        return "base-model", f"{base.path} holds no safetensors weights: names and shapes were not compared with it"
    return "base-model", f"{path} holds an adapter: names and shapes were not compared with {base.path}"
