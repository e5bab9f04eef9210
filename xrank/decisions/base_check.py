"""Check a source, under the names that a gather would write, against the names and shapes of a base model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xrank.decisions.adapter_names import find_adapter
from xrank.decisions.base_model import BaseModel, check_against
from xrank.decisions.ties import embedding_of
from xrank.plan.output import OutputTensor
from xrank.plan.source import StoredModel


def check_source(base: BaseModel, model: StoredModel, config: Mapping[str, Any] | None) -> str | None:
    """Check a source's names and shapes; return the checked facts as text, or None (see `describe_skipped_check`).

    Args:
        base: the base model.
        model: the source, under the names that a gather would write.
        config: the model's config.json, which decides whether the head is tied.

    Raises:
        ContradictionError: as for `check_against`.
    """
    names = [shard.name for shard in model.shards]
    if find_adapter(names, model.path, base.tensors) is not None:
        return None  # its tensors' names depend on the choice to keep or merge it
    tied = {name for name in names if name in model.aliases or embedding_of(name, names, config) is not None}
    outputs = [OutputTensor(s.name, s.dtype, s.shape) for s in model.shards if s.name not in tied]
    return check_against(base, outputs, set(), tied)


def describe_skipped_check(base: BaseModel, path: str) -> tuple[str, str]:
    """Return the note that a source was not compared with a base model.

    Args:
        base: the base model.
        path: path of the source.
    """
    if not base.tensors:
        return "base-model", f"{base.path} holds no safetensors weights: names and shapes were not compared with it"
    return "base-model", f"{path} holds an adapter: names and shapes were not compared with {base.path}"
