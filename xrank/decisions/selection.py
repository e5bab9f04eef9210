"""The selection: the tensors of the output, their element types, and the names that share one tensor."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xrank import dtypes
from xrank.decisions.options import GatherOptions, matches
from xrank.decisions.quantized_tensors import find_scales
from xrank.decisions.ties import find_ties, select_recorded_ties
from xrank.errors import IncompleteError, UnsafeError, UsageError, either, needs, option
from xrank.plan.output import OutputTensor
from xrank.plan.source import StoredModel, StoredShard
from xrank.words import list_text

if TYPE_CHECKING:
    from xrank.decisions.base_model import BaseModel

_TARGETS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and halves of characters that no file can contain."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The source's tensors that are written, tied, cast or left out."""

    outputs: tuple[OutputTensor, ...]
    tied: Mapping[str, tuple[str, ...]]
    """Written name -> names that must hold the same values and are not written."""
    excluded: tuple[str, ...]
    cast: Mapping[str, str]
    """Name -> its cast, as in ``"F32 -> BF16"``."""
    notes: tuple[tuple[str, str], ...]


def select(
    source: StoredModel,
    options: GatherOptions,
    base: BaseModel | None,
    config: Mapping[str, Any] | None,
    aliases: Mapping[str, str],
    apart: Collection[str] = (),
) -> Selection:
    """Return the tensors of a source to write, with their dtypes, ties and casts.

    Args:
        source: the model that the reader found.
        options: include, exclude and dtype choices.
        base: the base model, if any.
        config: the config.json that the output will have, if any; it ties or unties the head.
        aliases: tied name -> name it is written under, from a layout file.
        apart: names outside the model, such as an adapter's; they get neither ties nor the base model's dtypes.

    Raises:
        IncompleteError: a tensor that the source lists is on no rank, and is not left out.
        UsageError: a pattern matches nothing, a dtype choice can't be followed, or nothing is left.
        UnsafeError: a tensor's name contains control characters or a path's way up.
    """
    for shard in source.shards:
        _check_name(shard.name, source.path)
    kept, excluded = _filter(source, options, base)
    recorded, tie_notes = select_recorded_ties(kept, config, base, source.aliases)
    tied, more_notes = find_ties([s for s in kept if s.name not in apart], config, aliases, recorded)
    tie_notes += more_notes
    dropped = {name for names in tied.values() for name in names}
    outputs, cast, untouched, uncast = [], {}, [], []
    scales = find_scales(kept) if options.dtype != "keep" else set()
    for shard in kept:
        if shard.name in dropped:
            continue
        if shard.name == "__metadata__":
            raise UsageError(
                f"{shard.name}: safetensors keeps this name for itself",
                tensor=shard.name,
                file=source.path,
                next_step=either(
                    "let the ranks write it under another name",
                    f"leave it out with {option('exclude')}",
                    needs("model_or_state_dict", "leave it out of what is given"),
                ),
            )
        is_left = shard.name in scales or (options.dtype == "base" and shard.name in apart)
        dtype = shard.dtype if is_left else _target_dtype(shard, options, base)
        if dtype != shard.dtype:
            cast[shard.name] = f"{shard.dtype} -> {dtype}"
        elif options.dtype in _TARGETS and shard.dtype.startswith("F8"):
            untouched.append(shard.name)
        elif _is_kept(shard, options):
            uncast.append(shard.name)
        outputs.append(OutputTensor(shard.name, dtype, shard.shape))
    if not outputs:
        raise UsageError(
            "no tensor is left to write",
            got=f"{len(source.shards)} tensors in the source",
            want="one or more to write",
            next_step=either(
                f"change {option('include')} or {option('exclude')}",
                needs("model_or_state_dict", "give a model with tensors"),
            ),
        )
    notes = list(tie_notes)
    if untouched:
        notes.append(("not-cast", f"{len(untouched)} float8 tensors are quantised payloads and stay as they are"))
    if scales:
        notes.append(("not-cast", f"scales of quantised payloads stay as they are: {list_text(sorted(scales), 3)}"))
    if uncast:
        told = list_text(uncast, 3)
        notes.append(("kept-fp32", f"not cast, as the list of what stays in fp32 says, the recipe's or yours: {told}"))
    return Selection(tuple(outputs), tied, tuple(excluded), cast, tuple(notes))


