"""The names of transformers' conversions: which tensors become which, before any shape is known.

transformers renames text: a transform replaces the first match of its pattern in a name
(transformers/core_model_loading.py: rename_source_key). All renamings of a model apply in turn, and at most one
converter, whose inputs are gathered under the name of its first target.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from xrank.recipes.conversion_table import Side, Transform


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are converted together; a tensor that is only renamed is a group of its own."""

    name: str
    """The new name; of a converter, the one with its first target in it."""
    side: Side | None
    """The converter; None: the tensor is only renamed."""
    inputs: dict[str, list[str]] = field(default_factory=dict)
    """Pattern of the converter -> names that match it, in natural order."""


class NamePass:
    """One pass over the names of a model in one direction; keeps which transforms it used."""

    def __init__(self, transforms: Sequence[Transform], *, is_save: bool) -> None:
        """Prepare a pass.

        Args:
            transforms: the transforms in the order of loading.
            is_save: whether to go from memory to files.
        """
        # Inner models' transforms were applied last when loading, so they are undone first.
        ordered = list(enumerate(transforms))[:: -1 if is_save else 1]
        self._is_save = is_save
        self._renamings = [(number, each) for number, each in ordered if not each.is_converter]
        self._converters = [(number, each) for number, each in ordered if each.is_converter]
        self._active: set[int] = set()
        self.used: set[int] = set()
        """Numbers of the transforms that matched a name."""

    def find_groups(self, names: Iterable[str], wanted: Collection[str] = (), prefix: str = "") -> list[Group]:
        """Return the groups of all names.

        Args:
            names: names of one model.
            wanted: when loading, names of the module, to which `prefix` is added or removed where that fits.
            prefix: the model's ``base_model_prefix``.
        """
        groups: dict[str, Group] = {}
        for name in sort_naturally(names):
            new, side, pattern = self._rename_once(name)
            if not self._is_save and wanted:
                new = _fit_prefix(new, prefix, wanted)
                if new not in wanted and name in wanted:
                    new, side, pattern = name, None, name
            group = groups.setdefault(new, Group(new, side))
            group.inputs.setdefault(pattern, []).append(name)
        return list(groups.values())

    def finish_name(self, name: str) -> str:
        """Return the final name of a converter's output: when saving, renamings follow the converters."""
        return self._apply_renamings(name) if self._is_save else name

    def _rename_once(self, name: str) -> tuple[str, Side | None, str]:
        if not self._is_save:
            new, side, pattern = self._apply_converters(self._apply_renamings(name))
            return new, side, pattern or name
        new, side, pattern = self._apply_converters(name)
        return (self._apply_renamings(name), None, name) if side is None else (new, side, pattern)

    def _apply_renamings(self, name: str) -> str:
        for number, transform in self._renamings:
            name, _ = self._apply(number, transform, name)
        return name

    def _apply_converters(self, name: str) -> tuple[str, Side | None, str]:
        for number, transform in self._converters:
            new, pattern = self._apply(number, transform, name)
            if pattern is not None:
                return new, self._side(transform), pattern
        return name, None, ""

    def _side(self, transform: Transform) -> Side:
        return transform.save if self._is_save else transform.load

    def _apply(self, number: int, transform: Transform, name: str) -> tuple[str, str | None]:
        """Return the new name and the pattern that matched; the name itself and None without a match."""
        start = _find_scope(transform, name)
        if start is None:
            return name, None
        side, rest = self._side(transform), name[len(start) :]
        compiled = _compile(side.patterns)
        found = compiled.search(rest)
        if found is None:
            return name, None
        label = next(key for key, value in found.groupdict().items() if value is not None)
        index = int(label[1:])
        if transform.kind == "group" and index == 0:
            self._active.add(number)
        elif transform.kind == "group" and number not in self._active:
            return name, None
        self.used.add(number)
        target = side.targets[index if transform.kind == "group" else 0]
        if "\\" in target:
            first = compiled.groupindex[label]
            if transform.kind == "offset":
                target = target.replace(r"\1", str(int(found.group(first + 1)) + side.offset))
            else:
                target = re.sub(r"\\(\d+)", lambda at: found.group(first + int(at[1])), target)
        return start + rest.replace(found.group(0), target, 1), side.patterns[index]


def sort_naturally(names: Iterable[str]) -> list[str]:
    """Return names sorted as transformers sorts them: numbers by value, before text."""
    return sorted(names, key=_natural_key)


def _natural_key(name: str) -> list[tuple[object, ...]]:
    key: list[tuple[object, ...]] = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        if part.isdigit():
            key.append((0, int(part)))
        elif len(text) < len(part):
            key.append((1, text, int(part[len(text) :])))
        else:
            key.append((1, text))
    return key


def _find_scope(transform: Transform, name: str) -> str | None:
    """Return the start of a name that the transform leaves alone; None if the name is outside its scope."""
    if transform.scope is None:
        return ""
    scope = f"{transform.scope}." if transform.scope else ""
    prefix = f"{transform.prefix}." if transform.prefix else ""
    return next((start for start in (prefix + scope, scope) if name.startswith(start)), None)


def _fit_prefix(name: str, prefix: str, wanted: Collection[str]) -> str:
    """Return a name with the base model's prefix added or removed, if the module has it only so."""
    if name.startswith(prefix) and (shorter := re.sub(f"^{prefix}.", "", name, count=1)) in wanted:
        return shorter
    return longer if (longer := f"{prefix}.{name}") in wanted else name


@lru_cache(maxsize=1024)
def _compile(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return one expression for all patterns; a longer one counts before a shorter one."""
    branches = []
    for index, pattern in sorted(enumerate(patterns), key=lambda each: -len(each[1])):
        pattern = pattern.replace("*.", r".*\.")
        # A pattern that ends in a word ends at the end of a word in the name.
        end = r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else ""
        branches.append(f"(?P<g{index}>{pattern}{end})")
    return re.compile("|".join(branches))
