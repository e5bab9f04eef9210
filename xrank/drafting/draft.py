"""Draft a recipe: explain the tensors of a source by those of a base model, and write the rules that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import prod
from typing import Any

from xrank.drafting.choices import Candidate, Evidence, choose, confirm, guess_alike
from xrank.drafting.explanations import Explanation, Looker, explain
from xrank.drafting.kinds import Kind, find_kinds, split_kinds
from xrank.drafting.line_samples import LineSamples
from xrank.drafting.rule_texts import write_rule
from xrank.drafting.size_names import SizeNames
from xrank.drafting.vectors import explain_vector
from xrank.plan.decoding import open_files
from xrank.plan.source import StoredModel
from xrank.recipes.tied_weights import find_class_ties


@dataclass(frozen=True, slots=True)
class DraftedRule:
    """A rule, and the reason for it.

    Args:
        source: the text of the source.
        targets: part -> text of its target; the key is "" for a source that is one part.
        evidence: what speaks for the rule.
        names: the source's tensors.
        layers: the layers that have the targets, if it is not all of them.
        unless: a flag that makes the tensor superfluous.
    """

    source: str
    targets: Mapping[str, str]
    evidence: Evidence
    names: tuple[str, ...]
    layers: frozenset[int] | None = None
    unless: str | None = None


@dataclass(frozen=True, slots=True)
class Undecided:
    """Tensors of one kind without a rule, and the reason."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    reason: str


@dataclass(slots=True)
class Draft:
    """The rules of a draft, the sizes in them, and what is not decided."""

    rules: list[DraftedRule] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)
    """Kinds of the source's tensors."""
    missing: list[Undecided] = field(default_factory=list)
    """Kinds of the base model's tensors that nothing becomes."""
    config: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)


def draft(source: StoredModel, base: StoredModel, config: Mapping[str, Any]) -> Draft:
    """Return the draft of a recipe from a source's names to a base model's.

    Args:
        source: the source under its own names.
        base: the base model, with values.
        config: the content of the base model's config.json.
    """
    with closing(open_files(source)) as source_files, closing(open_files(base)) as base_files:
        looks = Looker(LineSamples(source, source_files)), Looker(LineSamples(base, base_files))
        return _Drafter(source, base, config, *looks).make()


