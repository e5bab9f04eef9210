"""The decision about a source (adapters, recipe, names, dtypes, ties, small files), and the plan of its output."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import xxhash
from msgspec import Struct, field
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.companions import CompanionFile, check_companions
from xrank.engine.hf_folder import find_weights_stem, lay_out, lay_out_file
from xrank.engine.planner import Plan, make_plan
from xrank.errors import (
    AGAIN,
    ContradictionError,
    IncompleteError,
    LayoutError,
    Text,
    UnsafeError,
    UsageError,
    XrankError,
    either,
    needs,
    option,
)
from xrank.layout import LayoutMap
from xrank.layout.output_files import OutputFile, OutputTensor, Selection
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.readers.base import Faults
from xrank.readers.discovery import WORKSPACE, SourcePlace, find_source
from xrank.readers.records import refuse_foreign_names
from xrank.recipes.adapter_names import CONFIG_NAME, find_adapter, parse_adapter_config
from xrank.recipes.adapters import Adapted, adapt, adapter_beside, check_ties, convert_adapted, drop_tied
from xrank.recipes.config_proof import check_against, describe_skipped_check, prove_config
from xrank.recipes.conversions import (
    TABLE,
    Converted,
    convert_states,
    convert_to_files,
    convert_to_module,
    keep_routers,
    split_experts,
)
from xrank.recipes.found_source import BaseModel, FoundSource, override_config
from xrank.recipes.model_names import names_of_class
from xrank.recipes.options import KINDS, GatherOptions, matches
from xrank.recipes.quantization import Quantization, find_scales
from xrank.recipes.recipe import Match
from xrank.recipes.recipe_choice import (
    apply_recipe,
    choose_recipe,
    find_padded_names,
    fits_any_recipe,
    match_asked_recipe,
)
from xrank.recipes.sources import complete_adapter, open_base_model, read_source
from xrank.recipes.ties import declare_ties, find_ties
from xrank.storage import places
from xrank.storage.output_place import SALVAGE_NAME
from xrank.storage.url import is_url
from xrank.words import list_text, plural

if TYPE_CHECKING:
    from xrank.engine.encodings import Encoding
    from xrank.engine.transforms import Replacements, Transform, Transforms
    from xrank.recipes.salvage import MissingTensor
    from xrank.recipes.schemes import Quantizing

_CAST_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class SmallFiles(Struct, frozen=True):
    """The files beside the weights, except texts that the conversion itself adds."""

    companions: tuple[CompanionFile, ...] = ()
    """Files to copy byte for byte, in the order of their names."""
    config_text: str | None = None
    """Text of a new config.json; None: no new one is made."""
    notes: tuple[tuple[str, str], ...] = ()


def small_files_of(
    companions: Iterable[CompanionFile],
    found: FoundSource,
    options: GatherOptions,
    *,
    is_model: bool,
    overrides: Mapping[str, Any] | None = None,
) -> SmallFiles:
    """Return the files to write beside the weights; an adapter alone has no config.json.

    The last of the companions of one name wins. `overrides` are values to set in config.json in addition.
    """
    named = {companion.name: companion for companion in companions}
    text: str | None = None
    notes: list[tuple[str, str]] = []
    if is_model:
        text, notes = config_text_of(found.config_path, found.config, options, found.place)
    if is_model and overrides is not None:
        known = json.loads(text) if text is not None else found.config or {}
        text = json.dumps(override_config(known, overrides), indent=2, sort_keys=True) + "\n"
        notes = [note for note in notes if note[0] != "no-config"]
    if text is not None or not is_model:
        named.pop("config.json", None)  # a new one is made, or the output is an adapter
    return SmallFiles(check_companions(named[name] for name in sorted(named)), text, tuple(notes))


def config_text_of(
    path: str | None, found: Mapping[str, Any] | None, options: GatherOptions, place: str | None = None
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the config.json that replaces the one at `path` (None: copy that one, if any), and notes about it."""
    if found is None:
        replaced = f"{AGAIN} with {option('overwrite', True)}"
        told = f"no config.json was found; give {option('base_model')}, and {replaced}"
        if place is not None:
            folder = place if places.is_folder(place) else os.path.dirname(place) or os.curdir
            told = "no config.json was found, which from_pretrained needs; give "
            told += f"{option('base_model', metavar='DIR')}, or put it into {folder}; then "
            # A store cannot add a file to a model that it has.
            told += f"gather again, with a new {option('out')}" if is_url(place) else replaced
        return None, [] if options.salvage else [("no-config", Text(told))]
    cast = _CAST_NAMES.get(options.dtype)
    if path is not None and cast is None:
        return None, []
    config, notes = dict(found), []
    if cast is not None:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        if config.get(key) != cast:
            notes.append(("config-dtype", f"config.json has {key} {cast}: the tensors were cast to {options.dtype}"))
            config[key] = cast
    # The format of transformers (configuration_utils.py: to_json_string).
    return json.dumps(config, indent=2, sort_keys=True) + "\n", notes