def _is_kept(shard: StoredShard, options: GatherOptions) -> bool:
    """Return whether `keep_fp32` protects a tensor that a cast would change."""
    target = _TARGETS.get(options.dtype)
    is_other = target is not None and target != shard.dtype and dtypes.dtype(shard.dtype).is_float
    return is_other and matches(options.keep_fp32, shard.name)


def keep_all(source: StoredModel) -> Selection:
    """Return a selection that keeps every tensor of a source as it is."""
    return Selection(tuple(OutputTensor(s.name, s.dtype, s.shape) for s in source.shards), {}, (), {}, ())


def _check_name(name: str, path: str) -> None:
    if _UNPRINTABLE.search(name) or (".." in name and ".." in re.split(r"[/\\]", name)):
        raise UnsafeError(
            f"a tensor's name is not one: {name!r}",
            tensor=name,
            file=path,
            got="control characters or a way up to another folder",
            want="printable text",
            next_step="find out who wrote this state; no model has such a name",
        )


def _filter(source: StoredModel, options: GatherOptions, base: BaseModel | None) -> tuple[list[StoredShard], list[str]]:
    """Return the tensors to write and the names left out, including those that only the base model has."""
    held = [shard.name for shard in source.shards]
    names = list(dict.fromkeys([*held, *source.absent, *(base.tensors if base else ())]))
    for name, patterns in (
        ("include", options.include),
        ("exclude", options.exclude),
        ("keep_fp32", options.keep_fp32),
    ):
        for pattern in patterns:
            if not any(re.fullmatch(pattern, one) for one in names):
                raise UsageError(
                    f"{option(name)}: {pattern!r} matches no tensor",
                    got=pattern,
                    want=f"a regular expression for whole names, such as {names[0] if names else 'a.weight'!r}",
                    next_step="xrank inspect --tensors lists the names",
                )
    left_out = {name for name in names if options.leaves_out(name)}
    missing = [name for name in source.absent if name not in left_out]
    if missing:
        raise IncompleteError(
            f"{missing[0]}: no rank holds it, and the source names it",
            tensor=missing[0],
            file=source.path,
            got=f"nothing of {list_text(missing, 4)}",
            want="a part on some rank",
            next_step=either(
                "let the ranks write it",
                "correct the name's dims",
                f"leave it out with {option('exclude')}",
            ),
        )
    kept = [shard for shard in source.shards if shard.name not in left_out]
    return kept, [name for name in names if name in left_out]


def _target_dtype(shard: StoredShard, options: GatherOptions, base: BaseModel | None) -> str:
    found = dtypes.dtype(shard.dtype)
    if options.dtype == "keep" or not found.is_float:
        return shard.dtype
    # keep_fp32 preserves precision, so a cast to fp32 still widens smaller floats.
    if matches(options.keep_fp32, shard.name) and not (options.dtype == "fp32" and found.nbytes < 4):
        return shard.dtype
    if options.dtype in _TARGETS:
        return _TARGETS[options.dtype]
    if base is None or shard.name not in base.tensors:
        raise UsageError(
            f"{option('dtype', 'base')}: the base model does not have {shard.name}, whose type is wanted",
            tensor=shard.name,
            got="no base model with weights" if base is None or not base.tensors else f"no such tensor in {base.path}",
            next_step=f"give {option('base_model')} a folder with weights, or choose another {option('dtype')}",
        )
    stored = base.tensors[shard.name][0]
    if not dtypes.dtype(stored).is_float:
        raise UsageError(
            f"{option('dtype', 'base')}: {shard.name} cannot be cast to {stored}",
            tensor=shard.name,
            got=shard.dtype,
            want=stored,
            next_step=f"choose another {option('dtype')}, or a base model that is not quantised",
        )
    return stored
