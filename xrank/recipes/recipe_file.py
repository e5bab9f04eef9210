"""The tables of a recipe's file, merged into those of the recipe that it extends; and the terms of sizes in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import combinations
from operator import add, mul, sub
from typing import Any, Literal, TypeAlias

from msgspec import Raw, Struct
from msgspec.json import decode as json_decode
from msgspec.structs import replace

from xrank.errors import LayoutError, UsageError
from xrank.layout.layout_map import parse_toml
from xrank.layout.notation import MAX_SIZE, size_names_of
from xrank.layout.tensor_name import TensorName, compile_pattern
from xrank.recipes.recipe import Recipe, Rule, Side, parse_side, part_names, size_texts
from xrank.words import clip, list_text, nearest_text, size_text

_BEGINNING = "layers "
_VALUE = r"([A-Za-z_][\w.]*|[0-9]{1,18})"
_CONDITION = (
    rf"(?P<range>from|before) {_VALUE}|every {_VALUE}(?: from {_VALUE})?|(?P<list>in|not in) {_VALUE}|{_VALUE} = (\S+)"
)
_Kind = Literal["from", "before", "every", "in", "not in"]
_Get: TypeAlias = Callable[[str], Any]


class LayerChoice(Struct, frozen=True):
    """The layers of a group by one origin, config.json or the trainer's arguments.

    All conditions, (kind, numbers), must hold. For ``every`` the numbers are step and start.
    """

    text: str
    origin: str
    conditions: tuple[tuple[_Kind, tuple[int, ...]], ...]

    def __contains__(self, layer: int) -> bool:
        """Return whether the layer has blocks of the group."""
        return all(_HOLDS[kind](layer, numbers) for kind, numbers in self.conditions)


_HOLDS: Mapping[_Kind, Callable[[int, tuple[int, ...]], bool]] = {
    "from": lambda layer, numbers: layer >= numbers[0],
    "before": lambda layer, numbers: layer < numbers[0],
    "every": lambda layer, numbers: layer >= numbers[1] and (layer - numbers[1]) % numbers[0] == 0,
    "in": lambda layer, numbers: layer in numbers,
    "not in": lambda layer, numbers: layer not in numbers,
}


def is_layer_term(text: str) -> bool:
    """Return whether a term is well formed: ``layers``, then conditions."""
    return text.startswith(_BEGINNING) and all(
        re.fullmatch(_CONDITION, one) for one in text.removeprefix(_BEGINNING).split(" and ")
    )


def parse_layers(text: str, get: _Get, origin: str) -> LayerChoice | None:
    """Return the layers of a term; None if a key is absent or has a value of another kind.

    Example:
        >>> choice = parse_layers("layers every step and not in dense", {"step": 2, "dense": [3]}.get, "config.json")
        >>> [layer for layer in range(8) if layer in choice]
        [1, 5, 7]
    """
    found = [_parse_condition(one, get) for one in text.removeprefix(_BEGINNING).split(" and ")]
    conditions = tuple(condition for condition in found if condition is not None)
    return LayerChoice(text, origin, conditions) if len(conditions) == len(found) else None


def _parse_condition(text: str, get: _Get) -> tuple[_Kind, tuple[int, ...]] | None:
    found = re.fullmatch(_CONDITION, text)
    if found is None:
        return None
    _, bound, step, start, _, listed, key, entry = found.groups()
    if bound is not None:
        return _numbers("from" if found["range"] == "from" else "before", get, bound)
    if step is not None:
        every = _numbers("every", get, step, step if start is None else start)
        if every is None or every[1][0] < 1:
            return None
        return every if start is not None else ("every", (every[1][0], every[1][0] - 1))
    if listed is not None:
        layers = get(listed)
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            return None
        return ("in" if found["list"] == "in" else "not in"), tuple(layers)
    entries = get(key)
    if not isinstance(entries, list | str):
        return None
    return "in", tuple(i for i, value in enumerate(entries) if str(value) in entry.split("|"))


def _numbers(kind: _Kind, get: _Get, *texts: str) -> tuple[_Kind, tuple[int, ...]] | None:
    """Return a condition with the values of these numbers and keys; None if one of them is not an integer."""
    values = [int(text) if text.isdecimal() else get(text) for text in texts]
    return (kind, tuple(values)) if all(type(value) is int for value in values) else None


def evaluate(values: Mapping[str, Any], terms: Iterable[str]) -> object:
    """Return the value of the first known term; None if none is known."""
    return next((value for term in terms if (value := _term(values, term)) is not None), None)


def _term(values: Mapping[str, Any], term: str) -> object:
    """Evaluate a term; return None if a key is unknown or the condition does not hold.

    A term is a key, ``not KEY``, ``len KEY`` of a list or text, or ``A / B``, ``A // B`` without the remainder,
    ``A * B``, ``A + B`` or ``A - B``, where A may be such a term and B is a key or a number; the sign that is last
    counts last, but products come before sums.
    ``SECTION.KEY`` is a key of a section, ``KEY.0`` the first number of a list. A condition may
    follow: ``if KEY``, ``unless KEY``, ``if KEY = TEXT`` or ``unless KEY = TEXT``, where TEXT may be another key, which
    stands for its value. A condition on an absent key never holds. A number, ``true`` or ``false`` as a term is the
    default of a key that a complete config.json (one with a model_type) lacks. `xrank.recipes.sizes` has the
    terms of a group's layers.
    """
    if is_layer_term(term):
        return None
    counts_constants = "model_type" in values
    for word in (" if ", " unless "):
        term, found, condition = term.partition(word)
        if found:
            key, has_text, text = condition.partition(" = ")
            value = look_up(values, key)
            holds = value == look_up(values, text) or str(value) == text if has_text else value is True
            if value is None or holds != (word == " if "):
                return None
            # The condition's key is known, so a constant is no longer the default of an absent key.
            counts_constants = True
    if _NUMBER.fullmatch(term) or term in ("true", "false"):
        constant = int(term) if _NUMBER.fullmatch(term) else term == "true"
        return constant if counts_constants else None
    if term.startswith("not "):
        value = look_up(values, term.removeprefix("not "))
        return not value if isinstance(value, bool) else None
    if term.startswith("len "):
        value = look_up(values, term.removeprefix("len "))
        return len(value) if isinstance(value, list | str) else None
    for signs in (" [+-] ", " (?:[*/]|//) "):
        found_sign = re.fullmatch(f"(.+)({signs})(.+)", term)
        if found_sign is not None:
            left, sign, right = found_sign.groups()
            a, b = (int(one) if _NUMBER.fullmatch(one) else _term(values, one) for one in (left, right))
            return _calculate(a, sign.strip(), b)
    return look_up(values, term)


_SIGNS: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}


def _calculate(a: object, sign: str, b: object) -> int | None:
    if type(a) is not int or type(b) is not int:
        return None
    if sign in _SIGNS:
        return _SIGNS[sign](a, b)
    return a // b if b > 0 and (sign == "//" or a % b == 0) else None


_KEY = r"[A-Za-z_][\w.*-]*"
_NUMBER = re.compile("[0-9]{1,18}")
_MAX_OPERANDS = 32


def is_term(text: str) -> bool:
    """Return whether a text is a term, as `evaluate` reads it, or one of a group's layers.

    Example:
        >>> [is_term(text) for text in ("hidden_size / heads if use_heads", "layers from 3", "hidden_size /", "not 3")]
        [True, True, False, False]
    """
    if text.startswith(_BEGINNING):
        return is_layer_term(text)
    for word in (" if ", " unless "):
        text, found, condition = text.partition(word)
        if found and not re.fullmatch(_KEY, condition.partition(" = ")[0]):
            return False
    for word in ("not ", "len "):
        if text.startswith(word):
            return re.fullmatch(_KEY, text.removeprefix(word)) is not None
    operands = re.split(" (?:[-+*/]|//) ", text)
    # One after the other, each is evaluated by a call of its own.
    return len(operands) <= _MAX_OPERANDS and all(
        _NUMBER.fullmatch(one) or one.startswith("len ") or re.fullmatch(_KEY, one) for one in operands
    )


def look_up(values: Mapping[str, Any], key: str) -> object:
    """Return the value of a key, of the model or of its language model; None for an absent key."""
    inner = values.get("text_config", values.get("llm_config"))
    for section in (values, inner if isinstance(inner, Mapping) else {}):
        if key in section:
            return section[key]
        value: object = section if "." in key else None
        for step in key.split("."):  # a path through sections and lists may break off
            if isinstance(value, Mapping):
                value = value.get(step)
            elif isinstance(value, list | tuple) and _NUMBER.fullmatch(step) and int(step) < len(value):
                value = value[int(step)]
            else:
                value = None
        if value is not None:
            return value
    return None


TABLES = ("config", "args", "must", "must_config", "sizes", "tensors")
LISTS = ("model_types", "padded", "ignored", "dropped", "keep_fp32", "needed", "by_layer")
_TEXTS = ("framework", "extends")
_RENAMES = ("sources", "targets")
CONDITIONS = ("unless", "when", "group", "optional", "beside", "add", "times", "within")


CORRECT = "correct the recipe; the recipes that come with xrank are examples"

# Recipes extend each other, so several share most files.
_loads = lru_cache(maxsize=128)(parse_toml)


_FOLDER = os.path.dirname(__file__)


@lru_cache(maxsize=1)
def read_shipped() -> dict[str, str]:
    """Return name -> text of the recipes that come with xrank, sorted."""
    names = sorted(file.removesuffix(".toml") for file in os.listdir(_FOLDER) if file.endswith(".toml"))
    return {name: _read_text(os.path.join(_FOLDER, f"{name}.toml")) for name in names}


@lru_cache(maxsize=16)
def read_shipped_table(name: str, table: str) -> Any:
    """Return a table of a JSON file beside this module, which is generated from an installed transformers."""
    return json_decode(_split_shipped(name)[table])


@lru_cache(maxsize=8)
def _split_shipped(name: str) -> dict[str, Raw]:
    # To decode all tables of transformers.json takes longer than to plan a small checkpoint, which needs few of them.
    with open(os.path.join(_FOLDER, name), "rb") as file:
        return json_decode(file.read(), type=dict[str, Raw])


def _read_text(file: str, encoding: str = "utf-8") -> str:
    with open(file, encoding=encoding) as stream:
        return stream.read()


_MAX_NBYTES = 1 << 20


def read_text(path: str) -> str:
    """Return the text of a recipe's file."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_NBYTES + 1)
    except OSError as error:
        problem = f"the recipe {path} cannot be read: {error.strerror or error}"
        step = "give a readable recipe file, or the name of a recipe that comes with xrank"
        raise UsageError(problem, file=path, next_step=step) from error
    if len(content) > _MAX_NBYTES:
        got = f"more than {size_text(_MAX_NBYTES)}"
        raise LayoutError(f"the recipe {path} is too long", file=path, got=got, next_step="give a recipe file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise LayoutError(
            f"the recipe {path}, line {line} is not UTF-8",
            file=path,
            got=f"the byte {content[error.start]:#04x}",
            next_step="save the recipe as UTF-8",
        ) from error


