r"""Recipe files: a training framework's tensors on one side, Hugging Face's on the other, as data.

extends = "megatron-llama"              a shipped recipe to start from; later entries are added or replace its own
model_types = ["llama"]                 values of model_type in config.json that the recipe is for
framework = "Megatron-core"             the source's framework, for display
padded = ["v"]                          sizes whose rows may be followed by padding in the source; padding is cut
ignored = ['.*rotary_emb\.inv_freq']    patterns of names that are left out
dropped = ['.*\.moe\.expert_bias']      trained tensors that the model lacks a place for; a note names them
keep_fp32 = ['.*\.mlp\.gate\.weight']   patterns of target names that a cast to a smaller type skips
needed = ["attention.linear"]           groups that some layers of every model have
by_layer = ["f", "attention"]           sizes and flags that each layer has of its own (`xrank.recipes.layer_rules`)

[rename.sources]                        prefixes of the extended recipe's names, and those that replace them
"" = "language_model."
[rename.targets]
"model." = "model.language_model."

[config]                                sizes, flags and groups' layers from keys of config.json
L = "num_hidden_layers"
d = ["head_dim", "hidden_size / num_attention_heads"]     the first known term counts
tied = "tie_word_embeddings"
B = "vision_config.depth"               a key of a section
experts = "layers from first_k_dense_replace"             the layers of a group (`xrank.recipes.layer_choice`)

[args]                                  the same from the trainer's arguments
g = ["num_query_groups if group_query_attention", "num_attention_heads unless group_query_attention"]
tied = "not untie_embeddings_and_output_weights"
theta = "rotary_base"                   what both tables name must be equal, also if no tensor shows it

[must]                                  required values of the trainer's arguments; others mean another model
rotary_interleaved = false
normalization = ["RMSNorm", "TENorm"]   any of these
no_rope_freq = []                       absent or None
rotary_percent = "any"                  removes the extended recipe's requirement

[must_config]                           the same of config.json's keys
hidden_act = ["silu", "swish"]

[sizes]                                 sizes that are constant
half = 64

[tensors]                               source = target, or one target per part; false removes an inherited rule
"decoder.final_layernorm.weight [h]" = "model.norm.weight [h]"
"output_layer.weight [v, h]" = { to = "lm_head.weight [v, h]", unless = "tied" }
"decoder.layers.{L}.self_attention.linear_proj.bias [h]" = { to = "...", when = "attention_bias" }
"decoder.layers.{L}.self_attention.linear_qkv.weight [g <q: r d | k: d | v: d>, h]".to.q = "..."
"attn.c_attn.weight [g <q: d | k: d>, h]" = "... [h, <q: g d | k: g d>]"    one target with all parts of the source
"q_up.weight [a (s + t), l]" = "... [a (s + t), l]"                         a sum is one size

"decoder.layers.{L}.input_layernorm.weight [h]" = { to = "...", beside = "attention" }    backwards, only in such layers
"decoder.layers.{L}.self_attention.out_norm.weight [w]" = { to = "...", add = 1 }     values that differ by a number
"query.kernel [h, n, d]" = { to = "... [n d, h]", times = "sqrt(d)" }       or by the root of sizes

[repeat.mtp]                            the rules of these prefixes once more, for a stack of layers that some models
                                        have; their groups are mtp.GROUP; `repeat.mtp = false` undoes an inherited one
sources = { "decoder.layers.{L}." = "mtp.layers.{M}.transformer_layer." }
targets = { "model.layers.{L}." = "model.layers.{<_: L | mtp: M>}." }    M layers that count on from L
tensors = { "mtp.layers.{M}.norm.weight [h]" = "..." }                   rules of the stack's own
copies = { "embed.weight [v, h]" = "model.layers.{<_: L | mtp: M>}.embed.weight [v, h]" }    of another rule's source

[kept."model.visual."]                  tensors of the target that the source holds alike, under other prefixes
from = ["vision_model.", "visual."]
tensors = ["blocks.{B}.norm1.weight [c]"]
when = "vision"                         as in [tensors]; also unless, group, optional and beside

A source whose name has dims also matches a tensor with those dims in front of its own: Megatron-core's ``torch_dist``
stacks the layers so (megatron/core/transformer/transformer_block.py: sharded_state_dict).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any

from xrank.errors import LayoutError
from xrank.layout.binding import names_of_dim
from xrank.layout.tensor_name import TensorName
from xrank.recipes.recipe import Recipe, Rule, size_texts
from xrank.recipes.recipe_checks import check_names, check_patterns, check_required, check_sizes, find_useless
from xrank.recipes.recipe_tables import (
    CORRECT,
    LISTS,
    TABLES,
    check_texts,
    count_extended,
    find_place,
    misplaced,
    read_shipped,
    read_tables,
    read_text,
    repeat_rules,
)
from xrank.recipes.side import Side, parse_side, part_names
from xrank.words import clip, list_text


def read_recipe(path: str) -> Recipe:
    """Read a recipe file.

    Raises:
        UsageError: the file cannot be read.
        LayoutError: the file is not a recipe; the error names the place.
    """
    return _parse(path, read_text(path), path)


def list_shipped_recipes() -> tuple[str, ...]:
    """Return the sorted names of the recipes that come with xrank, without parsing them."""
    return tuple(read_shipped())


def read_shipped_text(name: str, *, is_merged: bool = False) -> str:
    """Return the text of the shipped recipe of that name.

    Args:
        name: the recipe's name.
        is_merged: whether to merge it with those that it extends, which loses the comments.
    """
    text = read_shipped()[name]
    if not is_merged:
        return text
    tables = repeat_rules(read_tables(text, f"{name}.toml"), f"{name}.toml")
    for key, useless in find_useless(load_shipped_recipe(name)):
        del tables[key][useless]
    top = [f"{key} = {_value_text(value)}\n" for key, value in tables.items() if key not in TABLES]
    for key in TABLES:
        if tables.get(key):
            rows = (f"{_key_text(own)} = {_value_text(value)}\n" for own, value in tables[key].items())
            top += [f"\n[{key}]\n", *rows]
    return "".join(top)


def _key_text(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _value_text(key)


def _value_text(value: Any) -> str:
    """Return a text, number, boolean, list or inline table as TOML; all but tables are written as in JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key_text(key)} = {_value_text(one)}" for key, one in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def load_shipped_recipes() -> tuple[Recipe, ...]:
    """Return all recipes that come with xrank, sorted by name."""
    return tuple(map(load_shipped_recipe, read_shipped()))


