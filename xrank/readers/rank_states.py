"""The states that ranks wrote to a workspace: reads each one, and checks that all belong to one run.

Run id, attempt, step and world size, which the states record, decide which of them belong together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

from xrank.errors import AGAIN, ContradictionError, IncompleteError
from xrank.formats.rank_state import SavedState, read_saved_state
from xrank.stores import places
from xrank.stores.places import state_file_name
from xrank.words import ranks_text, runs_text


def read_rank_state(path: str, rank: int) -> SavedState:
    """Return a rank's state in a folder, from its metadata alone.

    Raises:
        IncompleteError: it is empty.
        ContradictionError: another rank wrote it.
        CorruptError, UnsafeError: it is damaged, or contains more than data.
    """
    file = os.path.join(path, state_file_name(rank))
    if places.is_file(file) and places.nbytes_of(file) == 0:
        raise IncompleteError(
            f"rank {rank} wrote nothing yet: {file} is empty",
            rank=rank,
            file=file,
            got="0 bytes",
            want="a state",
            next_step=f"let rank {rank} write again, then {AGAIN}; nothing was written",
        )
    state = read_saved_state(file, rank)
    state.check_rank()
    return state


def run_text(state: SavedState) -> str:
    """Return a description of a state's run."""
    record = state.record
    if record is None:
        return "without a record"
    attempt = f", attempt {record.attempt}" if record.attempt is not None else ""
    step = f", step {record.step}" if record.step is not None else ""
    return f"run {record.run_id or 'without id'}{attempt}{step}, {record.world_size} ranks"


def check_run(path: str, states: Sequence[SavedState]) -> None:
    """Check that the states are those of one run, complete and without others.

    Raises:
        IncompleteError: ranks are missing, or their states belong to another run.
        ContradictionError: two runs are equally likely, or states of a larger world remain.
    """
    runs: dict[tuple[str | None, str | None, int | None, int] | None, list[SavedState]] = {}
    for state in states:
        runs.setdefault(state.run, []).append(state)
    most = max(map(len, runs.values()))
    # A complete run counts as a candidate, even if a larger world left more states.
    leading = [ours for run, ours in runs.items() if len(ours) == most or (run is not None and len(ours) == run[3])]
    ours, *others = leading
    if others:
        raise ContradictionError(
            f"{path} holds states of different runs",
            rank=others[0][0].rank,
            file=others[0][0].archive.path,
            got="; ".join(f"{_ranks(group)}: {run_text(group[0])}" for group in leading),
            want="states of one run, step and world size",
            next_step="move the states of the other run to another folder, or let all ranks write again",
        )
    record = ours[0].record
    # Without a record the highest state determines the size; a missing last rank stays unnoticed (see the note).
    world_size = record.world_size if record is not None else states[-1].rank + 1
    beyond = [state for state in states if state.rank >= world_size]
    if beyond:
        stale = beyond[0]
        raise ContradictionError(
            f"{stale.archive.path} belongs to rank {stale.rank}, but the run has {world_size} ranks",
            rank=stale.rank,
            file=stale.archive.path,
            got=f"{_ranks(beyond)}: {run_text(stale)}",
            want=run_text(ours[0]),
            next_step=f"move the state of {_ranks(beyond)}, left by another run, to another folder, then {AGAIN}",
        )
    foreign = [f"{_ranks(group)} of another: {run_text(group[0])}" for group in runs.values() if group is not ours]
    missing = list(_gaps([state.rank for state in ours], world_size))
    if not missing:
        return
    # Formatted from the gaps alone, because a damaged record may claim any number of ranks.
    text = runs_text(missing)
    names = f"rank {text}" if text.isdecimal() else f"ranks {text}"
    raise IncompleteError(
        f"{names} of {world_size} left nothing in {path} ({run_text(ours[0])})",
        rank=missing[0][0],
        file=os.path.join(path, state_file_name(missing[0][0])),
        got="; ".join([_ranks(ours), *foreign]),
        want=f"ranks 0-{world_size - 1}" if world_size > 1 else "rank 0",
        next_step=f"let {names} write again, then {AGAIN}; nothing was written",
    )


def _ranks(states: Sequence[SavedState]) -> str:
    return ranks_text(state.rank for state in states)


def _gaps(ranks: Sequence[int], world_size: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last rank of each gap in these rising ranks."""
    for before, after in pairwise([-1, *ranks, world_size]):
        if after - before > 1:
            yield before + 1, after - 1
