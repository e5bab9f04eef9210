"""The tables of a recipe's file, merged into those of the recipe that it extends; and the places of their faults."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from xrank.errors import LayoutError, UsageError
from xrank.layout.layout_map import parse_toml
from xrank.words import clip, size_text

TABLES = ("config", "args", "must", "must_config", "sizes", "tensors")
LISTS = ("model_types", "padded", "ignored", "dropped", "keep_fp32", "needed", "by_layer")
_TEXTS = ("framework", "extends")
_RENAMES = ("sources", "targets")
CONDITIONS = ("unless", "when", "group", "optional", "beside", "add", "times", "within")


CORRECT = "correct the recipe; those that come with xrank show how it is written"

# Recipes extend each other, so several share most files.
_loads = lru_cache(maxsize=128)(parse_toml)


@lru_cache(maxsize=1)
def read_shipped() -> dict[str, str]:
    """Return name -> text of the recipes that come with xrank, sorted."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("*.toml")}
    return dict(sorted(texts.items()))


_MAX_NBYTES = 1 << 20


def read_text(path: str) -> str:
    """Return the text of a recipe's file.

    Raises:
        UsageError: the file cannot be read; LayoutError: it is too long, or not in UTF-8.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_NBYTES + 1)
    except OSError as error:
        raise UsageError(
            f"the recipe {path} cannot be read: {error.strerror or error}",
            file=path,
            next_step="name a recipe's file that can be read, or one of the recipes that come with xrank",
        ) from error
    if len(content) > _MAX_NBYTES:
        raise LayoutError(
            f"the recipe {path} is too long",
            file=path,
            got=f"more than {size_text(_MAX_NBYTES)}",
            want="a recipe's file",
            next_step="name a recipe's file",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise LayoutError(
            f"the recipe {path}, line {line} is not UTF-8",
            file=path,
            got=f"the byte {content[error.start]:#04x}",
            want="a text in UTF-8, as TOML is",
            next_step="save the recipe as UTF-8",
        ) from error


def read_tables(text: str, file: str, via: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the content of a file, merged into the recipe that it extends."""
    tables = _parse_toml(text, file)
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
        near = (*get_close_matches(str(base), read_shipped(), n=1), "megatron-llama")[0]
        raise misplaced(
            file,
            ("extends",),
            base,
            f"the name of one recipe that comes with xrank, such as {near}",
            "run: xrank recipe list",
        )
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
        texts = {key: _check_text_table(block.get(key, {}), (*keys, key), file) for key in ("tensors", "copies")}
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


def _check_text_table(value: Any, keys: tuple[str, ...], file: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise misplaced(file, keys, value, "a table of sources and targets")
    return value


def _parse_toml(text: str, file: str) -> dict[str, Any]:
    try:
        return dict(_loads(text))
    except ValueError as error:
        message, _, at = str(error).partition(" (at ")
        found = re.match(r"(line \d+(?:, column \d+)?)", at)
        place = f", {found[1]}" if found else f", line {text.count(chr(10)) + 1}" if at else ""
        raise _not_toml(file, place, message) from error


def _not_toml(file: str, place: str, reason: str) -> LayoutError:
    return LayoutError(f"the recipe {file}{place} is not TOML: {reason}", file=file, want="TOML", next_step=CORRECT)


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
            near = get_close_matches(key, known, n=1)
            raise misplaced(file, (*keys, key), key, near[0] if near else f"one of {', '.join(sorted(known))}")


def misplaced(file: str, keys: tuple[str, ...], got: object, want: str, next_step: str = CORRECT) -> LayoutError:
    """Return the error that a recipe is wrong at nested keys."""
    where = ".".join(key if key.isidentifier() else repr(clip(key, 120)) for key in keys)
    return LayoutError(
        f"the recipe {find_place(file, *keys)} is wrong at {where}",
        file=file,
        got=_value_text(got),
        want=want,
        next_step=next_step,
    )


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
        text = Path(file).read_text(encoding="utf-8-sig")
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
            last = _find_kept(text, plain)
            break
        elif key not in TABLES:  # `config.h = ...` has no header, and a table may be inherited
            last = last if depth > 1 else None
            break
    return file if last is None else f"{file}, line {text.count(chr(10), 0, last) + 1}"


def _find_kept(text: str, source: str) -> int | None:
    """Return where [kept] lists the tensor that a source ends with."""
    start = text.find("[kept.")
    listed = re.compile(r"""["']([^"'\n]+)["']""").finditer(text, start) if start >= 0 else ()
    return next((found.end() for found in listed if "[" in found[1] and source.endswith(found[1])), None)
