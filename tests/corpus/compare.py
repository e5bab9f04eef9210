"""Compares two records: what must be the same, and the texts, of which a person reads what became of their facts."""

from __future__ import annotations

import difflib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["CORRECTED_EXITS", "compare"]

CORRECTED_EXITS: dict[str, tuple[int, int]] = {}
"""Commands whose exit code is another one on purpose, and with it the error's type: the code before and after."""

_TIMES = {"seconds", "peak_rss_nbytes"}
_OF_THIS_MACHINE = {"segments"}
"""Shared memory with names, which other programs may have left."""
_PRESENCE = ("got", "want", "try", "next_step")
_TEXT_KEYS = {"message", "problem", "why", "assumed"}
_VARYING = re.compile(r"[\d.,]+ [KMGT]?B/s|pid \d+|peak memory [\d.,]+ \w+|[\d.,]+ m?s\b|\d+ of \d+ bytes|0x[0-9a-f]+")
_MASKED_MESSAGE = re.compile(r'("message": |^  \["[\w-]+", )"(?:[^"\\]|\\.)*"', re.MULTILINE)
"""Of a note, in a report and in a manifest."""

Difference = tuple[str, str, str]
"""Class, command, what differs."""
TEXTS = "texts"


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, only: str = "") -> list[Difference]:
    """Return all differences in commands that have the pattern; texts may differ, if no fact was lost."""
    found = []
    if old["build_id"] != new["build_id"]:
        found.append(("sources", "all", "the records are of different builds of the sources"))
    ours, theirs = old["commands"], new["commands"]
    for name in sorted(name for name in ours.keys() | theirs.keys() if re.search(only, name)):
        if name not in ours or name not in theirs:
            found.append(("missing", name, f"only in the {'second' if name in theirs else 'first'} record"))
            continue
        found += _corrected(name, [(kind, name, text) for kind, text in _compare_command(ours[name], theirs[name])])
    return found


def report(differences: list[Difference], *, verbose: bool) -> bool:
    """Print the differences by class; return whether there are none but texts."""
    by_class = defaultdict(list)
    for kind, name, text in differences:
        by_class[kind].append((name, text))
    for kind, rows in sorted(by_class.items(), key=lambda item: item[0] == TEXTS):
        num_commands = len({name for name, _ in rows})
        print(f"{kind}: {len(rows)} differences in {num_commands} commands")
        for name, text in rows if verbose or kind != TEXTS else ():
            print(f"  {name}: {text}")
    return by_class.keys() <= {TEXTS, "corrected"}


def _corrected(name: str, differences: list[Difference]) -> list[Difference]:
    """Return the differences of a command; those of an exit code that was corrected, as such."""
    if name not in CORRECTED_EXITS:
        return differences
    before, after = CORRECTED_EXITS[name]
    allowed = re.compile(rf"(.*exit_code|exit code): {before} -> {after}$|.*type: |stderr class: ")
    return [("corrected", name, text) if allowed.match(text) else (kind, name, text) for kind, _, text in differences]


