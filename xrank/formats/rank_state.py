"""The schema of a rank's state file in a workspace, and of the record of its place in the run.

The file is ``rank_<r>_state.pth``, a torch archive of ``{"config": dict, "weight": dict[str, Tensor], "xrank": text}``.
``xrank`` is one JSON text, so readers can check it without unpickling. States of NVIDIA ModelOpt
(``modelopt/torch/export/distribute.py: NFSWorkspace``) have the same file name and no ``xrank``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from math import prod
from typing import Annotated, Any, TypeAlias

from msgspec import DecodeError, Meta, Raw, Struct, ValidationError, convert, field
from msgspec.json import decode
from msgspec.structs import replace

from xrank.errors import ContradictionError, CorruptError, UsageError
from xrank.formats.pickle_writing import write_pickle
from xrank.formats.pickles import PickleFamilies, fill_blanks, refuse_inert
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive

VERSION = 1
CONFIG, WEIGHT, RECORD = "config", "weight", "xrank"
"""Keys of the state."""

MeshRecord: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""A mesh: axis names, shape, and its ranks in row-major order."""

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""The engine computes offsets below 2**63."""
_KEYS = {"version", "run_id", "attempt", "step", "rank", "world_size", "host", "meshes", "tensors"}
_FREQUENT, _RARE = {"layout", "mesh", "shape"}, {"view", "name"}
"""Keys of a tensor's entry; the rare ones are optional."""


class TensorRecord(Struct, frozen=True):
    """The global tensor of one rank's tensor."""

    layout: str | None = None
    """The layout in the notation; None for a whole tensor on every rank, or an unknown layout."""
    mesh: int | None = None
    """Index into the record's meshes."""
    shape: tuple[_Count, ...] | None = None
    """Global shape; None if one rank alone cannot know it."""
    view: int | None = None
    """Index of the mesh of the view that the layout names."""
    name: str | None = None
    """The tensor's name with dims, if its index on the rank differs from that in the whole model."""


class RankRecord(Struct, frozen=True):
    """The rank, run and step of a state, and the layouts and meshes of its tensors."""

    run_id: str | None
    attempt: str | None
    step: _Count | None
    rank: _Count
    world_size: _Count
    host: str
    meshes: tuple[MeshRecord, ...] = ()
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    """Name -> record; tensors with an unknown layout have no entry."""
    version: Annotated[int, Meta(ge=1)] = VERSION

    def __post_init__(self) -> None:
        fault = _find_fault(self)
        if fault is not None:
            raise UsageError(
                f"the record of rank {self.rank} is wrong: {fault}",
                rank=self.rank,
                got=fault,
                next_step="let the rank write its state again",
            )

    def to_json(self) -> str:
        """Return the record as a text, which is the same for equal records."""
        return json.dumps(
            {
                **{key: getattr(self, key) for key in _KEYS - {"meshes", "tensors"}},
                "meshes": [
                    {"axis_names": names, "shape": shape, "ranks": ranks} for names, shape, ranks in self.meshes
                ],
                "tensors": {
                    name: {
                        "layout": tensor.layout,
                        "mesh": tensor.mesh,
                        "shape": tensor.shape,
                        **{key: value for key in sorted(_RARE) if (value := getattr(tensor, key)) is not None},
                    }
                    for name, tensor in self.tensors.items()
                },
            },
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str, *, file: str) -> RankRecord:
        """Parse and check the text of `to_json`; a newer xrank's is a UsageError, a malformed one a CorruptError."""
        place, entries = "record", _find_entries(text)
        try:
            rest = text if entries is None else text.replace(entries, "{}", 1)
            value = json.loads(rest, object_pairs_hook=_refuse_repeats)
            version = value.get("version") if isinstance(value, dict) else None
            if type(version) is int and version > VERSION:
                problem, got, want = f"{file} was written by a newer xrank", f"record version {version}", str(VERSION)
                raise UsageError(problem, file=file, got=got, want=f"version {want}", next_step="update xrank")
            _check_keys(value, _KEYS)
            tensors = _convert_entries(value["tensors"]) if entries is None else _read_entries(entries)
            place = "meshes"
            meshes = convert(value["meshes"], tuple[_StatedMesh, ...])
            place = "record"
            own = {"meshes": [(mesh.axis_names, mesh.shape, mesh.ranks) for mesh in meshes], "tensors": {}}
            record = convert({**value, **own}, cls)
            fault = _find_tensor_fault(tensors, len(record.meshes))
            if fault is not None:
                raise ValueError(fault)
            return replace(record, tensors=tensors)
        except (ValueError, RecursionError, ValidationError) as error:
            if isinstance(error, UsageError):
                raise
            place = error.place if isinstance(error, _EntryError) else place
            fault = f"{place}: {getattr(error.__cause__, 'got', None) or error}"
            raise CorruptError(
                f"{file}: its xrank record is malformed: {fault}",
                file=file,
                got=fault,
                next_step="let the rank write its state again",
            ) from None


