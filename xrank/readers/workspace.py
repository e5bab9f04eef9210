"""Reads a workspace: the states that ranks wrote with NFSWorkspace, or with NVIDIA ModelOpt's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from msgspec import Struct

from xrank.errors import AGAIN, ContradictionError, IncompleteError, LayoutError, XrankError, option
from xrank.formats.pickles import PickleFamilies, new_families
from xrank.formats.rank_state import SavedState, TensorRecord, read_saved_state
from xrank.formats.torch_archive import ArchivedTensor, ArchiveRecords
from xrank.layout import DeviceMesh
from xrank.layout.stored_model import StoredModel
from xrank.readers.base import MAX_LISTED, RAISING, Faults, Hints
from xrank.readers.placement import HeldTensor, place_all, shared_mesh
from xrank.readers.records import Records
from xrank.storage import places
from xrank.storage.places import rank_of, state_file_name
from xrank.storage.regular_file import Origin
from xrank.storage.shared_directory import check_one_owner
from xrank.storage.url import is_url
from xrank.words import ranks_text, repr_text, runs_text


def read_rank_state(path: str, rank: int, *, families: PickleFamilies | None = None) -> SavedState:
    """Return a rank's state in a folder, from its metadata alone; `families` as in `read_saved_state`."""
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
    state = read_saved_state(file, rank, families=families)
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


def check_run(path: str, states: Sequence[SavedState], faults: Faults = RAISING) -> tuple[Sequence[SavedState], int]:
    """Return the states of one run, complete and without others, and its number of ranks."""
    runs: dict[tuple[str | None, str | None, int | None, int] | None, list[SavedState]] = {}
    for state in states:
        runs.setdefault(state.run, []).append(state)
    most = max(map(len, runs.values()))
    # A complete run counts as a candidate, even if a larger world left more states.
    leading = [ours for run, ours in runs.items() if len(ours) == most or (run is not None and len(ours) == run[3])]
    ours, *others = leading
    if others:
        raise ContradictionError(
            f"{path} contains states of different runs",
            rank=others[0][0].rank,
            file=others[0][0].archive.path,
            got="; ".join(f"{_ranks(group)}: {run_text(group[0])}" for group in leading),
            want="states of one run, step and world size",
            next_step="move the states of the other run to another folder, or let all ranks write again",
        )
    record = ours[0].record
    # Without a record the highest state determines the size; a missing last rank stays unnoticed (see the note).
    world_size = record.world_size if record is not None else max([states[-1].rank, *faults.ranks]) + 1
    beyond = [state for state in states if state.rank >= world_size]
    for stale in beyond:
        next_step = f"move the state of {_ranks(beyond)}, left by another run, to another folder, then {AGAIN}"
        problem = f"belongs to rank {stale.rank}, but the run has {world_size} ranks"
        got = f"{_ranks(beyond)}: {run_text(stale)}"
        faults.lose(Origin(stale.archive.path, stale.rank).contradiction(problem, got, run_text(ours[0]), next_step))
    foreign = [f"{_ranks(group)} of another: {run_text(group[0])}" for group in runs.values() if group is not ours]
    edges = pairwise([-1, *(state.rank for state in ours), world_size])
    missing = [(before + 1, after - 1) for before, after in edges if after - before > 1]
    if not missing:
        return ours, world_size
    if not faults.raises and world_size - len(ours) <= MAX_LISTED:
        strange = {state.rank: state for state in states if state not in ours}
        for rank in (rank for first, last in missing for rank in range(first, last + 1)):
            origin = Origin(os.path.join(path, state_file_name(rank)), rank)
            step, error = f"let rank {rank} write again, or copy its file again", faults.files.get(origin.path)
            if error is None and rank in strange:
                got, want = (run_text(state) for state in (strange[rank], ours[0]))
                error = origin.contradiction("belongs to a different run or step", got, want, step)
            faults.lose(error or origin.incomplete("is missing", None, "the rank's state", step), origin.path)
        return ours, world_size
    # Formatted from the gaps alone, because a damaged record may claim any number of ranks.
    text = runs_text(missing)
    names = f"rank {text}" if text.isdecimal() else f"ranks {text}"
    raise IncompleteError(
        f"{names} of {world_size} wrote nothing in {path} ({run_text(ours[0])})",
        rank=missing[0][0],
        file=os.path.join(path, state_file_name(missing[0][0])),
        got="; ".join([_ranks(ours), *foreign]),
        want=f"ranks 0-{world_size - 1}" if world_size > 1 else "rank 0",
        next_step=f"let {names} write again, then {AGAIN}; nothing was written",
    )


