"""The states that ranks left in a workspace: read one by one, and judged as a set.

Which states belong together is decided by what they record: run id, attempt, step and world size.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrank.errors import ContradictionError, CorruptError, IncompleteError
from xrank.formats.rank_state import CONFIG, RECORD, WEIGHT, RankRecord, state_file_name
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive, refuse_inert
from xrank.plan.planner import ranks_text

__all__ = ["RankState", "check_run", "read_rank_state", "run_text"]


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's state: the archive, and what it records of itself."""

    rank: int
    archive: TorchArchive
    config: Mapping[str, Any] | None
    weights: Mapping[str, ArchivedTensor]
    record: RankRecord | None

    @property
    def run(self) -> tuple[str | None, str | None, int | None, int] | None:
        """What must be equal for states to belong together; None for a state without a record."""
        record = self.record
        return None if record is None else (record.run_id, record.attempt, record.step, record.world_size)


def read_rank_state(path: str, rank: int) -> RankState:
    """Return the state a rank left in a folder, by its metadata alone.

    Raises:
        IncompleteError: it is empty.
        ContradictionError: it is another rank's.
        CorruptError, UnsafeError: it is damaged, or more than data.
    """
    file = os.path.join(path, state_file_name(rank))
    if os.path.isfile(file) and os.path.getsize(file) == 0:
        raise IncompleteError(
            f"rank {rank} wrote nothing yet: {file} is empty",
            rank=rank,
            file=file,
            got="0 bytes",
            next_step=f"let rank {rank} write again, then run the same command; nothing was written",
        )
    archive = read_archive(file, rank=rank)
    state = archive.value
    refuse_inert(state, file, rank)
    if not isinstance(state, dict) or not {CONFIG, WEIGHT} <= state.keys():
        raise _malformed(rank, file, f"a {type(state).__name__}", f'a dict with "{CONFIG}" and "{WEIGHT}"')
    weights, config, text = state[WEIGHT], state[CONFIG], state.get(RECORD)
    if not isinstance(weights, dict):
        raise _malformed(rank, file, f"weights in a {type(weights).__name__}", "a dict of tensors")
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, ArchivedTensor):
            raise _malformed(rank, file, f"{name!r}: {type(tensor).__name__}", "tensors by name")
    if not (config is None or isinstance(config, dict)) or not (text is None or isinstance(text, str)):
        raise _malformed(
            rank, file, "a config that is no dict or a record that is no text", "both as xrank writes them"
        )
    record = None if text is None else RankRecord.from_json(text, file=file)
    if record is not None and record.rank != rank:
        raise ContradictionError(
            f"{file} is a copy of another rank's state",
            rank=rank,
            file=file,
            got=f"the state of rank {record.rank}",
            want=f"the state of rank {rank}",
            next_step=f"let rank {rank} write its state again",
        )
    return RankState(rank, archive, config, weights, record)


def _malformed(rank: int, file: str, got: str, want: str) -> CorruptError:
    return CorruptError(
        f"{file} is not a rank's state",
        rank=rank,
        file=file,
        got=got,
        want=want,
        next_step=f"let rank {rank} write its state again",
    )


def run_text(state: RankState) -> str:
    """Return what a state says of its run, in words."""
    record = state.record
    if record is None:
        return "without a record"
    attempt = f", attempt {record.attempt}" if record.attempt is not None else ""
    step = f", step {record.step}" if record.step is not None else ""
    return f"run {record.run_id or 'without id'}{attempt}{step}, {record.world_size} ranks"


def check_run(path: str, states: Sequence[RankState]) -> None:
    """Check that the states are those of one run: all of it, nothing else.

    Raises:
        IncompleteError: ranks are missing, or left only the state of another run.
        ContradictionError: two runs are mixed evenly, or ranks are left of a larger world.
    """
    runs = Counter(state.run for state in states)
    most = max(runs.values())
    leading = [run for run, count in runs.items() if count == most]
    if len(leading) > 1:
        one, other = (next(s for s in states if s.run == run) for run in leading[:2])
        raise ContradictionError(
            f"{path} holds states of different runs",
            rank=other.rank,
            file=other.archive.path,
            got=f"rank {one.rank}: {run_text(one)}; rank {other.rank}: {run_text(other)}",
            want="states of one run, step and world size",
            next_step="remove the states that do not belong, or let all ranks write again",
        )
    ours = [state for state in states if state.run == leading[0]]
    foreign = [state for state in states if state.run != leading[0]]
    record = ours[0].record
    world_size = record.world_size if record is not None else len(states)
    beyond = [state for state in states if state.rank >= world_size]
    if beyond and record is not None:
        stale = beyond[0]
        raise ContradictionError(
            f"{stale.archive.path} is of rank {stale.rank}, and the run has {world_size} ranks",
            rank=stale.rank,
            file=stale.archive.path,
            got=run_text(stale),
            want=run_text(ours[0]),
            next_step="remove this file, which an earlier run with more ranks left, then run the same command",
        )
    missing = sorted(set(range(world_size)) - {state.rank for state in ours})
    if not missing:
        return
    others = [f"rank {s.rank}'s is of another: {run_text(s)}" for s in foreign]
    raise IncompleteError(
        f"rank {ranks_text(missing)} of {world_size} left nothing in {path} ({run_text(ours[0])})",
        rank=missing[0],
        file=os.path.join(path, state_file_name(missing[0])),
        got="; ".join([f"ranks {ranks_text([s.rank for s in ours])}", *others]),
        want=f"ranks {ranks_text(range(world_size))}",
        next_step=f"let rank {ranks_text(missing)} write again, then run the same command; nothing was written",
    )
