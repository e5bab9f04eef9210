"""The form of a transformers model: in files as `save_pretrained` writes it, or in memory as a module has it.

Models on the Hub, which vLLM and others read, have one tensor for each expert's projection, and often older names than
the module has. `save_pretrained` undoes the conversions that loading made, and, for a model made from scratch, all that
transformers has for its class, without those that add or remove a prefix
(transformers/core_model_loading.py: revert_weight_conversion).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from xrank.errors import LayoutError, UsageError, option
from xrank.layout.stored_model import StoredModel
from xrank.recipes.conversions import (
    Conversion,
    Converted,
    Shape,
    convert_model,
    find_transforms,
    find_used,
    is_loaded_as,
)
from xrank.recipes.options import GatherOptions
from xrank.recipes.own_config import OwnConfig

TABLE = "transformers"
"""Name by which `recipe` asks for the conversion."""

_SAVED_FORMATS = ("safetensors", "hf-shards")
"""Formats whose names are those of files already, unless a base model shows otherwise."""
_SCALE = re.compile(r"[._:].*(scale|absmax|quant|zero_?point|blocks|packed|qdata)")
_ROUTERS = (r".*\.mlp\.gate\.weight", r".*\.block_sparse_moe\.gate\.weight")


def convert_to_files(
    source: StoredModel,
    config: Mapping[str, Any] | None,
    *,
    base_names: Collection[str] = (),
    own: OwnConfig | None = None,
    is_asked: bool = False,
) -> Converted | None:
    """Return the model as `save_pretrained` would write it; None where the names stay.

    `base_names` are those in the files that a module was loaded from; without any, it was made from scratch. A misfit
    is an error if the caller asked for the conversion. `own` is the knowledge of a live module about itself.
    """
    names = {shard.name for shard in source.shards}
    if config is None and is_asked:
        raise _config_error(source)
    if not names or config is None or "quantization_config" in config or (base_names and names <= set(base_names)):
        return None
    if source.format in _SAVED_FORMATS and not base_names and not is_asked:
        return None
    transforms = find_transforms(config)
    if not transforms:
        return None
    chosen = _choose(transforms, names, base_names, own)
    try:
        converted = convert_model(source, chosen, config, is_save=True)
    except LayoutError:
        if is_asked:
            raise
        return None
    new = {shard.name for shard in converted.model.shards}
    is_closer = not base_names or len(new.intersection(base_names)) > len(names.intersection(base_names))
    if new == names or not is_closer or not is_loaded_as(chosen, new, names) or _has_scales(names, converted):
        return None
    if not base_names and own is None and _is_in_files_form(source, chosen, config):
        return None
    return _describe(converted, config)


def convert_to_module(
    source: StoredModel, config: Mapping[str, Any] | None, module_shapes: Mapping[str, Shape | None]
) -> Converted | None:
    """Return the model of files under a module's names; None where it has them."""
    if config is None or "quantization_config" in config or not _count_misfits(source, module_shapes):
        return None
    transforms = find_transforms(config)
    converted = convert_model(source, transforms, config, is_save=False, module_shapes=module_shapes)
    is_closer = _count_misfits(converted.model, module_shapes) < _count_misfits(source, module_shapes)
    if not is_closer or _has_scales({shard.name for shard in source.shards}, converted):
        return None
    return _describe(converted, config)


def _count_misfits(source: StoredModel, module_shapes: Mapping[str, Shape | None]) -> int:
    """Return how many of a module's tensors the source lacks, or has with their dims in another order.

    Other shapes are no conversion's doing: rows of padding, or another model.
    """
    held = {shard.name: shard.shape for shard in source.shards}
    num_missing = sum(name not in held for name in module_shapes)
    pairs = ((shape, held[name]) for name, shape in module_shapes.items() if name in held and shape is not None)
    return num_missing + sum(want != got and sorted(want) == sorted(got) for want, got in pairs)


def convert_states(source: StoredModel, config: Mapping[str, Any] | None) -> Converted | None:
    """Return the model in its other form: from memory to files, or from files to memory; None if both are one."""
    if config is None:
        raise _config_error(source)
    transforms = [each for each in find_transforms(config) if each.kind != "prefix"]
    if not _is_in_files_form(source, transforms, config):
        return convert_to_files(source, config, is_asked=True)
    converted = convert_model(source, transforms, config, is_save=False)
    names = {shard.name for shard in source.shards}
    return None if _has_scales(names, converted) else _describe(converted, config)


def keep_routers(model: StoredModel, options: GatherOptions) -> GatherOptions:
    """Return options under which a cast leaves the routers of experts alone."""
    names = [shard.name for shard in model.shards]
    return options.with_keep_fp32([each for each in _ROUTERS if any(re.fullmatch(each, name) for name in names)])


def _choose(
    transforms: tuple[Conversion, ...], names: Collection[str], base_names: Collection[str], own: OwnConfig | None
) -> list[Conversion]:
    """Return the transforms that saving undoes."""
    if base_names:
        used = find_used(transforms, base_names, names)
        return [each for number, each in enumerate(transforms) if number in used]
    if own is not None and own.conversions is not None:
        transforms = tuple(each for each in transforms if "\n".join(each.load.patterns) in own.conversions)
        if own.is_loaded:
            return list(transforms)
    return [each for each in transforms if each.kind != "prefix"]


def _is_in_files_form(source: StoredModel, transforms: list[Conversion], config: Mapping[str, Any]) -> bool:
    """Return whether loading would change the names, and saving would then give them back.

    Without that, text that both forms share, as ``language_model``, would be replaced a second time.
    """
    names = {shard.name for shard in source.shards}
    try:
        loaded = convert_model(source, transforms, config, is_save=False).model
        saved = convert_model(loaded, transforms, config, is_save=True).model
    except LayoutError:
        return False
    return names != {shard.name for shard in loaded.shards} and names == {shard.name for shard in saved.shards}


def _has_scales(names: set[str], converted: Converted) -> bool:
    """Return whether a tensor that is taken apart or joined has scales, which would have to be, too."""
    moved = names - converted.renamed.keys()
    return any(
        name[:at] in moved and _SCALE.match(name, at)
        for name in names - moved
        for at, sign in enumerate(name)
        if sign in "._:"
    )


def _config_error(source: StoredModel) -> UsageError:
    step = f"name the folder that has one with {option('base_model')}, or put it beside the checkpoint"
    got = f"{option('recipe', TABLE)}, and no config.json"
    problem = f"{source.path}: no config.json names the class of this model"
    return UsageError(problem, file=source.path, got=got, want="the config.json of the model", next_step=step)


def _describe(converted: Converted, config: Mapping[str, Any]) -> Converted:
    name = f"{TABLE}-{config.get('model_type')}"
    note = ("recipe", f"tensors are named and taken apart by the recipe {name}")
    model = replace(converted.model, recipe=name, notes=(*converted.model.notes, note))
    return replace(converted, model=model)