_UNPRINTABLE = "[\x00-\x1f\x7f-\x9f\ud800-\udfff]"
"""Control characters, and halves of characters that no file can contain."""


def select(
    source: StoredModel,
    options: GatherOptions,
    base: BaseModel | None,
    config: Mapping[str, Any] | None,
    aliases: Mapping[str, str],
    apart: Collection[str] = (),
) -> Selection:
    """Return the tensors of a source to write, with their dtypes, ties and casts.

    The output's `config` ties or unties the head; `aliases` are a layout file's, tied name -> name it is written under.
    Names `apart` are outside the model, such as an adapter's; they get neither ties nor the base model's dtypes.
    """
    for shard in source.shards:
        name = shard.name
        is_plain = name.isprintable() or not re.search(_UNPRINTABLE, name)
        if not is_plain or (".." in name and ".." in re.split(r"[/\\]", name)):
            raise UnsafeError(
                f"a tensor's name is invalid: {name!r}",
                tensor=name,
                file=source.path,
                got="control characters, or a path to a parent folder",
                want="printable text",
                next_step="find out who wrote this state",
            )
    held = [shard.name for shard in source.shards]
    names = list(dict.fromkeys([*held, *source.absent, *(base.tensors if base else ())]))
    for option_name in ("include", "exclude", "keep_fp32"):
        for pattern in getattr(options, option_name):
            if not any(re.fullmatch(pattern, one) for one in names):
                problem = f"{option(option_name)}: {pattern!r} matches no tensor"
                step = "xrank inspect --tensors lists the names"
                want = f"a regular expression for whole names, such as {names[0] if names else 'a.weight'!r}"
                raise UsageError(problem, got=pattern, want=want, next_step=step)
    left_out = {name for name in names if options.leaves_out(name)}
    missing = [name for name in source.absent if name not in left_out]
    if missing:
        raise IncompleteError(
            f"{missing[0]}: no rank holds it, although the source names it",
            tensor=missing[0],
            file=source.path,
            got=f"nothing of {list_text(missing, 4)}",
            want="a part on some rank",
            next_step=either(
                "let the ranks write it", "correct the name's dims", f"leave it out with {option('exclude')}"
            ),
        )
    kept = [shard for shard in source.shards if shard.name not in left_out]
    excluded = [name for name in names if name in left_out]
    tied, notes = find_ties(kept, config, aliases, source.aliases, base=base, apart=apart)
    dropped = {name for names in tied.values() for name in names}
    outputs, cast, untouched, uncast = [], {}, [], []
    scales = find_scales(kept) if options.dtype != "keep" else set()
    for shard in kept:
        if shard.name in dropped:
            continue
        if shard.name == "__metadata__":
            step = either(
                "let the ranks write it under a different name",
                f"leave it out with {option('exclude')}",
                needs("model_or_state_dict", "omit it"),
            )
            problem = f"{shard.name}: safetensors reserves this name"
            raise UsageError(problem, tensor=shard.name, file=source.path, next_step=step)
        is_left = shard.name in scales or (options.dtype == "base" and shard.name in apart)
        dtype = shard.dtype if is_left else _target_dtype(shard, options, base)
        if dtype != shard.dtype:
            cast[shard.name] = f"{shard.dtype} -> {dtype}"
        elif options.dtype in KINDS and shard.dtype.startswith("F8"):
            untouched.append(shard.name)
        elif (
            KINDS.get(options.dtype, shard.dtype) != shard.dtype
            and dtypes.dtype(shard.dtype).is_float
            and matches(options.keep_fp32, shard.name)
        ):
            uncast.append(shard.name)
        outputs.append(OutputTensor(shard.name, dtype, shard.shape))
    if not outputs:
        step = either(
            f"change {option('include')} or {option('exclude')}",
            needs("model_or_state_dict", "give a model with tensors"),
        )
        got = f"{len(source.shards)} tensors in the source"
        raise UsageError("no tensor is left to write", got=got, want="one or more to write", next_step=step)
    if untouched:
        notes.append(("not-cast", f"{len(untouched)} float8 tensors are quantized values and stay unchanged"))
    if scales:
        notes.append(("not-cast", f"scales of quantized values stay unchanged: {list_text(sorted(scales), 3)}"))
    if uncast:
        told = list_text(uncast, 3)
        notes.append(("kept-fp32", f"not cast, because the recipe or your options keep them in fp32: {told}"))
    return Selection(tuple(outputs), tied, tuple(excluded), cast, tuple(notes))