class _Drafter:
    def __init__(
        self, source: StoredModel, base: StoredModel, config: Mapping[str, Any], look: Looker, base_look: Looker
    ) -> None:
        self._sources = find_kinds({shard.name: shard.shape for shard in source.shards if prod(shard.shape)})
        self._targets = find_kinds({shard.name: shard.shape for shard in base.shards if prod(shard.shape)})
        self._sources = split_kinds(self._sources, self._targets)
        self._targets = split_kinds(self._targets, self._sources)
        self._ties = find_class_ties([shard.name for shard in base.shards], config)
        self._look, self._base_look = look, base_look
        self._names = SizeNames(config)
        self._draft = Draft()
        self._reasons: dict[Kind, str] = {}

    def make(self) -> Draft:
        """Return the draft."""
        candidates = self._explain()
        tied = self._find_tied(candidates)
        chosen, open_ones = choose([one for one in candidates if one not in tied])
        if not chosen and not open_ones:
            chosen, open_ones = choose([*guess_alike(self._sources, self._targets)])
        for one in open_ones:
            others = ", ".join(kind.name_with("*" * len(kind.counts)) for kind in one.targets)
            for kind in one.sources:
                self._reasons[kind] = f"{self._reasons[kind]} or {others}" if kind in self._reasons else others
        used: set[Kind] = set()
        made: set[str] = set()
        for one in sorted(chosen, key=lambda one: self._sources.index(one.sources[0])):
            if self._add(one):
                used.update(one.sources)
                made |= one.target_names
        for one, name in tied.items():
            if one.target_names <= made and self._add(one, tied=name):
                used.update(one.sources)
        self._draft.undecided = [self._undecided(kind) for kind in self._sources if kind not in used]
        for kind in self._targets:
            names = tuple(name for name in kind.members.values() if name not in made)
            if names:
                self._draft.missing.append(Undecided(names, kind.shape, ""))
        self._draft.config, self._draft.sizes = self._names.config, self._names.sizes
        return self._draft

    def _explain(self) -> list[Candidate]:
        found: list[Candidate] = []
        for kind in self._sources:
            one = explain(kind, self._targets, self._look, self._base_look)
            if one is not None:
                found.append(_candidate(one, is_source_whole=True))
        explained = {kind for one in found for kind in (*one.sources, *_whole_targets(found))}
        for kind in self._targets:
            left = [source for source in self._sources if source not in explained]
            one = None if kind in explained else explain(kind, left, self._base_look, self._look)
            if one is not None and len(one.parts) > 1 and _is_whole(one):
                found.append(_candidate(one, is_source_whole=False))
        models = [one.explanation for one in found if one.is_source_whole]
        backwards = [one.explanation for one in found if not one.is_source_whole]
        explained = {kind for one in found for kind in (*one.sources, *_whole_targets(found))}
        sources, targets = ([k for k in kinds if k not in explained] for kinds in (self._sources, self._targets))
        for kind in sources:
            ones = explain_vector(kind, targets, self._look, self._base_look, models)
            found += [_candidate(one, is_source_whole=True) for one in ones]
        for kind in targets:
            ones = explain_vector(kind, sources, self._base_look, self._look, backwards)
            found += [_candidate(one, is_source_whole=False) for one in ones if len(one.parts) > 1 and _is_whole(one)]
        return found

    def _find_tied(self, candidates: Sequence[Candidate]) -> dict[Candidate, str]:
        """Return the candidates that are copies of a tied tensor -> the name that the base model ties to it."""
        found: dict[Candidate, str] = {}
        for tied, name in self._ties.items():
            copies = [one for one in candidates if len(one.kinds) == 2 and [*one.targets[0].members.values()] == [name]]
            copies = [one for one in copies if one.evidence == "equal values"]
            embeddings = [one for one in copies if _is_embedding(one.sources[0])]
            if len(copies) == 2 and len(embeddings) == 1:
                found.update({one: tied for one in copies if one not in embeddings})
        return found

    def _add(self, one: Candidate, tied: str | None = None) -> bool:
        """Add the rules of a candidate; return whether it has any."""
        evidence: Evidence | None = one.evidence
        if evidence not in ("names", "shapes"):
            evidence, other = confirm(one, self._look, self._base_look)
            if evidence is None:
                for kind in one.sources:
                    self._reasons[kind] = f"{', '.join(map(str, one.targets))}, which {other} contradicts"
                return False
        texts = write_rule(one.explanation, self._names)
        if texts is None:
            for kind in one.sources:
                self._reasons[kind] = f"{', '.join(map(str, one.targets))} in an order that recipes cannot express"
            return False
        assert evidence is not None
        if one.is_source_whole:
            targets = texts.parts
            if tied is not None:
                targets = {"": f"{tied} {texts.parts[''].partition(' ')[2]}"}
                self._names.config["tied"] = ("tie_word_embeddings", "true")
            rules = [(texts.whole, targets, one.sources[0])]
            if texts.rows is not None and texts.rows not in self._draft.padded:
                self._draft.padded.append(texts.rows)
        else:
            rules = [
                (text, {key: texts.whole}, kind)
                for (key, text), kind in zip(texts.parts.items(), one.sources, strict=True)
            ]
        for source, own, kind in rules:
            self._draft.rules.append(
                DraftedRule(
                    source,
                    own,
                    evidence,
                    tuple(kind.members.values()),
                    _partial_layers(one.targets[0]),
                    "tied" if tied is not None else None,
                )
            )
        return True

    def _undecided(self, kind: Kind) -> Undecided:
        reason = self._reasons.get(kind)
        text = "no tensors of the base model have its values" if reason is None else f"may be {reason}"
        return Undecided(tuple(kind.members.values()), kind.shape, text)


def _whole_targets(candidates: Sequence[Candidate]) -> list[Kind]:
    """Return the base model's kinds of which some candidates together make all tensors."""
    made = frozenset[str]().union(*(one.target_names for one in candidates))
    kinds = dict.fromkeys(kind for one in candidates for kind in one.targets)
    return [kind for kind in kinds if made.issuperset(kind.members.values())]


def _candidate(one: Explanation, *, is_source_whole: bool) -> Candidate:
    return Candidate(one, is_source_whole, "equal values" if one.is_exact else "similar values")


def _is_whole(one: Explanation) -> bool:
    """Return whether all tensors of the parts are in the whole, not those of some layers only."""
    return all(
        one.whole.values_at(a) == part.kind.values_at(b) for part in one.parts for a, b in part.alignment.indices
    )


def _is_embedding(kind: Kind) -> bool:
    return any(word in kind.texts[0].lower() for word in ("emb", "wte"))


def _partial_layers(target: Kind) -> frozenset[int] | None:
    if not target.counts:
        return None
    layers = target.values_at(0)
    return layers if len(layers) < target.counts[0] else None
