"""LoRA adapters found in a source: written beside the base model, or merged into it; never dropped, never guessed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.casts import LowRank
from xrank.engine.planner import Plan
from xrank.errors import ContradictionError, Text, UsageError, either, make_sentence, needs, option
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.recipes.adapter_names import (
    CONFIG_NAME,
    PREFIX,
    AdapterConfig,
    AdapterNames,
    Pair,
    find_adapter,
    find_config,
    is_turned,
    read_kind,
    refuse_other_kinds,
    search_config,
)
from xrank.recipes.conversions import Converted
from xrank.recipes.options import GatherOptions
from xrank.recipes.ties import find_class_ties, is_head
from xrank.storage import places
from xrank.words import list_text


def find_parameter_updates(
    pairs: Sequence[Pair],
    config: AdapterConfig,
    base: Mapping[str, StoredShard],
    shards: Mapping[str, StoredShard],
) -> dict[str, LowRank]:
    """Return the update of each adapted parameter.

    `base` has the weights under the base model's names, `shards` all tensors under the source's.
    """
    of_module: dict[str, list[Pair]] = {}
    for pair in pairs:
        of_module.setdefault(pair.module, []).append(pair)
    # A model's experts all lie one way: [out, in], or, in a module that is_transposed, [in, out].
    ways = [
        [list(_assign(each, config, base, shards, is_transposed=is_transposed)) for each in of_module.values()]
        for is_transposed in (False, True)
    ]
    fitting = [number for number, way in enumerate(ways) if all(way)]
    if pairs and (len(fitting) != 1 or any(len(found) != 1 for found in ways[fitting[0]])):
        pair = pairs[0]
        names = config.parameters_of(pair.module)
        held = [f"{name} {base[name].dtype} {list(base[name].shape)}" for name in names if name in base]
        got = f"lora_A {list(shards[pair.a].shape)}, lora_B {list(shards[pair.b].shape)} and {list_text(held, 4)}"
        want = f"one way for each of {list_text(names, 4, empty='target_parameters')}"
        problem = "the shapes do not show to which of its parameters the adapter is added, and how"
        raise UsageError(
            make_sentence(pair.module, problem),
            tensor=pair.a,
            file=config.path,
            got=got,
            want=want,
            next_step=_MERGE_WITH_PEFT,
        )
    found = {}
    for (one,) in ways[fitting[0]] if pairs else ():
        for name, pair in one.items():
            num_blocks = base[name].shape[0] if len(base[name].shape) > 2 else 1
            found[name] = LowRank(pair.a, pair.b, config.scale_of(name), fitting[0] == 1, num_blocks)
    return found


def _assign(
    pairs: Sequence[Pair],
    config: AdapterConfig,
    base: Mapping[str, StoredShard],
    shards: Mapping[str, StoredShard],
    *,
    is_transposed: bool,
) -> Iterator[dict[str, Pair]]:
    """Yield each way to give every pair of a module a parameter of its own that fits."""
    names = [name for name in config.parameters_of(pairs[0].module) if name in base]
    for order in permutations(names, len(pairs)):
        if all(
            _fits(base[name], shards[pair.a], shards[pair.b], config.rank_of(name), is_transposed=is_transposed)
            for name, pair in zip(order, pairs, strict=True)
        ):
            yield dict(zip(order, pairs, strict=True))


def _fits(weight: StoredShard, a: StoredShard, b: StoredShard, rank: int, *, is_transposed: bool) -> bool:
    """Return whether a pair can be added to a parameter (peft/tuners/lora/layer.py: ParamWrapper)."""
    if len(a.shape) != 2 or len(b.shape) != 2 or not all(dtypes.dtype(each.dtype).is_float for each in (weight, a, b)):
        return False
    if len(weight.shape) == 2 and not is_transposed:
        num_blocks, rows, columns = 1, *weight.shape
    elif len(weight.shape) == 3:
        num_blocks, rows, columns = weight.shape
    else:
        return False
    wide = (columns, rows) if is_transposed else (rows, columns)
    return a.shape[0] == b.shape[1] == num_blocks * rank and (b.shape[0], a.shape[1]) == wide


def find_updates(
    names: AdapterNames,
    config: AdapterConfig,
    base: Mapping[str, StoredShard],
    shards: Mapping[str, StoredShard],
) -> dict[str, LowRank]:
    """Return the update that each adapted weight gets, by the weight's name.

    `base` has the weights under the base model's names, `shards` all tensors under the source's.
    """
    fits = {}
    plain, stacked = list[Pair](), list[Pair]()
    for pair in names.pairs:
        # Pairs of parameters that `target_parameters` names are not those of layers' weights.
        is_stacked = pair.depth > 0 or any(name in base for name in config.parameters_of(pair.module))
        (stacked if is_stacked else plain).append(pair)
    for pair in plain:
        weight = _weight_of(pair, base, shards)
        a, b = shards[pair.a].shape, shards[pair.b].shape
        straight, turned = (b[0], a[1]), (a[1], b[0])
        fits[pair.module] = ((not pair.is_embedding and weight.shape == straight), weight.shape == turned)
        if not any(fits[pair.module]):
            name, want = f"{pair.module}.weight", f"a weight {list(turned if pair.is_embedding else straight)}"
            got = f"lora_A {list(a)} and lora_B {list(b)} for a weight {list(weight.shape)}"
            step = "check that adapter and base model belong together"
            problem = f"{name}: the shape of its adapter does not fit"
            raise ContradictionError(problem, tensor=name, file=config.path, got=got, want=want, next_step=step)
    kinds = {fits[pair.module] for pair in plain if not pair.is_embedding} - {(True, True)}
    found = {
        f"{pair.module}.weight": LowRank(
            pair.a, pair.b, config.scale_of(pair.module), is_turned(pair.module, fits[pair.module], kinds, config)
        )
        for pair in plain
    }
    return found | find_parameter_updates(stacked, config, base, shards)


def _weight_of(pair: Pair, base: Mapping[str, StoredShard], shards: Mapping[str, StoredShard]) -> StoredShard:
    """Return the weight that a pair is added to, after a check that both allow the calculation."""
    name = f"{pair.module}.weight"
    weight = base.get(name)
    if weight is None or not dtypes.dtype(weight.dtype).is_float:
        held = [other for other in base if other.rpartition(".")[0] == pair.module]
        problem = "is quantized, so nothing can be added to it" if held else "is not in the source"
        got = f"{weight.dtype} {list(weight.shape)}" if weight is not None else list_text(held)
        step = f"use {option('adapter', 'separate')}; or merge it with PEFT into the model that was not quantized"
        raise UsageError(make_sentence(name, problem), tensor=name, got=got, want="a float weight", next_step=step)
    for half in (shards[pair.a], shards[pair.b]):
        if len(half.shape) != 2 or len(weight.shape) != 2 or not dtypes.dtype(half.dtype).is_float:
            raise UsageError(
                f"{half.name}: an adapter of this kind cannot be merged",
                tensor=half.name,
                got=f"{half.dtype} {list(half.shape)} for a weight {list(weight.shape)}",
                want="float matrices",
                next_step=_MERGE_WITH_PEFT,
            )
    return weight


_MERGE_WITH_PEFT = f"use {option('adapter', 'separate')}, and merge it with PEFT"
FOLDER = "adapter/"
"""Folder in the output for an adapter that is kept apart."""
# peft/utils/constants.py: SAFETENSORSWEIGHTS_NAME; PEFT reads one file only, under this name.
WEIGHTS_NAME = "adapter_model.safetensors"
# With these options the result is not W + scale * (B @ A) (peft/tuners/lora/variants.py, layer.py, model.py).
_NOT_PLAIN = (
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens", "layer_replication"),
    *("trainable_token_indices", "arrow_config", "kasa_config", "monteclora_config", "velora_config"),
    "megatron_config",
)
# A trainer that shards its state may leave no configuration (transformers' Trainer with FSDP).
_NO_CONFIG = (
    "adapter-config",
    Text(
        f"no file states the adapter's rank and alpha, so no {CONFIG_NAME} is written, but PEFT needs it to load the "
        f"adapter: copy the trainer's file next to the adapter, or give it as {option('adapter_config')}"
    ),
)
_BESIDE = ("adapter_model.safetensors", "adapter_model.bin")


class Adapted(Struct, frozen=True):
    """A source with an adapter, in the form of the output."""

    source: StoredModel
    """The source's shards under their names in the output; `factors` has the shards that are merged into others."""
    factors: tuple[StoredShard, ...] = ()
    """Shards that are merged into others, under their names in the source."""
    updates: Mapping[str, LowRank] | None = None
    """Name in the output -> the update that is added to the tensor."""
    trained: frozenset[str] = frozenset()
    """Names in the output of tensors that are the adapter's in place of the base model's."""
    own: frozenset[str] = frozenset()
    """Names in `source` that are the adapter's, for a file of its own."""
    folder: str = ""
    """Folder of that file in the output; with `is_alone` it is the only file."""
    is_alone: bool = False
    """Whether the source lacks a base model."""
    config_text: str | None = None
    """The adapter_config.json to write."""
    notes: tuple[tuple[str, str], ...] = ()
    renamed: Mapping[str, str] | None = None
    """Name in the source -> name in the output, for the base model's tensors."""

    @property
    def base(self) -> StoredModel:
        """The source without the adapter's tensors: the part that a recipe may know."""
        return replace(self.source, shards=tuple(shard for shard in self.source.shards if shard.name not in self.own))

    @property
    def weights_file(self) -> str:
        """The file of the adapter's tensors."""
        return self.folder + WEIGHTS_NAME


