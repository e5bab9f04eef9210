"""Other sources beside the chosen one, such as a trainer's sharded state beside the model it saved whole."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from typing import TypeAlias

from xrank import dtypes
from xrank.decisions.adapter_names import find_adapter
from xrank.decisions.options import default_workers
from xrank.decisions.recipe_choice import choose_recipe, follow_recipe
from xrank.decisions.roundings import check_roundings, compute_digests
from xrank.decisions.saved_form import convert_to_files
from xrank.decisions.ties import find_config_ties
from xrank.errors import UsageError, XrankError, option
from xrank.plan.executor import Budget
from xrank.plan.output import OutputTensor
from xrank.plan.source import StoredModel, StoredShard
from xrank.readers.base import Hints, Reader
from xrank.readers.discovery import SourcePlace
from xrank.readers.own_readers import TORCH_SAVE
from xrank.readers.wrapper_names import remove_wrapper_names
from xrank.recipes.model_names import make_finder
from xrank.stores import places
from xrank.words import list_text, plural

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
    tensor that was frozen, so that only all of them show which of the two was taken.

    Args:
        where: the place of the source, with all readers that recognise it.
        hints: facts that the caller knows.
        share: position of this rank, and number of the ranks that compare together, each its share of the tensors.

    Raises:
        UsageError: no reader can use it, or two of them hold different values; other errors are those of `Reader.read`.
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
        notes.append(("also-here", f"{_beside(place, chosen, found, others[0][1])}, and cannot be read: {error}"))
        (_, chosen), others = others[0], others[1:]
    # A part that the caller chose by name need not equal another model beside it; layouts are not values.
    if hints.part is None and not hints.needs_layouts:
        notes += _compare(model, chosen, others, hints, share)
    return replace(model, notes=(*model.notes, *notes))


def _read(reader: Reader, place: str, hints: Hints) -> StoredModel:
    """Return the model of a reader.

    Raises:
        UsageError: the caller chose a part, and the reader knows none.
    """
    model = _read_bare(reader, place, hints)
    if hints.part != model.part:
        raise UsageError(
            f"{option('part')} was given, but {place} contains one model that is not in parts",
            file=place,
            got=option("part", hints.part),
            want="a checkpoint of several parts, such as model and ema",
            next_step=f"leave {option('part')} out",
        )
    return model


def _read_bare(reader: Reader, place: str, hints: Hints) -> StoredModel:
    """Return what a reader finds, without what wrapping modules added to it."""
    model = check_roundings(reader.read(place, hints))
    if model.format.startswith("megatron") or hints.needs_layouts or hints.keeps_names:
        return remove_wrapper_names(model)
    known = hints.shapes or hints.module_names
    config = model.config if hints.config is None else hints.config
    return remove_wrapper_names(model, make_finder(known, config, hints.is_left_out), known)


def _emptiness(place: str, reader: Reader) -> UsageError:
    return UsageError(
        f"{place}: its {reader.name} files hold no tensor",
        file=place,
        got="0 tensors",
        want="a model or an adapter",
        next_step="name the checkpoint of another step; if all are empty, the trainer could not save the model, as "
        "FSDP1 an adapter: train with FSDP2, or save with xrank.export_model",
    )


def _beside(place: str, reader: Reader, model: StoredModel, chosen: Reader) -> str:
    where = "" if place == model.path else f" in {place}"
    return f"{reader.name} files{where} lie beside the {chosen.name} files that are read"


def _compare(
    model: StoredModel, chosen: Reader, others: Sequence[tuple[str, Reader]], hints: Hints, share: tuple[int, int]
) -> Iterator[tuple[str, str]]:
    """Yield a note for each other source of the model, which names how it differs.

    Values are compared in the narrower of both dtypes: a trainer's model and the fp32 masters that it was cast from
    agree. A file of ``torch.save`` may hold anything; what has few tensors in common with the model is another thing.

    Raises:
        UsageError: a tensor differs, the other source holds one more, or it cannot be read; so the user must choose.
    """
    seen = {file.path for file in model.files}
    for place, reader in others:
        may_be_data = reader.name == TORCH_SAVE.name
        begin = _beside(place, reader, model, chosen)
        try:
            other = _read_bare(reader, place, hints)
            if seen.issuperset(file.path for file in other.files):
                continue  # the same files by another reader
            named = _rename(other, model, hints)
            pairs, lacking = _pair(model, named, hints)
        except XrankError as error:
            if not may_be_data:
                raise _doubt_error(model, chosen, place, reader, error) from error
            yield "also-here", f"{begin}, and cannot be read: {error}"
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
            raise _choice_error(model, chosen, place, reader, *difference)
        agreed = plural(len(pairs), "compared tensor")
        yield "also-here", f"{begin}: {_kinds(other)} there, {_kinds(model)} here; {agreed} agree"


def _choice_error(
    model: StoredModel, chosen: Reader, place: str, reader: Reader, difference: str, tensor: str | None = None
) -> UsageError:
    is_file = reader.name == TORCH_SAVE.name and places.is_file(place)
    other = f"give the path {place}" if is_file else option("format", reader.name)
    return UsageError(
        f"{place} can be read in several ways, which give different models"
        if place == model.path
        else f"{model.path} and {place} hold different models",
        file=place,
        tensor=tensor,
        got=f"{chosen.name} files and {reader.name} files{difference}",
        want="equal values, as where a trainer saves one model in two forms",
        next_step=f"choose one: {option('format', chosen.name)} or {other}",
    )


def _doubt_error(model: StoredModel, chosen: Reader, place: str, reader: Reader, error: XrankError) -> UsageError:
    """Return the error for another source that cannot be read, and may be the trained model all the same."""
    return UsageError(
        f"{place}: its {reader.name} files cannot be read, so it is unknown whether the {chosen.name} files of "
        f"{model.path} are the same model",
        file=place,
        tensor=error.tensor,
        got=error.message,
        want="equal values, as where a trainer saves one model in two forms",
        next_step=f"if the {chosen.name} files are the trained model, choose them with {option('format', chosen.name)}"
        + (f"; if not, {error.next_step}" if error.next_step else ""),
    )


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
    """Return number and dtypes of a model's tensors as a text."""
    counts = Counter(shard.dtype for shard in model.shards)
    return f"{plural(len(model.shards), 'tensor')} ({list_text(sorted(counts), 3)})"