def _target_dtype(shard: StoredShard, options: GatherOptions, base: BaseModel | None) -> str:
    found = dtypes.dtype(shard.dtype)
    if options.dtype == "keep" or not found.is_float:
        return shard.dtype
    # keep_fp32 preserves precision, so a cast to fp32 still widens smaller floats.
    if matches(options.keep_fp32, shard.name) and not (options.dtype == "fp32" and found.nbytes < 4):
        return shard.dtype
    if options.dtype in KINDS:
        return KINDS[options.dtype]
    if base is None or shard.name not in base.tensors:
        got = "no base model with weights" if base is None or not base.tensors else f"no such tensor in {base.path}"
        step = f"give {option('base_model')} a folder with weights, or choose another {option('dtype')}"
        problem = f"{option('dtype', 'base')}: the base model does not have {shard.name}, so its type is unknown"
        raise UsageError(problem, tensor=shard.name, got=got, next_step=step)
    stored = base.tensors[shard.name][0]
    if not dtypes.dtype(stored).is_float:
        step = f"choose another {option('dtype')}, or a base model that is not quantized"
        problem = f"{option('dtype', 'base')}: {shard.name} cannot be cast to {stored}"
        raise UsageError(problem, tensor=shard.name, got=shard.dtype, want=stored, next_step=step)
    return stored


class Purpose(Enum):
    """The product of a conversion; each purpose names tensors in its own way."""

    MODEL = "a model folder, under Hugging Face's names"
    STATES = "states of ranks, under the source's names unless a recipe is asked for, in either direction"
    MODULE = "the tensors of a live module, under the module's names"
    PROOF = "nothing; Hugging Face's names"


class Request(Struct, frozen=True, eq=False):
    """The caller's choices for a conversion."""

    purpose: Purpose
    options: GatherOptions = field(default_factory=GatherOptions)
    recipe: str | os.PathLike[str] | None = None
    """Name of a shipped recipe, a recipe file, ``"transformers"``, or ``"none"``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name -> name of the tensor that is written for it, from a layout file."""
    config_overrides: Mapping[str, Any] | None = None
    module_shapes: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Name in the live module to fill -> global shape; None where one rank does not know it."""
    file_names: Collection[str] = ()
    """Names of the same model in other files; a base model's count first."""


class Decision(Struct, frozen=True, eq=False):
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
    small: SmallFiles = SmallFiles()

    @property
    def is_model(self) -> bool:
        """Whether the result is a model, and not an adapter alone."""
        return self.adapted is None or not self.adapted.is_alone

    @property
    def padded_names(self) -> frozenset[str]:
        """Names of tensors that may end with rows of padding, as trainers pad a vocabulary."""
        return frozenset() if self.matched is None else find_padded_names(self.matched, self.source)


