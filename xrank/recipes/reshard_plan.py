"""The plan of a reshard: it reads the source, lays out and proves every rank's new state, and writes nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import xxhash
from msgspec import Struct, field
from msgspec.structs import replace

from xrank.engine.companions import CompanionFile, check_companions
from xrank.engine.hf_folder import lay_out_state
from xrank.engine.planner import Pieces, Plan, divide_pieces, make_plan
from xrank.errors import LayoutError
from xrank.formats.rank_state import RankRecord, TensorRecord
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.coverage import CoverageFault, contains, range_text
from xrank.layout.layout_map import base_of_shape, companion_part, inline_base
from xrank.layout.local_part import LocalPart, local_part
from xrank.layout.mesh_parts import flat_part
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.layout.notation import count_names_of, size_names_of
from xrank.layout.output_files import OutputTensor, Selection, TensorPart
from xrank.layout.stored_model import StoredModel
from xrank.layout.tensor_layout import flat_of
from xrank.readers.placement import Claim, Claims, find_local_name, list_counted_names
from xrank.recipes.decision import Purpose, Request, config_text_of, decide, digest_of_plan, layout_notes, read_layouts
from xrank.recipes.found_source import BaseModel, FoundSource
from xrank.recipes.options import GatherOptions
from xrank.recipes.sources import open_base_model, read_source
from xrank.storage.entries import plain_config
from xrank.system import host_name
from xrank.words import likewise_text, list_text, ranks_text


class NewPart(Struct, frozen=True):
    """The part of a tensor that one rank is to hold."""

    shape: tuple[int, ...]
    part: TensorPart


def new_claim(name: str, claims: Claims) -> Claim | None:
    """Return the claim that cuts a tensor; None where no rule decides. A flat buffer of the tensor alone is a claim."""
    claim = claims.find_in_file(name)
    flat = None if claim is None else flat_of(claim.layout)
    if flat is not None and (flat.multiple is not None or [member.name for member in flat.members] != [name]):
        raise LayoutError(
            f"{name}: the new layout is a flat buffer, which is written only if it holds this tensor alone",
            tensor=name,
            got=str(claim),
            want=f"the layout of one tensor, or flat({name} [...])",
            next_step="give each member its own layout",
        )
    return claim


def new_parts(
    name: str, claim: Claim, shape: tuple[int, ...], base: tuple[int, ...] | None = None
) -> Mapping[int, NewPart]:
    """Return the part of each rank that is to hold any element of a tensor.

    For a companion, `base` is the global shape of the tensor that it follows.
    """
    try:
        owners = tuple(rank for rank in claim.mesh.ranks if find_local_name(claim, name, rank) is not None)
        parts, fault = _prove(claim, owners, shape, base)
    except LayoutError as error:
        error.about(name, tensor=name, next_step="correct the layout file")
        raise
    if fault is not None:
        where = range_text(shape, fault.address, fault.address)
        ranks = [rank for rank, new in parts.items() if any(contains(nest, fault.address) for nest in new.part.nests)]
        what = "given to no rank" if fault.kind == "gap" else f"given to {ranks_text(ranks)} in contradicting layouts"
        problem = f"{name}, from {where} on: {what} by the new layout"
        got = f"{claim} of {list(shape)} on {claim.mesh.grid}"
        want, step = "every element on some rank, and equal parts wherever several have it", "correct the layout file"
        raise LayoutError(problem, tensor=name, index_range=where, got=got, want=want, next_step=step)
    return parts


@lru_cache(maxsize=1024)
def _prove(
    claim: Claim, owners: tuple[int, ...], shape: tuple[int, ...], base: tuple[int, ...] | None
) -> tuple[Mapping[int, NewPart], CoverageFault | None]:
    found = {}
    for rank in owners:
        part = _part(claim, rank, shape, base)
        if part is None:
            continue
        if part.sums:
            problem = f"the layout has partial sums over {', '.join(part.sums)}, but the stored tensor is the whole sum"
            raise LayoutError(problem, got=str(claim), want="parts or replicas")
        found[rank] = part
    rows = [(rank, nest) for rank, part in found.items() for nest in part.nests]
    table = NestTable.from_nests([nest for _, nest in rows])
    first, _, fault = divide_pieces(Pieces(int_array(rank for rank, _ in rows), table), math.prod(shape))
    compared: dict[int, list[Nest]] = {}
    for row in first.tolist():
        rank, nest = rows[row]
        compared.setdefault(rank, []).append(nest)
    parts = {
        rank: NewPart(part.shape, TensorPart(shape, part.nests, tuple(compared.get(rank, ()))))
        for rank, part in found.items()
    }
    return parts, fault


def _part(claim: Claim, rank: int, shape: tuple[int, ...], base: tuple[int, ...] | None) -> LocalPart | None:
    coordinate, sizes = claim.mesh.coordinate(rank), dict(claim.sizes)
    flat = flat_of(claim.layout)
    if flat is not None:
        (member,) = flat.members
        found = flat_part(claim.layout, claim.mesh, coordinate, {member.name: shape}, sizes=sizes)
        return None if found is None else LocalPart((found.size,), found.members[member.name], found.sums)
    if claim.companion is None:
        return local_part(claim.layout, claim.mesh, coordinate, shape, sizes=sizes)
    assert base is not None
    return companion_part(claim.companion, claim.layout, claim.mesh, coordinate, base, sizes=sizes)


class Reshard(Struct, frozen=True, eq=False):
    """A planned and proven reshard; nothing is written yet."""

    transforms: ClassVar[None] = None
    options: GatherOptions
    source: StoredModel
    selection: Selection
    """The source's tensors that are written, tied, cast or left out."""
    outputs: tuple[OutputTensor, ...]
    """The whole tensors; where names share their bytes in the states, only the kept name."""
    tied: Mapping[str, tuple[str, ...]]
    """Kept name -> names that share its bytes in the states."""
    plan: Plan
    """Plan of one file for each rank, ordered by rank."""
    run_id: str
    grid: str
    """Grid of the new mesh as text; semicolons separate several meshes."""
    companions: tuple[CompanionFile, ...]
    texts: Mapping[str, str]
    """Content of the companions that the plan changes, by name: a config.json with the dtype of a cast."""
    notes: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """Digest that identifies the plan of an interrupted output."""
        return digest_of_plan(self.plan)