def _ranks(states: Sequence[SavedState]) -> str:
    return ranks_text(state.rank for state in states)


class WorkspaceReader:
    """The reader of workspaces (`xrank.readers.base.Reader`)."""

    name = "workspace"

    def recognize(self, path: str) -> str | None:
        """Return None if the folder contains a rank's state."""
        if not places.is_folder(path):
            return "not a folder"
        if any(rank_of(entry) is not None for entry in places.list_names(path)):
            return None
        return "no rank_<r>_state.pth in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of a workspace lies; errors as in `Reader.read`."""
        entries = places.list_names(path) if places.is_folder(path) else []
        found = sorted(rank for rank in map(rank_of, entries) if rank is not None)
        if not found:
            raise IncompleteError(
                f"no rank wrote a state in {path}",
                file=path,
                want="rank_<r>_state.pth files",
                next_step="check the path, or let the ranks write with NFSWorkspace",
            )
        if not is_url(path):
            check_one_owner(path, map(state_file_name, found))
        states, faults = list[SavedState](), hints.faults
        families = new_families() if faults.raises else None  # whose first state must be right
        for rank in found:
            file = os.path.join(path, state_file_name(rank))
            with faults.losing(file):
                states.append(read_rank_state(path, rank, families=families))
            if file in faults.files:
                faults.ranks[rank] = file, -1  # its record is added below
        if not states:
            raise faults.errors[0]
        ours, world_size = check_run(path, states, faults)
        states = [state for state in ours if state.rank < world_size]
        records = Records()
        for rank in sorted({*range(world_size)}.difference(state.rank for state in states)) if faults.files else ():
            file = os.path.join(path, state_file_name(rank))
            faults.ranks[rank] = file, records.add_lost(file)
        placement = place_all(partial(_list_parts, _group_states(states, records)), hints, world_size=world_size)
        first = states[0].record
        notes = placement.notes
        if placement.num_pads:
            notes.append(("padding", f"{placement.num_pads} parts are padding by their names, and are left out"))
        notes += records.notes()
        if first is None:
            text = "the states record no run, world size or layout; a missing last rank can't be seen"
            notes.append(("no-record", text))
        elif first.run_id is None:
            text = "the states record no run id, so states of two runs cannot be distinguished"
            notes.append(("no-run-id", text))
        return StoredModel(
            format="workspace",
            path=path,
            files=tuple(records.files),
            records=records.table(faults.files),
            shards=placement.shards,
            absent=placement.absent,
            world_size=world_size,
            step=None if first is None else first.step,
            run_id=None if first is None else first.run_id,
            config=_common_config(states, faults) if hints.needs_config else None,
            nbytes=records.nbytes,
            notes=tuple(notes),
            layouts=placement.layouts,
            details={"ranks": [_rank_details(state) for state in states]},
        )


class _Alike(Struct, frozen=True):
    """Ranks whose states hold the same tensors, and record the same of them."""

    weights: Mapping[str, ArchivedTensor]
    known: Mapping[str, TensorRecord]
    meshes: Sequence[DeviceMesh]
    records: ArchiveRecords
    """Of one of the states; the others' have the same rows."""
    holders: list[tuple[int, str, int]]
    """(Rank, file, index of its first record)."""

    def list_parts(self, name: str) -> Iterator[HeldTensor]:
        """Yield the ranks' parts of a tensor."""
        tensor = self.weights.get(name)
        if tensor is None:
            return
        part = HeldTensor.from_archive(tensor, rank=-1, file="", record=self.records.row(tensor.key))
        stated = part.as_recorded(self.known.get(name, TensorRecord()), self.meshes)
        yield from stated.on((rank, file, first + part.record) for rank, file, first in self.holders)


