"""Sources in files or in memory, with the model's config and small files; other sources beside the one that is read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import product
from math import prod
from typing import TypeAlias

from msgspec.structs import replace

from xrank import dtypes
from xrank.dtypes import dtype
from xrank.engine.buffers import NullTarget
from xrank.engine.companions import CompanionFile, find_companions, find_hub_snapshot, list_base_companions
from xrank.engine.executor import Budget, execute
from xrank.engine.planner import make_plan
from xrank.engine.sources import open_source
from xrank.environment import environ, hub_cache
from xrank.errors import AGAIN, ContradictionError, IncompleteError, UsageError, XrankError, option
from xrank.formats.pickles import is_extra_state
from xrank.layout import LayoutMap
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import StoredModel, StoredShard, merge_models
from xrank.readers.base import RAISING, Faults, Hints, Reader
from xrank.readers.discovery import TORCH_SAVE, WORKSPACE, SourcePlace, find_source
from xrank.readers.names import drop_states, plain_names, remove_wrapper_names, rename_tensors
from xrank.readers.placement import note_zero_tails
from xrank.readers.records import find_checkpoint_folders
from xrank.recipes.adapter_names import PREFIX, find_adapter, find_config
from xrank.recipes.adapters import check_ties
from xrank.recipes.conversions import convert_to_files, convert_to_module
from xrank.recipes.found_source import BaseModel, FoundSource, OwnConfig, read_config
from xrank.recipes.model_names import make_finder
from xrank.recipes.options import default_workers
from xrank.recipes.proofs import prove_shapes
from xrank.recipes.recipe_choice import choose_recipe, follow_recipe
from xrank.recipes.ties import embedding_of, find_config_ties, list_unsaved
from xrank.storage import places
from xrank.words import list_text, plural

_MAX_NBYTES = 256 << 20
_BUDGET = Budget.from_memory(4 << 20, 1)


def check_roundings(model: StoredModel) -> StoredModel:
    """Return the model without its rounded copies, of which the smallest were compared with its tensors."""
    if not model.roundings:
        return model
    chosen: list[StoredShard] = []
    nbytes = 0
    for shard in sorted(model.roundings, key=lambda shard: (prod(shard.shape), shard.name)):
        nbytes += prod(shard.shape) * (dtype(shard.dtype).nbytes + 4)
        if chosen and nbytes > _MAX_NBYTES:
            break
        chosen.append(shard)
    plain = replace(model, roundings=())
    # A tied layer's copies have one name, so each copy is compared by itself.
    for shard in chosen:
        outputs = [OutputTensor(shard.name, shard.dtype, shard.shape)]
        rounded = replace(plain, shards=(shard,), aliases={}, absent=())
        if compute_digests(plain, outputs) != compute_digests(rounded, outputs):
            file = model.files[int(model.records.file[int(shard.record[0])])].path
            raise ContradictionError(
                f"{file} belongs to a different save, layer or expert than the fp32 weights",
                tensor=shard.name,
                file=file,
                got=f"other values of {shard.name}",
                want=f"the fp32 weights, rounded to {shard.dtype}",
                next_step="all files must come from one save of one run; copy them again from where they were saved",
            )
    return plain


def compute_digests(model: StoredModel, outputs: Sequence[OutputTensor], budget: Budget = _BUDGET) -> list[bytes]:
    """Return the digests of whole tensors in the outputs' dtypes."""
    plan = make_plan(model, [OutputFile.bare(output) for output in outputs])
    with closing(open_source(model)) as files:
        made = execute(plan, files, NullTarget(), budget=budget)
    return [made.files[number].digest for number in range(len(outputs))]


_ONE_MODEL = "equal values, as where a trainer saves one model in two forms"
_FIRST_NBYTES = 64 << 20
"""Bytes of the tensors that are compared first, the smallest ones; each further step compares twice as many."""
_MEMORY_NBYTES = 16 << 20
_MOST_REMOVED = 3
"""Parts at the front of a name that wrappers may have added."""
_ADAPTER_FILE = re.compile(r"(?:.*/)?adapter_model[^/]*")

_Pairs: TypeAlias = list[tuple[StoredShard, StoredShard]]