def plan_reshard(
    source: str,
    layouts: str | os.PathLike[str] | LayoutMap,
    options: GatherOptions,
    *,
    recipe: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
    part: str | None = None,
    world_size: int | None = None,
    host: str | None = None,
    is_partial: bool = False,
) -> Reshard:
    """Return the proven plan of a reshard; reads metadata alone. Arguments and errors as in `reshard_checkpoint`.

    `host` is the host name that the states record; None: this host. `is_partial` leaves tensors without a rule out,
    with a note, unless all are.
    """
    base = open_base_model(base_model) if base_model is not None else None
    if options.dequantize and base is not None:
        from xrank.recipes.dequantization import dequantize_base  # few sources are quantized

        base = dequantize_base(base)
    new = layouts if isinstance(layouts, LayoutMap) else read_layouts(layouts)
    try:
        found = read_source(source, base=base, part=part, world_size=world_size, keeps_names=True)
    except LayoutError as error:
        # The layouts of a reshard are the new ones.
        error.advise("gather it with its layouts or a base model, then reshard the model")
        raise
    if options.dequantize:
        from xrank.recipes.dequantization import dequantize_source

        found = dequantize_source(found, options.dtype)
    return plan_reshard_of(found, source, new, options, recipe=recipe, base=base, host=host, is_partial=is_partial)


