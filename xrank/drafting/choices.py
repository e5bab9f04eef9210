"""Choose among possible explanations: those that no other contradicts; the rest stays undecided."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from xrank.drafting.explanations import Explanation, Found, Looker, Matrix, align, members
from xrank.drafting.kinds import Kind
from xrank.drafting.line_maps import LineMap, Lines, are_alike
from xrank.drafting.line_samples import WIDTH, Array
from xrank.drafting.vectors import compare_vectors

Evidence: TypeAlias = Literal["equal values", "similar values", "equal values and names", "names", "shapes"]

_NOISE = {"model", "module", "weight"}
_NUM_LINES = 3


@dataclass(frozen=True, eq=False)
class Candidate:
    """An explanation that may be right.

    Args:
        explanation: a whole and its parts.
        is_source_whole: whether the whole is the source's, and the parts are the base model's.
        evidence: what speaks for it.
    """

    explanation: Explanation
    is_source_whole: bool
    evidence: Evidence

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of both models in it."""
        return frozenset((self.explanation.whole, *(part.kind for part in self.explanation.parts)))

    @property
    def sources(self) -> tuple[Kind, ...]:
        """The source's kinds in it."""
        parts = tuple(part.kind for part in self.explanation.parts)
        return (self.explanation.whole,) if self.is_source_whole else parts

    @cached_property
    def target_names(self) -> frozenset[str]:
        """The base model's tensors in it."""
        if not self.is_source_whole:
            return frozenset(self.explanation.whole.members.values())
        whole = self.explanation.whole
        return frozenset(
            name for part in self.explanation.parts for _, _, name, _ in members(whole, part.kind, part.alignment)
        )

    def contradicts(self, other: Candidate) -> bool:
        """Return whether both cannot be right: they share a tensor of a model."""
        return not set(self.sources).isdisjoint(other.sources) or not self.target_names.isdisjoint(other.target_names)

    @property
    def targets(self) -> tuple[Kind, ...]:
        """The base model's kinds in it."""
        parts = tuple(part.kind for part in self.explanation.parts)
        return parts if self.is_source_whole else (self.explanation.whole,)


def choose(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates that nothing contradicts, and those between which nothing decides.

    A candidate is chosen if it is the only one for each of its kinds: among those of equal values, then, for kinds
    that several values fit, among biases of chosen weights, then among those whose names agree, then among those of
    similar values.
    """
    chosen: list[Candidate] = []
    left = list(candidates)
    while True:
        beside = [one for one in left if any(_is_beside(one, other) for other in chosen)]
        similar = [one for one in left if one.evidence != "equal values"]
        for group, rivals in ((_equal(left), None), (beside, None), (_named(left), None), (similar, left)):
            found = next(_lone(group, rivals), None)
            if found is not None:
                break
        else:
            return chosen, left
        if group is not similar and found.evidence == "equal values" and found not in _lone(_equal(left), None):
            found = Candidate(found.explanation, found.is_source_whole, "equal values and names")
        chosen.append(found)
        left = [one for one in left if one is not found and not one.contradicts(found)]


def _equal(left: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in left if one.evidence == "equal values"]


def _named(left: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in left if len(one.kinds) == 2 and is_alike_by_name(one.sources[0], one.targets[0])]


def _is_beside(one: Candidate, other: Candidate) -> bool:
    """Return whether names differ as those of a bias and its weight do, on both sides, and places are the same."""
    stems, maps = (
        [[_stem(kind) for kind in (*each.sources, *each.targets)] for each in (one, other)],
        [[(part.map.start, part.map.loops) for part in each.explanation.parts] for each in (one, other)],
    )
    return stems[0] == stems[1] and maps[0] == maps[1]


def _stem(kind: Kind) -> str:
    return re.sub(r"[._](weight|bias)", "", kind.name_with("*" * len(kind.counts)))


def _lone(candidates: Sequence[Candidate], rivals: Sequence[Candidate] | None) -> Iterator[Candidate]:
    """Yield the candidates that share no kind with another one; rivals are all that may contradict them."""
    for one in candidates:
        others = candidates if rivals is None else rivals
        if not any(one is not other and one.contradicts(other) for other in others):
            yield one


def is_alike_by_name(a: Kind, b: Kind) -> bool:
    """Return whether the last parts of two names agree, but for words that say nothing."""
    return _role(a) == _role(b) and len(a.counts) == len(b.counts)


def _role(kind: Kind) -> tuple[str, ...]:
    text = kind.texts[-1] if kind.counts else kind.texts[0]
    words = tuple(word for word in re.split(r"[._]", text.lower()) if word and word not in _NOISE)
    return (*words, "weight" if text.endswith("weight") else "")


def guess_alike(sources: Iterable[Kind], targets: Sequence[Kind]) -> Iterator[Candidate]:
    """Yield candidates without evidence from values: kinds of one shape whose names agree, or that have no rival."""
    sources = list(sources)
    pairs = [
        (source, target, alignment)
        for source in sources
        for target in targets
        for alignment in align(source, target)
        if source.shape[len(alignment.part_dims) :] == target.shape[len(alignment.whole_dims) :]
    ]
    for source, target, alignment in pairs:
        rivals = {(a, b) for a, b, _ in pairs if a is source or b is target}
        is_named = is_alike_by_name(source, target) and not alignment.part_dims and not alignment.whole_dims
        if is_named or len(rivals) == 1:
            core = source.shape[len(alignment.part_dims) :]
            matrix = Matrix(core[:1], core[1:], by_column=False)
            loops = ((core[0], 1),) if core and core[0] > 1 else ()
            part = Found(target, alignment, matrix, LineMap(0, loops, is_exact=False))
            yield Candidate(Explanation(source, matrix, (part,)), True, "names" if is_named else "shapes")


def confirm(candidate: Candidate, source: Looker, base: Looker) -> tuple[Evidence | None, str | None]:
    """Compare a few lines of all tensors of a candidate; return the evidence, or the first tensor that contradicts."""
    own, others = (source, base) if candidate.is_source_whole else (base, source)
    evidence = candidate.evidence
    matrix, whole = candidate.explanation.matrix, candidate.explanation.whole
    for part in candidate.explanation.parts:
        places = part.map.places()
        picked = sorted({0, len(places) // 2, len(places) - 1})[:_NUM_LINES]
        short: list[tuple[Array, Array]] = []
        for whole_name, whole_at, part_name, part_at in members(whole, part.kind, part.alignment):
            name = whole_name if candidate.is_source_whole else part_name
            if part.matrix.across:
                a = own.few(whole_name, whole_at, matrix, places[picked].tolist())
                is_equal = are_alike(Lines(a), Lines(others.few(part_name, part_at, part.matrix, picked)))
            else:
                pair = own.vector(whole_name, whole_at)[places], others.vector(part_name, part_at)
                is_equal = compare_vectors(*pair)
                if is_equal is None and len(places) < WIDTH:
                    short.append(pair)  # too short to be similar alone
                    continue
            if is_equal is None:
                return None, name
            if not is_equal and evidence == "equal values":
                evidence = "similar values"
        if short and compare_vectors(*map(np.concatenate, zip(*short, strict=True))) is None:
            return None, name
        if short and evidence == "equal values":
            evidence = "similar values"
    return evidence, None
