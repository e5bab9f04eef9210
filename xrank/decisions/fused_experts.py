"""Experts that transformers fuses in memory: two tensors per layer, which become a few small ones for each expert.

Models on the Hub, which vLLM and others read, have one tensor for each expert's projection. `save_pretrained` splits
the tensors that loading fused (transformers/core_model_loading.py: revert_weight_conversion). Recipes define the split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from xrank.errors import UsageError
from xrank.plan.source import StoredModel
from xrank.recipes import recipe_file
from xrank.recipes.matching import Match, match
from xrank.recipes.recipe import Recipe
from xrank.words import list_text

__all__ = ["match_apart", "match_fused"]

_FUSED = ".experts.gate_up_proj"


def match_fused(source: StoredModel, config: Mapping[str, Any] | None) -> Match | None:
    """Match the recipe of transformers' own form of a model; return None where no experts are fused.

    Models keep their names if their experts are fused on the Hub, too, or if xrank has no recipe for them.

    Raises:
        UsageError: there is a recipe for this kind of model, and it does not fit.
    """
    recipe = _recipe_of(config) if _are_fused(shard.name for shard in source.shards) else None
    return None if recipe is None else _fitting(recipe, source, is_reversed=False)


def match_apart(source: StoredModel, config: Mapping[str, Any] | None, names: Collection[str]) -> Match | None:
    """Match the same recipe, in reverse, with a model folder; return None where its experts need no fusion.

    Args:
        source: the model folder, with Hugging Face's names.
        config: the content of its config.json.
        names: names in the module to fill.

    Raises:
        UsageError: as for `match_fused`.
    """
    is_needed = _are_fused(names) and not _are_fused(shard.name for shard in source.shards)
    recipe = _recipe_of(config) if is_needed else None
    return None if recipe is None else _fitting(recipe, source, is_reversed=True)


def _are_fused(names: Iterable[str]) -> bool:
    return any(name.endswith(_FUSED) for name in names)


def _recipe_of(config: Mapping[str, Any] | None) -> Recipe | None:
    """Return the recipe of transformers' own form of a kind of model, if there is one."""
    kind = (config or {}).get("model_type")
    if not isinstance(kind, str) or not kind.isidentifier():
        return None
    path = Path(recipe_file.__file__).parent / "fused_experts" / f"{kind}.toml"
    return replace(recipe_file.read_recipe(str(path)), name=f"transformers-{kind}") if path.is_file() else None


def _fitting(recipe: Recipe, source: StoredModel, *, is_reversed: bool) -> Match:
    found = match(recipe, [shard.name for shard in source.shards], is_reversed=is_reversed)
    if not found.fits:
        raise UsageError(
            f"the experts of {source.path} cannot be {'fused' if is_reversed else 'taken apart'}: its names are not "
            f"those of {recipe.name}",
            tensor=found.unknown[0] if found.unknown else None,
            got=list_text(found.unknown, empty=f"nothing for {list_text(found.missing)}"),
            want="the names that transformers gives such a model",
            next_step='keep the names as they are with recipe="none", or give a recipe of your own',
        )
    return found