def decide(found: FoundSource, request: Request, base: BaseModel | None = None) -> Decision:
    """Decide the output of a source; read small files only. `base` is the base model, if one is named."""
    purpose, options, config = request.purpose, request.options, found.config
    adapted = _adapt(found, options, base) if purpose is Purpose.MODEL else None
    stored = found.model
    if adapted is not None:
        adapted = drop_tied(adapted, config)
        adapted = replace(adapted, source=declare_ties(adapted.source, config, adapted.updates or ()))
        stored = adapted.source
    elif purpose in (Purpose.MODEL, Purpose.PROOF):
        stored = declare_ties(stored, config)
    named = stored if adapted is None else adapted.base
    if request.recipe == TABLE:
        matched = None
    elif purpose in (Purpose.STATES, Purpose.MODULE):
        matched = match_asked_recipe(named, request.recipe)
    else:
        matched = choose_recipe(named, config, request.recipe)
    if matched is not None and adapted is not None:
        step = f"keep the names with {option('recipe', 'none')}"
        problem = f"{stored.path} contains an adapter of tensors that the recipe {matched.recipe.name} would rename"
        raise UsageError(
            problem, file=stored.path, got="an adapter, and a recipe", want="Hugging Face's names", next_step=step
        )
    stored, options = apply_recipe(stored, matched, config, options)
    is_alone = adapted is not None and adapted.is_alone
    converted = None
    if matched is None and not is_alone:
        converted = _convert(found, stored if adapted is None else adapted.base, request, base)
    if converted is not None and adapted is not None:
        other = convert_adapted(adapted, converted, lambda model: _convert(found, model, request, base))
        adapted, converted = (adapted, None) if other is None else (other, converted)
    if converted is not None:
        stored = converted.model if adapted is None else adapted.source
        options = keep_routers(stored, options)
    if request.recipe is None and matched is None and purpose is Purpose.MODEL:
        _refuse_foreign(found, base)
    base = None if is_alone else base
    if options.filled and base is not None:
        from xrank.recipes.salvage import fill_from  # few gathers need this module

        stored = fill_from(stored, base, options.filled)
    decided = partial(Decision, found, stored, options, base, matched, adapted)
    if purpose is Purpose.STATES:
        # A base model gives states only small files; a config does not tie tensors that the layout file leaves untied.
        return decided(select(stored, options, None, None, request.aliases))
    if purpose is not Purpose.MODEL:
        outputs = tuple(OutputTensor(shard.name, shard.dtype, shard.shape) for shard in stored.shards)
        return decided(Selection(outputs, {}, (), {}, ()))
    # The layout file has the names of the source, or of the module.
    names = {**found.plain_names}
    for name in (*request.aliases, *request.aliases.values()):
        plain = names.get(name, name)
        if adapted is not None:
            names[name] = (adapted.renamed or {}).get(plain, plain)
        elif converted is not None:
            names[name] = converted.renamed.get(plain, name)
    aliases = {names.get(name, name): names.get(target, target) for name, target in request.aliases.items()}
    selection = select(stored, options, base, config, aliases, adapted.own if adapted is not None else ())
    companions = (*(base.companions if base is not None else ()), *found.companions)
    overrides = request.config_overrides
    return decided(selection, small_files_of(companions, found, options, is_model=not is_alone, overrides=overrides))


def _refuse_foreign(found: FoundSource, base: BaseModel | None) -> None:
    """Refuse tensors whose names are not those of the class in config.json: it would start from random weights."""
    model, names = names_of_class(found.config), [shard.name for shard in found.model.shards]
    # Without layers it is no model of transformers, but some tensors of the user's own.
    has_layers = any(part.isdecimal() for name in names for part in name.split("."))
    if model is None or not has_layers or (base is not None and base.tensors) or 4 * model.count(names) >= len(names):
        return
    first = names[0].partition(".")[0]
    prefix = first if all(name.startswith(f"{first}.") for name in names) else ""
    step = either(
        "put the config.json of the model that has these names in its place",
        f"rename the tensors with {option('recipe', metavar='FILE')}",
        f"keep the names with {option('recipe', 'none')} for code that expects them",
    )
    got = plural(len(names), "tensor") + (f", all under {prefix}" if prefix else f", such as {names[-1]}")
    want = f"names that begin with {list_text(model.examples, 3)}"
    problem = f"{names[0]}: the tensors have no names of {model.class_name}, the class in config.json"
    raise ContradictionError(problem, tensor=names[0], file=found.config_path, got=got, want=want, next_step=step)


def _convert(found: FoundSource, stored: StoredModel, request: Request, base: BaseModel | None) -> Converted | None:
    """Return the source in the form that the purpose needs; None where it has it, or another recipe was asked for."""
    if request.recipe not in (None, TABLE) or (request.purpose is Purpose.STATES and request.recipe is None):
        return None
    if request.purpose is Purpose.STATES:
        return convert_states(stored, found.config)
    if request.purpose is Purpose.MODULE:
        return convert_to_module(stored, found.config, request.module_shapes)
    names = base.tensors if base is not None and base.tensors else request.file_names
    return convert_to_files(stored, found.config, base_names=names, own=found.own, is_asked=request.recipe == TABLE)


