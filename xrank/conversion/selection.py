"""Which tensors the output has, of which element type, and which of the source's are the same one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrank import dtypes
from xrank.conversion.base_model import BaseModel
from xrank.conversion.options import GatherOptions
from xrank.errors import IncompleteError, LayoutError, UnsafeError, UsageError
from xrank.plan.output import OutputTensor
from xrank.plan.source import StoredModel, StoredShard

__all__ = ["Selection", "select"]

_TARGETS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_HEAD = re.compile(r"(?:.*\.)?lm_head\.weight")
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")


@dataclass(frozen=True, slots=True)
class Selection:
    """What becomes of the source's tensors."""

    outputs: tuple[OutputTensor, ...]
    tied: Mapping[str, tuple[str, ...]]
    """Written name -> names that must hold the same and are not written."""
    excluded: tuple[str, ...]
    cast: Mapping[str, str]
    """Name -> ``"F32 -> BF16"``."""
    notes: tuple[tuple[str, str], ...]


def select(
    source: StoredModel,
    options: GatherOptions,
    base: BaseModel | None,
    config: Mapping[str, Any] | None,
    aliases: Mapping[str, str],
    apart: Collection[str] = (),
) -> Selection:
    """Return what of a source is written and how.

    Args:
        source: what the reader found.
        options: include, exclude and dtype choices.
        base: the base model, if any.
        config: the config.json that the output will have, if any; says whether the head is tied.
        aliases: tied name -> name it is written under, from a layout file.
        apart: names that are no part of the model, such as an adapter's: neither tied, nor as the base model has them.

    Raises:
        IncompleteError: a tensor that the source counts is on no rank, and is not left out.
        UsageError: a pattern matches nothing, a dtype choice can't be followed, or nothing is left.
        UnsafeError: a tensor's name holds control characters or a path's way up.
    """
    for shard in source.shards:
        _check_name(shard.name, source.path)
    kept, excluded = _filtered(source, options, base)
    tied, tie_notes = _ties([s for s in kept if s.name not in apart], config, aliases, source.aliases)
    dropped = {name for names in tied.values() for name in names}
    outputs, cast, untouched = [], {}, []
    for shard in kept:
        if shard.name in dropped:
            continue
        if shard.name == "__metadata__":
            raise UsageError(
                f"{shard.name}: safetensors keeps this name for itself",
                tensor=shard.name,
                file=source.path,
                next_step="leave it out with --exclude, or let the ranks write it under another name",
            )
        is_apart = options.dtype == "base" and shard.name in apart
        dtype = shard.dtype if is_apart else _target_dtype(shard, options, base)
        if dtype != shard.dtype:
            cast[shard.name] = f"{shard.dtype} -> {dtype}"
        elif options.dtype in _TARGETS and shard.dtype.startswith("F8"):
            untouched.append(shard.name)
        outputs.append(OutputTensor(shard.name, dtype, shard.shape))
    if not outputs:
        raise UsageError("no tensor is left to write", next_step="change --include or --exclude")
    notes = list(tie_notes)
    if untouched:
        notes.append(("not-cast", f"{len(untouched)} float8 tensors are quantised payloads and stay as they are"))
    return Selection(tuple(outputs), tied, tuple(excluded), cast, tuple(notes))


def _check_name(name: str, path: str) -> None:
    if any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in name) or (
        ".." in re.split(r"[/\\]", name)
    ):
        raise UnsafeError(
            f"a tensor's name is not one: {name!r}",
            tensor=name,
            file=path,
            got="control characters or a way up to another folder",
            want="printable text",
            next_step="find out who wrote this state; no model has such a name",
        )


