"""The plan of a reshard: the source read, every rank's new state laid out, the proof made; nothing is written yet."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from xrank.conversion.base_model import read_config
from xrank.conversion.gather_plan import companions_beside, config_text_of, layout_notes, read_layouts
from xrank.conversion.new_parts import new_layout, new_parts
from xrank.conversion.options import GatherOptions
from xrank.conversion.plan_digest import digest_of_plan
from xrank.conversion.selection import Selection, select
from xrank.errors import LayoutError
from xrank.formats.rank_state import MeshRecord, RankRecord, TensorRecord
from xrank.layout import DeviceMesh, LayoutMap
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan, make_plan
from xrank.plan.source import StoredModel, StoredShard
from xrank.readers.base import Hints
from xrank.readers.discovery import find_source
from xrank.workspace.state_content import plain_config
from xrank.writers.companions import Companion
from xrank.writers.rank_states import lay_out_state

__all__ = ["Reshard", "plan_reshard"]


@dataclass(frozen=True, slots=True, eq=False)
class Reshard:
    """A reshard that is planned and proven; nothing is written yet."""

    options: GatherOptions
    source: StoredModel
    selection: Selection
    """The tensors, whole; of tied names the one that is kept."""
    tied: Mapping[str, tuple[str, ...]]
    """Name -> names that are to stand for the same bytes."""
    plan: Plan
    """One file for each rank, by rank."""
    run_id: str
    grid: str
    """Of the new mesh."""
    companions: tuple[Companion, ...]
    config_text: str | None
    """A config.json made here, with the dtype of a cast, in place of the one beside the source."""
    notes: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """Says which plan an interrupted output belongs to."""
        return digest_of_plan(self.plan)


def plan_reshard(source: str, layouts: str | os.PathLike[str] | LayoutMap, options: GatherOptions) -> Reshard:
    """Return the proven plan of a reshard; reads metadata alone. Arguments and errors as `reshard_checkpoint`."""
    new = layouts if isinstance(layouts, LayoutMap) else read_layouts(layouts)
    place, reader = find_source(source)
    beside = companions_beside(place)
    config_path = next((companion.path for companion in beside if companion.name == "config.json"), None)
    try:
        stored = reader.read(place, Hints(needs_config=config_path is None))
    except LayoutError as error:
        # --layout is the new one here.
        error.next_step = "gather it with --layout or --base-model, then reshard the model that this makes"
        raise
    config = read_config(config_path) if config_path is not None else stored.config
    selection = select(stored, options, None, None, new.aliases)
    names = _standing_for(stored, selection)
    tied: dict[str, list[str]] = {}
    for name, target in names.items():
        if name != target:
            tied.setdefault(target, []).append(name)
    made = config_text_of(config_path, config, options)[0] if config is not None else None
    run_id = stored.run_id or _new_run_id(stored, new)
    states = _States(stored, new, names, tied, run_id)
    for output in selection.outputs:
        if names[output.name] == output.name:
            states.add(output)
    states.refuse_unmatched()
    state_config = plain_config(dict(json.loads(made) if made is not None else config or {}))
    files = [
        lay_out_state(states.record(rank), state_config, states.held.get(rank, ()), states.names(rank))
        for rank in states.ranks
    ]
    compared = {name: others for name, others in selection.tied.items() if names[name] == name}
    notes = [*stored.notes, *selection.notes, *layout_notes(new, stored)]
    if stored.run_id is None:
        notes.append(("new-run-id", f"the source records no run id; the states say run {run_id}"))
    return Reshard(
        options,
        stored,
        selection,
        {target: tuple(others) for target, others in tied.items()},
        make_plan(stored, files, tied=compared),
        run_id,
        "; ".join(dict.fromkeys(mesh.grid for mesh in states.meshes)),
        beside,
        made if config_path is not None else None,
        tuple(notes),
    )


def _standing_for(stored: StoredModel, selection: Selection) -> dict[str, str]:
    """Return for every name of the source the name whose bytes it shares: as asked for, or as in the source."""
    asked = {name: target for target, names in selection.tied.items() for name in names}
    first: dict[tuple[Any, ...], str] = {}
    found = {}
    for shard in stored.shards:
        target = shard.name if not len(shard.record) else first.setdefault(_content(shard), shard.name)
        found[shard.name] = asked.get(shard.name) or asked.get(target, target)
    return {name: found.get(target, target) for name, target in found.items()}


def _content(shard: StoredShard) -> tuple[Any, ...]:
    nests = shard.nests
    arrays = (shard.rank, shard.record, nests.x, nests.y, nests.loops)
    return shard.dtype, shard.shape, *(array.tobytes() for array in arrays)


def _new_run_id(stored: StoredModel, layouts: LayoutMap) -> str:
    """Return an id for states of a source without one: the same again for the same source and layout."""
    files = [(os.path.basename(file.path), file.nbytes, file.inode, file.mtime_ns) for file in stored.files]
    return f"reshard-{xxhash.xxh3_64_hexdigest(repr((files, layouts)).encode())}"


@dataclass(slots=True)
class _States:
    """The states to be, growing tensor by tensor."""

    source: StoredModel
    layouts: LayoutMap
    standing: Mapping[str, str]
    """Every name, and the one whose bytes it shares."""
    tied: Mapping[str, Sequence[str]]
    """The same the other way round, without those that stand for themselves."""
    run_id: str
    held: dict[int, list[OutputTensor]] = field(default_factory=dict)
    records: dict[int, dict[str, TensorRecord]] = field(default_factory=dict)
    """By rank: of each tensor the rank holds."""
    meshes: dict[DeviceMesh, int] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def add(self, output: OutputTensor) -> None:
        """Give every rank its part of a tensor."""
        found = new_layout(output.name, self.layouts)
        if found is None:
            self.unmatched.append(output.name)
            return
        layout, mesh = found
        self._check_tied(output.name, str(layout), mesh)
        record = TensorRecord(str(layout), self.meshes.setdefault(mesh, len(self.meshes)), output.shape)
        for rank, new in new_parts(output.name, layout, mesh, output.shape).items():
            self.held.setdefault(rank, []).append(OutputTensor(output.name, output.dtype, new.shape, part=new.part))
            self.records.setdefault(rank, {})[output.name] = record

    def _check_tied(self, target: str, text: str, mesh: DeviceMesh) -> None:
        for name in self.tied.get(target, ()):
            found = new_layout(name, self.layouts)
            if found is not None and (str(found[0]), found[1]) != (text, mesh):
                raise LayoutError(
                    f"{name} and {target} are tied, but the layout file cuts them differently",
                    tensor=name,
                    got=f"{found[0]} on {found[1].grid}",
                    want=f"{text} on {mesh.grid}, or no rule for {name}",
                    next_step="correct the layout file; tensors that are to be cut apart must be stored apart",
                )

    def refuse_unmatched(self) -> None:
        """Refuse tensors that no rule decides for: whole on every rank is a layout too, and must be said."""
        if not self.unmatched:
            return
        first, *more = self.unmatched
        dims = ", ".join(f"d{i}" for i in range(len(_shape_of(self.source, first))))
        raise LayoutError(
            f"{first}: no rule of the layout file says how it is cut"
            + (
                f"; likewise {', '.join(more[:5])}" + (f" and {len(more) - 5} more" if len(more) > 5 else "")
                if more
                else ""
            ),
            tensor=first,
            got=f"{len(self.layouts)} rules",
            want="one for every tensor",
            next_step=f'add a rule, such as "{first}" = "[{dims}]" for a tensor that every rank holds whole',
        )

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks of the new world; one that no mesh names has a state without tensors."""
        return range(1 + max((rank for mesh in self.meshes for rank in mesh.ranks), default=0))

    def names(self, rank: int) -> dict[str, str]:
        """Return every name of a rank's state, in the source's order, and the tensor it stands for."""
        held = self.records.get(rank, {})
        return {name: target for name, target in self.standing.items() if target in held}

    def record(self, rank: int) -> RankRecord:
        """Return what a rank's state says of itself."""
        held = self.records.get(rank, {})
        return RankRecord(
            run_id=self.run_id,
            attempt=None,
            step=self.source.step,
            rank=rank,
            world_size=len(self.ranks),
            host=socket.gethostname(),
            meshes=tuple(_mesh_record(mesh) for mesh in self.meshes),
            tensors={name: held[target] for name, target in self.names(rank).items()},
        )


def _shape_of(source: StoredModel, name: str) -> tuple[int, ...]:
    return next(shard.shape for shard in source.shards if shard.name == name)


def _mesh_record(mesh: DeviceMesh) -> MeshRecord:
    return mesh.axis_names, mesh.shape, mesh.ranks