def _adapt(found: FoundSource, options: GatherOptions, base: BaseModel | None) -> Adapted | None:
    stored, own, known = found.model, found.own, base.tensors if base is not None else {}
    if own is None:
        assert found.place is not None
        return adapt(stored, options, found.place, known)
    names = find_adapter([shard.name for shard in stored.shards], stored.path, known)
    if names is None and own.adapter_text is not None:
        kind = json.loads(own.adapter_text).get("peft_type")
        is_prompt = any(shard.name.startswith("prompt_encoder.") for shard in stored.shards)
        step = "give the result of module.merge_and_unload() or module.unload()"
        step = "save a prompt with the model's own save_pretrained(): no model can contain it" if is_prompt else step
        problem = f"the model is a PeftModel whose adapter, {kind}, is not LoRA"
        raise UsageError(problem, got=f"peft_type {kind}", want="LoRA, or a model without an adapter", next_step=step)
    config = None
    if names is not None:
        if own.adapter_text is None:
            step = "give the PeftModel itself, or the result of its merge_and_unload() without adapter="
            got = f"{len(names.saved)} tensors of an adapter, and no PeftModel"
            problem = "the rank and alpha of the model's adapter are unknown"
            want = "the PeftModel, which has their configuration"
            raise UsageError(problem, tensor=next(iter(names.saved)), got=got, want=want, next_step=step)
        shapes = {shard.name: shard.shape for shard in stored.shards}
        config = parse_adapter_config(json.loads(own.adapter_text), "the model's peft_config", names, shapes)
    return adapt(stored, options, stored.path, known, names=names, config=config)


def digest_of_plan(plan: Plan, *options: str) -> str:
    """Return a digest that is the same for the same source, options and output."""
    state = xxhash.xxh3_128()
    for file in plan.source.files:
        state.update(repr(file.identity).encode())
    if plan.source.records.quantized:
        state.update(repr(sorted(plan.source.records.quantized.items())).encode())
    if plan.source.records.changed:
        state.update(repr(sorted(plan.source.records.changed.items())).encode())
    for tensor in plan.tensors:
        state.update(repr((tensor.output, tensor.source_dtype)).encode())
        if tensor.changed:
            state.update(repr(sorted(tensor.changed.items())).encode())
        if tensor.update is not None:
            a, b, rule = tensor.update.a, tensor.update.b, tensor.update.rule
            place = (rule.num_blocks, rule.start) if rule.num_blocks > 1 or rule.start else ()
            what = (a.output, b.output, rule.scale, rule.is_transposed, *place)
            state.update(repr(what).encode())
        for copies in tensor.read:
            for array in (copies.rank, copies.record, copies.nests.x, copies.nests.y, copies.nests.loops):
                state.update(array.tobytes())
    for made in plan.files:
        state.update(made.output.name.encode() + made.output.header)
        for offset, data in made.output.fragments:
            state.update(b"%d:" % offset + data)
    for choice in options:
        state.update(choice.encode("utf-8", "surrogateescape"))  # a path may hold bytes that are not text
    return state.hexdigest()


_SALVAGED = "salvaged"
"""Stem of the names of a salvage's files, which no program takes for those of a model."""
_GENERATION_NAME = "generation_config.json"
_TRAINING_NAMES = "the names stay the training framework's, as requested; from_pretrained will not find the tensors"


class FolderPlan(Struct, frozen=True, eq=False, dict=True):
    """A planned and proven model folder; nothing is written yet."""

    decision: Decision
    plan: Plan
    selection: Selection
    """The tensors of the folder: those of the decision, or a transform's results."""
    checked_against_base: str | None
    notes: tuple[tuple[str, str], ...]
    texts: Mapping[str, str]
    """Content of the small files that the plan itself decides, by name, but the index and the manifest."""
    transforms: Transforms | None = None
    """The tensors that a caller's function or an encoding replaces."""
    quantizing: Quantizing | None = None
    index: Mapping[str, Any] | None = None
    """Metadata of the index, of a version of a model that changes step by step."""
    missing: tuple[MissingTensor, ...] = ()
    """Tensors that a salvage did not find whole."""

    @property
    def options(self) -> GatherOptions:
        """The options of the decision."""
        return self.decision.options

    @property
    def source(self) -> StoredModel:
        """The model under the names of the output."""
        return self.decision.source

    @property
    def companions(self) -> tuple[CompanionFile, ...]:
        """Small files to copy."""
        return tuple(one for one in self.decision.small.companions if one.name not in self.texts)

    @property
    def padding_dropped(self) -> dict[str, int]:
        """Rows of padding that outputs lost, by name."""
        dropped = self.source.padding_dropped
        return {output.name: dropped[output.name] for output in self.selection.outputs if output.name in dropped}

    @cached_property
    def digest(self) -> str:
        """Digest that identifies an interrupted output: the same source, options and output give the same digest."""
        choices: list[str] = [self.options.replicas]
        if self.quantizing is not None:
            # Codes and scales of some schemes have the same types, whatever the tensors were cast to before.
            sources = () if self.transforms is None else self.transforms.sources.tensors
            kinds = [(one.output.name, one.output.dtype) for one in sources]
            choices.append(repr((self.quantizing.scheme.name, self.quantizing.scheme.dialect, kinds)))
        if self.index is not None:
            choices.append(repr(self.index))
        if self.options.sign is None:
            return digest_of_plan(self.plan, *choices)
        from xrank.formats.signature import name_key

        # A stage with a signature is not a start for an output without one, or with another key's.
        signing = name_key(os.fspath(self.options.sign)), str(self.options.attest)
        return digest_of_plan(self.plan, *choices, *signing)