def _group_states(states: Sequence[SavedState], records: Records) -> list[_Alike]:
    groups: dict[tuple[int, ...], _Alike] = {}
    for state in states:
        archive, record = state.archive, state.record
        try:
            stated = record.meshes if record is not None else ()
            meshes = [shared_mesh(shape, axes, ranks) for axes, shape, ranks in stated]
        except LayoutError as error:
            error.about(rank=state.rank, file=archive.path)
            error.advise(f"let rank {state.rank} write its state again, with a mesh that a layout can name")
            raise
        known = record.tensors if record is not None else {}
        # Ranks share these objects, which the states keep alive.
        key = (id(state.weights), id(known) if known else 0, *map(id, meshes))
        group = groups.setdefault(key, _Alike(state.weights, known, meshes, archive.records, []))
        group.holders.append((state.rank, archive.path, records.add_records(archive, archive.records)))
    return list(groups.values())


def _list_parts(groups: Sequence[_Alike]) -> Iterator[tuple[str, list[HeldTensor]]]:
    """Yield each tensor's name and its parts, in the order in which the ranks list them first."""
    for name in dict.fromkeys(name for group in groups for name in group.weights):
        parts = [part for group in groups for part in group.list_parts(name)]
        yield name, sorted(parts, key=lambda part: part.rank)


def _common_config(states: Sequence[SavedState], faults: Faults) -> Mapping[str, Any] | None:
    """Return the config on which all ranks agree, or None if they have none."""
    first = states[0]
    for state in states[1:]:
        difference = _first_difference(first.config or {}, state.config or {}, ())
        if difference is not None:
            path, theirs, ours = difference
            # As Python writes it: keys may be empty, or contain dots and blanks.
            place = "config" + "".join(f"[{repr_text(key)}]" for key in path)
            error = Origin(state.archive.path, state.rank).contradiction(
                f"ranks {first.rank} and {state.rank} disagree about {place}",
                f"{ours} on rank {state.rank}",
                f"{theirs}, as on rank {first.rank}",
                f"give {option('base_model')} (its config.json is used), or let all ranks write one config",
            )
            faults.add(error)
            return None
    try:
        json.dumps(first.config, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise Origin(first.archive.path, first.rank).usage(
            f"the ranks' config cannot be written as config.json: {error}",
            str(error),
            "text keys, and values that JSON supports",
            f"give {option('base_model')} (its config.json is used), or let all ranks write a config of plain values",
        ) from None
    return first.config or None


def _first_difference(a: Any, b: Any, path: tuple[object, ...]) -> tuple[tuple[object, ...], str, str] | None:
    """Return the keys, from the outermost in, at which two configs differ first, and what each has there."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}, key=repr_text):
            here = (*path, key)
            if key not in a or key not in b:
                in_a, in_b = (repr_text(side[key]) if key in side else "nothing" for side in (a, b))
                return here, in_a, in_b
            deeper = _first_difference(a[key], b[key], here)
            if deeper is not None:
                return deeper
        return None
    # Types count: 1, 1.0 and True are different values in JSON. repr makes NaN equal NaN.
    return None if repr(a) == repr(b) else (path, repr_text(a), repr_text(b))


def _rank_details(state: SavedState) -> dict[str, Any]:
    record = state.record
    return {
        "rank": state.rank,
        "state": "present",
        "file": os.path.basename(state.archive.path),
        "host": None if record is None else record.host,
        "run": run_text(state),
        "nbytes": state.archive.status.st_size,
        "num_tensors": len(state.weights),
        "num_layouts": 0 if record is None else sum(t.layout is not None for t in record.tensors.values()),
    }


def survey_ranks(path: str) -> list[dict[str, Any]]:
    """Return what each rank wrote, for display; damage is shown, not raised."""
    rows = []
    for rank in sorted(rank for rank in map(rank_of, places.list_names(path)) if rank is not None):
        try:
            rows.append(_rank_details(read_rank_state(path, rank)))
        except XrankError as error:
            rows.append({"rank": rank, "state": type(error).__name__, "file": error.file, "problem": error.message})
    return rows
