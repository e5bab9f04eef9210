"""Reads a workspace: the states that ranks left with `NFSWorkspace`, or NVIDIA ModelOpt's with its own.

The folder holds one ``rank_<r>_state.pth`` for each rank (`xrank.formats.rank_state`). Which states belong together is
decided by what they record: run id, attempt, step and world size.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError, XrankError
from xrank.formats.rank_state import CONFIG, RECORD, WEIGHT, RankRecord, TensorRecord, rank_of, state_file_name
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive, refuse_inert
from xrank.layout import DeviceMesh
from xrank.layout.nest_table import int_array
from xrank.plan.planner import ranks_text
from xrank.plan.source import NO_CHECKSUM, RecordTable, SourceFile, StoredModel
from xrank.readers.base import Hints
from xrank.readers.placement import HeldTensor, place

__all__ = ["WorkspaceReader"]


@dataclass(frozen=True, slots=True)
class _State:
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


class WorkspaceReader:
    """The reader of workspaces (`xrank.readers.base.Reader`)."""

    name = "workspace"

    def recognise(self, path: str) -> str | None:
        """Return None if the folder holds a rank's state."""
        if not os.path.isdir(path):
            return "no folder"
        if any(rank_of(entry) is not None for entry in os.listdir(path)):
            return None
        return "no rank_<r>_state.pth in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of a workspace lies; errors as `Reader.read` lists them."""
        found = sorted(rank for rank in map(rank_of, os.listdir(path)) if rank is not None)
        if not found:
            raise IncompleteError(
                f"no rank left a state in {path}",
                file=path,
                want="rank_<r>_state.pth files",
                next_step="check the path, or let the ranks write with NFSWorkspace",
            )
        states = [_read_state(path, rank) for rank in found]
        _check_set(path, states)
        return _describe(path, states, hints)


def _read_state(path: str, rank: int) -> _State:
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
    return _State(rank, archive, config, weights, record)


def _malformed(rank: int, file: str, got: str, want: str) -> CorruptError:
    return CorruptError(
        f"{file} is not a rank's state",
        rank=rank,
        file=file,
        got=got,
        want=want,
        next_step=f"let rank {rank} write its state again",
    )


def _run_text(state: _State) -> str:
    record = state.record
    if record is None:
        return "without a record"
    attempt = f", attempt {record.attempt}" if record.attempt is not None else ""
    step = f", step {record.step}" if record.step is not None else ""
    return f"run {record.run_id or 'without id'}{attempt}{step}, {record.world_size} ranks"


def _check_set(path: str, states: Sequence[_State]) -> None:
    """Check that the states are those of one run: all of it, nothing else."""
    runs = Counter(state.run for state in states)
    most = max(runs.values())
    leading = [run for run, count in runs.items() if count == most]
    if len(leading) > 1:
        one, other = (next(s for s in states if s.run == run) for run in leading[:2])
        raise ContradictionError(
            f"{path} holds states of different runs",
            rank=other.rank,
            file=other.archive.path,
            got=f"rank {one.rank}: {_run_text(one)}; rank {other.rank}: {_run_text(other)}",
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
            got=_run_text(stale),
            want=_run_text(ours[0]),
            next_step="remove this file, which an earlier run with more ranks left, then run the same command",
        )
    missing = sorted(set(range(world_size)) - {state.rank for state in ours})
    if not missing:
        return
    others = [f"rank {s.rank}'s is of another: {_run_text(s)}" for s in foreign]
    raise IncompleteError(
        f"rank {ranks_text(missing)} of {world_size} left nothing in {path} ({_run_text(ours[0])})",
        rank=missing[0],
        file=os.path.join(path, state_file_name(missing[0])),
        got="; ".join([f"ranks {ranks_text([s.rank for s in ours])}", *others]),
        want=f"ranks {ranks_text(range(world_size))}",
        next_step=f"let rank {ranks_text(missing)} write again, then run the same command; nothing was written",
    )