def read_best(where: SourcePlace, hints: Hints, share: tuple[int, int] = (0, 1)) -> StoredModel:
    """Read the source with the first reader, or with the next if its files cannot be used as a model.

    ZeRO-3 leaves a model folder of empty tensors if a trainer saves it without gathering; the state beside it is whole.
    Otherwise all tensors of both are compared: a model that training started from agrees with the trained one in each
    tensor that was frozen, so that only all of them show which of the two was taken. `share` is the position of this
    rank among the ranks that compare together, each its share of the tensors, and their number.
    """
    place, chosen, others = where.path, where.reader, where.others
    notes: list[tuple[str, str]] = []
    try:
        model = _read(chosen, place, hints)
        if others and not model.shards:
            raise _emptiness(place, chosen)
    except UsageError as error:
        found = None
        if others and others[0][1].name != TORCH_SAVE.name:
            with suppress(XrankError):
                found = _read(others[0][1], others[0][0], hints)
        if found is None or not found.shards:
            raise
        model = found
        notes.append(("also-here", f"{_beside(place, chosen, found, others[0][1])}, but cannot be read: {error}"))
        (_, chosen), others = others[0], others[1:]
    # A part that the caller chose by name need not equal another model beside it; layouts are not values.
    if hints.part is None and not hints.needs_layouts and not hints.faults.errors:
        notes += _compare(model, chosen, others, hints, share)
    return replace(model, notes=(*model.notes, *notes))


def _read(reader: Reader, place: str, hints: Hints, *, is_other: bool = False) -> StoredModel:
    """Return what a reader finds, without what wrapping modules added to it."""
    model = check_roundings(reader.read(place, hints))
    if model.format.startswith("megatron") or hints.needs_layouts or hints.keeps_names:
        model = remove_wrapper_names(model)
    else:
        known = hints.shapes or hints.module_names
        config = model.config if hints.config is None else hints.config
        model = remove_wrapper_names(model, make_finder(known, config, hints.is_left_out), known)
    if hints.part != model.part and not is_other:
        raise UsageError(
            f"{option('part')} was given, but {place} contains a single model without parts",
            file=place,
            got=option("part", hints.part),
            want="a checkpoint of several parts, such as model and ema",
            next_step=f"leave {option('part')} out",
        )
    return model


def _emptiness(place: str, reader: Reader) -> UsageError:
    return UsageError(
        f"{place}: its {reader.name} files contain no tensor",
        file=place,
        got="0 tensors",
        want="a model or an adapter",
        next_step="give the checkpoint of a different step; if all are empty, the trainer could not save the model "
        "(FSDP1 cannot save an adapter): train with FSDP2, or save with xrank.export_model",
    )


def _beside(place: str, reader: Reader, model: StoredModel, chosen: Reader) -> str:
    where = "" if place == model.path else f" in {place}"
    return f"{reader.name} files{where} are next to the {chosen.name} files that are read"


