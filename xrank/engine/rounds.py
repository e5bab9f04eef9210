"""Rounds: all ranks of a team make a plan's files together, each a share of every round, and the first joins them.

Order of events, on every rank: all divide the plan alike, without messages; in each round every rank makes its share
and sends the first rank its findings; the first joins them, compares the checksums of records that several ranks read,
and finishes the files whose every source is checked; at the end every rank checks that its sources have not changed.

A round is some files, so that the files of earlier rounds survive a failure. In a round all ranks make nearly equally
many bytes: each one contiguous stretch of the windows, also inside files. If ranks hold the source in their own
memories, a window goes to the rank with most of its bytes, at equal loads; windows of which several ranks hold equally
much, such as those of columns or replicas, go to the rank with the least work.
"""

from __future__ import annotations

import logging
import mmap
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import astuple

from xrank import dtypes
from xrank.engine import windows
from xrank.engine.buffers import NullTarget, OpenSource, Target
from xrank.engine.executor import Budget, Outcome, execute
from xrank.engine.faults import make_checksums
from xrank.engine.planner import Copies, FilePlan, Plan, TensorPlan
from xrank.engine.replicas import ReplicaChoice, prefer_own_copies
from xrank.engine.windows import BoolArray, FileHashes, FilePart, FinishedFile, JoinedFile, read_rest
from xrank.layout.nest_table import IntArray
from xrank.layout.output_files import PlacedBytes
from xrank.ranks.team import Team
from xrank.storage import client

if TYPE_CHECKING:
    from xrank.engine.transforms import Transforms


_NEARLY = 0.9
"""Fraction of the most bytes of a window on any rank; a rank with that much is near to the window."""
_MOST_PERCENT = 105
"""Most windows of a rank, in percent of the mean."""
_MOST_PLACES = 1 << 20
"""A tensor in more (window, rank) places than this is not near to any rank: its pieces are thin slices."""