def plan_gather(
    source: str,
    options: GatherOptions,
    *,
    base_model: str | os.PathLike[str] | None = None,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    format_name: str | None = None,
    part: str | None = None,
    world_size: int | None = None,
    workspace: bool = False,
    recipe: str | os.PathLike[str] | None = None,
    share: tuple[int, int] = (0, 1),
) -> FolderPlan:
    """Plan a gather and prove the plan; read only metadata, unless two forms of the model lie there.

    Arguments and errors are those of `gather_checkpoint`; `share` is that of `read_best`.
    """
    base = None if base_model is None else open_base_model(base_model)
    if options.dequantize and base is not None:
        from xrank.recipes.dequantization import dequantize_base  # few sources are quantized

        base = dequantize_base(base)
    given = layouts if isinstance(layouts, LayoutMap) or layouts is None else read_layouts(layouts)
    source = places.enter(source)
    where = SourcePlace(source, WORKSPACE.load()) if workspace else find_source(source, format_name=format_name)
    read = partial(
        read_source,
        source,
        where,
        base=base,
        layouts=given,
        part=part,
        world_size=world_size,
        is_left_out=options.leaves_out,
        share=share,
        keeps_names=recipe not in (None, TABLE),  # such a recipe knows the names that the source has
    )
    faults = Faults()
    if options.salvage or options.fill_from_base:
        return _plan_salvage(read(faults=faults), faults, where.path, options, base, given, recipe)
    try:
        return plan_found(read(), where.path, options, base, given, recipe)
    except XrankError as error:
        if not (options.include or options.exclude):
            raise
        # The chosen tensors may be whole.
        try:
            planned = plan_found(read(faults=faults), where.path, options, base, given, recipe)
        except UsageError:
            raise
        except XrankError:
            raise error from None
        if not faults.errors:
            raise
    return replace(planned, notes=(*planned.notes, *_fault_notes(faults)))


def _fault_notes(faults: Faults) -> list[tuple[str, str]]:
    told = "no written tensor needs it; the names of tensors that only it contains are unknown"
    return [("fault", f"{one.message}: {told}") for one in faults.errors]


def _plan_salvage(
    found: FoundSource,
    faults: Faults,
    place: str,
    options: GatherOptions,
    base: BaseModel | None,
    given: LayoutMap | None,
    recipe: str | os.PathLike[str] | None,
) -> FolderPlan:
    """Plan the gather of the tensors that are whole, and of the base model's tensors that fill in others.

    Unlike other plans, this reads all tensors: bytes show damage that metadata do not.
    """
    from xrank.recipes.salvage import explain_missing, find_missing, lose_damaged, salvage_text

    model = lose_damaged(found.model, faults, options.budget)
    lost = [*find_missing(model)]
    if lost and len(lost) == len(model.shards) + len(model.absent) and not options.fill_from_base:
        raise explain_missing(lost, faults, place)
    found = replace(found, model=replace(model, absent=()))
    aliases = {} if given is None else given.aliases
    try:
        source = decide(found, Request(Purpose.MODEL, options, recipe, aliases), base).source
    except XrankError:
        # Without some of its tensors, a model may fit no recipe: the training names stay.
        if recipe is not None or not faults.errors:
            raise
        recipe = "none"
        source = decide(found, Request(Purpose.MODEL, options, recipe, aliases), base).source
    missing = [one for one in find_missing(replace(source, absent=model.absent)) if not options.leaves_out(one.name)]
    known = {} if base is None else base.tensors
    whole = {shard.name for shard in source.shards}.difference(one.name for one in missing)
    lacking = [name for name in known if name not in whole and not options.leaves_out(name)]
    filled = [name for name in lacking if matches(options.fill_from_base, name)]
    if options.fill_from_base and not filled and missing:
        problem = f"{option('fill_from_base')} matches no missing tensor that the base model has"
        got = list_text(lacking or [one.name for one in missing], 3)
        step = "run xrank inspect to list the missing tensors"
        raise UsageError(problem, got=got, want="a pattern that matches missing names", next_step=step)
    missing = [one for one in missing if one.name not in filled]
    if missing and not options.salvage:
        raise explain_missing(missing, faults, place)
    left = {*lacking, *(one.name for one in missing)}.difference(filled) if options.salvage else set[str]()
    chosen = replace(options, missing=frozenset(left), filled=tuple(filled))
    planned = plan_found(found, place, chosen, base, given, recipe)
    notes = [*planned.notes, *(("fault", one.message) for one in faults.errors)]
    if filled:
        assert base is not None
        notes.append(("filled", f"taken from the base model {base.path}: {list_text(filled)}"))
    planned = replace(planned, missing=tuple(missing), notes=tuple(notes))
    if not options.salvage:
        return planned
    # Without config.json and the other small files nothing takes the folder for a model.
    decision = replace(planned.decision, small=SmallFiles())
    texts = {SALVAGE_NAME: salvage_text(source, missing, faults, filled)}
    return replace(planned, decision=decision, texts=texts)