def adapt(
    source: StoredModel,
    options: GatherOptions,
    place: str,
    own: Mapping[str, Any],
    *,
    names: AdapterNames | None = None,
    config: AdapterConfig | None = None,
) -> Adapted | None:
    """Return a source with its adapter kept apart or merged by the options; None for a source without an adapter.

    Tensors of the base model, `own`, are not an adapter's, even if their names look like it. `names` and `config` are
    the adapter's, where they are known; else they are searched in the source and in the files at its `place`.
    """
    if names is None:
        names = find_adapter([shard.name for shard in source.shards], source.path, own)
    if names is None:
        try:
            refuse_other_kinds([shard.name for shard in source.shards], source.path, own)
        except UsageError as error:
            stated = read_kind(options.adapter_config, place)
            error.about(got=None if stated is None else f"peft_type {stated}, by its {CONFIG_NAME}")
            raise
        if options.adapter is not None or options.adapter_config is not None:
            step = either(
                f"omit {option('adapter')} and {option('adapter_config')}",
                needs("model_or_state_dict", f"leave {option('adapter')} out"),
            )
            got = f"{len(source.shards)} tensors, none named like <module>.lora_A.<adapter>.weight"
            problem = f"{source.path} contains no adapter to {options.adapter or 'configure'}"
            raise UsageError(problem, file=source.path, got=got, next_step=step)
        return None
    shapes = {shard.name: shard.shape for shard in source.shards}
    if options.adapter in ("merge", "both"):
        config = config or find_config(options.adapter_config, place, names, shapes)
        merged = _merge(source, names, config)
        return merged if options.adapter == "merge" else _add_folder(merged, _separate(source, names, config), config)
    if not names.is_alone:
        _check_bases(source, names)
    adapted = _separate(source, names, config or search_config(options.adapter_config, place, names, shapes))
    if options.adapter is not None:
        return adapted
    merge = option("adapter", "merge")
    how = f"{merge} and {option('base_model')} write one model" if names.is_alone else f"{merge} writes one model"
    text = Text(f"{option('adapter', 'separate')} is the default; {how}, with the adapter added")
    return replace(adapted, notes=(*adapted.notes, ("adapter-choice", text)))