def read_tables(text: str, file: str, via: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the content of a file, merged into the recipe that it extends."""
    try:
        tables = dict(_loads(text))
    except ValueError as error:
        message, _, at = str(error).partition(" (at ")
        found = re.match(r"(line \d+(?:, column \d+)?)", at)
        place = f", {found[1]}" if found else f", line {text.count(chr(10)) + 1}" if at else ""
        problem = f"the recipe {file}{place} is not TOML: {message}"
        raise LayoutError(problem, file=file, want="TOML", next_step=CORRECT) from error
    refuse_unknown(tables, (*TABLES, *LISTS, *_TEXTS, "rename", "kept", "repeat"), file)
    for key in (*TABLES, "rename", "kept", "repeat"):
        if not isinstance(tables.get(key, {}), dict):
            raise misplaced(file, (key,), tables[key], f"a table [{key}]")
    kept = tables.pop("kept", {})
    if kept:
        tables["tensors"] = {**_expand_kept(kept, file), **tables.get("tensors", {})}
    base, renames = tables.pop("extends", None), _check_renames(tables.pop("rename", {}), file)
    if base is None:
        if renames:
            raise misplaced(file, ("rename",), None, "extends = NAME, whose names it changes")
        return tables
    # A recipe that extends itself, even by way of others, would be read forever.
    if not isinstance(base, str) or base not in read_shipped() or base in via:
        near = nearest_text(str(base), read_shipped()) or "megatron-llama"
        want = f"the name of one recipe that comes with xrank, such as {near}"
        raise misplaced(file, ("extends",), base, want, "run: xrank recipe list")
    return _extend(_rename(read_tables(read_shipped()[base], f"{base}.toml", (*via, base)), renames), tables, file)


def repeat_rules(tables: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return merged tables with the rules of [repeat]: those of other prefixes once more, its own, and copies."""
    given = {source: _as_rule(source, value, file) for source, value in tables.get("tensors", {}).items()}
    rules = dict(given)
    for stack, block in tables.get("repeat", {}).items():
        keys = ("repeat", stack)
        if block is False:
            continue  # this recipe removes an inherited stack
        if not isinstance(block, dict) or not set(_RENAMES) <= block.keys():
            raise misplaced(file, keys, block, "a table with sources and targets")
        refuse_unknown(block, (*_RENAMES, "tensors", "copies"), file, keys)
        renames = _check_renames({side: block[side] for side in _RENAMES}, file, keys)
        texts = {key: block.get(key, {}) for key in ("tensors", "copies")}
        for key, table in texts.items():
            if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
                raise misplaced(file, (*keys, key), table, "a table of sources and targets")
        old = tuple(renames["sources"])
        chosen = {source: value for source, value in given.items() if source.startswith(old)}
        for source, value in _rename({"tensors": chosen}, renames)["tensors"].items():
            rule = {**value, "within": stack}
            if "group" in rule:
                rule["group"] = f"{stack}.{rule['group']}"
            if "beside" in rule:
                rule["beside"] = [
                    f"{stack}.{group}" for group in check_texts(rule["beside"], ("tensors", source), file)
                ]
            rules.setdefault(source, rule)
        rules |= {source: {"to": text, "within": stack} for source, text in texts["tensors"].items()}
        for source, text in texts["copies"].items():
            if source not in rules:
                raise misplaced(file, (*keys, "copies", source), source, "the source of a rule")
            rule = rules[source]
            rules[source] = {**rule, "copies": {**rule.get("copies", {}), stack: text}}
    return {**{key: value for key, value in tables.items() if key != "repeat"}, "tensors": rules}


def _as_rule(source: str, value: Any, file: str) -> dict[str, Any]:
    """Return the table of a rule, whose targets and copies have texts; a text alone is its target."""
    rule = value if isinstance(value, dict) else {"to": value}
    refuse_unknown(rule, ("to", "copies", *CONDITIONS), file, ("tensors", source))
    targets = rule.get("to")
    texts = targets if isinstance(targets, dict) else {"": targets}
    if not texts or not all(isinstance(text, str) for text in texts.values()):
        raise misplaced(file, ("tensors", source, "to"), targets, "a target's text, or one for each part")
    if not isinstance(rule.get("copies", {}), dict):
        wanted = "a target's text for each stack of layers"
        raise misplaced(file, ("tensors", source, "copies"), rule["copies"], wanted)
    return rule


def count_extended(text: str) -> int:
    """Return the number of recipes that a valid recipe extends, one after the other."""
    base = _loads(text).get("extends")
    return 0 if base is None else 1 + count_extended(read_shipped()[base])


def _expand_kept(kept: Mapping[str, Any], file: str) -> dict[str, dict[str, Any]]:
    """Return the rules of tensors that both sides have alike, except for their prefix."""
    rules: dict[str, dict[str, Any]] = {}
    for prefix, block in kept.items():
        keys = ("kept", prefix)
        if not isinstance(block, dict):
            raise misplaced(file, keys, block, "a table of from and tensors")
        refuse_unknown(block, ("from", "tensors", *CONDITIONS), file, keys)
        texts = {key: check_texts(block.get(key), (*keys, key), file) for key in ("from", "tensors")}
        conditions = {key: block[key] for key in CONDITIONS if key in block}
        for own in texts["from"]:
            rules.update({own + text: {"to": prefix + text, **conditions} for text in texts["tensors"]})
    return rules


def _check_renames(
    renames: Mapping[str, Any], file: str, keys: tuple[str, ...] = ("rename",)
) -> Mapping[str, Mapping[str, str]]:
    refuse_unknown(renames, _RENAMES, file, keys)
    for side, prefixes in renames.items():
        if not isinstance(prefixes, dict) or not all(isinstance(new, str) for new in prefixes.values()):
            raise misplaced(file, (*keys, side), prefixes, "a table of prefixes")
    return renames


def _rename(base: dict[str, Any], renames: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return the tables of a recipe with other prefixes of its names; the longest prefix that matches counts."""
    if not renames:
        return base
    sources, targets = (
        sorted(renames.get(side, {}).items(), key=lambda item: len(item[0]), reverse=True) for side in _RENAMES
    )

    def rename(text: str, prefixes: list[tuple[str, str]]) -> str:
        return next((new + text[len(old) :] for old, new in prefixes if text.startswith(old)), text)

    def rename_targets(value: Any) -> Any:
        if isinstance(value, str):
            return rename(value, targets)
        if "to" in value:
            return {**value, "to": rename_targets(value["to"])}
        return {part: rename(text, targets) for part, text in value.items()}

    rules = {rename(source, sources): rename_targets(value) for source, value in base["tensors"].items()}
    # A stack of repeated layers has prefixes of its own: a recipe that renames the others repeats them itself.
    return {**{key: table for key, table in base.items() if key != "repeat"}, "tensors": rules}


def _extend(base: dict[str, Any], own: dict[str, Any], file: str) -> dict[str, Any]:
    found = {**base, **own}
    for key in (*TABLES, "repeat"):
        # A replaced rule keeps its place in the base: rules are numbered by it, which orders the output's tensors.
        found[key] = {**base.get(key, {}), **own.get(key, {})}
    for key in ("must", "must_config"):
        found[key] = {name: value for name, value in found[key].items() if value != "any"}
    for source, value in own.get("tensors", {}).items():
        if value is False:
            if source not in base.get("tensors", {}):
                raise misplaced(file, ("tensors", source), False, "a rule, or a source of the extended recipe")
            del found["tensors"][source]
    return found


def check_texts(value: Any, keys: tuple[str, ...], file: str) -> tuple[str, ...]:
    """Return a text, or a list of texts, as a tuple."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise misplaced(file, keys, value, "a text, or a list of texts")
    return tuple(texts)


def refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], file: str, keys: tuple[str, ...] = ()) -> None:
    """Refuse keys that a table of a recipe does not have."""
    for key in table:
        if key not in known:
            want = nearest_text(key, known) or f"one of {', '.join(sorted(known))}"
            raise misplaced(file, (*keys, key), key, want)


