"""The schema of a rank's state: what one rank leaves in a workspace, and the record that says where it belongs.

The file is ``rank_<r>_state.pth``, a torch archive of ``{"config": dict, "weight": dict[str, Tensor], "xrank": text}``.
``xrank`` is one JSON text, so that no reader has to unpickle anything of ours to trust it. States that NVIDIA ModelOpt
writes (``modelopt/torch/export/distribute.py: NFSWorkspace``) have the same name and lack ``xrank``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn, TypeAlias

from xrank.errors import CorruptError, UsageError

__all__ = ["CONFIG", "RECORD", "VERSION", "WEIGHT", "MeshRecord", "RankRecord", "TensorRecord", "rank_of"]
__all__ += ["state_file_name"]

VERSION = 1
CONFIG, WEIGHT, RECORD = "config", "weight", "xrank"
"""Keys of the state."""

MeshRecord: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""A mesh: axis names, shape, and its ranks in row-major order."""

_KEYS = ["version", "run_id", "attempt", "step", "rank", "world_size", "host", "meshes", "tensors"]
_RARE = ["view", "name"]
"""Keys of a tensor's entry that most have not."""
_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})_state\.pth")


def state_file_name(rank: int) -> str:
    """Return the name of that rank's state, as ModelOpt has it."""
    return f"rank_{rank}_state.pth"