def adapter_beside(place: str, read: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return the report's notes on an adapter's files that lie in a source and are not among those `read`."""
    if not places.is_folder(place):
        return []
    paths = [os.path.join(folder, name) for folder in ("", "lora_adapter", "adapter") for name in _BESIDE]
    return [
        ("adapter-beside", f"{path} belongs to an adapter, and is left out: give the adapter's folder to gather it")
        for path in paths
        if path not in read and places.is_file(os.path.join(place, path))
    ]


def check_ties(
    updates: Collection[str], trained: Collection[str], tied: Mapping[str, Sequence[str]], config: Any = None
) -> None:
    """Refuse to merge into one of two tied tensors: it is unknown whether the other should change with it.

    An adapter is added to the tensors `updates` and replaces the tensors `trained`. `tied` maps a name to the names of
    the tensors that are one with it in the source. The model's `config` may tie an updated or trained tensor to one
    that the source lacks.
    """
    of_class = {target: (name,) for name, target in find_class_ties({*updates, *trained}, config).items()}
    for target, others in (*tied.items(), *of_class.items()):
        names = (target, *others)
        for name in names:
            if name in updates or (name in trained and not all(one in trained for one in names)):
                raise UsageError(
                    f"{name} has an adapter, and is tied to {', '.join(one for one in names if one != name)}",
                    tensor=name,
                    got=f"one tensor under the names {', '.join(names)}",
                    want="a separate tensor to merge into",
                    next_step=f"use {option('adapter', 'separate')}; or untie them in config.json, where both were "
                    "saved",
                )


def describe_merges(plan: Plan) -> dict[str, str]:
    """Describe the update that was added to each tensor, in the words of the manifest."""
    found = {}
    for tensor in plan.tensors:
        if tensor.update is not None:
            a, b = tensor.update.a.output.name, tensor.update.b.output.name
            rule = tensor.update.rule
            turned = ", transposed" if rule.is_transposed else ""
            part = f", {rule.num_blocks} experts, from element {rule.start}" if rule.num_blocks > 1 else ""
            found[tensor.output.name] = f"W + {rule.scale!r} * ({b} @ {a}{turned}{part})"
    return found


def _check_bases(source: StoredModel, names: AdapterNames) -> None:
    modules = names.modules
    for pair in names.pairs:
        if pair.module not in modules:
            step = either(
                "check that the checkpoint is whole",
                f"give the model that the adapter was trained on as {option('base_model')}",
            )
            got = f"{pair.a}, and no tensor of {pair.module}"
            want = f"{pair.module}.weight, as other adapted modules have it"
            problem = f"{pair.module} has an adapter, but the module itself is missing"
            raise ContradictionError(problem, tensor=pair.a, file=source.path, got=got, want=want, next_step=step)


def _separate(source: StoredModel, names: AdapterNames, config: AdapterConfig | None) -> Adapted:
    """Return the base model with a PEFT folder in it; for a source without a base model, the folder alone."""
    has_own_base = not names.is_alone
    source, names = _drop_tied_tokens(source, names, config)
    biases = names.biases_of(config.values.get("bias")) if has_own_base and config is not None else {}
    base = {name: PREFIX + name.removeprefix(PREFIX) for name in names.base} if names.is_alone else names.base
    renamed = {**base, **names.saved}
    notes = [
        ("adapter", f"{len(names.pairs)} LoRA pairs are written separately, as a PEFT folder"),
        *([_NO_CONFIG] if config is None else config.notes(has_own_base=has_own_base)),
    ]
    if names.trained:
        notes.append(("adapter-trained", f"{list_text(names.trained)}: the trained ones are in the adapter's folder"))
    model = _with_names(source, renamed)
    copies = tuple(replace(shard, name=biases[shard.name]) for shard in source.shards if shard.name in biases)
    return Adapted(
        replace(model, shards=(*model.shards, *copies), absent=() if names.is_alone else source.absent),
        own=frozenset(renamed.values() if names.is_alone else (*names.saved.values(), *biases.values())),
        folder="" if names.is_alone else FOLDER,
        is_alone=names.is_alone,
        config_text=None if config is None else config.text(has_own_base=has_own_base),
        notes=tuple(notes),
        renamed=base,
    )


def _merge(source: StoredModel, names: AdapterNames, config: AdapterConfig) -> Adapted:
    if names.is_alone:
        step = f"add {option('base_model')} with the safetensors weights that it was trained on; or use "
        step += option("adapter", "separate")
        got = f"{len(names.pairs)} LoRA pairs and no weight of their modules"
        problem = f"{source.path} contains only an adapter, and no model to merge it into"
        raise UsageError(problem, file=source.path, got=got, next_step=step)
    kinds = [key for key in _NOT_PLAIN if config.values.get(key)]
    biases = [bias for pair in names.pairs for bias in pair.biases]
    if kinds or biases:
        got, tensor = list_text([*kinds, *biases]), biases[0] if biases else None
        problem = f"{source.path}: its adapter is more than W + scale * B @ A, and cannot be merged"
        raise UsageError(
            problem, tensor=tensor, file=config.path, got=got, want="plain LoRA", next_step=_MERGE_WITH_PEFT
        )

    _check_bases(source, names)
    shards = {shard.name: shard for shard in source.shards}
    left_out = [name for name, new in names.base.items() if new in names.trained]
    renamed = {name: new for name, new in names.base.items() if new not in names.trained}
    renamed.update((name, new) for new, name in names.trained.items())
    stored_as = {new: name for name, new in renamed.items()}
    updates = find_updates(names, config, {new: shards[name] for new, name in stored_as.items()}, shards)
    scales = list_text([f"{scale:g}" for scale in sorted({update.scale for update in updates.values()})])
    done = f"{len(updates)} LoRA pairs are merged: W + {scales} * B @ A, computed in float32, rounded once"
    notes = [("adapter", done), *config.notes(has_own_base=False)]
    if left_out:
        text = f"{list_text(left_out)}: left out; the trained tensors that replace them are written"
        notes.append(("adapter-trained", text))
    return Adapted(
        _with_names(source, renamed),
        factors=tuple(shards[name] for pair in names.pairs for name in (pair.a, pair.b)),
        updates=updates,
        trained=frozenset(names.trained),
        notes=tuple(notes),
        renamed=renamed,
    )


def _add_folder(merged: Adapted, apart: Adapted, config: AdapterConfig) -> Adapted:
    """Return a merged model with the adapter's folder in it; the folder is for the base model, as it was trained."""
    own = tuple(shard for shard in apart.source.shards if shard.name in apart.own)
    text = f"{apart.folder} has the adapter for its base model; the model here already contains it"
    return replace(
        merged,
        source=replace(merged.source, shards=(*merged.source.shards, *own)),
        own=apart.own,
        folder=apart.folder,
        config_text=config.text(has_own_base=False),
        notes=(*merged.notes, ("adapter-apart", text)),
    )


def _drop_tied_tokens(
    source: StoredModel, names: AdapterNames, config: AdapterConfig | None
) -> tuple[StoredModel, AdapterNames]:
    """Leave out the trained rows of a head that is tied to the embedding: PEFT saves them once.

    The configuration names the other module, or none: then it is the input embedding.
    """
    given = config.values.get("trainable_token_indices") if config is not None else None
    dropped = {
        name
        for module, name in names.tokens.items()
        if (isinstance(given, dict) and not any(f".{module}".endswith(f".{target}") for target in given))
        or (isinstance(given, list) and len(names.tokens) > 1 and is_head(f"{module}.weight"))
    }
    saved = {name: new for name, new in names.saved.items() if name not in dropped}
    shards = tuple(shard for shard in source.shards if shard.name not in dropped)
    return replace(source, shards=shards), replace(names, saved=saved)


def _with_names(source: StoredModel, renamed: Mapping[str, str]) -> StoredModel:
    shards = tuple(replace(shard, name=renamed[shard.name]) for shard in source.shards if shard.name in renamed)
    aliases = {renamed[a]: renamed[b] for a, b in source.aliases.items() if a in renamed and b in renamed}
    return replace(source, shards=shards, aliases=aliases)


def drop_tied(adapted: Adapted, config: Mapping[str, Any] | None) -> Adapted:
    """Return an adapter alone without tensors of the base model that are tied to one that it lacks; others unchanged.

    A trainer that leaves frozen parameters out may leave the other name of one of them in the state. PEFT saves an
    embedding and its head together, or what `modules_to_save` names.
    """
    if not adapted.is_alone or adapted.config_text is None:
        return adapted
    kept = json.loads(adapted.config_text).get("modules_to_save") or []
    names = {shard.name.removeprefix(PREFIX) for shard in adapted.source.shards}
    dropped = [
        PREFIX + tied
        for tied, target in find_class_ties(names, config).items()
        if tied in names and target not in names and not any(f".{tied}".endswith(f".{one}.weight") for one in kept)
    ]
    if not dropped:
        return adapted
    shards = tuple(shard for shard in adapted.source.shards if shard.name not in dropped)
    note = ("adapter-tied", f"left out, because they are tied to tensors that are missing: {list_text(dropped)}")
    source = replace(adapted.source, shards=shards)
    return replace(adapted, source=source, own=adapted.own.difference(dropped), notes=(*adapted.notes, note))


def convert_adapted(
    adapted: Adapted, converted: Converted, convert: Callable[[StoredModel], Converted | None]
) -> Adapted | None:
    """Return a source with an adapter whose base model is converted.

    None: an adapted tensor becomes tensors that are not runs of its elements.
    """
    updates, renamed = adapted.updates or {}, converted.renamed
    moved = {renamed[name]: update for name, update in updates.items() if name in renamed}
    for new, olds, start in _trace(adapted.base, convert) if len(moved) < len(updates) else ():
        if not updates.keys().isdisjoint(olds):
            if start is None:
                return None
            moved[new] = replace(updates[olds[0]], start=updates[olds[0]].start + start)
    own = (shard for shard in adapted.source.shards if shard.name in adapted.own)
    return replace(
        adapted,
        source=replace(converted.model, shards=(*converted.model.shards, *own)),
        updates=None if adapted.updates is None else moved,
        renamed={old: renamed.get(new, new) for old, new in (adapted.renamed or {}).items()},
    )


def _trace(
    model: StoredModel, convert: Callable[[StoredModel], Converted | None]
) -> Iterator[tuple[str, list[str], int | None]]:
    """Yield (name, names before, address) of each converted tensor.

    The address is that of its first element in the only tensor before; None where it is not a run of that one.
    """
    # Each tensor gets a record of its own, with its elements in their order.
    tables = {
        shape: NestTable.in_order(prod(shape))
        for shape in {shard.shape for shard in model.shards if 0 not in shard.shape}
    }
    traced = [
        replace(shard, rank=int_array([0]), record=int_array([number]), nests=tables[shard.shape])
        for number, shard in enumerate(model.shards)
        if 0 not in shard.shape
    ]
    converted = convert(replace(model, shards=tuple(traced)))
    for shard in converted.model.shards if converted is not None else ():
        olds = [model.shards[number].name for number in dict.fromkeys(shard.record.tolist())]
        loops, shifts = shard.nests.loops, shard.nests.x - shard.nests.y
        is_run = bool(
            ((loops[:, :, 1] == loops[:, :, 2]) | (loops[:, :, 0] == 1)).all() and (shifts == shifts[0]).all()
        )
        yield shard.name, olds, int(shifts[0]) if is_run and len(olds) == 1 else None
