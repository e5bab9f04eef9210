"""Writing a delta: a team's ranks compare two versions of a model, each some tensors, and make the folder together.

Order of events, on every rank: it makes the bodies of its tensors, lends them to the others, and plans the same folder,
whose tensors the bodies are. From there on the folder is written as any model: stage, journal, manifest, one rename.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import chain
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank.commands.folder_filling import make_once, make_output
from xrank.commands.report import folder_report
from xrank.engine.delta_bodies import Bodies, DeltaBody, make_bodies
from xrank.engine.hf_folder import lay_out
from xrank.engine.planner import make_plan
from xrank.engine.report import DeltaDetails, Report
from xrank.engine.rounds import deal
from xrank.engine.tensor_pairs import Bytes, TensorSide
from xrank.errors import UsageError, option
from xrank.formats.deltas import (
    CHECKSUMS,
    ENCODINGS,
    MAX_OVERWRITTEN_NBYTES,
    DeltaFacts,
    state_digest,
    version_name,
    version_of,
)
from xrank.layout.nest_table import int_array
from xrank.layout.output_files import OutputTensor, Selection
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.ranks.loans import MemoryOffer, PeerSource, share_offers
from xrank.ranks.team import Team
from xrank.readers.deltas import number_of, read_held_version
from xrank.readers.placement import memory_of
from xrank.recipes.decision import Decision, FolderPlan
from xrank.recipes.found_source import FoundSource
from xrank.recipes.options import GatherOptions

_CHOICES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


def plan_version(
    out: str, base: str, *, encoding: str = "xor", checksum: str = "xxh3-128", step: int | None = None
) -> DeltaFacts:
    """Return the facts of the version that a folder's name gives.

    The base has the number that its name or its manifest gives, else it is taken for the version before.

    Raises:
        UsageError: `out` is not named as a version, its number is not above the base's, or a choice is unknown.
    """
    for name, value, choices in (("encoding", encoding, ENCODINGS), ("checksum", checksum, CHECKSUMS)):
        if value not in choices:
            wanted = ", ".join(choices)
            raise UsageError(
                f"{option(name)} must be one of {wanted}", got=repr(value), want=wanted, next_step="give one of these"
            )
    version, known = version_of(os.path.basename(out.rstrip("/"))), number_of(base)
    if known is None and (held := read_held_version(base)) is not None:
        known = held.number
    before = known if known is not None else (version or 0) - 1
    if version is None or not 0 <= before < version:
        raise UsageError(
            f"{out} is not the folder of a version after {base}",
            file=out,
            got=os.path.basename(out.rstrip("/")),
            want=f"{version_name((known or 0) + 1)}, or a higher number",
            next_step="give the folder such a name: its number is the version's",
        )
    return DeltaFacts(version, before, encoding, checksum, step=step)


def check_same_tensors(
    new: Sequence[OutputTensor], old: Sequence[OutputTensor], new_path: str, old_path: str, out: str
) -> None:
    """Check that two versions have the same names, shapes and types; UsageError otherwise."""
    known = [{one.name: one for one in each} for each in (new, old)]
    for name in sorted({*known[0], *known[1]}):
        mine, other = (each.get(name) for each in known)
        got, want = ("no such tensor" if one is None else f"{one.dtype} {list(one.shape)}" for one in (mine, other))
        if got != want:
            error = make_unfit_error(name, f"{got} in {new_path}", f"{want}, as in {old_path}", new_path, out)
            if mine is not None and other is not None and mine.shape == other.shape and other.dtype in _CHOICES:
                error.advise(f"give {option('dtype', _CHOICES[other.dtype])}, the type in {old_path}")
            raise error


def make_unfit_error(name: str | None, got: str | None, want: str, new_path: str, out: str) -> UsageError:
    """Return the error for a tensor whose change a delta cannot contain."""
    return UsageError(
        f"{name}: a delta only has changed values of the same tensors",
        tensor=name,
        got=got,
        want=want,
        next_step=f"write {new_path} as a whole model, with a gather to {out}: it starts a new chain",
    )


Batches: TypeAlias = Callable[[Sequence[int]], Iterable[tuple[Sequence[int], tuple[TensorSide, TensorSide]]]]
"""Returns parts of some tensors, by number, each with the new and the old model; files of the plans have the same
numbers. It may prepare the values of a part, and raises if a model has changed after the last."""


class NewVersion(Struct, frozen=True, eq=False):
    """A version that ranks write together."""

    team: Team
    outputs: Sequence[OutputTensor]
    """All tensors of the model."""
    facts: DeltaFacts
    """Without the digests of the states, unless they are known."""
    described: StoredModel
    """The new model, for the manifest and the report."""
    out: str
    options: GatherOptions
    """Buffers, threads, size of files, and what may be replaced."""
    command: str
    """Name of the command in the report."""
    started: float
    """When it began, on the monotonic clock."""
    notes: Sequence[tuple[str, str]] = ()
    timeout_seconds: float = 1800.0
    """How long a rank may be silent."""


def write_delta(
    new: NewVersion,
    batches: Batches,
    *,
    units: Sequence[Sequence[int]] | None = None,
    keep: Callable[[int, int, Bytes], object] = lambda number, low, new: None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Write the delta between two models with all ranks of a team, which are together; each makes this call.

    Args:
        new: the version.
        batches: reads this rank's share of the tensors.
        units: tensors, by number, that one rank must read together; None: each alone.
        keep: called with each stretch that was compared: the tensor's number, the first byte, and the new bytes; by
            any thread.
        progress: called on the first rank with (bytes compared, bytes in all), estimated from its own.

    Returns:
        The report; other ranks than the first do not know digests and counts.
    """
    team, facts, options = new.team, new.facts, new.options
    _check_sizes(new)
    numbers = share_of(team, new.outputs, units or [[number] for number in range(len(new.outputs))])
    total, done = sum(output.nbytes for output in new.outputs), [0]

    def count(nbytes: int) -> None:
        done[0] += nbytes
        if progress is not None and team.is_first:
            progress(min(total, done[0] * team.size), total)

    def make() -> Bodies:
        memory, workers, failures = options.max_memory_nbytes, options.num_workers, team.make_failure_check()
        kind, made = (facts.encoding, facts.checksum), list[Bodies]()
        for part, sides in batches(numbers):
            made.append(make_bodies(sides, part, *kind, memory, workers, keep, cancelled=failures, progress=count))
        return Bodies([*chain(*(one.found for one in made))], [*chain(*(one.frames for one in made))])

    made, _ = team.agree("the changes", make, lambda _: None, lambda _, __: None)
    return write_bodies(new, made)