def misplaced(file: str, keys: tuple[str, ...], got: object, want: str, next_step: str = CORRECT) -> LayoutError:
    """Return the error that a recipe is wrong at nested keys."""
    where = ".".join(key if key.isidentifier() else repr(clip(key, 120)) for key in keys)
    problem = f"the recipe {find_place(file, *keys)} is wrong at {where}"
    return LayoutError(problem, file=file, got=_value_text(got), want=want, next_step=next_step)


def _value_text(value: object) -> str:
    """Return a value as its file shows it, or its kind; values may nest deeply."""
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "nothing"
        case dict():
            return "a table"
        case list():
            is_plain = all(isinstance(one, str | int | float) for one in value)
            return clip(", ".join(map(_value_text, value)) or "an empty list", 200) if is_plain else "a list of others"
    return clip(repr(value) if isinstance(value, str) else str(value), 200)


def find_place(file: str, *keys: str) -> str:
    """Return ``FILE, line N`` for the value of nested keys of a recipe's file; without the line if it is not found.

    tomllib does not keep lines, so each key is searched in the text, after the one before it. Spaces do not count.
    """
    try:
        text = _read_text(file, "utf-8-sig")
    except OSError:
        text = read_shipped().get(file.removesuffix(".toml"), "")
    text, at, last = text.replace(" ", ""), 0, None
    for depth, key in enumerate(keys):
        plain = key.replace(" ", "")
        forms = "|".join(re.escape(form) for form in dict.fromkeys((plain, json.dumps(plain)[1:-1])))
        found = re.compile(rf"""(?:^|[\[.{{,])["']?(?:{forms})["']?(?=[\].=])""", re.MULTILINE).search(text, at)
        if found is not None:
            at = last = found.end()
        elif depth == 1 and keys[0] == "tensors":  # a rule that [kept] or an extended recipe writes
            start = text.find("[kept.")
            listed = re.compile(r"""["']([^"'\n]+)["']""").finditer(text, start) if start >= 0 else ()
            last = next((one.end() for one in listed if "[" in one[1] and plain.endswith(one[1])), None)
            break
        elif key not in TABLES:  # `config.h = ...` has no header, and a table may be inherited
            last = last if depth > 1 else None
            break
    return file if last is None else f"{file}, line {text.count(chr(10), 0, last) + 1}"


