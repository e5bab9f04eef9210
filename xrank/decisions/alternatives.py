"""Other sources beside the chosen one, such as a trainer's sharded state beside the model it saved whole."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod

from xrank import dtypes
from xrank.decisions.recipe_choice import choose_recipe, follow_recipe
from xrank.decisions.roundings import check_roundings, compute_digests
from xrank.errors import UsageError, XrankError
from xrank.faces import option
from xrank.plan.output import OutputTensor
from xrank.plan.source import StoredModel, StoredShard
from xrank.readers.base import Hints, Reader
from xrank.readers.discovery import SourcePlace
from xrank.words import list_text, plural

__all__ = ["read_best"]

_NUM_SAMPLED = 4
"""Tensors that are compared, of each kind: matrices, and vectors or scalars."""
_MAX_SAMPLED_NBYTES = 64 << 20
_ADAPTER_NAME = re.compile(r"\.(lora_[AB])\.\w+\.weight$")


def read_best(where: SourcePlace, hints: Hints) -> StoredModel:
    """Read the source with the first reader, or with the next if its files cannot be used as a model.

    ZeRO-3 leaves a model folder of empty tensors if a trainer saves it without gathering; the state beside it is whole.

    Args:
        where: the place of the source, with all readers that recognise it.
        hints: facts that the caller knows.

    Raises:
        UsageError: no reader can use it, or two of them hold different values; other errors are those of `Reader.read`.
    """
    place, chosen, others = where.path, where.reader, where.others
    try:
        model = _read(chosen, place, hints)
        if others and not model.shards:
            raise _emptiness(place, chosen)
    except UsageError:
        found = None
        if others:
            with suppress(XrankError):
                found = _read(others[0][1], others[0][0], hints)
        if found is None or not found.shards:
            raise
        model, chosen, others = found, others[0][1], ((place, chosen), *others[1:])
    # A part that the caller chose by name need not equal another model beside it.
    compared = _compare(model, chosen, others, hints) if hints.part is None else ()
    return replace(model, notes=(*model.notes, *compared))


def _read(reader: Reader, place: str, hints: Hints) -> StoredModel:
    """Return the model of a reader.

    Raises:
        UsageError: the caller chose a part, and the reader knows none.
    """
    model = check_roundings(reader.read(place, hints))
    if hints.part != model.part:
        raise UsageError(
            f"{option('part')} was given, but {place} contains one model that is not in parts",
            file=place,
            got=option("part", hints.part),
            want="a checkpoint of several parts, such as model and ema",
            next_step=f"leave {option('part')} out",
        )
    return model


def _emptiness(place: str, reader: Reader) -> UsageError:
    return UsageError(
        f"{place}: its {reader.name} files hold no tensor",
        file=place,
        got="0 tensors",
        want="a model or an adapter",
        next_step="name the checkpoint of another step; if all are empty, the trainer could not save the model, as "
        "FSDP1 an adapter: train with FSDP2, or save with xrank.export_model",
    )


def _compare(
    model: StoredModel, chosen: Reader, others: Sequence[tuple[str, Reader]], hints: Hints
) -> Iterator[tuple[str, str]]:
    """Yield a note for each other source of the model, which names how it differs.

    Values of a few tensors are compared, in the narrower of both dtypes: a trainer's model and the fp32 masters that
    it was cast from agree. A model that training started from and the state after training do not.

    Raises:
        UsageError: values differ, so that the user must choose.
    """
    for place, reader in others:
        where = "" if place == model.path else f" in {place}"
        begin = f"{reader.name} files{where} lie beside the {chosen.name} files that are read"
        try:
            other = check_roundings(reader.read(place, hints))
            if not other.shards:
                raise _emptiness(place, reader)
            other = _rename(other, hints)
            sampled = _sample(model, other)
            digests = [compute_digests(each, outputs) for each, outputs in zip((model, other), sampled, strict=True)]
        except XrankError as error:
            yield "also-here", f"{begin}, and cannot be read: {error.message}"
            continue
        unequal = [a for a, one, two in zip(sampled[0], *digests, strict=True) if one != two]
        if unequal or not sampled[0]:
            raise UsageError(
                f"{place} can be read in several ways, which give different models"
                if place == model.path
                else f"{model.path} and {place} hold different models",
                file=place,
                tensor=unequal[0].name if unequal else None,
                got=f"{chosen.name} files and {reader.name} files "
                + (f"with different values of {unequal[0].name}" if unequal else "without a tensor in common"),
                want="equal values, as where a trainer saves one model in two forms",
                next_step=f"choose one: {option('format', chosen.name)} or {option('format', reader.name)}",
            )
        agreed = plural(len(sampled[0]), "compared tensor")
        yield "also-here", f"{begin}: {_kinds(other)} there, {_kinds(model)} here; {agreed} agree"


def _rename(model: StoredModel, hints: Hints) -> StoredModel:
    """Return a model under Hugging Face's names where it has Megatron's, to compare it with one that has them."""
    if not model.format.startswith("megatron"):
        return model
    found = choose_recipe(model, hints.config, None)
    return model if found is None else follow_recipe(model, found, hints.config)


def _kinds(model: StoredModel) -> str:
    """Return number and dtypes of a model's tensors as a text."""
    counts = Counter(shard.dtype for shard in model.shards)
    return f"{plural(len(model.shards), 'tensor')} ({list_text(sorted(counts), 3)})"