def _compare_command(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if len(old["steps"]) != len(new["steps"]):
        yield "steps", f"{len(old['steps'])} -> {len(new['steps'])}"
    for number, (ours, theirs) in enumerate(zip(old["steps"], new["steps"], strict=False)):
        if ours["words"] != theirs["words"]:
            yield "steps", f"{ours['words']} -> {theirs['words']}"
        for kind, text in _compare_step(ours, theirs):
            yield kind, text if len(old["steps"]) == 1 else f"step {number}: {text}"
    yield from _compare_files(old["files"], new["files"])


def _compare_step(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if old["exit_code"] != new["exit_code"]:
        yield "exit code", f"exit code: {old['exit_code']} -> {new['exit_code']}"
    yield from _compare_json(old.get("json"), new.get("json"))
    is_exact = "--toml" in old["words"] or "-q" in old["words"]
    if is_exact and old["stdout"] != new["stdout"]:
        yield "stdout", _diff(old["stdout"], new["stdout"])
    elif (ours := _labels(old["stdout"])) != (theirs := _labels(new["stdout"])):
        yield "stdout labels", f"{ours} -> {theirs}"
    if old["num_ranks"] == 1:  # of several, whichever fails first may end the others before they print
        for part, ours, theirs in _pairs(_stderr_facts(old["stderr"]), _stderr_facts(new["stderr"])):
            yield "stderr", f"stderr {part}: {ours} -> {theirs}"
        for stream in ("stdout", "stderr"):
            ours, theirs = (_VARYING.sub("~", step[stream]) for step in (old, new))
            if stream == "stderr":  # threads finish files in any order, and after a failure some or none
                ours, theirs = (re.sub("^finished .*\n", "", text, flags=re.MULTILINE) for text in (ours, theirs))
            if ours != theirs:
                yield TEXTS, f"{stream}\n{_diff(ours, theirs)}"


def _labels(text: str) -> list[str]:
    """Return the first words of the lines that are not indented."""
    return [line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith(" ")]


def _stderr_facts(text: str) -> dict[str, Any]:
    classes = re.findall(r"^xrank: (\w+(?:Error|Exception)): ", text, re.MULTILINE)
    labels = set(re.findall(r"^  (got|want|try) ", text, re.MULTILINE))
    return {"class": classes, "traceback": "Traceback" in text, **{f"has {label}": True for label in labels}}


def _pairs(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Return what differs; what is there now and was not is none, where it is only said to be there."""
    for key in (*old, *(key for key in new if key not in old)):
        ours, theirs = old.get(key, "-"), new.get(key, "-")
        if ours != theirs and not (key.rpartition(" ")[0].endswith("has") and ours == "-"):
            yield key, ours, theirs


def _compare_json(old: Any, new: Any) -> Iterator[tuple[str, str]]:
    (facts, texts), (new_facts, new_texts) = ({}, {}), ({}, {})
    _sort_json(old, "", facts, texts)
    _sort_json(new, "", new_facts, new_texts)
    for path, ours, theirs in _pairs(facts, new_facts):
        kind = "error" if "error" in path else "notes" if "notes" in path else "report"
        yield kind, f"{path}: {json.dumps(ours)} -> {json.dumps(theirs)}"
    for path in texts.keys() & new_texts.keys():
        ours, theirs = (_VARYING.sub("~", str(each[path])) for each in (texts, new_texts))
        if ours != theirs:
            yield TEXTS, f"{path}\n      - {ours}\n      + {theirs}"


def _sort_json(value: Any, path: str, facts: dict[str, Any], texts: dict[str, Any]) -> None:
    """Put each leaf of a JSON object among the facts or among the texts, by its path."""
    if isinstance(value, dict):
        has_message = "message" in value
        for key, part in value.items():
            place = f"{path}.{key}" if path else key
            if (key in _TIMES and path in ("", "result", "result[0]")) or key in _OF_THIS_MACHINE:
                continue
            if key in _TEXT_KEYS or (has_message and key in _PRESENCE):
                if part is not None:
                    facts[f"{path} has {key}"] = True
                    texts[place] = part
            else:
                _sort_json(part, place, facts, texts)
        if not value:
            facts[path] = "{}"
    elif isinstance(value, list):
        facts[f"{path}[]"] = len(value)
        for number, part in enumerate(value):
            _sort_json(part, f"{path}[{number}]", facts, texts)
    else:
        facts[path] = value


def _compare_files(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in sorted(name for name in old.keys() | new.keys() if ".xrank-" not in name):  # a stage: by chance
        if name not in old or name not in new:
            yield "files", f"{name}: only in the {'second' if name in new else 'first'}"
        elif old[name]["sha256"] != new[name]["sha256"]:
            ours, theirs = (each[name].get("text", "") for each in (old, new))
            is_note = name.endswith(".json") and ours and _without_messages(ours) == _without_messages(theirs)
            yield TEXTS if is_note else "files", f"{name} differs\n{_diff(ours, theirs)}".rstrip()


def _without_messages(text: str) -> str:
    return _MASKED_MESSAGE.sub(r"\1~", text)


def _diff(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return "\n".join(f"      {line}" for line in list(lines)[2:] if not line.startswith("@@"))
