"""The names that share one tensor: as a layout file, the source, the model's class or its config declare them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from xrank.errors import LayoutError
from xrank.plan.source import StoredModel, StoredShard
from xrank.recipes.found_source import BaseModel
from xrank.words import list_text

_PATH = Path(__file__).with_name("tied_weights.json")
_KEY, _TEXT = "tie_word_embeddings", "text_config"
_STATES = (None, False, True)
_UNSAVED: Mapping[str, tuple[str, ...]] = {
    "MarianMTModel": ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
}
"""Tensors that `save_pretrained` leaves out and `from_pretrained` computes (``_keys_to_ignore_on_save``), by class."""
_UNSHARED: Mapping[str, Mapping[str, str]] = {
    "MarianModel": {},
    "MarianMTModel": {"lm_head.weight": "model.decoder.embed_tokens.weight"},
}
"""Ties of classes that the config's ``share_encoder_decoder_embeddings`` takes the shared embedding from."""


@cache
def _read_table() -> tuple[dict[str, dict[str, Any]], dict[str, bool]]:
    """Return the kinds of classes by class name, and by model type whether a config without the key declares ties."""
    content = json.loads(_PATH.read_text())
    classes = {name: kind for kind in content["classes"] for name in kind["names"]}
    return classes, {**dict.fromkeys(content["tied"], True), **dict.fromkeys(content["untied"], False)}


def is_known_class(config: Mapping[str, Any] | None) -> bool:
    """Return whether the table has the class in config.json's ``architectures``."""
    return _kind_of(config) is not None