def plan_found(
    found: FoundSource,
    place: str,
    options: GatherOptions,
    base: BaseModel | None,
    given: LayoutMap | None,
    recipe: str | os.PathLike[str] | None = None,
) -> FolderPlan:
    """Plan the gather of a source that was read from a place. Errors are those of `gather_checkpoint`."""
    if options.strict_pickles:
        refuse_foreign_names(found.model)
    if options.dequantize:
        from xrank.recipes.dequantization import dequantize_source

        found = dequantize_source(found, options.dtype)
    if options.adapter in ("merge", "both") and base is not None:
        found = replace(found, model=complete_adapter(found.model, base, options.adapter_config, place))
    request = Request(Purpose.MODEL, options, recipe, {} if given is None else given.aliases)
    decision = decide(found, request, base)
    notes = layout_notes(given, decision.source)
    if decision.base is not None and not decision.base.tensors:
        notes.append(describe_skipped_check(decision.base, place))
    notes += adapter_beside(place) if decision.adapted is None else decision.adapted.notes
    if recipe == "none" and fits_any_recipe(decision.source):
        notes.append(("training-names", _TRAINING_NAMES))
    return plan_output(decision, notes)


def plan_output(
    decision: Decision, more_notes: Sequence[tuple[str, str]], transform: Transform | None = None
) -> FolderPlan:
    """Return the proven plan of a decision, after a check against the base model.

    A `transform`, or a quantization that the options ask for, changes tensors after that check.
    """
    source, options, selection, adapted = decision.source, decision.options, decision.selection, decision.adapted
    found, small, base = decision.found, decision.small, decision.base
    stem = _SALVAGED if options.salvage else find_weights_stem(found.config)
    max_nbytes, outputs, transforms = options.max_shard_nbytes, selection.outputs, None
    whole, updates, beside = source, None, list[OutputFile]()
    if adapted is not None:
        if transform is not None:
            raise UsageError(
                "a model with an adapter cannot be transformed",
                got="transform=, and tensors of an adapter",
                want="a model without an adapter, or no transform",
                next_step="give the result of module.merge_and_unload(), or omit transform=",
            )
        check_ties(adapted.updates or (), adapted.trained, selection.tied)
        # The adapter is merged into the model's files, or has a file of its own.
        own_outputs = [output for output in outputs if output.name in adapted.own]
        outputs = tuple(output for output in outputs if output.name not in adapted.own)
        beside = [lay_out_file(adapted.weights_file, own_outputs)] if own_outputs else []
        whole = replace(adapted.source, shards=(*adapted.source.shards, *adapted.factors))
        updates = adapted.updates
    quantizing = replaced = None
    if options.quantize is not None:
        whole, matrices, quantizing = _quantize(decision, whole, outputs, updates or {}, transform)
        selection = replace(selection, outputs=(*matrices, *(one for file in beside for one in file.tensors)))
        encodings = {name: quantizing.scheme.encoding for names in quantizing.groups for name in names}
        replaced = _encode(matrices, encodings, quantizing.groups, is_cast=True)
    elif isinstance(transform, Quantization):
        wanted = {output.name for output in outputs}
        chosen = [one for one in source.shards if one.name in wanted]
        chosen = [one for one in chosen if transform.applies_to(one.name, one.dtype, one.shape)]
        replaced = _encode(chosen, {one.name: transform.encoding for one in chosen})
    elif transform is not None:
        from xrank.engine.transforms import probe_transform

        replaced = probe_transform(transform, source, selection)
    if replaced is None:
        is_empty = adapted is not None and (adapted.is_alone or not outputs)
        files = [] if is_empty else lay_out(list(outputs), max_nbytes, stem=stem)
        plan = make_plan(whole, [*files, *beside], tied=selection.tied, updates=updates)
    else:
        from xrank.engine.transforms import plan_transformed  # few gathers need this module

        plan, selection, transforms = plan_transformed(
            whole,
            selection,
            replaced,
            max_nbytes,
            stem,
            max_memory_nbytes=options.max_memory_nbytes,
            updates=updates,
            beside=beside,
        )
    checked = None
    excluded = set(decision.selection.excluded)
    if base is not None:
        tied = {name for names in decision.selection.tied.values() for name in names}
        checked = check_against(base, list(outputs), excluded, tied)
    notes = (*source.notes, *found.notes, *selection.notes, *small.notes, *more_notes)
    texts = {"config.json": small.config_text}
    if quantizing is not None:
        known = found.config if small.config_text is None else json.loads(small.config_text)
        texts |= quantizing.texts(known)
    if decision.is_model and not options.salvage:
        notes += prove_config(
            found,
            source,
            base=base,
            config=None if (text := texts["config.json"]) is None else json.loads(text),
            left_out=excluded,
            apart=() if adapted is None else adapted.own,
            written=None if replaced is None else selection.outputs,
        )
    # A live module makes this file where the base model has none.
    if found.own is not None and decision.is_model and all(one.name != _GENERATION_NAME for one in small.companions):
        texts[_GENERATION_NAME] = found.own.generation_text
    if adapted is not None:
        texts[adapted.folder + CONFIG_NAME] = adapted.config_text
    known_texts = {name: text for name, text in texts.items() if text is not None}
    return FolderPlan(decision, plan, selection, checked, notes, known_texts, transforms, quantizing)