def _filtered(
    source: StoredModel, options: GatherOptions, base: BaseModel | None
) -> tuple[list[StoredShard], list[str]]:
    """Return the tensors to write and the names left out, also those that the base model alone has."""
    held = [shard.name for shard in source.shards]
    names = list(dict.fromkeys([*held, *source.absent, *(base.tensors if base else ())]))
    for option, patterns in (
        ("--include", options.include),
        ("--exclude", options.exclude),
        ("--keep-fp32", options.keep_fp32),
    ):
        for pattern in patterns:
            if not any(re.fullmatch(pattern, name) for name in names):
                raise UsageError(
                    f"{option} {pattern!r} matches no tensor",
                    got=pattern,
                    want=f"a regular expression for whole names, such as {names[0] if names else 'a.weight'!r}",
                    next_step="xrank inspect --tensors lists the names",
                )
    left_out = {
        name
        for name in names
        if (options.include and not _matches(options.include, name)) or _matches(options.exclude, name)
    }
    missing = [name for name in source.absent if name not in left_out]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise IncompleteError(
            f"{missing[0]}: no rank holds it, and its layout's name counts it",
            tensor=missing[0],
            file=source.path,
            got=f"nothing of {', '.join(missing[:4])}{more}",
            want="a part on some rank",
            next_step="let the ranks write it, correct the name's dims, or leave it out with --exclude",
        )
    kept = [shard for shard in source.shards if shard.name not in left_out]
    return kept, [name for name in names if name in left_out]


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _ties(
    shards: Sequence[StoredShard],
    config: Mapping[str, Any] | None,
    aliases: Mapping[str, str],
    recorded: Mapping[str, str],
) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, str]]]:
    """Return the tied names: those of the layout file and the source, and the head that config.json declares tied."""
    names = {shard.name for shard in shards}
    tied: dict[str, list[str]] = {}
    for name, target in aliases.items():
        if name in names and target not in names:
            raise LayoutError(
                f"the layout file ties {name} to {target}, which no rank holds",
                tensor=name,
                got=f"[alias] {name} = {target}",
                next_step="correct the [alias] table of the layout file",
            )
        if name in names:
            tied.setdefault(target, []).append(name)
    for name, target in recorded.items():
        if name in names and target in names and name not in aliases and target not in aliases:
            tied.setdefault(target, []).append(name)
    notes: list[tuple[str, str]] = []
    done = {*aliases, *recorded, *recorded.values()}
    heads = [name for name in names if _HEAD.fullmatch(name) and name not in done]
    if heads and _says_tied(config):
        embeddings = [name for name in names if _EMBEDDING.fullmatch(name) and name not in {*aliases, *recorded}]
        if len(heads) == 1 and len(embeddings) == 1:
            tied.setdefault(embeddings[0], []).append(heads[0])
        else:
            notes.append(
                (
                    "tie-unclear",
                    f"config.json ties the head, but {len(embeddings)} tensors could be its embedding; all are written",
                )
            )
    return {target: tuple(others) for target, others in tied.items()}, notes


def _says_tied(config: Mapping[str, Any] | None) -> bool:
    if config is None:
        return False
    text = config.get("text_config")
    return config.get("tie_word_embeddings") is True or (
        isinstance(text, Mapping) and text.get("tie_word_embeddings") is True
    )


def _target_dtype(shard: StoredShard, options: GatherOptions, base: BaseModel | None) -> str:
    if options.dtype == "keep" or not dtypes.dtype(shard.dtype).is_float or _matches(options.keep_fp32, shard.name):
        return shard.dtype
    if options.dtype in _TARGETS:
        return _TARGETS[options.dtype]
    if base is None or shard.name not in base.tensors:
        raise UsageError(
            f"--dtype base: the base model does not say how {shard.name} is stored",
            tensor=shard.name,
            got="no base model with weights" if base is None or not base.tensors else f"no such tensor in {base.path}",
            next_step="give --base-model a folder with weights, or choose a dtype",
        )
    stored = base.tensors[shard.name][0]
    if not dtypes.dtype(stored).is_float:
        raise UsageError(
            f"--dtype base: {shard.name} can't be cast to {stored}",
            tensor=shard.name,
            got=shard.dtype,
            want=stored,
            next_step="choose a dtype, or a base model that is not quantised",
        )
    return stored