def list_unsaved(config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names that `save_pretrained` leaves out for the class in config.json's ``architectures``."""
    names = (config or {}).get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return _UNSAVED.get(name, ()) if isinstance(name, str) else ()


def never_ties(config: Mapping[str, Any] | None) -> bool:
    """Return whether config.json's class ties nothing, whatever the config declares (BigBirdPegasusForCausalLM)."""
    kind = _kind_of(config)
    return kind is not None and not any(kind["ties"].values())


def _kind_of(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    names = (config or {}).get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return _read_table()[0].get(name) if isinstance(name, str) else None


def declares_ties(config: Mapping[str, Any] | None) -> bool | None:
    """Return whether config.json ties embeddings and heads as transformers reads it; None where that is not known.

    Classes differ in the default of the key, and in whether the text model's config counts too.
    """
    if config is None:
        return None
    text = config.get(_TEXT)
    inner = text if isinstance(text, Mapping) else {}
    flags = [one.get(_KEY) if isinstance(one.get(_KEY), bool) else None for one in (config, inner)]
    kind = _kind_of(config)
    if kind is not None:
        return bool(kind["declared"][3 * _STATES.index(flags[0]) + _STATES.index(flags[1])] == "T")
    if any(flag is not None for flag in flags):
        return True in flags
    return _read_table()[1].get(str(config.get("model_type")))


def find_class_ties(names: Collection[str], config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the ties that the model's class lists and its config declares: name -> name of the tensor that it is.

    At least one name of each tie is among `names`.
    """
    kind = _kind_of(config)
    if kind is None or config is None:
        return {}
    by_place = kind["ties"]
    if config.get("share_encoder_decoder_embeddings") is False:
        own = _UNSHARED.get(config["architectures"][0])
        by_place = by_place if own is None else {"": own}
    declared = [ties for place, ties in by_place.items() if _is_declared(config, place)]
    pairs = [pair for ties in declared for pair in ties.items() if not set(pair).isdisjoint(names)]
    # A model inside a model may tie what the outer one ties in turn.
    known = dict(pairs)
    return {tied: known.get(target, target) for tied, target in pairs}


def _is_declared(config: Mapping[str, Any], place: str) -> bool:
    """Return whether the config, or the config inside it at `place`, declares ties."""
    inner = config.get(place) if place else config
    return isinstance(inner, Mapping) and declares_ties(inner) is True


_HEAD = re.compile(r"(?:.*\.)?lm_head\.weight")
# The names that tie_word_embeddings concerns: heads and embeddings of all families, and the heads' second biases.
_OF_WORDS = re.compile(
    r"(?:.*\.)?(?:(?:lm_head|embed_out|proj_out|vocab_projector|embed_tokens|wte|word_embeddings|embed_in|shared"
    r"|tok_embeddings|(?:lm_head|predictions)\.decoder)\.weight|(?:lm_head|predictions)\.decoder\.bias)"
)
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")


def declare_ties(source: StoredModel, config: Mapping[str, Any] | None, fixed: Collection[str] = ()) -> StoredModel:
    """Return a source with the ties that the model's class lists among its aliases.

    A tensor that the source has only under a tied name gets the name under which `save_pretrained` writes it.
    """
    held = {shard.name for shard in source.shards}
    ties = find_class_ties(held, config)
    if not ties:
        return source
    renamed: dict[str, str] = {}
    for tied, target in ties.items():
        taken = {*held, *source.absent, *fixed, *renamed.values()}
        if tied in held and tied not in fixed and target not in taken and _has_siblings(target, held):
            renamed[tied] = target
    shards = tuple(replace(shard, name=renamed.get(shard.name, shard.name)) for shard in source.shards)
    held = {shard.name for shard in shards}
    aliases = {tied: target for tied, target in ties.items() if {tied, target} <= held}
    for name, target in source.aliases.items():
        first, second = renamed.get(name, ties.get(name, name)), renamed.get(target, ties.get(target, target))
        if first == second:
            continue
        # The class decides which of two names is written.
        alias, written = (second, first) if first in ties.values() else (first, second)
        aliases.setdefault(alias, written)
    return replace(source, shards=shards, aliases=aliases)


def is_head(name: str) -> bool:
    """Return whether a name is that of a language model's head."""
    return _HEAD.fullmatch(name) is not None


def leave_unsaved(source: StoredModel, config: Mapping[str, Any] | None) -> StoredModel:
    """Return a source without the tensors that `save_pretrained` leaves out for the model's class, with a note."""
    unsaved = [shard.name for shard in source.shards if shard.name in list_unsaved(config)]
    if not unsaved:
        return source
    shards = tuple(shard for shard in source.shards if shard.name not in unsaved)
    note = ("not-saved", f"save_pretrained leaves out: {list_text(unsaved, 4)}")
    return replace(source, shards=shards, notes=(*source.notes, note))


def _has_siblings(name: str, names: Collection[str]) -> bool:
    """Return whether other tensors lie in the module that contains this name's module.

    Otherwise the names are not those in memory: the Hub's VLMs have their text model at another place.
    """
    parent = ".".join(name.split(".")[:-2])
    return not parent or any(other.startswith(f"{parent}.") for other in names)


def select_recorded_ties(
    shards: Sequence[StoredShard],
    config: Mapping[str, Any] | None,
    base: BaseModel | None,
    recorded: Mapping[str, str],
) -> tuple[Mapping[str, str], list[tuple[str, str]]]:
    """Return the ties of the source, without those of heads and embeddings that config.json does not tie.

    Loading initialises untied tensors at random if they are missing. A tie stays if the base model lacks the tensor.
    """
    if declares_ties(config) is not False:
        return recorded, []
    names = {shard.name for shard in shards}
    of_words = {pair[1] for pair in recorded.items() if any(map(_OF_WORDS.fullmatch, pair))}
    untied = {
        name: target
        for name, target in recorded.items()
        if target in of_words and {name, target} <= names and (base is None or not base.tensors or name in base.tensors)
    }
    if not untied:
        return recorded, []
    name, target = next(iter(untied.items()))
    more = f", and {len(untied) - 1} more such" if len(untied) > 1 else ""
    text = f"{name} is one with {target} in the source{more}, and config.json does not tie them: all are written"
    return {name: other for name, other in recorded.items() if name not in untied}, [("untied", text)]


def find_ties(
    shards: Sequence[StoredShard],
    config: Mapping[str, Any] | None,
    aliases: Mapping[str, str],
    recorded: Mapping[str, str],
) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, str]]]:
    """Return the tied names of each written name, and notes; the layout file counts before the source and the config.

    `aliases` are a layout file's, `recorded` the source's: tied name -> name that is written for it.
    """
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
    # The layout file and the source decide about a name before config.json does.
    done = {*aliases, *recorded, *recorded.values()}
    for name, target in find_config_ties(names, config).items():
        if name in names and target in names and name not in done and target not in {*aliases, *recorded}:
            tied.setdefault(target, []).append(name)
    notes: list[tuple[str, str]] = []
    if not is_known_class(config) and declares_ties(config):
        written = {*tied, *(name for others in tied.values() for name in others)}
        if any(_HEAD.fullmatch(name) for name in names - written):
            count = sum(_EMBEDDING.fullmatch(name) is not None for name in names)
            text = f"config.json ties the head, but {count} tensors could be its embedding; all are written"
            notes.append(("tie-unclear", text))
    return {target: tuple(others) for target, others in tied.items()}, notes


def find_config_ties(names: Iterable[str], config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the ties that config.json declares among these names: name -> name of the tensor that it is.

    They are those that the model's class lists. Where it is not known, or gives tensors other names in memory, the only
    head is tied to the only embedding.
    """
    found = set(names)
    ties = {tied: target for tied, target in find_class_ties(found, config).items() if {tied, target} <= found}
    if ties or never_ties(config) or not declares_ties(config):
        return ties
    heads, embeddings = ([n for n in found if kind.fullmatch(n)] for kind in (_HEAD, _EMBEDDING))
    return {heads[0]: embeddings[0]} if len(heads) == 1 and len(embeddings) == 1 else {}


def embedding_of(name: str, names: Iterable[str], config: Mapping[str, Any] | None) -> str | None:
    """Return the name among these that config.json ties a name to, such as a head's embedding; None for others."""
    known = set(names)
    target = find_config_ties({name, *known}, config).get(name)
    return target if target in known else None