def load_recipes_for(names: Iterable[str]) -> tuple[Recipe, ...]:
    """Return the shipped recipes that may know any of these training names; the other files are not parsed."""
    words = {name.partition(".")[0] for name in names}
    # Hugging Face's own names have a head, too: it calls for a recipe only among names that are all the recipe's.
    return tuple(
        load_shipped_recipe(name)
        for name in read_shipped()
        if words & _first_words(name) - {"lm_head"} or words <= _first_words(name)
    )


def load_recipes_of(types: Collection[str]) -> tuple[Recipe, ...]:
    """Return the shipped recipes for any of these model types; the other files are not parsed."""
    return tuple(load_shipped_recipe(name) for name in read_shipped() if not find_model_types(name).isdisjoint(types))


@lru_cache(maxsize=256)
def find_model_types(name: str) -> frozenset[str]:
    """Return the model types of a shipped recipe, from its text, as `_first_words`."""
    found = frozenset[str]()
    for line in read_shipped()[name].splitlines():
        if line.startswith("extends = "):
            found = find_model_types(line.split('"')[1])
        if line.startswith("model_types = "):
            return frozenset(line.split('"')[1::2])
        if line.startswith("["):
            break
    return found


@lru_cache(maxsize=256)
def load_shipped_recipe(name: str) -> Recipe:
    """Return the shipped recipe of that name."""
    return _parse(name, read_shipped()[name], f"{name}.toml")


@lru_cache(maxsize=256)
def _first_words(name: str) -> frozenset[str]:
    """Return the first components of the source names of a shipped recipe and of those that it extends.

    They are searched in the text, because parsing all recipes takes longer than the rest of a small dry run: each
    source is the first quoted text of its line.
    """
    words, inherited, section = set[str](), frozenset[str](), ""
    for line in read_shipped()[name].splitlines():
        if line.startswith("["):
            section = line
        if line.startswith("extends = "):
            inherited = _first_words(line.split('"')[1])
        elif section == "[rename.sources]" and line.startswith('"" = "'):
            inherited = frozenset([line.split('"')[3].partition(".")[0]])
        elif section.startswith("[kept.") and line.startswith("from = "):
            words.update(text.partition(".")[0] for text in line.split('"')[1::2])
        elif section.startswith("[repeat.") and line.startswith("sources = "):
            words.update(text.partition(".")[0] for text in line.split('"')[3::4])
        elif found := _SOURCE.match(line) if section.startswith(("[tensors", "[repeat.")) else None:
            words.add(found[1])
    return inherited.union(words)


_SOURCE = re.compile(r"""\s*(?:\[tensors\.)?["']([^"'.{\[ ]+)""")


