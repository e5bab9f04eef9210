"""The names that a model's tensors have without the parts that wrapping modules put before them.

``model_names.json`` beside this module is generated from an installed transformers by
``tests/oracle/make_model_names.py``: how the names begin in each model type.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from msgspec import Struct, field

from xrank.errors import LayoutError, UsageError, either, option
from xrank.recipes.conversions import Conversion, NamePass, find_transforms
from xrank.recipes.recipe import match
from xrank.recipes.recipe_file import load_recipes_for, read_shipped_table
from xrank.words import plural

_Strip: TypeAlias = Callable[[str], str]
_TABLE = "model_names.json"
_NUM_PARTS = 3
_MAX_LEVELS = 12
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_OF_PEFT = "base_model.model."  # peft puts it before the names of the model that it adapts


def find_stem(name: str) -> str:
    """Return the first parts of a tensor's module without inner numbers: ``model.layers.self_attn``."""
    parts = [part for at, part in enumerate(name.split(".")) if at == 0 or not part.isdecimal()]
    return ".".join(parts[: min(_NUM_PARTS, max(len(parts) - 1, 1))])


class ModelNames(Struct, frozen=True, eq=False):
    """The names of a model, as far as their first parts show them."""

    stems: Collection[str]
    base_prefix: str = ""
    """Prefix of the base model in classes with a head, with its last dot; files may lack it."""
    transforms: Sequence[Conversion] = ()
    """Conversions of transformers, which has further names in files."""
    is_exact: bool = False
    """Whether another model's tensors show the names, so that the base model's prefix is not optional."""
    class_name: str = ""
    has_head: bool = False
    """Whether the class is a base model with a head."""
    _kinds: dict[str, int] = field(default_factory=dict)

    @property
    def examples(self) -> list[str]:
        """Beginnings of some names, the base model's first."""
        return sorted(self.stems, key=lambda stem: (not stem.startswith(self.base_prefix), stem))

    def count(self, names: Iterable[str]) -> int:
        """Return the number of names that are the model's as they are."""
        return sum(self._kind(name) > 0 for name in names)

    def list_within(self, names: Sequence[str]) -> list[str]:
        """Return the names in the model's outermost modules, without those of modules beside them."""
        outer = {
            stem.removeprefix(prefix).partition(".")[0] for stem in self.stems for prefix in ("", self.base_prefix)
        }
        return [name for name in names if name.partition(".")[0] in outer]

    def find_wrapping(self, names: Sequence[str]) -> _Strip | None:
        """Return the function that takes off what wrappers put before the names; it leaves tensors beside the model.

        None: no name is the model's, however much is taken off.
        """
        bare = self.count(names)
        if bare and 2 * bare >= len(names):
            return self._make_strip("", names)
        # Most names of a wrapped model have its prefix, so that few prefixes are left for the slower comparison.
        counts = Counter(name[: dot.end()] for name in names for dot in islice(re.finditer(r"\.", name), _MAX_LEVELS))
        often = [p for p, count in counts.items() if count > bare and 4 * count >= len(names)]
        found = {p: self.count(name.removeprefix(p) for name in names if name.startswith(p)) for p in often}
        best = min(found, key=lambda prefix: (-found[prefix], len(prefix)), default="")
        if found.get(best, 0) <= bare or 4 * found[best] < len(names) or _is_near_recipe(names):
            return self._make_strip("", names) if bare else None
        rivals = [
            p
            for p, count in found.items()
            if 2 * count > found[best] and not (p.startswith(best) or best.startswith(p))
        ]
        if rivals:
            pair = (best, min(rivals, key=len))
            got = " and ".join(f"{plural(found[p], 'tensor')} under {p[:-1]}" for p in pair)
            step = either(*(f"leave one of them out with {option('exclude', f'{p}*')}" for p in pair[::-1]))
            problem, want = f"{pair[0]}* and {pair[1]}* are both models of this kind", self.class_name or "model"
            raise UsageError(problem, got=got, want=f"one {want}", next_step=step)
        return self._make_strip(best, names)

    def _make_strip(self, prefix: str, names: Sequence[str]) -> _Strip:
        kinds = [self._kind(name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
        # A wrapper may hold a base model alone, or its head, too. Then a class with a head is proven with its prefix.
        adds = 2 * kinds.count(1) > len(kinds) and (self.is_exact or (bool(prefix) and self.has_head))

        def strip(name: str) -> str:
            if not name.startswith(prefix):
                return name
            bare = name.removeprefix(prefix)
            return self.base_prefix + bare if adds and self._kind(bare) == 1 else bare

        return strip

    def _kind(self, name: str) -> int:
        """Return 2 for a name of the model, 1 for one without the base model's prefix, 0 for any other."""
        family = _NUMBER.sub("0", name.removeprefix(_OF_PEFT))
        if family not in self._kinds:
            forms = [family]
            if self.transforms:
                forms.append(NamePass(self.transforms, is_save=False).find_groups([family])[0].name)
            if any(map(self._has_stem, forms)):
                self._kinds[family] = 2
            else:
                prefixed = [self.base_prefix + form for form in forms] if self.base_prefix else []
                self._kinds[family] = int(any(map(self._has_stem, prefixed)))
        return self._kinds[family]

    def _has_stem(self, name: str) -> bool:
        # Parts of a module's own, such as an adapter's, may follow those that the model is known by.
        parts = find_stem(name).split(".")
        return any(".".join(parts[:count]) in self.stems for count in range(1, len(parts) + 1))


def _is_near_recipe(names: Sequence[str]) -> bool:
    """Return whether half of the names are those of a training framework, whose recipe renames them or misses some."""
    found = (match(recipe, names) for recipe in load_recipes_for(names))
    return any(one.fits or (one.knows_layers and 2 * one.num_telling >= len(names)) for one in found)


def names_of_class(config: Mapping[str, Any] | None) -> ModelNames | None:
    """Return the names of the class that a config.json names; None if transformers has no such class.

    Without a class, the names of all classes of its ``model_type`` count.
    """
    types = read_shipped_table(_TABLE, "types")
    entry = None if config is None or "auto_map" in config else types.get(str(config.get("model_type")))
    if config is None or entry is None:
        return None
    prefix, known, stems = entry
    classes = config.get("architectures") or ()
    names = [str(each).removeprefix("FSDP") for each in classes] if isinstance(classes, list) else []
    if not set(names) <= set(known.split()):
        return None
    try:
        transforms = find_transforms(config)
    except LayoutError:
        transforms = ()
    class_name = names[0] if names else f"model of type {config['model_type']}"
    has_head = bool(names) and not names[0].endswith("Model")
    own_prefix = f"{prefix}." if prefix else ""
    return ModelNames(frozenset(stems.split()), own_prefix, transforms, class_name=class_name, has_head=has_head)


def make_finder(
    known: Collection[str], config: Mapping[str, Any] | None, is_left_out: Callable[[str], bool] | None = None
) -> Callable[[Sequence[str]], _Strip | None]:
    """Return the function that finds what wrappers put before the names of a model.

    Names `known` of a base model, or of a module to fill, count first; next those of the class in its config.json. A
    tensor that the caller leaves out is no second model.
    """

    def find(names: Sequence[str]) -> _Strip | None:
        own = [name for name in names if is_left_out is None or not is_left_out(name)]
        entry = read_shipped_table(_TABLE, "types").get(str((config or {}).get("model_type")))
        prefix = f"{entry[0]}." if entry is not None and entry[0] else ""
        shown = ModelNames(frozenset(map(find_stem, known)), prefix, is_exact=True) if known else None
        for model in (shown, names_of_class(config)):
            strip = None if model is None else model.find_wrapping(own)
            if strip is not None:
                return strip
        return None

    return find
