"""Decisions of a conversion about a source before it plans: adapters, recipe, names, dtypes, ties, small files.

Every conversion decides here, by one function, for every source and every purpose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from xrank.decisions.adapter_names import find_adapter
from xrank.decisions.adapters import Adapted, adapt
from xrank.decisions.found_source import FoundSource
from xrank.decisions.options import GatherOptions
from xrank.decisions.own_config import OwnConfig
from xrank.decisions.recipe_choice import apply_recipe, choose_recipe, find_padded_names, match_asked_recipe
from xrank.decisions.saved_form import (
    TABLE,
    convert_adapted,
    convert_states,
    convert_to_files,
    convert_to_module,
    keep_routers,
)
from xrank.decisions.selection import Selection, keep_all, select
from xrank.decisions.small_files import SmallFiles, small_files_of
from xrank.decisions.ties import declare_ties, leave_unsaved
from xrank.errors import ContradictionError, UsageError, either, option
from xrank.plan.source import StoredModel
from xrank.recipes.conversions import Converted
from xrank.recipes.matching import Match
from xrank.recipes.model_names import names_of_class
from xrank.words import list_text, plural
from xrank.writers.hf_folder import find_weights_stem

if TYPE_CHECKING:
    from xrank.decisions.base_model import BaseModel


class Purpose(Enum):
    """The product of a conversion; each purpose names tensors in its own way."""

    MODEL = "a model folder, under Hugging Face's names"
    STATES = "states of ranks, under the source's names unless a recipe is asked for, in either direction"
    MODULE = "the tensors of a live module, under the module's names"
    PROOF = "nothing; Hugging Face's names"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The caller's choices for a conversion."""

    purpose: Purpose
    options: GatherOptions = field(default_factory=GatherOptions)
    recipe: str | os.PathLike[str] | None = None
    """Name of a shipped recipe, a recipe file, ``"transformers"``, or ``"none"``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name -> name of the tensor that is written for it, from a layout file."""
    config_overrides: Mapping[str, Any] | None = None
    """Additional content of config.json."""
    module_shapes: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Name in the live module to fill -> global shape; None where one rank does not know it."""
    file_names: Collection[str] = ()
    """Names of the same model in other files; a base model's count first."""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The decided output of a source; no tensor is planned or read yet."""

    found: FoundSource
    source: StoredModel
    """The model under its new names."""
    options: GatherOptions
    """The caller's options, with the names that the recipe keeps in fp32."""
    base: BaseModel | None
    """The base model to compare with; also None for an adapter alone."""
    matched: Match | None
    """The recipe that gave the names, and its match with the source."""
    adapted: Adapted | None
    """The source with its adapter kept apart or merged; None for a source without an adapter."""
    selection: Selection
    """The tensors to write, their dtypes and ties."""
    small: SmallFiles
    """Small files beside the weights."""

    @property
    def is_model(self) -> bool:
        """Whether the result is a model, and not an adapter alone."""
        return self.adapted is None or not self.adapted.is_alone

    @property
    def weights_stem(self) -> str:
        """How the names of the model's weight files begin."""
        return find_weights_stem(self.found.config)

    @property
    def padded_names(self) -> frozenset[str]:
        """Names of tensors that may end with rows of padding, as trainers pad a vocabulary."""
        return frozenset() if self.matched is None else find_padded_names(self.matched, self.source)