def plan_reshard_of(
    found: FoundSource,
    source: str,
    new: LayoutMap,
    options: GatherOptions,
    *,
    recipe: str | os.PathLike[str] | None = None,
    base: BaseModel | None = None,
    host: str | None = None,
    is_partial: bool = False,
) -> Reshard:
    """Return the proven plan of a reshard for a source that was read, or for an imagined one; see `plan_reshard`."""
    config, config_path = found.config, found.config_path
    decision = decide(found, Request(Purpose.STATES, options, recipe, new.aliases))
    stored, options, selection = decision.source, decision.options, decision.selection
    claims = Claims(new)
    names = _find_targets(stored, selection, claims)
    tied: dict[str, list[str]] = {}
    for name, target in names.items():
        if name != target:
            tied.setdefault(target, []).append(name)
    made = config_text_of(config_path, config, options, source)[0] if config is not None else None
    # The same source and layout give the same id.
    content = repr(([file.identity for file in stored.files], new)).encode()
    run_id = stored.run_id or f"reshard-{xxhash.xxh3_64_hexdigest(content)}"
    shapes = {shard.name: shard.shape for shard in stored.shards}
    states = _States(stored, new, names, tied, run_id, host or host_name(), claims, shapes)
    # The tensors that are written separately; a tied name among them gets the dtype and shape of its target.
    known = {output.name: output for output in selection.outputs}
    for target, others in selection.tied.items():
        known.update((name, replace(known[target], name=name)) for name in others)
    outputs = tuple(known[name] for name, target in names.items() if name == target and name in known)
    for output in outputs:
        states.add(output)
    if not is_partial or not states.held:
        states.refuse_unmatched()
    state_config = plain_config(dict(json.loads(made) if made is not None else config or {}))
    files = [
        lay_out_state(states.record(rank), state_config, states.held.get(rank, ()), states.names(rank))
        for rank in states.ranks
    ]
    compared = {name: others for name, others in selection.tied.items() if names[name] == name}
    companions = check_companions({c.name: c for c in (*(base.companions if base else ()), *found.companions)}.values())
    changed = made if config_path is not None else None
    notes = [*stored.notes, *found.notes, *selection.notes, *layout_notes(new, stored), *states.notes()]
    if states.unmatched:
        text = f"{list_text(states.unmatched)}: not sent to the engine, because its layouts have no rule"
        notes.append(("not-taken", text))
    if stored.run_id is None:
        notes.append(("new-run-id", f"the source records no run id; the states say run {run_id}"))
    return Reshard(
        options,
        stored,
        selection,
        outputs,
        {target: tuple(others) for target, others in tied.items()},
        make_plan(stored, files, tied=compared),
        run_id,
        "; ".join(dict.fromkeys(mesh.grid for mesh in states.meshes)),
        companions,
        {one.name: changed for one in companions if one.name == "config.json" and changed is not None},
        tuple(notes),
    )


def _find_targets(stored: StoredModel, selection: Selection, claims: Claims) -> dict[str, str]:
    """Return for every name of the source the name whose bytes it will share: as requested, or as in the source."""
    asked = {name: target for target, names in selection.tied.items() for name in names}
    first: dict[tuple[Any, ...], str] = {}
    found = {}
    for shard in stored.shards:
        # Names with the same pieces of the same records are one tensor in the source.
        nests, target = shard.nests, shard.name
        if len(shard.record):
            arrays = (shard.rank, shard.record, nests.x, nests.y, nests.loops)
            content = shard.dtype, shard.shape, *(array.tobytes() for array in arrays)
            target = first.setdefault(content, shard.name)
        found[shard.name] = asked.get(shard.name) or asked.get(target, target)
    # A target may share another one's bytes itself.
    standing = {name: found.get(target, target) for name, target in found.items()}
    # Two names cannot share bytes if the new layout cuts them in two ways, or puts them on different ranks.
    for name, target in standing.items():
        mine, its = new_claim(name, claims), new_claim(target, claims)
        if mine is not None and its is not None and (str(mine), mine.mesh) != (str(its), its.mesh):
            standing[name] = name
    return standing


