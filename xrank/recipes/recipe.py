"""Recipes as data: rules from a framework's tensors to Hugging Face's, and their match with a model's names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod, sqrt

from msgspec import Struct, field
from msgspec.structs import replace

from xrank.layout.tensor_name import TensorName
from xrank.recipes.side import Side, find_range, part_names

_SIZE = r"(?:[A-Za-z_]\w*|[1-9][0-9]{0,8})"
_ROOT = re.compile(rf"sqrt\(({_SIZE}(?: {_SIZE}){{0,7}})\)")


def size_texts(times: str) -> tuple[str, ...]:
    """Return the sizes in ``sqrt(SIZE SIZE ...)``; none if the text is not of this form."""
    found = _ROOT.fullmatch(times)
    return () if found is None else tuple(found[1].split())


class Rule(Struct, frozen=True):
    """One source tensor, or many of one kind, and the tensors that they become.

    Args:
        sources: the source as the file writes it, then its stacked forms.
        targets: part of the source -> the tensor that it becomes; one entry for a source without parts.
        unless: a flag; if it is true, the source may lack the tensor.
        when: a flag; a model has the tensor exactly if it is true. A model has all tensors of one flag or none.
        group: the kind of block, such as dense or sparse, that the tensor belongs to; each layer has one kind. Where
            layers have several choices, the text before a dot names the choice: ``mixer.attention``, ``mlp.dense``.
        optional: whether a model may lack the tensor.
        add: a number that is added to the source's values, and backwards taken from the target's.
        times: the root of a product of sizes, ``sqrt(n d)``, by which values are multiplied, and backwards divided.
        beside: groups; backwards, where several sources become the target, the rule is for layers with their blocks.
    """

    sources: tuple[Side, ...]
    targets: Mapping[str, Side]
    unless: str | None = None
    when: str | None = None
    group: str | None = None
    optional: bool = False
    beside: tuple[str, ...] = ()
    add: int = 0
    times: str | None = None
    within: str | None = None
    """A flag that only tensors raise: the rule's tensors exist in models with the stack of layers of this name."""
    is_copy: bool = False
    """Whether the targets are copies of what another rule makes of the source."""
    line: str | None = None
    """The source in the recipe's file, of a rule for one layer."""

    def factor(self, sizes: Mapping[str, int]) -> float:
        """Return the number that `times` stands for; 1 without it."""
        texts = size_texts(self.times) if self.times is not None else ()
        return sqrt(prod(int(text) if text.isdecimal() else sizes[text] for text in texts))

    @property
    def choice(self) -> str:
        """The choice between kinds of blocks that the group belongs to; empty if there is only one, or no group."""
        return (self.group or "").rpartition(".")[0]

    @property
    def outcome(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The rule as texts, equal for rules of two recipes with the same effect."""
        targets = tuple((part, str(side)) for part, side in sorted(self.targets.items()))
        if self.add:
            targets += (("add", str(self.add)),)
        return str(self.sources[0]), targets if self.times is None else (*targets, ("times", self.times))


class Recipe(Struct, frozen=True, eq=False):
    """The content of a recipe file."""

    name: str
    framework: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    keep_fp32: tuple[str, ...] = ()
    config: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Size, flag, group or fact -> terms over the keys of config.json; the first known term counts."""
    args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    """Groups that some layers of every model have."""
    must: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Key of the trainer's arguments -> the values it may have, if it is present."""
    must_config: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """The same of the keys of config.json."""
    dropped: tuple[str, ...] = ()
    """Patterns of names of trained tensors that the target model lacks a place for."""
    by_layer: tuple[str, ...] = ()
    """Sizes and flags that each layer has of its own."""
    depth: int = 0
    """Number of recipes that it extends, one after the other."""


_Place = tuple[int, int]


class Match(Struct, frozen=True):
    """The result of matching one recipe with the names of a model."""

    recipe: Recipe
    is_reversed: bool
    """Whether the recipe is read from its targets to its sources."""
    used: Mapping[_Place, tuple[str, ...]]
    """(number of the rule, index in its `source_sides`) -> the names that match."""
    unknown: tuple[str, ...]
    """Names that match no rule and are not ignored."""
    ignored: tuple[str, ...]
    """Names that the recipe leaves out, those of trained tensors among them."""
    missing: tuple[str, ...]
    """Hugging Face's tensors in the recipe that are required, and that no name becomes (or is)."""

    def side_at(self, place: _Place) -> Side:
        """Return the side of a rule that the names at a place match."""
        return source_sides(self.recipe.rules[place[0]], self.is_reversed)[place[1]]

    def find_sides(self) -> Iterator[tuple[Side, str]]:
        """Yield each name that matches, with the side that it matches."""
        for place, names in self.used.items():
            side = self.side_at(place)
            yield from ((side, name) for name in names)

    def find_repeated(self) -> tuple[_Place, _Place, str] | None:
        """Return two places of different rules that match a name, and the name; None if no name has two, copies aside.

        Backwards several rules may make parts of one tensor.
        """
        if self.is_reversed:
            return None
        originals = {place: names for place, names in self.used.items() if not self.recipe.rules[place[0]].is_copy}
        for name, places in _find_places(originals).items():
            other = next((place for place in places if place[0] != places[0][0]), None)
            if other is not None:
                return places[0], other, name
        return None

    @property
    def fits(self) -> bool:
        """Whether all names are known and all required tensors are present."""
        return bool(self.used) and not self.unknown and not self.missing

    @property
    def dropped(self) -> tuple[str, ...]:
        """Those ignored names that belong to trained tensors."""
        patterns = [re.compile(pattern) for pattern in self.recipe.dropped]
        return tuple(name for name in self.ignored if any(pattern.fullmatch(name) for pattern in patterns))

    @property
    def num_known(self) -> int:
        """Number of names that match a rule."""
        return sum(map(len, self.used.values()))

    @property
    def num_telling(self) -> int:
        """Number of names that match a rule and become others; a name that stays is Hugging Face's already."""
        return sum(len(names) for (number, _), names in self.used.items() if not _keeps_name(self.recipe.rules[number]))

    @property
    def knows_layers(self) -> bool:
        """Whether a framework's own name of a layer's tensor matches.

        Names such as ``norm.weight`` occur in many frameworks, and trainers keep Hugging Face's modules of vision under
        other prefixes.
        """
        rules = (self.recipe.rules[number] for number, _ in self.used)
        return any(rule.sources[0].name.dims and not _keeps_name(rule) for rule in rules)


def _keeps_name(rule: Rule) -> bool:
    """Return whether a name stays, or from the number of the layer on: a module of Hugging Face's own."""
    source = rule.sources[0]
    if source.name.dims:
        return _tail(source) in map(_tail, rule.targets.values())
    return any(source.name == target.name for target in rule.targets.values())


def _tail(side: Side) -> str:
    """Return a side's text from the number of the layer on."""
    return str(side).partition("{")[2]


def source_sides(rule: Rule, is_reversed: bool) -> tuple[Side, ...]:
    """Return the sides of a rule that the names of a model are matched with."""
    return tuple(rule.targets.values()) if is_reversed else rule.sources


def target_sides(rule: Rule, is_reversed: bool) -> tuple[Side, ...]:
    """Return the sides of a rule that matched names become."""
    return rule.sources[:1] if is_reversed else tuple(rule.targets.values())


def is_required(rule: Rule) -> bool:
    """Return whether every model with the rule's stack of layers has its tensors, whatever its configuration."""
    return not rule.optional and rule.unless is None and rule.when is None


@lru_cache(maxsize=256)
def active_rules(recipe: Recipe, is_reversed: bool) -> tuple[int, ...]:
    """Return the rules of a direction; if several sources become one target, only the first rule is reversible."""
    if not is_reversed:
        return tuple(range(len(recipe.rules)))
    found: list[int] = []
    taken: set[tuple[str, str]] = set()  # name, and part of it; "" for all of it
    for number, rule in enumerate(recipe.rules):
        made = [(str(side.name), part if part in part_names(side) else "", side) for part, side in rule.targets.items()]
        if rule.beside or any(taken.isdisjoint({(name, part), (name, "")}) for name, part, _ in made):
            found.append(number)
        taken.update((name, part) for name, part, _ in made)
        taken.update(
            (name, "") for name, _, side in made if taken.issuperset((name, part) for part in part_names(side))
        )
    return tuple(found)


def match(recipe: Recipe, names: Iterable[str], *, is_reversed: bool = False) -> Match:
    """Match a recipe with these names: the training framework's, or, reversed, Hugging Face's."""
    kinds = _index(recipe, is_reversed)
    ignored = [re.compile(pattern) for pattern in (*recipe.ignored, *recipe.dropped)]
    used: dict[_Place, list[str]] = {}
    unknown: list[str] = []
    left_out: list[str] = []
    for name in names:
        places = [at for at, expression in kinds.get(_generalise(name), ()) if re.fullmatch(expression, name)]
        for place in places:
            used.setdefault(place, []).append(name)
        if not places:
            (left_out if any(pattern.fullmatch(name) for pattern in ignored) else unknown).append(name)
    if is_reversed and any(rule.beside for rule in recipe.rules):
        before = {name for names in used.values() for name in names}
        used = _keep_beside(recipe, used)
        unknown += sorted(before.difference(*used.values()))
    # A name of two stacks of layers is not evidence of either. Each stack has names of its own.
    sure = {places[0] for places in _find_places(used).values() if len(places) == 1}
    flags = raised_flags(recipe, sure)
    kept = {at: tuple(used[at]) for at in sorted(used) if recipe.rules[at[0]].within in (None, *flags)}
    missing = tuple(_missing(recipe, kept, is_reversed, flags))
    return Match(recipe, is_reversed, kept, tuple(unknown), tuple(left_out), missing)


def settle(found: Match, sizes: Mapping[str, int]) -> Match:
    """Return the match with each name only at the places that have its indices.

    Layers of two stacks may count on from each other in the names of one side: ``layers.{L}`` and then
    ``layers.{<_: L | next: M>}``. A name alone fits both; the number of layers decides.
    """
    wrong: set[tuple[_Place, str]] = set()
    originals = {at: names for at, names in found.used.items() if not found.recipe.rules[at[0]].is_copy}
    for name, each in _find_places(originals).items():
        right = [at for at in each if len(each) == 1 or _has_indices(found.side_at(at).name, name, sizes)]
        wrong.update((at, name) for at in each if right and at not in right)
    if not wrong:
        return found
    used = {at: tuple(n for n in names if (at, n) not in wrong) for at, names in found.used.items()}
    used = {at: names for at, names in used.items() if names}
    flags = raised_flags(found.recipe, used)
    return replace(found, used=used, missing=tuple(_missing(found.recipe, used, found.is_reversed, flags)))


def _find_places(used: Mapping[_Place, Iterable[str]]) -> dict[str, list[_Place]]:
    places: dict[str, list[_Place]] = {}
    for place, names in used.items():
        for name in names:
            places.setdefault(name, []).append(place)
    return places


def _has_indices(name: TensorName, text: str, sizes: Mapping[str, int]) -> bool:
    """Return whether the indices in a text lie in the dims of the name, as far as their sizes are known."""
    for dim, index in zip(name.dims, name.indices(text) or (), strict=True):
        first, last = find_range(dim, sizes)
        if index < first or (last is not None and index >= last):
            return False
    return True


def raised_flags(recipe: Recipe, used: Iterable[_Place]) -> set[str]:
    """Return the flags that these places show to be true."""
    rules = [recipe.rules[number] for number, _ in used]
    return {flag for rule in rules if not rule.is_copy for flag in (rule.when, rule.within) if flag is not None}


def _keep_beside(recipe: Recipe, used: Mapping[_Place, list[str]]) -> dict[_Place, list[str]]:
    """Return the names of each place without those in layers that lack the blocks which a rule is beside."""

    def layers_of(place: _Place) -> list[tuple[int, ...]]:
        side = source_sides(recipe.rules[place[0]], True)[place[1]]
        return [(side.name.indices(name) or ())[:1] for name in used[place]]

    groups: dict[str, set[tuple[int, ...]]] = {}
    for place in used:
        group = recipe.rules[place[0]].group
        if group is not None:
            groups.setdefault(group, set()).update(layers_of(place))
    found: dict[_Place, list[str]] = {}
    for place, names in used.items():
        beside = recipe.rules[place[0]].beside
        own = set[tuple[int, ...]]().union(*(groups.get(group, set()) for group in beside))
        kept = [name for name, layer in zip(names, layers_of(place), strict=True) if not beside or layer in own]
        if kept:
            found[place] = kept
    return found


@lru_cache(maxsize=256)
def _index(recipe: Recipe, is_reversed: bool) -> dict[str, list[tuple[_Place, str]]]:
    """Return kind of name -> (place, regular expression) of the rules that may match.

    A model has thousands of names of a few dozen kinds, so few expressions are ever compiled.
    """
    found: dict[str, list[tuple[_Place, str]]] = {}
    for number in active_rules(recipe, is_reversed):
        for form, side in enumerate(source_sides(recipe.rules[number], is_reversed)):
            kind = _generalise(side.name.with_indices(*(0 for _ in side.name.dims)))
            found.setdefault(kind, []).append(((number, form), side.name.expression))
    return found


@lru_cache(maxsize=1 << 17)
def _generalise(name: str) -> str:
    return re.sub(r"[0-9]+", "0", name)


def _missing(recipe: Recipe, used: Iterable[_Place], is_reversed: bool, raised: set[str]) -> list[str]:
    """Return the targets that a model must have and that no used rule makes (or has)."""
    texts = _target_texts(recipe)
    made: set[str] = set()
    for number, form in used:
        targets = texts[number]
        made.update(name for name, _ in (targets[form : form + 1] if is_reversed else targets))
    # A dense model lacks the sparse blocks rightly, but one without any block lacks all kinds: its layers are lost.
    present = {recipe.rules[number].group for number, _ in used} - {None}
    chosen = {recipe.rules[number].choice for number, _ in used if recipe.rules[number].group is not None}
    wanted: list[tuple[str, str]] = []
    for number in active_rules(recipe, is_reversed):
        rule = recipe.rules[number]
        # One tensor of a flag shows that the flag is true, so the others of the flag are due, too.
        is_due = (is_required(rule) or rule.when in raised) and rule.within in (None, *raised)
        is_due = is_due and not rule.is_copy
        is_needed = rule.group in (None, *present, *recipe.needed) or rule.choice not in chosen
        if is_due and is_needed:
            wanted += texts[number]
    return [text for name, text in dict.fromkeys(wanted) if name not in made]


@lru_cache(maxsize=256)
def _target_texts(recipe: Recipe) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return by rule the name of each target, and the target, as texts."""
    return tuple(tuple((str(side.name), str(side)) for side in rule.targets.values()) for rule in recipe.rules)
