"""Rounds: all ranks of a team make a plan's files together, each a share of every round, and the first joins them.

The destination of the bytes is given as `Outputs`. Order of events, on every rank: all divide the plan alike; in each
round every rank makes its share and sends the first rank its findings; the first joins them, compares the checksums of
records that several ranks read, and finishes the files whose every source is checked; at the end every rank checks that
its sources have not changed.
"""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple

from xrank.engine import windows
from xrank.engine.buffers import NullTarget, OpenSource, Target
from xrank.engine.division import Division, divide
from xrank.engine.executor import Budget, Outcome, execute
from xrank.engine.faults import raise_mismatch
from xrank.engine.planner import Plan
from xrank.engine.replicas import ReplicaChoice, prefer_own_copies
from xrank.engine.windows import DigestPart, FileHashes, FilePart, FinishedFile, JoinedFile, RecordChecksums, read_rest
from xrank.layout.nest_table import IntArray
from xrank.ranks.team import Team

if TYPE_CHECKING:
    from xrank.engine.transforms import Transforms


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

    def to_message(self) -> dict[str, Any]:
        """Return the findings as a message for a gather."""
        digests = [(part.index, tensor, digest) for part in self.parts for tensor, digest in part.digests]
        blocks = [(index, tensor, *one) for index, tensor, digest in digests for one in digest.blocks]
        edges = [(index, tensor, *one) for index, tensor, digest in digests for one in digest.edges]
        crcs = [(part.index, *crc) for part in self.parts for crc in part.crcs]
        data = b"".join(one[3] for one in (*blocks, *edges))
        return {
            "files": _table([(part.index,) for part in self.parts], 1),
            "blocks": _table(((*one[:3], len(one[3])) for one in blocks), 4),
            "edges": _table(((*one[:3], len(one[3])) for one in edges), 4),
            "crcs": _table(crcs, 5),
            "records": _table(self.records, 4),
            "bytes": _tensor(np.frombuffer(bytearray(data), np.uint8)),
            "num_checksums": self.num_checksums,
            "shared_nbytes": self.shared_nbytes,
            "differences": {name: dict(ranks) for name, ranks in self.differences.items()},
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> PartialResults:
        """Return the findings from a message of `to_message`."""
        data = message["bytes"].numpy().tobytes()
        crcs: dict[int, list[tuple[int, int, int, int]]] = {}
        for index, *crc in message["crcs"].tolist():
            crcs.setdefault(index, []).append(tuple(crc))
        found: dict[int, dict[int, tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]]] = {}
        # In the order of `to_message`: the bytes of all blocks, then those of all edges.
        position = 0
        for kind, table in enumerate(("blocks", "edges")):
            for index, tensor, start, nbytes in message[table].tolist():
                digest = found.setdefault(index, {}).setdefault(tensor, ([], []))
                digest[kind].append((start, data[position : position + nbytes]))
                position += nbytes
        digests = {
            index: tuple((tensor, DigestPart(*map(tuple, digest))) for tensor, digest in tensors.items())
            for index, tensors in found.items()
        }
        return cls(
            tuple(
                FilePart(index, digests.get(index, ()), tuple(crcs.get(index, ())))
                for (index,) in message["files"].tolist()
            ),
            [tuple(row) for row in message["records"].tolist()],
            message["num_checksums"],
            message["differences"],
            message["shared_nbytes"],
        )


def _table(rows: Iterable[tuple[int, ...]], width: int) -> Any:
    return _tensor(np.array(list(rows), np.int64).reshape(-1, width))


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch  # ranks that meet have imported it already: they met through its store

    return torch.from_numpy(array)


def take_traffic() -> list[int]:
    """Return the requests and bytes of this process since the last call, as numbers for a message."""
    # A command without a URL never imports the client.
    client: Any = sys.modules.get("xrank.storage.client")
    return [] if client is None else [*astuple(client.take_traffic())]


def add_traffic(counts: Sequence[int]) -> None:
    """Add the requests and bytes of another rank to this process's."""
    if any(counts):
        from xrank.storage.client import Traffic, add_traffic

        add_traffic(Traffic(*counts))