_MAX_ADDED = 1 << 24  # fp32 has all integers up to here


def _check_values(tables: Mapping[str, Any], lists: Mapping[str, tuple[str, ...]], file: str) -> None:
    """Refuse patterns that are not expressions, sizes that are not numbers, and values that no argument can have."""
    for key in ("ignored", "dropped", "keep_fp32"):
        for pattern in lists[key]:
            try:
                compile_pattern(pattern)
            except ValueError as error:
                raise misplaced(file, (key,), pattern, f"a regular expression ({error})") from error
    for size, number in tables.get("sizes", {}).items():
        # isinstance would take TOML's `true` for 1.
        if type(number) is not int or not 1 <= number <= MAX_SIZE:
            raise misplaced(file, ("sizes", size), number, f"a whole number from 1 to {MAX_SIZE}")
    for table in ("must", "must_config"):
        for key, value in tables.get(table, {}).items():
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(one, str | int | float | bool) for one in values):
                raise misplaced(file, (table, key), value, "a text, a number, true or false, or a list of them")


def check_names(recipe: Recipe, file: str) -> None:
    """Refuse names that the recipe does not define. They are probably misspelt."""
    sizes = _find_sizes(recipe)
    groups = {rule.group for rule in recipe.rules if rule.group is not None}
    flags = {flag for rule in recipe.rules for flag in (rule.when, rule.unless) if flag is not None}
    for table, terms in (("config", recipe.config), ("args", recipe.args)):
        for name, texts in terms.items():
            wrong = next((text for text in texts if not is_term(text)), None)
            if wrong is not None:
                raise misplaced(file, (table, name), wrong, "a key, or a term such as 'hidden_size / num_heads'")
    # Recipes inherit sizes and flags that not all of them use.
    useless = find_useless(recipe) if recipe.depth == 0 else ()
    if useless:
        known = sizes | flags | groups
        raise misplaced(file, useless[0], useless[0][1], f"a name that a rule has: one of {_names(known)}")
    for key, names, all_names in (("padded", recipe.padded, sizes), ("needed", recipe.needed, groups)):
        for name in names:
            if name not in all_names:
                raise misplaced(file, (key,), name, f"one of the recipe's own: {_names(all_names)}")
    if recipe.by_layer and not any(rule.sources[0].name.dims for rule in recipe.rules):
        raise misplaced(file, ("by_layer",), recipe.by_layer[0], "a rule of layers, such as layers.{L}.w [h]")
    for rule in recipe.rules:
        keys = ("tensors", str(rule.sources[0]))
        for key, flag in (("when", rule.when), ("unless", rule.unless)):
            if flag is not None and flag not in recipe.config.keys() | recipe.args.keys():
                raise misplaced(file, (*keys, key), flag, f"a flag that [config] or [args] has, such as {flag} = KEY")
        for group in rule.beside:
            if group not in groups:
                raise misplaced(file, (*keys, "beside"), group, f"one of the recipe's groups: {_names(groups)}")
        if rule.group is not None and not rule.sources[0].name.dims:
            raise misplaced(file, (*keys, "group"), rule.group, "a tensor of a layer, such as layers.{L}.w [h]")
        if abs(rule.add) > _MAX_ADDED:
            raise misplaced(file, (*keys, "add"), rule.add, f"a number from -{_MAX_ADDED} to {_MAX_ADDED}")