def _compare(
    model: StoredModel, chosen: Reader, others: Sequence[tuple[str, Reader]], hints: Hints, share: tuple[int, int]
) -> Iterator[tuple[str, str]]:
    """Yield a note for each other source of the model, which names how it differs.

    Values are compared in the narrower of both dtypes: a trainer's model and the fp32 masters that it was cast from
    agree. A file of ``torch.save`` may hold anything; what has few tensors in common with the model is another thing.
    """
    seen = {file.path for file in model.files}
    for place, reader in others:
        may_be_data = reader.name == TORCH_SAVE.name
        begin = _beside(place, reader, model, chosen)
        try:
            other = _read(reader, place, replace(hints, faults=RAISING), is_other=True)
            if seen.issuperset(file.path for file in other.files):
                continue  # the same files by another reader
            named = _rename(other, model, hints)
            pairs, lacking = _pair(model, named, hints)
        except XrankError as error:
            if not may_be_data:
                # It may be the trained model all the same.
                files = f"{chosen.name} files"
                step = f"if the {files} are the trained model, choose them with {option('format', chosen.name)}"
                raise UsageError(
                    f"{place}: its {reader.name} files cannot be read, so it is unknown whether the {files} of "
                    f"{model.path} are the same model",
                    file=place,
                    tensor=error.tensor,
                    got=error.message,
                    want=_ONE_MODEL,
                    next_step=step + (f"; if not, {error.next_step}" if error.next_step else ""),
                ) from error
            yield "also-here", f"{begin}, but cannot be read: {error}"
            continue
        seen.update(file.path for file in other.files)
        if not other.shards:
            yield "also-here", f"{begin}, and cannot be read: {_emptiness(place, reader)}"
            continue
        if may_be_data and 2 * len(pairs) < len(named.shards):
            yield "also-here", f"{begin}, and hold other tensors: {_kinds(other)}"
            continue
        difference = _find_difference(model, named, pairs, lacking, share)
        if difference is not None:
            is_file = may_be_data and places.is_file(place)
            way = f"give the path {place}" if is_file else option("format", reader.name)
            problem = f"{model.path} and {place} hold different models"
            if place == model.path:
                problem = f"{place} can be read in several ways, which give different models"
            raise UsageError(
                problem,
                file=place,
                tensor=difference[1],
                got=f"{chosen.name} files and {reader.name} files{difference[0]}",
                want=_ONE_MODEL,
                next_step=f"choose one: {option('format', chosen.name)} or {way}",
            )
        agreed = plural(len(pairs), "compared tensor")
        yield "also-here", f"{begin}: {_kinds(other)} there, {_kinds(model)} here; {agreed} agree"


def _rename(other: StoredModel, model: StoredModel, hints: Hints) -> StoredModel:
    """Return another source under the names that its tensors have in files, if it has training names."""
    names = {shard.name for shard in model.shards}
    if names.issuperset(shard.name for shard in other.shards):
        return other
    found = choose_recipe(other, hints.config, None)
    if found is not None:
        return follow_recipe(other, found, hints.config)
    converted = convert_to_files(other, hints.config, base_names=names)
    return other if converted is None else converted.model


def _kinds(model: StoredModel) -> str:
    counts = Counter(shard.dtype for shard in model.shards)
    return f"{plural(len(model.shards), 'tensor')} ({list_text(sorted(counts), 3)})"


def _find_difference(
    model: StoredModel, other: StoredModel, pairs: _Pairs, lacking: Sequence[StoredShard], share: tuple[int, int]
) -> tuple[str, str | None] | None:
    """Return how another source differs from the model, in words, and the tensor; None if all that it holds agrees."""
    if not pairs:
        return " without a tensor in common", None
    for a, b in pairs:
        one, two = dtypes.dtype(a.dtype), dtypes.dtype(b.dtype)
        # One dtype must be the other, or one that the other is rounded to.
        can_compare = one == two or (one.is_float and two.is_float and one.nbytes != two.nbytes)
        if a.shape != b.shape or not can_compare:
            return f": {a.name} is {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}", a.name
    if lacking:
        return f", and only they contain {list_text([shard.name for shard in lacking], 3)}", lacking[0].name
    position, number = share
    rest = sorted(pairs, key=lambda pair: (prod(pair[0].shape), pair[0].name))[position::number]
    room, budget = _FIRST_NBYTES, Budget.from_memory(_MEMORY_NBYTES, default_workers())
    while rest:
        sampled: _Pairs = []
        nbytes = 0
        while rest and (not sampled or nbytes < room):
            sampled.append(rest.pop(0))
            nbytes += prod(sampled[-1][0].shape) * dtypes.dtype(sampled[-1][0].dtype).nbytes
        narrow = [min(pair, key=lambda shard: dtypes.dtype(shard.dtype).nbytes).dtype for pair in sampled]
        digests = []
        for each, shards in zip((model, other), zip(*sampled, strict=True), strict=True):
            outputs = [OutputTensor(s.name, t, s.shape) for s, t in zip(shards, narrow, strict=True)]
            digests.append(compute_digests(each, outputs, budget))
        for (a, _), one, two in zip(sampled, *digests, strict=True):
            if one != two:
                return f" with different values of {a.name}", a.name
        room *= 2
    return None