def _parse(name: str, text: str, file: str) -> Recipe:
    tables = repeat_rules(read_tables(text, file), file)
    lists = {key: check_texts(tables.get(key, []), (key,), file) for key in LISTS}
    check_patterns(lists, file)
    check_sizes(tables.get("sizes", {}), file)
    for key in ("must", "must_config"):
        check_required(key, tables.get(key, {}), file)
    framework = tables.get("framework", "")
    if not isinstance(framework, str):
        raise misplaced(file, ("framework",), framework, "a text")
    rules = tuple(
        rule for source, value in tables.get("tensors", {}).items() for rule in _parse_rules(source, value, file)
    )
    if not rules:
        raise misplaced(file, ("tensors",), None, "a table [tensors] with rules")
    if lists["by_layer"]:  # layers of different sizes cannot be stacked in one tensor
        rules = tuple(replace(rule, sources=rule.sources[:1]) for rule in rules)
    recipe = Recipe(
        name,
        framework,
        rules,
        lists["model_types"],
        lists["padded"],
        lists["ignored"],
        lists["keep_fp32"],
        config={key: check_texts(terms, ("config", key), file) for key, terms in tables.get("config", {}).items()},
        args={key: check_texts(terms, ("args", key), file) for key, terms in tables.get("args", {}).items()},
        sizes=tables.get("sizes", {}),
        needed=lists["needed"],
        must=_allowed(tables.get("must", {})),
        must_config=_allowed(tables.get("must_config", {})),
        dropped=lists["dropped"],
        by_layer=lists["by_layer"],
        depth=count_extended(text),
    )
    check_names(recipe, file)
    return recipe


# Recipes extend each other, so several share most sides.
_side = lru_cache(maxsize=1024)(parse_side)


def _parse_rules(source: str, value: Mapping[str, Any], file: str) -> Iterator[Rule]:
    """Yield the rule of a source, then those of its copies."""
    yield _parse_rule(source, value, file)
    own = {key: value[key] for key in ("add", "times") if key in value}
    for stack, text in value.get("copies", {}).items():
        yield replace(_parse_rule(source, {**own, "to": text, "optional": True, "within": stack}, file), is_copy=True)


def _parse_rule(source: str, value: Mapping[str, Any], file: str) -> Rule:
    keys = ("tensors", source)
    to, optional, add = value.get("to"), value.get("optional", False), value.get("add", 0)
    texts = to if isinstance(to, dict) else {"": to}
    names: dict[str, Any] = {key: value.get(key) for key in ("unless", "when", "group", "within")}
    for key, name in names.items():
        if name is not None and not isinstance(name, str):
            raise misplaced(file, (*keys, key), name, "a name")
    if not isinstance(optional, bool):
        raise misplaced(file, (*keys, "optional"), optional, "true or false")
    times = value.get("times")
    if type(add) is not int:
        raise misplaced(file, (*keys, "add"), add, "a whole number")
    try:
        side = _side(source)
        targets = {part: _side(text) for part, text in texts.items()}
    except LayoutError as error:
        error.about(f"{find_place(file, *keys)}: tensors.{clip(source, 120)!r}", file=file, next_step=CORRECT)
        raise
    if times is not None:
        sizes = size_texts(times) if isinstance(times, str) else ()
        known = {name for dim in side.all_dims for name in names_of_dim(dim)}
        if add or not sizes or not all(size.isdecimal() or size in known for size in sizes):
            what = "the root of a product of the source's sizes, such as sqrt(d), without add"
            raise misplaced(file, (*keys, "times"), times, what)
    parts = part_names(side)
    if isinstance(to, str) and parts:
        if sorted(part_names(targets[""])) != sorted(parts):
            raise misplaced(
                file, keys, to, f"one target for each of the parts {list_text(parts)}, or one with all of them"
            )
        targets = dict.fromkeys(parts, targets[""])
    beside = check_texts(value.get("beside", []), (*keys, "beside"), file)
    return Rule((side, *_stack_dims(side)), targets, **names, optional=optional, beside=beside, add=add, times=times)


def _allowed(table: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    return {key: tuple(value) if isinstance(value, list) else (value,) for key, value in table.items()}


def _stack_dims(side: Side) -> list[Side]:
    """Return the forms of a source with some dims of its name moved in front of the tensor's own dims.

    A dim leaves the name together with the dot before it, so it must be a whole component of the name.
    """
    texts, dims = side.name.texts, side.name.dims
    movable = [i for i in range(len(dims)) if texts[i].endswith(".") and texts[i + 1][:1] in ("", ".")]
    found = []
    for count in range(1, len(movable) + 1):
        for moved in combinations(movable, count):
            kept_texts, kept_dims = [texts[0]], []
            for i, dim in enumerate(dims):
                if i in moved:
                    kept_texts[-1] = kept_texts[-1].removesuffix(".") + texts[i + 1]
                else:
                    kept_dims.append(dim)
                    kept_texts.append(texts[i + 1])
            name = TensorName(tuple(kept_texts), tuple(kept_dims))
            found.append(Side(name, (*(dims[i] for i in moved), *side.dims)))
    return found


def find_rule(recipe: Recipe, number: int) -> str:
    """Return ``FILE, line N`` of a rule of a recipe."""
    rule = recipe.rules[number]
    place = find_place(recipe.name, "tensors", rule.line or str(rule.sources[0]))
    return f"{place}, which inherits it" if place == recipe.name else place