def write_bodies(new: NewVersion, made: Bodies) -> Report:
    """Write the folder of a version, of whose bodies each rank has made some; errors as of `write_delta`."""
    team, facts = new.team, new.facts
    offer = MemoryOffer(
        made.frames,
        across_hosts=team.needs_ports,
        addresses=team.addresses,
        secret=team.secret,
        is_alone=team.size == 1,
    )
    with closing(offer):
        parts = share_offers(team, "all ranks' changes", offer, {"bodies": msgspec.to_builtins(made.found)})
        bodies = [msgspec.convert(part["bodies"], list[DeltaBody]) for part in parts]
        planned, ranks, views = _plan_folder(new, bodies)
        source = PeerSource(
            offer,
            team.rank,
            {rank: part["offer"] for rank, part in zip(team.ranks, parts, strict=True)},
            ranks,
            views,
            check=team.make_failure_check(),
            timeout_seconds=new.timeout_seconds,
        )
        with closing(source):
            if team.size == 1:
                written = make_once(planned, new.out, None, team, source)
            else:
                written = make_output(planned, source, new.out, None, team, planned.source.records.file)
            team.meet("the end of the delta")
    details = DeltaDetails(
        version=facts.version,
        base_version=facts.base_version,
        encoding=facts.encoding,
        checksum=facts.checksum,
        num_compared=sum(map(len, bodies)),
        num_changed=len(planned.selection.outputs),
        state=(planned.index or {})["xrank"].get("state", ""),
    )
    return replace(folder_report(new.command, planned, written, new.out, new.started), details=details)