def _pair(model: StoredModel, other: StoredModel, hints: Hints) -> tuple[_Pairs, list[StoredShard]]:
    """Return the tensors that are the same in both by their names, and those with weights that the model lacks.

    PEFT leaves its adapter's name out of names in files, and transformers saves models that contain others under other
    prefixes than they have in memory. Without an equal name, the only tensor with the same end of a name counts.
    """
    ours, (theirs, in_adapter) = _names_in_files(model)[0], _names_in_files(other)
    pairs = [(ours[name], shard) for name, shard in theirs.items() if name in ours]
    known = {name: shard for name, shard in ours.items() if name not in theirs}
    rest = {name: shard for name, shard in theirs.items() if name not in ours}
    for i, j in sorted(product(range(_MOST_REMOVED + 1), repeat=2), key=sum):
        found, wanted = _find_ends(known, i), _find_ends(rest, j)
        shared = [end for end in found.keys() & wanted.keys() if "." in end or 0 in (i, j)]
        pairs += [(known.pop(found[end]), rest.pop(wanted[end])) for end in shared]
    written = {other.aliases.get(shard.name, shard.name) for _, shard in pairs}
    is_adapter = all(_ADAPTER_FILE.fullmatch(file.path) for file in model.files)
    ties = find_config_ties({*ours, *rest}, hints.config)
    lacking = []
    for name, shard in rest.items():
        if ties.get(name) in ours:
            pairs.append((ours[ties[name]], shard))
        elif (
            dtypes.dtype(shard.dtype).is_float
            and 0 not in shard.shape
            and other.aliases.get(shard.name, shard.name) not in written
            and (not is_adapter or shard.name in in_adapter)
        ):
            lacking.append(shard)
    return pairs, lacking


def _names_in_files(model: StoredModel) -> tuple[dict[str, StoredShard], frozenset[str]]:
    """Return a model's shards by the names that PEFT saves them under, and the names of its adapter's shards."""
    names = find_adapter([shard.name for shard in model.shards], model.path)
    if names is None:
        return {shard.name: shard for shard in model.shards}, frozenset()
    saved = {**names.base, **names.saved}
    return {saved.get(shard.name, shard.name): shard for shard in model.shards}, frozenset(names.saved)


def _find_ends(names: dict[str, StoredShard], num_removed: int) -> dict[str, str]:
    """Return end of a name -> name, without so many first parts, where no other name ends so."""
    ends = [name.split(".", num_removed) for name in names]
    counts = Counter(parts[-1] for parts in ends)
    return {
        parts[-1]: name
        for name, parts in zip(names, ends, strict=True)
        if len(parts) > num_removed and counts[parts[-1]] == 1
    }