def _describe(path: str, states: Sequence[_State], hints: Hints) -> StoredModel:
    files: list[SourceFile] = []
    rows: list[tuple[int, int, int, int]] = []
    numbers: dict[tuple[int, str], int] = {}
    for index, state in enumerate(states):
        files.append(SourceFile.of(state.archive.path, state.archive.status))
        for key, storage in state.archive.records.items():
            numbers[state.rank, key] = len(rows)
            crc = storage.crc32 if state.archive.has_checksums else NO_CHECKSUM
            rows.append((index, storage.offset, storage.nbytes, crc))
    held: dict[str, list[HeldTensor]] = {}
    for state in states:
        meshes = [] if state.record is None else [_mesh(mesh) for mesh in state.record.meshes]
        for name, tensor in state.weights.items():
            held.setdefault(name, []).append(_held(state, name, tensor, meshes, numbers[state.rank, tensor.key]))
    shards, assumptions, unplaced = [], [], []
    for name, parts in held.items():
        try:
            shard, assumption = place(name, parts, hints, world_size=len(states))
        except XrankError as error:
            # A layout that is missing for one tensor is missing for more: name them all at once.
            if isinstance(error, UsageError) or error.exit_code != 2:
                raise
            unplaced.append(error)
            continue
        shards.append(shard)
        if assumption:
            assumptions.append(assumption)
    if unplaced:
        raise _joined(unplaced)
    record, config = states[0].record, None
    if hints.needs_config:
        config = _common_config(states)
    return StoredModel(
        format="workspace",
        path=path,
        files=tuple(files),
        records=RecordTable(*(int_array(row[i] for row in rows) for i in range(4))),
        shards=tuple(shards),
        world_size=len(states),
        step=None if record is None else record.step,
        run_id=None if record is None else record.run_id,
        config=config,
        nbytes=sum(row[2] for row in rows),
        notes=_notes(states, assumptions),
        details={"ranks": [_rank_details(state) for state in states]},
    )


def _joined(errors: Sequence[XrankError]) -> XrankError:
    first = errors[0]
    if len(errors) > 1:
        names = ", ".join(error.tensor or "?" for error in errors[1:6])
        more = f" and {len(errors) - 6} more" if len(errors) > 6 else ""
        first.message += f"; likewise {names}{more}"
    return first


def _mesh(record: tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]) -> DeviceMesh:
    names, shape, ranks = record
    return DeviceMesh(shape, names, ranks)


def _held(state: _State, name: str, tensor: ArchivedTensor, meshes: Sequence[DeviceMesh], record: int) -> HeldTensor:
    known = TensorRecord() if state.record is None else state.record.tensors.get(name, TensorRecord())
    return HeldTensor(
        rank=state.rank,
        file=state.archive.path,
        record=record,
        dtype=tensor.dtype,
        shape=tensor.shape,
        strides=tensor.strides,
        storage_offset=tensor.storage_offset,
        layout=known.layout,
        mesh=None if known.mesh is None else meshes[known.mesh],
        global_shape=known.shape,
    )


def _common_config(states: Sequence[_State]) -> Mapping[str, Any] | None:
    """Return the config on which all ranks agree, or None where none of them has one."""
    first = states[0]
    for state in states[1:]:
        key = _first_difference(first.config or {}, state.config or {}, "")
        if key is not None:
            raise ContradictionError(
                f"ranks {first.rank} and {state.rank} disagree about the config, at {key}",
                rank=state.rank,
                file=state.archive.path,
                got=f"{_at(state.config or {}, key)} on rank {state.rank}",
                want=f"{_at(first.config or {}, key)}, as on rank {first.rank}",
                next_step="give --base-model, whose config.json wins, or let all ranks write one config",
            )
    return first.config or None


def _first_difference(a: Any, b: Any, path: str) -> str | None:
    """Return the dotted path of the first key at which two configs differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}, key=str):
            here = f"{path}.{key}" if path else str(key)
            if key not in a or key not in b:
                return here
            deeper = _first_difference(a[key], b[key], here)
            if deeper is not None:
                return deeper
        return None
    # Types count: 1, 1.0 and True are three different values in JSON. repr compares NaN with NaN as equal.
    return None if repr(a) == repr(b) else path


def _at(config: Any, path: str) -> str:
    for key in path.split("."):
        if not isinstance(config, dict) or key not in config:
            return "nothing"
        config = config[key]
    return repr(config)[:200]


def _notes(states: Sequence[_State], assumptions: Sequence[str]) -> tuple[tuple[str, str], ...]:
    notes = [("assumed-layout", text) for text in assumptions]
    bare = [state.rank for state in states if not state.archive.has_checksums]
    if bare:
        notes.append(("no-checksums", f"the states of ranks {ranks_text(bare)} were written without checksums"))
    if states[0].record is None:
        notes.append(("no-record", "the states record no run, world size or layout; a missing last rank can't be seen"))
    elif states[0].record.run_id is None:
        notes.append(("no-run-id", "the states record no run id; states of two runs could not be told apart by it"))
    return tuple(notes)


def _rank_details(state: _State) -> dict[str, Any]:
    record = state.record
    return {
        "rank": state.rank,
        "file": os.path.basename(state.archive.path),
        "host": None if record is None else record.host,
        "run_id": None if record is None else record.run_id,
        "step": None if record is None else record.step,
        "nbytes": state.archive.status.st_size,
        "num_tensors": len(state.weights),
        "layouts": 0 if record is None else sum(t.layout is not None for t in record.tensors.values()),
    }