def _sample(model: StoredModel, other: StoredModel) -> tuple[list[OutputTensor], list[OutputTensor]]:
    """Return the smallest matrices and vectors that both have, from each, with the dtype to compare them in."""
    pairs = [pair for pair in _pair(model, other) if pair[0].shape == pair[1].shape and _can_compare(*pair)]
    pairs.sort(key=lambda pair: (prod(pair[0].shape), pair[0].name))
    matrices = [pair for pair in pairs if len(pair[0].shape) > 1]
    vectors = [pair for pair in pairs if len(pair[0].shape) < 2]
    ours: list[OutputTensor] = []
    theirs: list[OutputTensor] = []
    nbytes = 0
    for a, b in (*matrices[:_NUM_SAMPLED], *vectors[:_NUM_SAMPLED]):
        dtype = min(a.dtype, b.dtype, key=lambda name: dtypes.dtype(name).nbytes)
        output = OutputTensor(a.name, dtype, a.shape)
        nbytes += output.nbytes
        if ours and nbytes > _MAX_SAMPLED_NBYTES:
            break
        ours.append(output)
        theirs.append(replace(output, name=b.name))
    return ours, theirs


def _pair(model: StoredModel, other: StoredModel) -> list[tuple[StoredShard, StoredShard]]:
    """Return the tensors that have the same name in both; or, without one, the same end of a name.

    PEFT leaves its adapter's name out of names in files, and transformers saves models that contain others under other
    prefixes than they have in memory.
    """
    for num_removed in range(3):
        known = _names_without(other, num_removed)
        found = _names_without(model, num_removed)
        pairs = [(shard, known[name]) for name, shard in found.items() if name in known]
        if pairs:
            return pairs
    return []


def _names_without(model: StoredModel, num_removed: int) -> dict[str, StoredShard]:
    """Return the shards by their names without so many first parts, if no other shard has the same."""
    names = [_ADAPTER_NAME.sub(r".\1.weight", shard.name).split(".", num_removed)[-1] for shard in model.shards]
    counts = Counter(names)
    return {name: shard for name, shard in zip(names, model.shards, strict=True) if counts[name] == 1}


def _can_compare(a: StoredShard, b: StoredShard) -> bool:
    """Return whether one dtype is the other, or one that the other is rounded to."""
    one, two = dtypes.dtype(a.dtype), dtypes.dtype(b.dtype)
    return one == two or (one.is_float and two.is_float and one.nbytes != two.nbytes)