def read_source(
    asked: str,
    where: SourcePlace | None = None,
    *,
    base: BaseModel | None = None,
    layouts: LayoutMap | None = None,
    part: str | None = None,
    world_size: int | None = None,
    is_left_out: Callable[[str], bool] | None = None,
    for_layouts: bool = False,
    beside: tuple[tuple[CompanionFile, ...], tuple[tuple[str, str], ...]] | None = None,
    share: tuple[int, int] = (0, 1),
    module_names: Collection[str] = (),
    keeps_names: bool = False,
    faults: Faults = RAISING,
) -> FoundSource:
    """Read a source, only its metadata, with the best reader of those that recognize it.

    Args:
        asked: the path from the user.
        where: the place where the source was found, with its readers; None: find it.
        base: the model whose shapes are the whole ones, and whose config stands in for one beside the source.
        layouts: layouts for tensors without a recorded layout.
        part: keys of the part to read, joined by dots; None: the only one that may be the model.
        world_size: number of ranks that wrote the source, as the caller states it; None: not stated.
        is_left_out: returns whether the caller will leave a tensor out, so that it needs no layout.
        for_layouts: whether the caller wants the layouts that ranks recorded, and not their config.
        beside: the result of `companions_of`, where the caller has it; None: this function calls it.
        share: this rank's share of the comparison with another source at the place, as in `read_best`.
        module_names: names of a live module that the source will fill; wrappers' parts of names that it has stay.
        keeps_names: whether names need not be those of config.json's class, as where a trainer will load them.
        faults: collects the faults of the source, whose lost pieces are then in the model.
    """
    where = find_source(asked) if where is None else where
    companions, notes = companions_of(asked, where) if beside is None else beside
    candidates = (*companions, *(base.companions if base is not None else ()))
    config_path = next((companion.path for companion in candidates if companion.name == "config.json"), None)
    config = None if config_path is None else read_config(config_path)
    if config is None and base is not None:
        config = base.config  # its file is no companion if its weights are decoded
    hints = Hints(
        layouts=layouts,
        shapes={name: shape for name, (_, shape) in base.tensors.items()} if base is not None else {},
        tied_to=lambda name: embedding_of(name, base.tensors if base is not None else (), config),
        is_left_out=is_left_out,
        needs_config=config is None and not for_layouts,
        needs_layouts=for_layouts,
        part=part,
        world_size=world_size,
        config=config,
        module_names=module_names,
        keeps_names=keeps_names,
        base_path=base.path if base is not None and base.tensors else None,
        prove_shapes=lambda shapes: prove_shapes(shapes, config),
        faults=faults,
    )
    model = read_best(where, hints, share)
    if world_size is not None and world_size != model.world_size:
        stated, has_fewer = option("world_size", world_size), (model.world_size or world_size) < world_size
        got = "a source that records no ranks" if model.world_size is None else plural(model.world_size, "rank")
        problem = f"{model.path} was not written by the number of ranks in {stated}"
        step = f"correct or omit {option('world_size')}"
        step = f"copy the files of the missing ranks into the folder, or {step}, then {AGAIN}" if has_fewer else step
        kind = IncompleteError if has_fewer else UsageError
        raise kind(problem, file=model.path, got=got, want=plural(world_size, "rank"), next_step=step)
    known = config if config is not None else model.config
    notes = (*notes, *where.notes, *note_zero_tails(model))
    return FoundSource(model, known, config_path, companions, notes, where.path)


def companions_of(asked: str, where: SourcePlace) -> tuple[tuple[CompanionFile, ...], tuple[tuple[str, str], ...]]:
    """Return the companions of the source at a place, and notes on unused ones."""
    # The states of a workspace contain a config; a config in a folder above does not replace it.
    is_workspace, own = where.reader.name == WORKSPACE.name, (where.path, os.path.join(where.path, "huggingface"))
    whole = None
    if where.reader.name == "safetensors":
        from xrank.readers.deltas import find_whole  # other sources have no versions

        whole = find_whole(where.path)
    folders = own if is_workspace else find_checkpoint_folders(asked, where.path) if whole is None else whole
    found, others = find_companions(folders)
    return found, tuple(("companion", text) for text in others)


def find_live_source(stored: StoredModel, own: OwnConfig, base: BaseModel | None) -> FoundSource:
    """Return the parts of a live model on all ranks as a source, under the model's own names."""
    config_path = next((c.path for c in base.companions if c.name == "config.json"), None) if base else None
    config = base.config if base is not None and config_path is not None else own.config
    stored = drop_states(stored)
    known = base.tensors if base is not None else ()
    plain = plain_names([*(shard.name for shard in stored.shards), *stored.absent], make_finder(known, config), known)
    stored = rename_tensors(stored, plain)
    stored = replace(stored, aliases=_choose_saved(stored.aliases, own.tied))
    unsaved = tuple(shard.name for shard in stored.shards if shard.name in own.unsaved)
    stored = replace(stored, shards=tuple(shard for shard in stored.shards if shard.name not in own.unsaved))
    _check_tensors(stored, base)
    return FoundSource(stored, config, config_path, own=own, plain_names=plain, unsaved=unsaved)


def _choose_saved(aliases: Mapping[str, str], tied: Sequence[str]) -> Mapping[str, str]:
    """Return aliases of the name that `save_pretrained` keeps for each tensor.

    It leaves out the names that match a pattern, in their order, as long as one name remains
    (transformers/modeling_utils.py: remove_tied_weights_from_state_dict).
    """
    names_of: dict[str, list[str]] = {}
    for alias, target in aliases.items():
        names_of.setdefault(target, [target]).append(alias)
    found: dict[str, str] = {}
    for target, names in names_of.items():
        left_out = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in tied)]
        kept = target if target not in left_out else next((n for n in names if n not in left_out), max(names))
        found |= {name: kept for name in names if name != kept}
    return found