def decide(found: FoundSource, request: Request, base: BaseModel | None = None) -> Decision:
    """Decide the output of a source; read small files only.

    Args:
        found: the source under its own names.
        request: the caller's choices.
        base: the base model, if one is named.

    Raises:
        UsageError, LayoutError: the request must change: no recipe fits, a pattern has no match, a choice is missing.
        IncompleteError, ContradictionError: adapter, recipe, config and tensors do not fit each other.
        UnsafeError: a tensor's name contains control characters or a step up in a path.
    """
    is_selected = request.purpose in (Purpose.MODEL, Purpose.STATES)
    adapted = _adapt(found, request.options, base) if request.purpose is Purpose.MODEL else None
    if adapted is not None:
        from xrank.decisions.lone_adapter import drop_tied

        adapted = drop_tied(adapted, found.config)
        adapted = replace(adapted, source=declare_ties(adapted.source, found.config, adapted.updates or ()))
        stored = adapted.source
    else:
        is_named = request.purpose in (Purpose.MODEL, Purpose.PROOF)
        stored = declare_ties(leave_unsaved(found.model, found.config), found.config) if is_named else found.model
    matched = _match(found, stored if adapted is None else adapted.base, request)
    if matched is not None and adapted is not None:
        raise _renames_adapted(stored, matched)
    stored, options = apply_recipe(stored, matched, found.config, request.options)
    converted = None
    if matched is None and (adapted is None or not adapted.is_alone):
        converted = _convert(found, stored if adapted is None else adapted.base, request, base)
    if converted is not None and adapted is not None:
        other = convert_adapted(adapted, converted, lambda model: _convert(found, model, request, base))
        adapted, converted = (adapted, None) if other is None else (other, converted)
    if converted is not None:
        stored = converted.model if adapted is None else adapted.source
        options = keep_routers(stored, options)
    if request.recipe is None and matched is None and request.purpose is Purpose.MODEL:
        _refuse_foreign(found, base)
    if adapted is not None and adapted.is_alone:
        base = None
    if not is_selected:
        return Decision(found, stored, options, base, matched, adapted, keep_all(stored), SmallFiles())
    if request.purpose is Purpose.STATES:
        # A base model gives states only small files; a config does not tie tensors that the layout file leaves untied.
        selection = select(stored, options, None, None, request.aliases)
        return Decision(found, stored, options, base, matched, adapted, selection, SmallFiles())
    selection = select(
        stored,
        options,
        base,
        found.config,
        _rename_aliases(request.aliases, found, adapted, converted),
        adapted.own if adapted is not None else (),
    )
    small = small_files_of(
        (*(base.companions if base is not None else ()), *found.companions),
        found.config_path,
        found.config,
        options,
        is_model=adapted is None or not adapted.is_alone,
        place=found.place,
        overrides=request.config_overrides,
    )
    return Decision(found, stored, options, base, matched, adapted, selection, small)


def _refuse_foreign(found: FoundSource, base: BaseModel | None) -> None:
    """Refuse tensors whose names are not those of the class in config.json: it would start from random weights.

    Raises:
        ContradictionError: hardly any is, whatever stands before it.
    """
    model, names = names_of_class(found.config), [shard.name for shard in found.model.shards]
    # Without layers it is no model of transformers, but some tensors of the user's own.
    has_layers = any(part.isdecimal() for name in names for part in name.split("."))
    if model is None or not has_layers or (base is not None and base.tensors) or 4 * model.count(names) >= len(names):
        return
    first = names[0].partition(".")[0]
    prefix = first if all(name.startswith(f"{first}.") for name in names) else ""
    raise ContradictionError(
        f"{names[0]}: the tensors have no names of {model.class_name}, the class in config.json",
        tensor=names[0],
        file=found.config_path,
        got=f"{plural(len(names), 'tensor')}" + (f", all under {prefix}" if prefix else f", such as {names[-1]}"),
        want=f"names that begin with {list_text(model.examples, 3)}",
        next_step=either(
            "put the config.json of the model that has these names in its place",
            f"rename the tensors with {option('recipe', metavar='FILE')}",
            f"keep the names with {option('recipe', 'none')} for code that expects them",
        ),
    )


def _match(found: FoundSource, stored: StoredModel, request: Request) -> Match | None:
    """Match a recipe with the source; return None where the names stay."""
    if request.recipe == TABLE:
        return None
    if request.purpose in (Purpose.STATES, Purpose.MODULE):
        return match_asked_recipe(stored, request.recipe)
    return choose_recipe(stored, found.config, request.recipe)