class _States(Struct):
    source: StoredModel
    layouts: LayoutMap
    standing: Mapping[str, str]
    """Every name -> the name whose bytes it shares."""
    tied: Mapping[str, Sequence[str]]
    """The inverse of `standing`, without names that stand for themselves."""
    run_id: str
    host: str
    claims: Claims
    shapes: Mapping[str, tuple[int, ...]]
    """Global shapes of all tensors."""
    held: dict[int, list[OutputTensor]] = field(default_factory=dict)
    records: dict[int, dict[str, TensorRecord]] = field(default_factory=dict)
    """Records by rank and by the rank's own name."""
    own_names: dict[int, dict[str, str]] = field(default_factory=dict)
    """Rank -> tensor name -> the rank's own name."""
    meshes: dict[DeviceMesh, int] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def add(self, output: OutputTensor) -> None:
        """Give every rank its part of a tensor."""
        claim = new_claim(output.name, self.claims)
        if claim is None:
            self.unmatched.append(output.name)
            return
        base = None
        if claim.companion is not None:
            base = base_of_shape(claim.companion, self.layouts, output.name, output.shape, self.shapes)
        try:
            parts = new_parts(output.name, claim, output.shape, base)
        except LayoutError as error:
            if told := self._describe_sizes(output.name):
                error.advise(f"correct the layout file: in its [sizes], {told} must be the model's")
            raise
        record = self._record(claim, output.shape)
        for rank, new in parts.items():
            self.held.setdefault(rank, []).append(OutputTensor(output.name, output.dtype, new.shape, part=new.part))
            for name in (output.name, *self.tied.get(output.name, ())):
                self._name(rank, name, find_local_name(claim, name, rank) or name, record)

    def _describe_sizes(self, name: str) -> str:
        """Return the sizes of the layout file that a tensor's rule uses, as in ``r = 4, d = 128``."""
        rule, layout = self.layouts.rule_for(name), self.layouts[name]
        if rule is None or layout is None:
            return ""
        pattern = self.layouts.name_of(rule)
        dims = (*layout.tree.dims, *(pattern.dims if pattern is not None else ()))
        names = dict.fromkeys(size for dim in dims for size in (*size_names_of(dim), *count_names_of(dim)))
        return ", ".join(f"{size} = {self.layouts.sizes[size]}" for size in names if size in self.layouts.sizes)

    def _name(self, rank: int, name: str, own: str, record: TensorRecord) -> None:
        held = self.records.setdefault(rank, {})
        if own in held:
            other = next(name for name, taken in self.own_names[rank].items() if taken == own)
            raise LayoutError(
                f"{name}: rank {rank} would have both {own} and {other} under this name",
                tensor=name,
                rank=rank,
                got=f"two tensors {own}",
                want="a name for each",
                next_step="choose different names with dims in the layout file",
            )
        held[own] = record
        self.own_names.setdefault(rank, {})[name] = own

    def _record(self, claim: Claim, shape: tuple[int, ...]) -> TensorRecord:
        layout, view = claim.layout, claim.layout.view_mesh
        companion = None if claim.companion is None else inline_base(claim.companion, layout.tree)
        return TensorRecord(
            str(companion or layout),
            self.meshes.setdefault(claim.mesh, len(self.meshes)),
            None if flat_of(layout) is not None else shape,  # a buffer's shape is not its tensor's
            None if view is None else self.meshes.setdefault(view, len(self.meshes)),
            None if claim.pattern is None else str(claim.pattern),
        )

    def notes(self) -> list[tuple[str, str]]:
        """Return notes on patterns that count more tensors than the source has: a size may be another model's."""
        found: dict[str, tuple[Claim, list[str]]] = {}
        for name in self.shapes:
            claim = self.claims.find_in_file(name)
            if claim is not None and claim.pattern is not None:
                found.setdefault(str(claim.pattern), (claim, []))[1].append(name)
        counts = {pattern: sum(1 for _ in list_counted_names(claim)) for pattern, (claim, _) in found.items()}
        surplus = [pattern for pattern, (_, names) in found.items() if counts[pattern] > len(names)]
        if not surplus:
            return []
        first, *more = surplus
        text = f"{first} counts {counts[first]:,} tensors, and the source has {len(found[first][1]):,}"
        return [("counts-more", f"{text}{likewise_text(more)}: is the layout file of this model's size?")]

    def refuse_unmatched(self) -> None:
        """Refuse tensors without a rule: whole on every rank is a layout, too, and the file must state it."""
        if not self.unmatched:
            return
        first, *more = self.unmatched
        for rule, layout in self.layouts.items():
            flat = None if layout is None else flat_of(layout)
            if flat is not None and any(member.name == first for member in flat.members):
                problem = f"{first}: the layout file puts it into the flat buffer {rule}, but reshard writes none"
                step = "give each member of the buffer its own layout"
                raise LayoutError(problem, tensor=first, got=str(layout), want="a rule for each tensor", next_step=step)
        dims = ", ".join(f"d{i}" for i in range(len(self.shapes[first])))
        problem = f"{first}: no rule of the layout file gives its layout{likewise_text(more)}"
        step = f'add a rule, such as "{first}" = "[{dims}]" for a tensor that every rank holds whole'
        got = f"{len(self.layouts)} rules"
        raise LayoutError(problem, tensor=first, got=got, want="one for every tensor", next_step=step)

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks of the new world; a rank outside all meshes has a state without tensors."""
        return range(1 + max((rank for mesh in self.meshes for rank in mesh.ranks), default=0))

    def names(self, rank: int) -> dict[str, str]:
        """Return every name of a rank's state, in the source's order, and the tensor that it stands for."""
        own = self.own_names.get(rank, {})
        return {own[name]: target for name, target in self.standing.items() if name in own}

    def record(self, rank: int) -> RankRecord:
        """Return the record that a rank's state contains about itself."""
        held = self.records.get(rank, {})
        return RankRecord(
            run_id=self.run_id,
            attempt=None,
            step=self.source.step,
            rank=rank,
            world_size=len(self.ranks),
            host=self.host,
            meshes=tuple((mesh.axis_names, mesh.shape, mesh.ranks) for mesh in self.meshes),
            tensors={name: held[name] for name in self.names(rank)},
        )