def _find_fault(record: RankRecord) -> str | None:
    """Return the first fault of a record with correct types, or None."""
    if record.world_size < 1 or not 0 <= record.rank < record.world_size:
        return f"rank {record.rank} of {record.world_size}"
    if record.run_id == "":
        return "an empty run id"
    if record.step is not None and record.step < 0:
        return f"step {record.step}"
    for index, (names, shape, ranks) in enumerate(record.meshes):
        if len(names) != len(shape) or len(set(names)) != len(names) or not all(names):
            return f"mesh {index} of shape {list(shape)} has axes {list(names)}"
        if any(size < 1 for size in shape) or prod(shape) != len(ranks):
            return f"mesh {index} of shape {list(shape)} has {len(ranks)} ranks"
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < record.world_size for rank in ranks):
            return f"mesh {index} names a rank twice, or one outside the world of {record.world_size}"
    return _find_tensor_fault(record.tensors, len(record.meshes))


def _find_tensor_fault(tensors: Mapping[str, TensorRecord], num_meshes: int) -> str | None:
    seen: set[int] = set()  # a large model has few kinds of tensors, whose records are the same objects
    for name, tensor in tensors.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        for mesh in (tensor.mesh, tensor.view):
            if mesh is not None and not 0 <= mesh < num_meshes:
                return f"tensor {name!r} is on mesh {mesh} of {num_meshes}"
        if tensor.shape is not None and any(size < 0 for size in tensor.shape):
            return f"tensor {name!r} has the global shape {list(tensor.shape)}"
    return None


class _Entries(Struct):
    tensors: Raw


class _EntryError(ValueError):
    """The entry of a tensor is malformed."""

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__(str(error))
        self.place = place


def _find_entries(text: str) -> str | None:
    """Return the part of a record's text that ranks mostly have alike, the tensors' entries; None for a malformed one.

    No JSON text contains it, as its quotes are not escaped.
    """
    try:
        return bytes(decode(text, type=_Entries).tensors).decode()
    except DecodeError:
        return None


@lru_cache(maxsize=4)
def _read_entries(text: str) -> Mapping[str, TensorRecord]:
    return _convert_entries(json.loads(text, object_pairs_hook=_refuse_repeats))


def _convert_entries(entries: object) -> Mapping[str, TensorRecord]:
    known: dict[TensorRecord, TensorRecord] = {}  # a large model has few kinds of tensors
    tensors: dict[str, TensorRecord] = {}
    for name, stated in convert(entries, dict[str, Any]).items():
        try:
            tensor = convert(_check_keys(stated, _FREQUENT, _RARE), TensorRecord)
        except ValueError as error:
            raise _EntryError(f"tensors[{name!r}]", error) from None
        tensors[name] = known.setdefault(tensor, tensor)
    return tensors