def _find_difference(
    model: StoredModel, other: StoredModel, pairs: _Pairs, lacking: Sequence[StoredShard], share: tuple[int, int]
) -> tuple[str, str | None] | None:
    """Return how another source differs from the model, in words, and the tensor; None if all that it holds agrees."""
    if not pairs:
        return " without a tensor in common", None
    for a, b in pairs:
        if a.shape != b.shape or not _can_compare(a, b):
            return f": {a.name} is {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}", a.name
    if lacking:
        return f", which alone hold {list_text([shard.name for shard in lacking], 3)}", lacking[0].name
    position, number = share
    rest = sorted(pairs, key=lambda pair: (prod(pair[0].shape), pair[0].name))[position::number]
    room, budget = _FIRST_NBYTES, Budget.from_memory(_MEMORY_NBYTES, default_workers())
    while rest:
        sampled: _Pairs = []
        nbytes = 0
        while rest and (not sampled or nbytes < room):
            sampled.append(rest.pop(0))
            nbytes += prod(sampled[-1][0].shape) * dtypes.dtype(sampled[-1][0].dtype).nbytes
        narrow = [min(a.dtype, b.dtype, key=lambda name: dtypes.dtype(name).nbytes) for a, b in sampled]
        digests = [
            compute_digests(
                each, [OutputTensor(s.name, t, s.shape) for s, t in zip(shards, narrow, strict=True)], budget
            )
            for each, shards in zip((model, other), zip(*sampled, strict=True), strict=True)
        ]
        for (a, _), one, two in zip(sampled, *digests, strict=True):
            if one != two:
                return f" with different values of {a.name}", a.name
        room *= 2
    return None


def _pair(model: StoredModel, other: StoredModel, hints: Hints) -> tuple[_Pairs, list[StoredShard]]:
    """Return the tensors that are the same in both by their names, and those with weights that the model lacks.

    PEFT leaves its adapter's name out of names in files, and transformers saves models that contain others under other
    prefixes than they have in memory. Without an equal name, the only tensor with the same end of a name counts.

    Raises:
        ContradictionError, UsageError: from `find_adapter`.
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


def _can_compare(a: StoredShard, b: StoredShard) -> bool:
    """Return whether one dtype is the other, or one that the other is rounded to."""
    one, two = dtypes.dtype(a.dtype), dtypes.dtype(b.dtype)
    return one == two or (one.is_float and two.is_float and one.nbytes != two.nbytes)