def _convert(found: FoundSource, stored: StoredModel, request: Request, base: BaseModel | None) -> Converted | None:
    """Return the source in the form that the purpose needs; None where it has it, or another recipe was asked for.

    Raises:
        LayoutError: the conversion was asked for, and does not fit.
    """
    if request.recipe not in (None, TABLE) or (request.purpose is Purpose.STATES and request.recipe is None):
        return None
    if request.purpose is Purpose.STATES:
        return convert_states(stored, found.config)
    if request.purpose is Purpose.MODULE:
        return convert_to_module(stored, found.config, request.module_shapes)
    names = base.tensors if base is not None and base.tensors else request.file_names
    return convert_to_files(stored, found.config, base_names=names, own=found.own, is_asked=request.recipe == TABLE)


def _rename_aliases(
    aliases: Mapping[str, str], found: FoundSource, adapted: Adapted | None, converted: Converted | None
) -> dict[str, str]:
    """Return aliases under the present names of the tensors."""
    names = {**found.plain_names}
    if adapted is not None:
        names |= {name: adapted.new_name(names.get(name, name)) for name in (*aliases, *aliases.values())}
    elif converted is not None:
        names |= {name: converted.renamed.get(names.get(name, name), name) for name in (*aliases, *aliases.values())}
    return {names.get(name, name): names.get(target, target) for name, target in aliases.items()}


def _renames_adapted(source: StoredModel, matched: Match) -> UsageError:
    """Return the error for a recipe that would rename tensors which an adapter in the source adapts."""
    return UsageError(
        f"{source.path} holds an adapter of tensors that the recipe {matched.recipe.name} would rename",
        file=source.path,
        got=f"an adapter, and names of {matched.recipe.name}",
        want="an adapter of a model under Hugging Face's names",
        next_step=f"keep the names with {option('recipe', 'none')}",
    )


def _adapt(found: FoundSource, options: GatherOptions, base: BaseModel | None) -> Adapted | None:
    """Return the source with its adapter kept apart or merged. Errors are those of `adapt`."""
    if found.own is not None:
        return _adapt_live(found.model, options, found.own, base)
    assert found.place is not None
    model = found.model
    if options.adapter == "merge" and base is not None:
        from xrank.decisions.lone_adapter import complete_adapter

        model = complete_adapter(model, base, options.adapter_config, found.place)
    return adapt(model, options, found.place, base.tensors if base is not None else {})


def _adapt_live(stored: StoredModel, options: GatherOptions, own: OwnConfig, base: BaseModel | None) -> Adapted | None:
    """Return a live model with its adapter kept apart or merged. Errors are those of `adapt`."""
    known = base.tensors if base is not None else {}
    names = find_adapter([shard.name for shard in stored.shards], stored.path, known)
    if names is None and own.adapter_text is not None:
        kind = json.loads(own.adapter_text).get("peft_type")
        raise UsageError(
            f"the model is a PeftModel whose adapter, {kind}, is not LoRA",
            got=f"peft_type {kind}",
            want="LoRA, or a model without an adapter",
            next_step="save a prompt with the model's own save_pretrained(): no model can contain it"
            if any(shard.name.startswith("prompt_encoder.") for shard in stored.shards)
            else "give what module.merge_and_unload() or module.unload() returns",
        )
    config = None
    if names is not None:
        if own.adapter_text is None:
            raise UsageError(
                "nothing gives the rank and alpha of the model's adapter",
                tensor=next(iter(names.saved)),
                got=f"{len(names.saved)} tensors of an adapter, and no PeftModel",
                want="the PeftModel, which knows them",
                next_step="give the PeftModel itself; or what its merge_and_unload() returns, without adapter=",
            )
        from xrank.decisions.adapter_config import parse_adapter_config

        shapes = {shard.name: shard.shape for shard in stored.shards}
        config = parse_adapter_config(json.loads(own.adapter_text), "the model's peft_config", names, shapes)
    return adapt(stored, options, stored.path, known, names=names, config=config)
