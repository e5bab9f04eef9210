"""Compares gradients that ranks should hold alike: by hashes, then by values where hashes differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from xxhash import xxh128_hexdigest

from xrank.gradients.checking.findings import FindingKind, GradientFinding
from xrank.gradients.plan import GradientPlan, list_later
from xrank.gradients.wire import GradientWire
from xrank.words import join_words, ranks_text
from xrank.workspace.plain_memory import row_major_bytes

_MAX_COMPARED = 64
"""Gradients of one set of ranks whose values are compared; further findings have no difference."""


def compare_replicas(
    owned: Mapping[str, torch.Tensor | None], plan: GradientPlan, wire: GradientWire
) -> list[GradientFinding]:
    """Return where gradients differ that should be equal; all ranks of a set return the same.

    Args:
        owned: by name, the flat elements that this rank owns; None if no gradient came.
        plan: this rank's plan.
        wire: collectives between the ranks of the plan.
    """
    digests = {name: _digest(tensor) for name, tensor in owned.items()}
    findings: list[GradientFinding] = []
    sets: dict[tuple[tuple[int, ...], FindingKind, tuple[str, ...]], list[str]] = {}
    for name, ranks, kind, axes in _sets(plan):
        sets.setdefault((ranks, kind, axes), []).append(name)
    # All ranks use one order: a rank is in several sets, and each set waits for all of its ranks.
    for (ranks, kind, axes), names in sorted(sets.items()):
        own = [digests.get(name, "missing") for name in names]
        # One digest for all gradients of the set; each one's own travels only after a difference.
        digest_by_rank = wire.exchange(xxh128_hexdigest("\n".join(own).encode()), ranks)
        if len(set(digest_by_rank.values())) == 1:
            continue
        texts = wire.exchange(json.dumps([names, own]), ranks)
        names_of_first, _ = json.loads(texts[ranks[0]])  # each stage has its own name for a table
        known = {rank: json.loads(texts[rank])[1] for rank in ranks}
        num_compared = 0
        for place, name in enumerate(names):
            by_rank = {rank: known[rank][place] for rank in ranks}
            if len(set(by_rank.values())) == 1 or "missing" in by_rank.values():
                continue  # the rank without the gradient reports it
            difference, at = None, None
            tensor = owned.get(name)
            is_comparable = len({_header(text) for text in by_rank.values()}) == 1 and tensor is not None
            if is_comparable and num_compared < _MAX_COMPARED:
                assert tensor is not None
                num_compared += 1
                difference, at = _largest_difference(tensor, ranks, wire)
                if difference == 0:
                    continue  # only the signs of zeros differ
            message = _message(by_rank, axes, difference, at)
            findings.append(GradientFinding(kind, names_of_first[place], ranks, message, difference))
    return findings


def _sets(plan: GradientPlan) -> Iterator[tuple[str, tuple[int, ...], FindingKind, tuple[str, ...]]]:
    """Yield each parameter with each set of two or more ranks that should own equal elements of it."""
    for planned in plan.parameters:
        buffer = plan.buffers[planned.buffer]
        same = buffer.across_ranks if plan.config.use_distributed_optimizer else planned.ranks
        if len(same) > 1:
            yield planned.name, same, "replicas", planned.axes
    for planned, later in list_later(plan.parameters):
        kind: FindingKind = "tied" if later.kind in ("word", "position") else "replicas"
        yield planned.name, later.ranks, kind, later.axes


def _digest(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none came"
    return f"{tensor.numel()} of {tensor.dtype} {xxh128_hexdigest(row_major_bytes(tensor).data)}"


def _header(digest: str) -> str:
    return digest.rpartition(" ")[0]


def _largest_difference(tensor: torch.Tensor, ranks: tuple[int, ...], wire: GradientWire) -> tuple[float, int]:
    """Return the largest difference of an element between ranks, and the element's index."""
    values = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
    # Two maxima give the spread of each element over the ranks: max(x) + max(-x).
    high = values.to(wire.device, torch.float64)
    # Elements that are not finite are other findings; here they would hide the rest.
    high = torch.nan_to_num(high, nan=0.0, posinf=0.0, neginf=0.0)
    low = -high
    for handle in [wire.all_reduce(high, ranks, "max"), wire.all_reduce(low, ranks, "max")]:
        handle.wait()
    spread = high.add_(low)
    at = int(spread.argmax())
    return float(spread[at]), at // 2 if tensor.is_complex() else at


def _message(by_rank: Mapping[int, str], axes: Sequence[str], difference: float | None, at: int | None) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        groups.setdefault(text, []).append(rank)
    if len(groups) == len(by_rank):
        how = "each rank has another value"
    else:
        how = "; ".join(f"{ranks_text(ranks)} have one and the same" for ranks in groups.values() if len(ranks) > 1)
        alone = [ranks[0] for ranks in groups.values() if len(ranks) == 1]
        if alone:
            how += f", {ranks_text(alone)} another"
    headers = {_header(text) for text in groups}
    if len(headers) > 1:
        return f"copies along {join_words(axes)} are not alike: {how} ({' or '.join(sorted(groups))})"
    by = "" if difference is None else f", by up to {difference:.3g} at element {at} of those that are compared"
    return f"copies along {join_words(axes)} are not equal{by}: {how}"
