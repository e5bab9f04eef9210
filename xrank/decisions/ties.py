"""The names that share one tensor: as a layout file, the source, the model's class or its config declare them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xrank.errors import LayoutError
from xrank.plan.source import StoredModel, StoredShard
from xrank.recipes.tied_weights import declares_ties, find_class_ties, is_known_class, list_unsaved, never_ties
from xrank.words import list_text

if TYPE_CHECKING:
    from xrank.decisions.base_model import BaseModel


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

    Args:
        source: the model under transformers' names.
        config: the model's config.json.
        fixed: names that stay.
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

    Args:
        shards: the tensors to write, of the model alone.
        config: the config.json that the output will have.
        aliases: tied name -> name it is written under, from a layout file.
        recorded: the same as the source records it.

    Raises:
        LayoutError: the layout file ties a name to one that no rank holds.
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