class _StatedMesh(Struct, forbid_unknown_fields=True):
    """A mesh as a record's text states it."""

    axis_names: tuple[str, ...]
    shape: tuple[_Count, ...]
    ranks: tuple[_Count, ...]


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; a repeated name is refused, because two readers may take different values for it."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _check_keys(value: Any, want: set[str], rare: Collection[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() - set(rare) != want:
        keys = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{keys}, not {sorted(want)}")
    return value


def state_pickle(config: Mapping[str, Any], weights: Mapping[str, ArchivedTensor], record: str) -> bytes:
    """Return the pickle of ``{"config": config, "weight": weights, "xrank": record}``, by `write_pickle`."""
    return write_pickle({CONFIG: config, WEIGHT: weights, RECORD: record})


class SavedState(Struct, frozen=True):
    """One rank's state: the archive and its record."""

    rank: int
    """The expected rank."""
    archive: TorchArchive
    config: dict[str, Any] | None
    weights: dict[str, ArchivedTensor]
    record: RankRecord | None
    """None for a state of ModelOpt."""

    @property
    def run(self) -> tuple[str | None, str | None, int | None, int] | None:
        """(run id, attempt, step, world size), equal for states of one run; None without a record."""
        record = self.record
        return None if record is None else (record.run_id, record.attempt, record.step, record.world_size)

    def check_rank(self) -> None:
        """Raise a ContradictionError for a record of another rank than the expected one."""
        if self.record is None or self.record.rank == self.rank:
            return
        raise ContradictionError(
            f"{self.archive.path} is a copy of another rank's state: it contains the state of rank {self.record.rank}",
            rank=self.rank,
            file=self.archive.path,
            got=f"the state of rank {self.record.rank}",
            want=f"the state of rank {self.rank}",
            next_step=f"let rank {self.rank} write its state again",
        )


def read_saved_state(file: str, rank: int, *, families: PickleFamilies | None = None) -> SavedState:
    """Read the state of an expected rank, which `SavedState.check_rank` checks, without its tensors' bytes.

    States that are read with the same `families` share what they have alike.
    """
    archive = read_archive(file, rank=rank, families=families)
    state: Any = archive.value
    if archive.own is not None:  # the first state of the family was checked
        config, record = fill_blanks(state[CONFIG], archive.own), record_of(archive, rank)
        # The texts of records would take much memory.
        return SavedState(rank, replace(archive, own=()), config, state[WEIGHT], record)
    refuse_inert(state, file, rank)
    if not isinstance(state, dict) or not {CONFIG, WEIGHT} <= state.keys():
        raise state_error(file, rank, f"a {type(state).__name__}", f'a dict with "{CONFIG}" and "{WEIGHT}"')
    config, weights = state[CONFIG], state[WEIGHT]
    if not (config is None or isinstance(config, dict)):
        raise state_error(file, rank, f"a config in a {type(config).__name__}", "a dict")
    if not isinstance(weights, dict):
        raise state_error(file, rank, f"weights in a {type(weights).__name__}", "a dict of tensors")
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, ArchivedTensor):
            raise state_error(file, rank, f"{ascii(name)[:100]}: {type(tensor).__name__}", "tensors by name")
    return SavedState(rank, archive, config, weights, record_of(archive, rank))


def record_of(archive: TorchArchive, rank: int | None) -> RankRecord | None:
    """Return the record of a state's archive; None if it has no record. Errors name the rank, if known."""
    text = archive.value.get(RECORD) if isinstance(archive.value, dict) else None
    text = fill_blanks(text, archive.own or ())
    if text is None:
        return None
    if not isinstance(text, str):
        raise state_error(archive.path, rank, f"a record in a {type(text).__name__}", "a text")
    return RankRecord.from_json(text, file=archive.path)


def state_error(file: str, rank: int | None, got: str, want: str) -> CorruptError:
    """Return the error for an unexpected value in a state."""
    whose = "a rank" if rank is None else f"rank {rank}"
    return CorruptError(
        f"{file}: the state of {whose} differs from what was written: {got}",
        rank=rank,
        file=file,
        got=got,
        want=want,
        next_step=f"let {'the rank' if rank is None else whose} write its state again",
    )