def find_useless(recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """Return the entries (table, name) that give a value to a name of no rule, and that compare nothing."""
    used = _find_sizes(recipe) | {
        name for rule in recipe.rules for name in (rule.when, rule.unless, rule.group) if name
    }
    found = [("config", name) for name in recipe.config if name not in used | recipe.args.keys()]
    found += [("args", name) for name in recipe.args if name not in used | recipe.config.keys()]
    return (*found, *(("sizes", name) for name in recipe.sizes if name not in used))


def _find_sizes(recipe: Recipe) -> set[str]:
    sides = (side for rule in recipe.rules for side in (rule.sources[0], *rule.targets.values()))
    return {size for side in sides for dim in side.all_dims for size in size_names_of(dim)}


def _names(names: set[str]) -> str:
    return list_text(sorted(names), 16, "none")


def read_recipe(path: str) -> Recipe:
    """Read a recipe file."""
    return _parse(path, read_text(path), path)


def list_shipped_recipes() -> tuple[str, ...]:
    """Return the sorted names of the recipes that come with xrank, without parsing them."""
    return tuple(read_shipped())


def read_shipped_text(name: str, *, is_merged: bool = False) -> str:
    """Return the text of the shipped recipe of that name."""
    text = read_shipped()[name]
    if not is_merged:
        return text
    tables = repeat_rules(read_tables(text, f"{name}.toml"), f"{name}.toml")
    for key, useless in find_useless(load_shipped_recipe(name)):
        del tables[key][useless]
    top = [f"{key} = {_toml_text(value)}\n" for key, value in tables.items() if key not in TABLES]
    for key in TABLES:
        if tables.get(key):
            rows = (f"{_key_text(own)} = {_toml_text(value)}\n" for own, value in tables[key].items())
            top += [f"\n[{key}]\n", *rows]
    return "".join(top)


def _key_text(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_text(value: Any) -> str:
    """Return a text, number, boolean, list or inline table as TOML; all but tables are written as in JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key_text(key)} = {_toml_text(one)}" for key, one in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def load_shipped_recipes() -> tuple[Recipe, ...]:
    """Return all recipes that come with xrank, sorted by name."""
    return tuple(map(load_shipped_recipe, read_shipped()))


def load_recipes_for(names: Iterable[str], types: Collection[str] = ()) -> Iterator[Recipe]:
    """Yield the shipped recipes that may know any of these training names; the other files are not parsed.

    With `types`, only those of one of these model types.
    """
    words = {name.partition(".")[0] for name in names}
    for name in read_shipped():
        if types and find_model_types(name).isdisjoint(types):
            continue
        # Hugging Face's own names have a head, too: it calls for a recipe only among names that are all the recipe's.
        if words & _first_words(name) - {"lm_head"} or words <= _first_words(name):
            yield load_shipped_recipe(name)


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
    fields: dict[str, Any] = {key: check_texts(tables.get(key, []), (key,), file) for key in LISTS}
    _check_values(tables, fields, file)
    framework = tables.get("framework", "")
    if not isinstance(framework, str):
        raise misplaced(file, ("framework",), framework, "a text")
    rules: tuple[Rule, ...] = ()
    for source, value in tables.get("tensors", {}).items():
        rules += (_parse_rule(source, value, file),)
        own = {key: value[key] for key in ("add", "times") if key in value}
        for stack, target in value.get("copies", {}).items():
            copy = _parse_rule(source, {**own, "to": target, "optional": True, "within": stack}, file)
            rules += (replace(copy, is_copy=True),)
    if not rules:
        raise misplaced(file, ("tensors",), None, "a table [tensors] with rules")
    if fields["by_layer"]:  # layers of different sizes cannot be stacked in one tensor
        rules = tuple(replace(rule, sources=rule.sources[:1]) for rule in rules)
    for table in ("config", "args"):
        entries = tables.get(table, {})
        fields[table] = {key: check_texts(terms, (table, key), file) for key, terms in entries.items()}
    for table in ("must", "must_config"):
        entries = tables.get(table, {})
        fields[table] = {key: tuple(value) if isinstance(value, list) else (value,) for key, value in entries.items()}
    recipe = Recipe(name, framework, rules, sizes=tables.get("sizes", {}), depth=count_extended(text), **fields)
    check_names(recipe, file)
    return recipe


# Recipes extend each other, so several share most sides.
_side = lru_cache(maxsize=1024)(parse_side)


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
        known = {name for dim in side.all_dims for name in size_names_of(dim)}
        if add or not sizes or not all(size.isdecimal() or size in known for size in sizes):
            what = "the root of a product of the source's sizes, such as sqrt(d), without add"
            raise misplaced(file, (*keys, "times"), times, what)
    parts = part_names(side)
    if isinstance(to, str) and parts:
        if sorted(part_names(targets[""])) != sorted(parts):
            want = f"one target for each of the parts {list_text(parts)}, or one with all of them"
            raise misplaced(file, keys, to, want)
        targets = dict.fromkeys(parts, targets[""])
    beside = check_texts(value.get("beside", []), (*keys, "beside"), file)
    return Rule((side, *_stack_dims(side)), targets, **names, optional=optional, beside=beside, add=add, times=times)


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