def _check_sizes(new: NewVersion) -> None:
    for one in new.outputs:
        if new.facts.encoding == "overwrite" and one.nbytes > MAX_OVERWRITTEN_NBYTES:
            raise UsageError(
                f"{one.name} is too large for {option('encoding', 'overwrite')}, which records positions in 4 bytes",
                tensor=one.name,
                file=new.out,
                got=f"{one.nbytes:,} bytes",
                want=f"at most {MAX_OVERWRITTEN_NBYTES:,}",
                next_step=f"give {option('encoding', 'xor')}",
            )


def share_of(team: Team, outputs: Sequence[OutputTensor], units: Sequence[Sequence[int]]) -> list[int]:
    """Return the tensors of this rank, by number; those of a unit are one rank's."""
    owners = deal([sum(outputs[number].nbytes for number in unit) for unit in units], team.size)
    return [number for unit, owner in zip(units, owners, strict=True) if owner == team.position for number in unit]


def _plan_folder(new: NewVersion, bodies: Sequence[Sequence[DeltaBody]]) -> tuple[FolderPlan, list[int], list[int]]:
    """Return the plan of the folder, whose records are the bodies, and the rank and the view of each record."""
    ranks, outputs, facts, options = new.team.ranks, new.outputs, new.facts, new.options
    everything = [*chain.from_iterable(bodies)]
    if any(one.digest for one in everything):  # else the facts are those of versions that are folded
        kinds = [(outputs[one.number].name, outputs[one.number].dtype, outputs[one.number].shape) for one in everything]
        for field in ("digest", "base_digest"):
            rows_of = zip(kinds, everything, strict=True)
            state = state_digest({name: (dtype, shape, getattr(one, field)) for (name, dtype, shape), one in rows_of})
            facts = replace(facts, **{"state" if field == "digest" else "base_state": state})
    rows = []
    for position, own in enumerate(bodies):
        changed = [one for one in own if one.nbytes]
        rows += [(one.number, one, position, view) for view, one in enumerate(changed)]
    rows.sort(key=lambda row: row[0])
    shards, tensors, checksums = [], [], {}
    for record, (number, one, position, _) in enumerate(rows):
        tensors.append(OutputTensor(outputs[number].name, "U8", (one.nbytes,)))
        one_tensor = tensors[-1]
        shards.append(StoredShard.from_record(one_tensor.name, "U8", one_tensor.shape, record, ranks[position]))
        checksums[outputs[number].name] = one.checksum
    files = int_array(position for _, _, position, _ in rows)
    sizes = int_array(one.nbytes for _, one, _, _ in rows)
    held = [int(sizes[files == position].sum()) for position in range(len(ranks))]
    model = replace(
        new.described,
        files=tuple(SourceFile(memory_of(rank), size, rank, 0) for rank, size in zip(ranks, held, strict=True)),
        records=RecordTable(files, np.zeros(len(rows), np.int64), sizes, np.full(len(rows), NO_CHECKSUM)),
        shards=tuple(shards),
        aliases={},
        absent=(),
        hashes=(),
        padding_dropped={},
    )
    laid_out = lay_out(tensors, options.max_shard_nbytes, checksums=checksums) if tensors else ()
    selection = Selection(tuple(tensors), {}, (), {}, ())
    decision = Decision(FoundSource(model, None), model, options, None, None, None, selection)
    plan = make_plan(model, laid_out)
    planned = FolderPlan(decision, plan, selection, None, tuple(new.notes), {}, index=facts.to_metadata())
    return planned, [ranks[position] for _, _, position, _ in rows], [view for _, _, _, view in rows]