def deal(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank that gets each piece of work: the largest piece first, each to the rank with the least so far."""
    owners, loads = [0] * len(sizes), [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


def assign_makers(files: Sequence[FilePlan], starts: Sequence[int], holder: IntArray, num_ranks: int) -> IntArray:
    """Return the rank that makes each window; all ranks make nearly equally many.

    `starts` has the number of each file's first window, and at the end the number of windows; `holder` has by source
    record the rank that holds it.
    """
    makers = np.full(starts[-1], -1, np.int64)
    loads = np.zeros(num_ranks, np.int64)
    for low, high, near in _runs(files, starts, holder, num_ranks):
        # One contiguous part for each near rank.
        step = -(-(high - low) // len(near))
        for start in range(low, high, step):
            rank = int(near[loads[near].argmin()])  # the lowest of equals
            stop = min(start + step, high)
            makers[start:stop] = rank
            loads[rank] += stop - start
    _even_out(makers, loads)
    return makers


def _runs(
    files: Sequence[FilePlan], starts: Sequence[int], holder: IntArray, num_ranks: int
) -> Iterator[tuple[int, int, IntArray]]:
    """Yield (first window, one past the last, near ranks) of runs of windows with the same near ranks."""
    everyone = np.arange(num_ranks)
    for file, start, stop in zip(files, starts, starts[1:], strict=False):
        window, rank = _find_near_ranks(file, stop - start, holder, num_ranks)
        counts = np.bincount(window, minlength=stop - start)
        firsts = np.cumsum(counts) - counts
        # A run ends where the number of near ranks changes, or one of them.
        is_new = np.append(True, counts[1:] != counts[:-1])[: stop - start]
        before = firsts[window - 1] + np.arange(len(window)) - firsts[window]
        compared = ~is_new[window]
        is_new[window[compared][rank[compared] != rank[before[compared]]]] = True
        for low, high in pairwise((*np.flatnonzero(is_new).tolist(), stop - start)):
            near = rank[firsts[low] : firsts[low] + counts[low]]
            yield start + low, start + high, near if len(near) else everyone


def _find_near_ranks(file: FilePlan, num_windows: int, holder: IntArray, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Return (window, rank) for all near ranks of each window of a file, by rising window, then rank."""
    held = [_measure_held(tensor, holder, num_ranks) for tensor in file.tensors]
    none = np.empty(0, np.int64)
    keys, nbytes = (np.concatenate([none, *column]) for column in zip(*held, strict=True)) if held else (none, none)
    # Several tensors may be in one window: equal keys are added up.
    order = np.argsort(keys, kind="stable")  # fast on rising runs
    keys = keys[order]
    firsts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    sums = np.add.reduceat(nbytes[order], firsts) if len(firsts) else none
    keys = keys[firsts]
    window, rank = keys // num_ranks, keys % num_ranks
    most = np.zeros(num_windows, np.int64)
    np.maximum.at(most, window, sums)
    is_near = sums >= _NEARLY * most[window]
    return window[is_near], rank[is_near]


def _measure_held(tensor: TensorPlan, holder: IntArray, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Return (window * ranks + rank, bytes) for all pieces of a tensor; holes are spread evenly."""
    output, width = tensor.output, dtypes.dtype(tensor.output.dtype).nbytes
    found = []
    for copies in (tensor.copies, tensor.replicas):
        start, end = (output.offset + side * width for side in (copies.nests.y, copies.nests.y_ends))
        low, high = start // windows.WINDOW_NBYTES, (end - 1) // windows.WINDOW_NBYTES
        counts = high - low + 1
        if counts.sum() > _MOST_PLACES:
            continue
        piece = np.repeat(np.arange(len(copies)), counts)
        window = low[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
        inside = np.minimum(end[piece], (window + 1) * windows.WINDOW_NBYTES)
        inside -= np.maximum(start[piece], window * windows.WINDOW_NBYTES)
        share = copies.nests.sizes * width / np.maximum(1, end - start)
        found.append((window * num_ranks + holder[copies.record[piece]], (inside * share[piece]).astype(np.int64)))
    none = np.empty(0, np.int64)
    return np.concatenate([none, *(keys for keys, _ in found)]), np.concatenate([none, *(nb for _, nb in found)])


def _even_out(makers: IntArray, loads: IntArray) -> None:
    """Move the last windows of overloaded ranks to those with the fewest."""
    mean, most = len(makers) // len(loads), -(-_MOST_PERCENT * len(makers) // (100 * len(loads)))
    surplus = np.concatenate([np.flatnonzero(makers == rank)[most:] for rank in range(len(loads))])
    # In the order of the files, so a rank receives windows that follow each other.
    surplus.sort()
    done = 0
    kept = np.minimum(loads, most)
    while done < len(surplus):
        rank = int(kept.argmin())
        # Up to the mean at once: one window at a time would deal neighbors out to all ranks in turn.
        count = max(1, mean - int(kept[rank]))
        makers[surplus[done : done + count]] = rank
        kept[rank] += count
        done += count


ROUND_NBYTES = 2 << 30
"""Bytes of a round for each rank: after each, the ranks wait for the slowest."""


class Round(Struct, frozen=True):
    """Files that are made together."""

    files: tuple[int, ...]
    shares: tuple[Mapping[int, tuple[range, ...]], ...]
    """By rank: file -> ranges of its windows that the rank makes, rising; files without any are left out."""


class Division(Struct, frozen=True, eq=False):
    """A plan's unfinished files in rounds, and the ranks that read each source record."""

    rounds: tuple[Round, ...]
    first_rank: IntArray
    """By record: the lowest rank that reads it; the number of ranks if none does."""
    last_rank: IntArray
    """By record: the highest rank that reads it; -1 if none does."""
    last_round: IntArray
    """By record: the last round in which a rank reads it; -1 if none does."""

    @property
    def left_open(self) -> BoolArray:
        """Mask of the records that several ranks read, so that none of them can check one alone."""
        return self.first_rank < self.last_rank

    def find_records(self, number: int, rank: int | None = None) -> list[int]:
        """Return the records that this rank alone reads, or several if it is None, for the last time in that round."""
        alone = (self.first_rank == rank) & (self.last_rank == rank)
        wanted = self.left_open if rank is None else alone
        return [int(record) for record in np.flatnonzero(wanted & (self.last_round == number))]


def divide(
    plan: Plan,
    files: Sequence[int],
    num_ranks: int,
    *,
    holder: IntArray | None = None,
    round_nbytes: int | None = None,
    units: Mapping[int, int] | None = None,
) -> Division:
    """Divide a plan's files, by index and in order, among ranks.

    `holder` has by record the rank that holds it, `units` by file the bytes of which a multiple begins every rank's
    stretch: those of a window for other files.
    """
    num_records = len(plan.source.records)
    first, last, last_round = (np.full(num_records, value, np.int64) for value in (num_ranks, -1, -1))
    rounds = []
    least = num_ranks * (ROUND_NBYTES if round_nbytes is None else round_nbytes)
    for number, group in enumerate(group_files(plan, files, least)):
        counts = [-(-plan.files[index].output.nbytes // windows.WINDOW_NBYTES) for index in group]
        starts = [0, *accumulate(counts)]
        if holder is None:
            makers = np.arange(starts[-1]) * num_ranks // max(1, starts[-1])
        else:
            makers = assign_makers([plan.files[index] for index in group], starts, holder, num_ranks)
        for index, start, stop in zip(group, starts, starts[1:], strict=False):
            unit = (units or {}).get(index, windows.WINDOW_NBYTES) // windows.WINDOW_NBYTES
            if unit > 1:  # the maker of a unit's first window makes all of it
                makers[start:stop] = np.repeat(makers[start:stop:unit], unit)[: stop - start]
        rounds.append(Round(tuple(group), _shares(group, starts, makers, num_ranks)))
        for index, start in zip(group, starts, strict=False):
            for tensor in plan.files[index].tensors:
                for copies in tensor.read:
                    lowest, highest = _readers(tensor, copies, start, makers, is_rising=holder is None)
                    # `at`: several pieces may be in one record, and an assignment would keep only the last rank.
                    np.minimum.at(first, copies.record, lowest)
                    np.maximum.at(last, copies.record, highest)
                    last_round[copies.record] = number
    return Division(tuple(rounds), first, last, last_round)


def _shares(
    group: Sequence[int], starts: Sequence[int], makers: IntArray, num_ranks: int
) -> tuple[Mapping[int, tuple[range, ...]], ...]:
    """Return by rank its windows of each file; the i-th file of the group has the windows from starts[i] on."""
    shares: list[dict[int, list[range]]] = [{} for _ in range(num_ranks)]
    for index, start, stop in zip(group, starts, starts[1:], strict=False):
        changes = np.flatnonzero(np.diff(makers[start:stop])) + 1
        for low, high in pairwise((0, *changes.tolist(), stop - start)):
            shares[int(makers[start + low])].setdefault(index, []).append(range(low, high))
    return tuple({index: tuple(ranges) for index, ranges in share.items()} for share in shares)


def group_files(plan: Plan, files: Sequence[int], least_nbytes: int) -> Iterator[list[int]]:
    """Yield consecutive groups of the files, each of at least that many bytes but for the last."""
    group: list[int] = []
    nbytes = 0
    for index in files:
        group.append(index)
        nbytes += plan.files[index].output.nbytes
        if nbytes >= least_nbytes:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _readers(
    tensor: TensorPlan, copies: Copies, start: int, makers: IntArray, *, is_rising: bool
) -> tuple[IntArray, IntArray]:
    """Return, for each piece, the lowest and the highest rank that may read it; `start` is its file's first window."""
    # A piece with holes is taken for one without: a rank too many costs a message, one too few breaks the proof.
    output = tensor.output
    width = dtypes.dtype(output.dtype).nbytes
    lows, ends = copies.nests.y * width, copies.nests.y_ends * width
    # Factors of an update are read whole, whichever windows of the tensor a rank makes.
    if copies is not tensor.copies and copies is not tensor.replicas:
        lows, ends = np.zeros_like(lows), np.full_like(ends, output.nbytes)
    low = start + (output.offset + lows) // windows.WINDOW_NBYTES
    # A factor without bytes would end in the window before its first.
    high = np.maximum(low, start + (output.offset + ends - 1) // windows.WINDOW_NBYTES)
    if is_rising or not len(low):
        return makers[low], makers[high]
    # Minimum and maximum of each range; reduceat needs a valid index as the end of the last one.
    borders, padded = np.stack((low, high + 1), axis=1).ravel(), np.append(makers, makers[-1])
    return np.minimum.reduceat(padded, borders)[::2], np.maximum.reduceat(padded, borders)[::2]


class Work(Struct, frozen=True, eq=False):
    """A plan, and the settings by which one rank makes its files. The opener of the source also closes it."""

    plan: Plan
    """The plan of all files."""
    source: OpenSource
    """The source that this rank reads."""
    budget: Budget
    """Threads and buffers of this rank; a transform needs memory for one whole tensor and its outputs on top."""
    replicas: ReplicaChoice = "verify"
    """Whether differing replicas raise an error or one is picked."""
    holder: IntArray | None = None
    """By record, the position in the team of the rank whose memory holds it; None: the records are in files."""
    transforms: Transforms | None = None
    """Outputs of a caller's function on a live model's tensors; they are in separate files."""
    file_hashes: FileHashes | None = None
    """Hashes the files that this rank writes alone, for a signature."""
    measures_errors: bool = False
    """Whether the errors of encoded tensors are measured."""
    make_transformed: Callable[..., None] | None = None
    """`xrank.engine.transformed_files.make_transformed`, if there are transforms."""

    def split_files(self, files: Iterable[int]) -> tuple[list[int], list[int]]:
        """Split files by index into copied and transformed ones."""
        apart = set() if self.transforms is None else self.transforms.files
        parts: tuple[list[int], list[int]] = ([], [])
        for index in files:
            parts[index in apart].append(index)
        return parts


class PartialResults(Struct, frozen=True):
    """One rank's findings."""

    parts: tuple[FilePart, ...]
    records: Sequence[tuple[int, int, int, int]]
    """(Record, start, end, CRC-32) of the stretches that this rank read of records that others read too."""
    num_checksums: int
    """Number of records that this rank alone read and compared, since the beginning."""
    differences: Mapping[str, Mapping[int, int]]
    """Differences in this round, as in `Outcome.differences`."""
    shared_nbytes: int = 0
    """Bytes in this round, as in `Outcome.shared_nbytes`."""
    odd: Sequence[tuple[int, int, bytes]] = ()
    """(File, offset, bytes) of pages that the first rank writes."""
    errors: Mapping[str, Sequence[float]] = {}
    """As in `Outcome.errors`."""


_logger = logging.getLogger(__name__)


class Outputs:
    """The files of a rank's shares. Each round calls `begin`, `target.write`, `finish_share`, then `close`.

    The first rank then calls `finish` for each file that is complete. The base class discards every byte: for digests
    alone.
    """

    target: Target = NullTarget()
    """The target that the executor writes to."""
    writes_anywhere: ClassVar[bool] = True
    """Whether a rank may write any bytes of a file; if not, it writes whole units of `unit_nbytes`."""

    def unit_nbytes(self, index: int) -> int:
        """Return the bytes of which a multiple is the beginning of every rank's share of a file."""
        return windows.WINDOW_NBYTES

    def explain_errors(self) -> AbstractContextManager[None]:
        """Explain errors of the body in terms of these outputs."""
        return nullcontext()

    def begin(self, index: int) -> None:
        """Prepare for writes to a file."""

    def finish_share(self, part: FilePart) -> None:
        """Flush the part of a file to its storage."""

    def take_receipt(self) -> str:
        """Return a text about the shares of a round, which the first rank gets; empty if it needs none."""
        return ""

    def accept(self, receipt: str) -> None:
        """Take, on the first rank, the text of one rank about a round, before the round's files are finished."""

    def close(self) -> None:
        """Release the files that a failure left open."""

    def finish(self, finished: FinishedFile, ending: Sequence[PlacedBytes] = ()) -> None:
        """Finish a file, all parts of which are made, and write this ending."""


def make_files(
    team: Team,
    work: Work,
    files: Sequence[int],
    outputs: Outputs,
    *,
    what: str,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Make files of a plan, the transformed ones last, by a process alone or by all ranks as `make_in_rounds`.

    A process alone closes `outputs` itself, and checks itself that the source has not changed.
    """
    copied, last = work.split_files(files)
    checksums = make_checksums(work.plan) if team.size == 1 else None
    if checksums is None:
        outcome = make_in_rounds(team, work, copied, outputs, what=what, progress=progress)
    else:
        outcome = execute(
            work.plan,
            work.source,
            outputs.target,
            budget=work.budget,
            files=copied,
            checksums=checksums,
            file_hashes=work.file_hashes,
            replicas=work.replicas,
            begin=outputs.begin,
            finish=outputs.finish,
            progress=progress,
        )
    if last:
        assert work.make_transformed is not None, "transforms without their maker"
        before = sum(work.plan.files[index].output.nbytes for index in copied)
        work.make_transformed(
            team,
            work,
            last,
            outputs,
            outcome,
            what=what,
            checksums=checksums,
            progress=lambda done: progress(before + done),
        )
        if checksums is not None:
            outcome.num_checksums = checksums.num_checked
    return outcome


def make_in_rounds(
    team: Team,
    work: Work,
    files: Sequence[int],
    outputs: Outputs,
    *,
    what: str,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Make files of a plan together with all other ranks, which make the same call; return the findings of all.

    `what` names the files in errors, and `progress` is called on the first rank with an estimate of the bytes that all
    ranks have made so far. Transformed files are not among the files.

    Returns:
        On the first rank, the same outcome as from one process; an empty outcome elsewhere.

    Raises:
        CorruptError, ContradictionError: the source does not match its metadata.
        XrankError: from `outputs`.
        RankFailedError: a rank failed; finished files are kept.
    """
    plan, rank = work.plan, team.position
    units = {index: outputs.unit_nbytes(index) for index in files}
    division = divide(plan, files, team.size, holder=work.holder, units=units)
    own = plan if work.holder is None else prefer_own_copies(plan, work.holder, rank)
    checksums = make_checksums(plan, left_open=division.left_open)
    joining = _Joining(work, division, outputs)
    sizes = {index: plan.files[index].output.nbytes for index in files}
    before, total = 0, sum(sizes.values())

    def count(done: int) -> None:
        # Rank 0 assumes that the others are equally far: they report only at the end of a round.
        if team.is_first:
            progress(min(before + done * team.size, total))

    for number, round_ in enumerate(division.rounds):
        try:
            with outputs.explain_errors():
                outcome = execute(
                    own,
                    work.source,
                    outputs.target,
                    budget=work.budget,
                    shares=round_.shares[rank],
                    checksums=checksums,
                    replicas=work.replicas,
                    begin=outputs.begin,
                    finish_share=outputs.finish_share,
                    cancelled=team.make_failure_check(),
                    progress=count,
                )
        finally:
            outputs.close()
        # Only of records that no other rank reads: of the others the first rank joins the parts, and reads the rest.
        read_rest(checksums, work.source, division.find_records(number, rank), _staging(work.budget))
        results = PartialResults(
            tuple(outcome.parts.values()),
            checksums.take_parts(division.find_records(number)),
            checksums.num_checked,
            outcome.differences,
            outcome.shared_nbytes,
        )
        with exchange(team, f"{what}, round {number + 1}", outputs, results) as found:
            if team.is_first:
                joining.join(number, found)
        if team.is_first:
            before += sum(sizes[index] for index in round_.files)
            progress(before)
            _logger.debug("round %d of %d: %d files", number + 1, len(division.rounds), len(round_.files))
    if division.rounds:
        work.source.check_unchanged()  # all ranks have finished reading
        team.meet(f"{what}, all of it")
    return joining.outcome() if team.is_first else Outcome()


@contextmanager
def exchange(team: Team, what: str, outputs: Outputs, results: PartialResults) -> Iterator[list[PartialResults]]:
    """Send this rank's findings of a round to the first, and yield there those of all ranks, elsewhere none."""
    message = {
        "findings": b2a_base64(msgspec.msgpack.encode(results), newline=False).decode(),
        "receipt": outputs.take_receipt(),
        "traffic": [*astuple(client.take_traffic())],
    }
    with team.collect(what, message) as messages:
        for position, one in enumerate(messages):
            outputs.accept(one["receipt"])
            if position:  # the first rank has counted its own
                client.add_traffic(client.StoreTraffic(*one["traffic"]))
        yield [msgspec.msgpack.decode(a2b_base64(one["findings"]), type=PartialResults) for one in messages]


class _Joining:
    """Joins the findings of all ranks, on the first rank."""

    def __init__(self, work: Work, division: Division, outputs: Outputs) -> None:
        self._work, self._plan, self._division, self._outputs = work, work.plan, division, outputs
        self._checksums = make_checksums(work.plan)
        self._joined: dict[int, JoinedFile] = {}  # files that later rounds continue to read
        self._outcome = Outcome()
        self._num_checked: Sequence[int] = ()
        self._last_round = dict.fromkeys((index for r in division.rounds for index in r.files), 0)
        for index in self._last_round:
            read = (copies for tensor in self._plan.files[index].tensors for copies in tensor.read if len(copies))
            self._last_round[index] = max((int(division.last_round[c.record].max()) for c in read), default=0)

    def join(self, number: int, found: Sequence[PartialResults]) -> None:
        """Join the findings of all ranks in a round; finish each file whose sources are all checked."""
        for index in self._division.rounds[number].files:
            self._joined[index] = JoinedFile(self._plan.files[index].output, index)
        for results in found:
            for part in results.parts:
                self._joined[part.index].join(part)
            for record in results.records:
                self._checksums.join(*record)
            self._outcome.shared_nbytes += results.shared_nbytes
            for name, ranks in results.differences.items():
                known = self._outcome.differences.setdefault(name, {})
                for rank, num_elements in ranks.items():
                    known[rank] = known.get(rank, 0) + num_elements
        self._num_checked = [results.num_checksums for results in found]
        # A record is missing here if no rank read it, or if two ranks read it in overlapping cuts.
        staging = _staging(self._work.budget)
        read_rest(self._checksums, self._work.source, self._division.find_records(number), staging)
        # A file with a record that later rounds read waits: its bytes are not proven before the record's checksum is.
        for index in [index for index in self._joined if self._last_round[index] <= number]:
            finished, ending = self._joined.pop(index).finish()
            self._outputs.finish(finished, ending)
            self._outcome.files[index] = finished

    def outcome(self) -> Outcome:
        assert not self._joined, "files were made and never finished"
        self._outcome.num_checksums = sum(self._num_checked) + self._checksums.num_checked
        return self._outcome


def _staging(budget: Budget) -> memoryview:
    return memoryview(mmap.mmap(-1, budget.staging_nbytes))