def _quantize(
    decision: Decision,
    whole: StoredModel,
    outputs: Sequence[OutputTensor],
    updates: Collection[str],
    transform: Transform | None,
) -> tuple[StoredModel, Sequence[OutputTensor], Quantizing]:
    """Return the model and its outputs with each expert's matrices apart, and the quantization of them."""
    options = decision.options
    assert options.quantize is not None
    if transform is not None or not decision.is_model:
        got = f"{option('transform')}, too" if transform is not None else "an adapter alone"
        raise UsageError(
            f"{option('quantize', options.quantize)} is for a model's own tensors",
            got=got,
            want="a model, without a function that changes it",
            next_step=f"leave {option('quantize')} out"
            if transform is None
            else f"leave {option('quantize')} or {option('transform')} out",
        )
    from xrank.recipes import schemes  # few gathers need this module

    scheme = schemes.find_scheme(options.quantize, options.dialect)
    patterns = schemes.find_ignored_patterns(scheme, options.quantize_ignore)
    # A merge adds to a whole stack.
    merged = {name.rpartition(".")[0] for name in updates}
    whole, outputs = split_experts(whole, outputs, lambda name: name in merged or schemes.is_ignored(name, patterns))
    model_type = (decision.found.config or {}).get("model_type")
    return whole, outputs, schemes.plan_quantization(scheme, outputs, options.quantize_ignore, model_type)


def _encode(
    tensors: Iterable[OutputTensor | StoredShard],
    encodings: Mapping[str, Encoding],
    groups: Sequence[Sequence[str]] = (),
    *,
    is_cast: bool = False,
) -> Replacements:
    """Return what replaces the tensors that have an encoding; other arguments as of `Replacements`."""
    from xrank.engine.transforms import Replacements  # few gathers need this module

    chosen = (one for one in tensors if one.name in encodings)
    made = {one.name: encodings[one.name].outputs(one.name, one.dtype, one.shape) for one in chosen}
    return Replacements(made, None, encodings, is_cast, groups)


def read_layouts(path: str | os.PathLike[str]) -> LayoutMap:
    """Read a layout file that the caller named."""
    try:
        return LayoutMap.read(path)
    except (LayoutError, UsageError) as error:
        error.about(next_step=f"correct {option('layouts')} or the file, then {AGAIN}")
        raise


def layout_notes(layouts: LayoutMap | None, stored: StoredModel) -> list[tuple[str, str]]:
    """Return the report's notes on rules that do not decide for any tensor."""
    if layouts is None:
        return []
    unused = layouts.find_unused([shard.name for shard in stored.shards])
    if len(unused) > 3:
        return [("unused-rule", f"rules of the layout file match no tensor: {list_text(map(repr, unused), 3)}")]
    return [("unused-rule", f"the layout file's rule {pattern!r} matches no tensor") for pattern in unused]