_logger = logging.getLogger(__name__)

Finish = Callable[[JoinedFile, int], FinishedFile]
"""Finishes a file after all its parts are joined, on the first rank: (the file, its index) -> the finished file."""


class Outputs(Protocol):
    """The files of a rank's shares. Each round calls `begin`, `target.write`, `finish_share`, then `close`."""

    @property
    def target(self) -> Target:
        """The target that the executor writes to."""

    @property
    def writes_anywhere(self) -> bool:
        """Whether a rank may write any bytes of a file; if not, it writes whole units of `unit_nbytes`."""

    def unit_nbytes(self, index: int) -> int:
        """Return the bytes of which a multiple is the beginning of every rank's share of a file."""

    def explain_errors(self) -> AbstractContextManager[None]:
        """Explain errors of the body in terms of these outputs."""

    def begin(self, index: int) -> None:
        """Prepare for writes to a file."""

    def finish_share(self, part: FilePart) -> None:
        """Flush the part of a file to its storage."""

    def take_receipt(self) -> str:
        """Return a text about the shares of a round, which the first rank gets; empty if it needs none."""

    def accept(self, receipt: str) -> None:
        """Take, on the first rank, the text of one rank about a round, before the round's files are finished."""

    def close(self) -> None:
        """Release the files that a failure left open."""


class LocalOutputs:
    """Base of outputs that need no receipts and have no units."""

    writes_anywhere = True

    def unit_nbytes(self, index: int) -> int:
        """Return the bytes of a window."""
        return windows.WINDOW_NBYTES

    def take_receipt(self) -> str:
        """Return no text."""
        return ""

    def accept(self, receipt: str) -> None:
        """Do nothing."""