def _check_tensors(stored: StoredModel, base: BaseModel | None) -> None:
    """Refuse tensors without a name, or of shape [0], as ZeRO-3 leaves them in a state dict."""
    known = base.tensors if base is not None else {}
    for shard in stored.shards:
        if not shard.name:
            raise UsageError("a tensor has the name ''", got="''", want="a name", next_step="give it a name")
        like = known.get(shard.name)
        if shard.shape == (0,) and dtypes.dtype(shard.dtype).is_float and (like is None or like[1] != (0,)):
            step = "make the call within deepspeed.zero.GatheredParameters(list(module.parameters())), or save a "
            step += "checkpoint and gather that: xrank gather; if there are no values, omit the tensor"
            problem = f"{shard.name} has shape [0], a placeholder of DeepSpeed's ZeRO-3"
            want = "values; or a base model that has it so"
            raise UsageError(problem, tensor=shard.name, got="shape [0]", want=want, next_step=step)


def open_base_model(name: str | os.PathLike[str]) -> BaseModel:
    """Open the base model in a folder, or in the local Hugging Face cache where `name` is an ID."""
    from xrank.readers.hugging_face.folder import HfFolderReader, read_headers

    text = places.enter(name)
    if places.is_file(text):
        step = f"give {option('base_model')} the folder that holds it: {os.path.dirname(text) or os.curdir}"
        want = "a model's folder, as from_pretrained takes it"
        raise UsageError(f"{text} is a file, not a base model", file=text, got="a file", want=want, next_step=step)
    path = text if places.is_folder(text) else find_hub_snapshot(text, hub_cache(environ()))
    config_path = os.path.join(path, "config.json")
    tensors = {}
    if HfFolderReader().recognize(path) is None:
        found = (tensor for header in read_headers(path) for tensor in header.tensors)
        tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in found if not is_extra_state(tensor.name)}
    config = read_config(config_path) if places.exists(config_path) else None
    tensors = {name: tensor for name, tensor in tensors.items() if name not in list_unsaved(config)}
    if not tensors and config is None:
        problem = f"{path} is not a base model: it contains neither safetensors weights nor a config.json"
        got = list_text(sorted(places.list_names(path)), empty="an empty folder")
        step = f"give {option('base_model')} the folder of the model itself"
        raise UsageError(problem, file=path, got=got, next_step=step)
    return BaseModel(path, list_base_companions(path), config, tensors)


def complete_adapter(
    source: StoredModel, base: BaseModel, given: str | os.PathLike[str] | None, place: str
) -> StoredModel:
    """Return a source that holds an adapter alone with the base model's tensors beside it; return others unchanged.

    The base model gets its names in memory, which those of adapters follow. Tensors that the adapter's folder holds
    whole, as PEFT saves `modules_to_save`, stand in place of the base model's.
    """
    from xrank.readers.hugging_face.folder import HfFolderReader

    names = find_adapter([shard.name for shard in source.shards], source.path, base.tensors)
    if names is None or not names.is_alone or not base.tensors:
        return source
    config = find_config(given, place, names, {shard.name: shard.shape for shard in source.shards})
    stored = HfFolderReader().read(base.path, Hints())
    stored = stored if base.decode is None else base.decode(stored)
    adapted = {
        name
        for pair in names.pairs
        for name in (config.parameters_of(pair.module) if pair.depth else ()) or [f"{pair.module}.weight"]
    }
    stacked = {name for pair in names.pairs for name in config.parameters_of(pair.module)}
    converted = convert_to_module(stored, base.config, dict.fromkeys(adapted | stacked))
    own = set(names.base.values())
    check_ties(adapted, own.union(names.trained), {}, base.config)
    inner = stored if converted is None else converted.model
    kept = replace(inner, shards=tuple(shard for shard in inner.shards if shard.name not in own))
    whole = merge_models(replace(source, absent=()), kept, PREFIX)
    replaced = sorted(own.intersection(shard.name for shard in inner.shards))
    notes = [("adapter-trained", f"{list_text(replaced)}: copied from {source.path}, not from the base model")]
    return replace(whole, nbytes=source.nbytes + stored.nbytes, notes=(*source.notes, *(notes if replaced else ())))