def rank_of(file_name: str) -> int | None:
    """Return the rank that a file name says, or None where it is no state's name."""
    match = _NAME.fullmatch(file_name)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What one rank's tensor is a part of."""

    layout: str | None = None
    """The layout's notation; None for a tensor that every rank holds whole, or of which nothing is known."""
    mesh: int | None = None
    """Index into the record's meshes."""
    shape: tuple[int, ...] | None = None
    """Global shape; None where one rank alone cannot know it."""
    view: int | None = None
    """The mesh that is the view which the layout names, an index like `mesh`."""
    name: str | None = None
    """The tensor's name with dims in it, where its index on the rank is not the one in the whole model."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Whose state it is, of which run and step, and how its tensors lie on which meshes."""

    run_id: str | None
    attempt: str | None
    step: int | None
    rank: int
    world_size: int
    host: str
    meshes: tuple[MeshRecord, ...] = ()
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    """By name; tensors of which nothing is known have no entry."""
    version: int = VERSION

    def __post_init__(self) -> None:
        fault = _fault(self)
        if fault is not None:
            raise UsageError(f"the record of rank {self.rank} is wrong: {fault}", rank=self.rank, got=fault)
        object.__setattr__(self, "tensors", dict(self.tensors))

    def to_json(self) -> str:
        """Return the record as text: the same record always gives the same text."""
        return json.dumps(
            {
                "version": self.version,
                "run_id": self.run_id,
                "attempt": self.attempt,
                "step": self.step,
                "rank": self.rank,
                "world_size": self.world_size,
                "host": self.host,
                "meshes": [
                    {"axis_names": names, "shape": shape, "ranks": ranks} for names, shape, ranks in self.meshes
                ],
                "tensors": {
                    name: {
                        "layout": tensor.layout,
                        "mesh": tensor.mesh,
                        "shape": tensor.shape,
                        **{key: value for key in _RARE if (value := getattr(tensor, key)) is not None},
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
        """Return the record of that text, every part of it checked.

        Args:
            text: what `to_json` gave.
            file: the file it was found in, for the errors.

        Raises:
            UsageError: a newer xrank wrote it.
            CorruptError: it is not what any xrank writes.
        """
        return _Parser(file).record(text)


def _fault(record: RankRecord) -> str | None:
    """Return what is wrong with a record of right types, or None."""
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
    for name, tensor in record.tensors.items():
        for mesh in (tensor.mesh, tensor.view):
            if mesh is not None and not 0 <= mesh < len(record.meshes):
                return f"tensor {name!r} lies on mesh {mesh} of {len(record.meshes)}"
        if tensor.shape is not None and any(size < 0 for size in tensor.shape):
            return f"tensor {name!r} has the global shape {list(tensor.shape)}"
    return None


class _Parser:
    """Checks types as it goes; what it meets wrong is named by its path in the text."""

    def __init__(self, file: str) -> None:
        self.file = file

    def fail(self, fault: str) -> NoReturn:
        raise CorruptError(
            f"{self.file}: its xrank record is malformed: {fault}",
            file=self.file,
            got=fault,
            next_step="let the rank write its state again",
        )

    def record(self, text: str) -> RankRecord:
        try:
            # Twice the same name would mean that two readers may disagree about one file.
            value = json.loads(text, object_pairs_hook=self.unique, parse_constant=self.fail)
        except (ValueError, RecursionError) as error:
            if isinstance(error, CorruptError):
                raise
            self.fail(f"no JSON ({error})")
        top = self.mapping(value, "record")
        version = self.number(top.get("version"), "version", low=1)
        if version > VERSION:
            raise UsageError(
                f"{self.file} was written by a newer xrank",
                file=self.file,
                got=f"record version {version}",
                want=f"version {VERSION}",
                next_step="update xrank",
            )
        self.keys(top, "record", _KEYS)
        meshes = tuple(self.mesh(mesh, f"meshes[{i}]") for i, mesh in enumerate(self.items(top["meshes"], "meshes")))
        tensors = {
            name: self.tensor(t, f"tensors[{name!r}]") for name, t in self.mapping(top["tensors"], "tensors").items()
        }
        try:
            return RankRecord(
                run_id=self.optional_text(top["run_id"], "run_id"),
                attempt=self.optional_text(top["attempt"], "attempt"),
                step=self.optional_number(top["step"], "step"),
                rank=self.number(top["rank"], "rank"),
                world_size=self.number(top["world_size"], "world_size", low=1),
                host=self.text(top["host"], "host"),
                meshes=meshes,
                tensors=tensors,
                version=version,
            )
        except UsageError as error:
            self.fail(error.got or str(error))

    def mesh(self, value: Any, where: str) -> MeshRecord:
        mesh = self.keys(self.mapping(value, where), where, ["axis_names", "shape", "ranks"])
        return (
            tuple(self.text(name, f"{where}.axis_names") for name in self.items(mesh["axis_names"], where)),
            self.numbers(mesh["shape"], f"{where}.shape"),
            self.numbers(mesh["ranks"], f"{where}.ranks"),
        )

    def tensor(self, value: Any, where: str) -> TensorRecord:
        tensor = self.mapping(value, where)
        self.keys(tensor, where, ["layout", "mesh", "shape", *(key for key in _RARE if key in tensor)])
        return TensorRecord(
            layout=self.optional_text(tensor["layout"], f"{where}.layout"),
            mesh=self.optional_number(tensor["mesh"], f"{where}.mesh"),
            shape=None if tensor["shape"] is None else self.numbers(tensor["shape"], f"{where}.shape"),
            view=self.optional_number(tensor.get("view"), f"{where}.view"),
            name=self.optional_text(tensor.get("name"), f"{where}.name"),
        )

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            self.fail("a name occurs twice")
        return found

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(f"{where} is no object")
        return value

    def keys(self, value: dict[str, Any], where: str, want: list[str]) -> dict[str, Any]:
        if sorted(value) != sorted(want):
            self.fail(f"{where} has {sorted(value)}, not {sorted(want)}")
        return value

    def items(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(f"{where} is no list")
        return value

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self.fail(f"{where} is no text")
        return value

    def optional_text(self, value: Any, where: str) -> str | None:
        return None if value is None else self.text(value, where)

    def number(self, value: Any, where: str, low: int = 0) -> int:
        # bool is an int to Python; the upper bound is that of every offset the engine computes with.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**63:
            self.fail(f"{where} is no number from {low}")
        return value

    def optional_number(self, value: Any, where: str) -> int | None:
        return None if value is None else self.number(value, where)

    def numbers(self, value: Any, where: str) -> tuple[int, ...]:
        return tuple(self.number(item, where) for item in self.items(value, where))