class NoOutputs(LocalOutputs):
    """Discards every byte: for digests alone."""

    def __init__(self) -> None:
        self.target = NullTarget()

    def explain_errors(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def begin(self, index: int) -> None:
        """Do nothing."""

    def finish_share(self, part: FilePart) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def finish_nothing(file: JoinedFile, index: int) -> FinishedFile:
    """Return the finished state of a file that is not written."""
    return file.finish()[0]


def make_in_rounds(
    team: Team,
    work: Work,
    files: Sequence[int],
    outputs: Outputs,
    *,
    what: str,
    finish: Finish = finish_nothing,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Outcome:
    """Make files of a plan together with all other ranks, which make the same call; return the findings of all.

    Args:
        team: the ranks.
        work: the work of this rank.
        files: indices of the files to make; transformed files are not among them.
        outputs: the destination of this rank's shares.
        what: a short name of the files, for errors.
        finish: finishes a file, on the first rank.
        progress: called, on the first rank, with an estimate of the bytes that all ranks have made so far.

    Returns:
        On the first rank, the same outcome as from one process; an empty outcome elsewhere.

    Raises:
        CorruptError, ContradictionError: the source does not match its metadata.
        XrankError: from `outputs` or `finish`.
        RankFailedError: a rank failed; finished files are kept.
    """
    plan = work.plan
    units = {index: outputs.unit_nbytes(index) for index in files}
    division = divide(plan, files, team.size, holder=work.holder, units=units)
    share = _Share(team, work, division, outputs)
    joining = _Joining(work, division, finish)
    done, total = 0, _nbytes(plan, files)

    def count(nbytes: int) -> None:
        # Rank 0 assumes that the others are equally far: they report only at the end of a round.
        nonlocal done
        done = min(done + nbytes * team.size, total)
        progress(done)

    for number, round_ in enumerate(division.rounds):
        results = share.make(number, count if team.is_first else lambda nbytes: None)
        message = {**results.to_message(), **describe_share(outputs)}
        with team.collect(f"{what}, round {number + 1}", message) as messages:
            if team.is_first:
                accept_shares(outputs, messages)
                joining.join(number, [PartialResults.from_message(message) for message in messages])
        if team.is_first:
            done = sum(_nbytes(plan, r.files) for r in division.rounds[: number + 1])
            progress(done)
            _logger.debug("round %d of %d: %d files", number + 1, len(division.rounds), len(round_.files))
    if division.rounds:
        work.source.check_unchanged()  # all ranks have finished reading
        team.meet(f"{what}, all of it")
    return joining.outcome() if team.is_first else Outcome()


def describe_share(outputs: Outputs) -> dict[str, Any]:
    """Return the parts of a rank's message about its shares of a round."""
    return {"receipt": outputs.take_receipt(), "traffic": take_traffic()}


def accept_shares(outputs: Outputs, messages: Sequence[Mapping[str, Any]]) -> None:
    """Take, on the first rank, these parts of the messages of all ranks, its own first."""
    for position, message in enumerate(messages):
        outputs.accept(message["receipt"])
        if position:
            add_traffic(message["traffic"])


class _Share:
    """One rank's share of all rounds."""

    def __init__(self, team: Team, work: Work, division: Division, outputs: Outputs) -> None:
        self._team, self._work, self._division, self._outputs = team, work, division, outputs
        plan, holder = work.plan, work.holder
        self._plan = plan if holder is None else prefer_own_copies(plan, holder, team.position)
        self._checksums = RecordChecksums(
            plan.source.records, partial(raise_mismatch, plan), left_open=division.left_open
        )

    def make(self, number: int, count: Callable[[int], None]) -> PartialResults:
        """Make this rank's windows of a round, and flush them; call `count` with the bytes of each."""
        work, division, rank = self._work, self._division, self._team.position
        try:
            with self._outputs.explain_errors():
                outcome = execute(
                    self._plan,
                    work.source,
                    self._outputs.target,
                    budget=work.budget,
                    shares=division.rounds[number].shares[rank],
                    checksums=self._checksums,
                    replicas=work.replicas,
                    begin=self._outputs.begin,
                    finish_share=self._outputs.finish_share,
                    cancelled=self._team.make_failure_check(),
                    progress=count,
                )
        finally:
            self._outputs.close()
        # Only of records that no other rank reads: of the others the first rank joins the parts, and reads the rest.
        read_rest(self._checksums, work.source, division.find_own_records(rank, number), _staging(work.budget))
        return PartialResults(
            tuple(outcome.parts.values()),
            self._checksums.take_parts(division.find_open_records(number)),
            self._checksums.num_checked,
            outcome.differences,
            outcome.shared_nbytes,
        )


class _Joining:
    """Joins the findings of all ranks, on the first rank."""

    def __init__(self, work: Work, division: Division, finish: Finish) -> None:
        self._work, self._plan, self._division, self._finish = work, work.plan, division, finish
        self._checksums = RecordChecksums(work.plan.source.records, partial(raise_mismatch, work.plan))
        self._joined: dict[int, JoinedFile] = {}  # files that later rounds continue to read
        self._outcome = Outcome()
        self._num_checked: Sequence[int] = ()
        self._last_round = {index: max(self._read_last(index), default=0) for r in division.rounds for index in r.files}

    def _read_last(self, index: int) -> list[int]:
        return [
            int(self._division.last_round[copies.record].max())
            for tensor in self._plan.files[index].tensors
            for copies in tensor.read
            if len(copies)
        ]

    def join(self, number: int, found: Sequence[PartialResults]) -> None:
        """Join the findings of all ranks in a round; finish each file whose sources are all checked."""
        self._joined |= {
            index: JoinedFile(self._plan.files[index].output, index) for index in self._division.rounds[number].files
        }
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
        read_rest(self._checksums, self._work.source, self._division.find_open_records(number), staging)
        # A file with a record that later rounds read waits: its bytes are not proven before the record's checksum is.
        for index in [index for index in self._joined if self._last_round[index] <= number]:
            self._outcome.files[index] = self._finish(self._joined.pop(index), index)

    def outcome(self) -> Outcome:
        """Return the same outcome as from one process."""
        assert not self._joined, "files were made and never finished"
        self._outcome.num_checksums = sum(self._num_checked) + self._checksums.num_checked
        return self._outcome


def _nbytes(plan: Plan, files: Iterable[int]) -> int:
    return sum(plan.files[index].output.nbytes for index in files)


def _staging(budget: Budget) -> memoryview:
    return memoryview(mmap.mmap(-1, budget.staging_nbytes))
