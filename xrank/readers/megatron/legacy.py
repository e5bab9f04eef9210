"""Reads Megatron's checkpoints with one file per model-parallel rank (--ckpt-format torch)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from xrank.errors import LayoutError, option
from xrank.formats.pickles import inert_error
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import infer_shape, local_part
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.readers.base import Hints
from xrank.readers.claims import HeldTensor, pieces_of
from xrank.readers.megatron.layouts import (
    LAYER,
    count_experts,
    expert_in,
    is_kept_whole,
    layout_of,
    layout_of_down_projection,
    layout_of_packed,
    plain_layout,
    projections,
    shape_of_grouped,
    stack_of,
    whole_name,
)
from xrank.readers.megatron.run import (
    FILE,
    Chunk,
    GridPlace,
    ParallelSizes,
    check_agreement,
    check_grid,
    check_iteration,
    count_layers,
    explain_mismatch,
    first_layers,
    grid_text,
    has_encoder,
    list_folders,
    parallel_sizes,
    places_of,
    plain_args,
    resolve_folder,
    sibling_iterations,
)
from xrank.readers.records import CopiedValues, Records, Subject, nbytes_below
from xrank.storage import places
from xrank.storage.regular_file import Origin, quote
from xrank.words import likewise_text, list_text

EXTRA_STATE = "_extra_state"
_VERSION = 3.0
_CHUNK = re.compile(r"model(0|[1-9]\d{0,3})", re.ASCII)


class MegatronRankFile(Struct, frozen=True, eq=False):
    """Content of a rank's file."""

    archive: TorchArchive
    origin: Origin
    args: Mapping[str, Any]
    iteration: object
    chunks: tuple[Mapping[str, ArchivedTensor], ...]
    """The tensors of each virtual chunk, by the rank's names."""
    num_extra: int
    """Number of Transformer Engine's own entries in the state, which are not tensors."""


def read_rank_file(path: str, rank: int) -> MegatronRankFile:
    """Return the content of a rank's file, from its metadata alone."""
    archive = read_archive(path, rank=rank)
    origin, state = Origin(path, rank), archive.value
    if not isinstance(state, dict):
        raise inert_error(state, origin)
    args = plain_args(state.get("args"), origin)
    if args is None:
        raise origin.corrupt("contains no args", _keys(state), 'a dict with "args" and "model"')
    version = state.get("checkpoint_version")
    if version != _VERSION:
        got = f"checkpoint_version {quote(str(version))}"
        step = "load and save it once with a newer Megatron"
        raise origin.usage("has another version of the format", got, str(_VERSION), step)
    sizes = parallel_sizes(args, origin)
    found = {int(match[1]): key for key in state if isinstance(key, str) and (match := _CHUNK.fullmatch(key))}
    keys = [found[number] for number in sorted(found)] if sizes.virtual > 1 else ["model"]
    if (sizes.virtual > 1 and sorted(found) != list(range(sizes.virtual))) or not all(key in state for key in keys):
        want = f"model0 to model{sizes.virtual - 1}" if sizes.virtual > 1 else "model"
        raise origin.corrupt("lacks chunks that its args require", _keys(state), want)
    chunks = tuple(_tensors(state[key], origin) for key in keys)
    num_extra = sum(name.endswith(EXTRA_STATE) for key in keys for name in state[key])
    return MegatronRankFile(archive, origin, args, state.get("iteration"), chunks, num_extra)


def _keys(state: Mapping[object, object]) -> str:
    return list_text((quote(str(key))[1:-1] for key in state), 12)


def _tensors(module: object, origin: Origin) -> dict[str, ArchivedTensor]:
    if not isinstance(module, dict):
        raise inert_error(module, origin, "its model")
    tensors = {}
    for name, value in module.items():
        if not isinstance(name, str):
            raise origin.corrupt("its model has a name that is not a text", type(name).__name__)
        if name.endswith(EXTRA_STATE):
            continue
        if isinstance(value, ArchivedTensor):
            tensors[name] = value
        elif isinstance(value, dict):
            raise origin.usage(
                f"{quote(name)[1:-1]} is a nested module: the model is older than Megatron-core",
                "nested dicts",
                "tensors by full names",
                "load it with --use-legacy-models and save it as a Megatron-core model",
            )
        else:
            error = inert_error(value, origin, quote(name)[1:-1])
            error.about(tensor=name)
            raise error
    return tensors


def check_identities(
    files: Mapping[GridPlace, MegatronRankFile], sizes: ParallelSizes, own: Mapping[GridPlace, Sequence[ArchivedTensor]]
) -> None:
    """Check that each file is its rank's: by the rank in its args, else by the tensors of which it has its own part."""
    recorded = {place: file.args.get("rank") for place, file in files.items()}
    # A converter writes the same rank into all files, so equal ranks prove nothing.
    if len(files) > 1 and len({repr(rank) for rank in recorded.values()}) > 1:
        seen: set[object] = set()
        for place, rank in recorded.items():
            if type(rank) is not int or rank in seen or not _fits(rank, place, sizes, files[place].args):
                raise files[place].origin.contradiction(
                    "is another rank's file, or several runs' files are mixed",
                    f"args.rank {quote(str(rank))}",
                    f"a rank that fits TP {place.tensor}, PP {place.pipeline}, EP {place.expert} of {sizes}",
                    f"copy {place.folder(sizes)} again from where it was written",
                )
            seen.add(rank)
        return
    copies = CopiedValues()
    for place, file in files.items():
        tensors = own.get(place, ())
        copies.add(file.archive, tensors, sum(prod(tensor.shape) for tensor in tensors), file.origin)


def _fits(rank: int, place: GridPlace, sizes: ParallelSizes, args: Mapping[str, Any]) -> bool:
    """Return whether a rank of the run may be at that place (megatron/core/parallel_state.py: the order of ranks)."""
    if rank % sizes.tensor != place.tensor:
        return False
    # Experts come next, with their own tensor parallelism; old versions counted context-parallel ranks before them.
    widths = {sizes.expert_tensor, sizes.tensor * sizes.context}
    if place.expert not in {rank // width % sizes.expert for width in widths}:
        return False
    if args.get("use_tp_pp_dp_mapping"):
        return rank // (sizes.tensor * sizes.context) % sizes.pipeline == place.pipeline
    # Otherwise stages vary slowest.
    if sizes.world is None or sizes.world % sizes.pipeline:
        return True
    return rank // (sizes.world // sizes.pipeline) == place.pipeline


_GATED = ("swiglu", "geglu", "quick_geglu", "gated_linear_unit")
# Rows of gate and up alternate (megatron/training/arguments.py); the table does not describe this layout.
_INTERLEAVED = "moe_mlp_glu_interleave_size"


class TensorParts(Struct):
    """The parts of one tensor in the files."""

    name: str
    has_expert: bool
    """Whether it belongs to one expert."""
    held: list[HeldTensor] = field(default_factory=list)
    tensors: list[ArchivedTensor] = field(default_factory=list)
    """The same parts as in their files."""
    places: list[GridPlace] = field(default_factory=list)
    """Places of the files."""


def collect_parts(
    files: Mapping[GridPlace, MegatronRankFile], sizes: ParallelSizes, starts: Mapping[Chunk, int], records: Records
) -> dict[str, TensorParts]:
    """Return each tensor's parts, by its name in the whole model, in the model's order."""
    found: dict[tuple[int, int], dict[str, TensorParts]] = {chunk: {} for chunk in sorted(starts)}
    by_name: dict[str, TensorParts] = {}
    for place, file in files.items():
        index = records.add_archive(file.archive)
        for number, chunk in enumerate(file.chunks):
            key = (number, place.pipeline)
            num_experts = _num_experts(chunk, file, sizes)
            for local_name, tensor in chunk.items():
                layer, expert = whole_name(local_name, starts[key], num_experts * place.expert)
                parts = by_name.get(layer)
                if parts is None:
                    parts = by_name[layer] = found[key][layer] = TensorParts(layer, expert)
                parts.held.append(_part_of(local_name, file, tensor, index(tensor.key), sizes))
                parts.tensors.append(tensor)
                parts.places.append(place)
    # Virtual chunks alternate over stages: chunk 0 of all stages, then chunk 1.
    whole = [item for chunk in found.values() for item in chunk.items()]
    return dict(sorted(whole, key=_model_order))


def _model_order(item: tuple[str, TensorParts]) -> tuple[int, int]:
    """Sort the embedding first, then layers by number, then the rest; names of one layer keep the files' order."""
    found = LAYER.fullmatch(item[0])
    return (1, int(found[1])) if found else (0 if item[0].startswith("embedding.") else 2, 0)


def _num_experts(chunk: Mapping[str, ArchivedTensor], file: MegatronRankFile, sizes: ParallelSizes) -> int:
    """Return the number of experts that a rank holds in each layer of a chunk, checked against the arguments."""
    for name in chunk:
        try:
            expert_in(name)
        except ValueError:
            raise file.origin.layout(
                f"{quote(name)[1:-1]}: it is unknown how Megatron cuts a tensor of this name",
                "experts without a number in their name",
                "an expert's number in the name, or all experts of a layer as GroupedMLP has them",
                "save with --ckpt-format torch_dist, which records it",
                tensor=name,
            ) from None
    try:
        held = count_experts(chunk)
    except ValueError as error:
        raise file.origin.corrupt("has gaps in its experts, or layers with other experts", str(error)) from None
    total = file.args.get("num_experts")
    if held and type(total) is int and held * sizes.expert != total:
        # Old releases with Megatron's --moe-extended-tp put a part of every expert on every rank.
        raise file.origin.contradiction(
            "does not hold its share of the experts in its args",
            f"{held} experts in a layer, on each of {sizes.expert} expert ranks",
            f"{total} in all, as in args.num_experts",
            "check that the files come from one run; if experts are cut in another way, save as torch_dist",
        )
    return held


def _part_of(
    name: str, file: MegatronRankFile, tensor: ArchivedTensor, record: int, sizes: ParallelSizes
) -> HeldTensor:
    assert file.origin.rank is not None
    shape, strides = tensor.shape, tensor.strides
    number = file.args.get("num_experts")
    try:
        grouped = shape_of_grouped(name, shape, number // sizes.expert if type(number) is int else 0)
    except ValueError as error:
        raise file.origin.corrupt(f"{name} does not fit the experts in args", str(error)) from None
    if grouped is not None:
        if strides != (shape[1], 1):
            raise file.origin.corrupt(f"{name} is not a plain matrix", f"strides {list(strides)}")
        shape, strides = grouped, (grouped[1] * grouped[2], grouped[2], 1)
    held = HeldTensor.from_archive(tensor, rank=file.origin.rank, file=file.origin.path, record=record)
    return replace(held, shape=shape, strides=strides)


def find_gating(tensors: Mapping[str, TensorParts], first: MegatronRankFile) -> dict[str, bool]:
    """Return stack of layers -> whether its linear_fc1 is gate and up, by the arguments and the shapes.

    The arguments are those of the language model; shapes alone decide about a vision tower.
    """
    if first.args.get(_INTERLEAVED):
        problem = "its experts have alternating gate and up rows, which are not supported"
        got = f"args.{_INTERLEAVED} {first.args[_INTERLEAVED]}"
        raise first.origin.usage(problem, got, "halves", "save with --ckpt-format torch_dist")
    recorded = [first.args[key] for key in _GATED if isinstance(first.args.get(key), bool)]
    found: dict[str, bool] = {}
    for name, rows, columns in projections({name: parts.held[0].shape for name, parts in tensors.items()}):
        # Without an argument the first projection of a stack decides, and all others must agree with it.
        is_recorded = bool(recorded) and "vision" not in stack_of(name)
        is_gated = found.setdefault(stack_of(name), any(recorded) if is_recorded else rows == 2 * columns)
        if rows != columns * (2 if is_gated else 1):
            held = tensors[name].held[0]
            raise held.of(name).contradiction(
                f"its shape is not that of {'gate and up halves' if is_gated else 'one projection'}, by args",
                f"{rows} rows, for {columns} columns of linear_fc2",
                f"{columns * (2 if is_gated else 1)} rows",
                "check that args.swiglu is that of the run",
            )
    return {stack_of(name): any(recorded) for name in tensors} | found


def layouts_of(
    tensors: Mapping[str, TensorParts], sizes: ParallelSizes, hints: Hints, first: MegatronRankFile
) -> dict[str, TensorLayout]:
    """Return how each tensor is cut: by the caller's layout file, else by Megatron's own table, or the arguments."""
    found, unknown = {}, []
    gating = find_gating(tensors, first)
    shapes = {name: parts.held[0].shape for name, parts in tensors.items()}
    for name, parts in tensors.items():
        layout = _find_given(name, hints) or layout_of(name, is_gated=gating[stack_of(name)])
        if layout is None:
            layout = layout_of_packed(name, shapes, sizes.tensor)
        if layout is None and parts.held[0].shape:
            layout = layout_of_down_projection(name, parts.held[0].shape[0], first.args, sizes.tensor)
        if layout is None and (is_kept_whole(name) or (sizes.tensor == 1 and not parts.has_expert)):
            # The tensor is whole on every rank, and its copies are compared.
            layout = plain_layout(len(parts.held[0].shape))
        if layout is None:
            unknown.append(name)
        else:
            found[name] = layout
    if unknown:
        held = tensors[unknown[0]].held[0]
        more = likewise_text([quote(name)[1:-1] for name in unknown[1:]])
        raise held.of(quote(unknown[0])[1:-1]).layout(
            f"it is unknown how Megatron cuts a tensor of this name{more}",
            f"a part of shape {list(held.shape)}",
            f"a name in xrank's table, or a rule of {option('layouts')} on the axes tp and etp",
            f"give {option('layouts', metavar='FILE')} with its layout, or save with --ckpt-format torch_dist",
        )
    return found


def _find_given(name: str, hints: Hints) -> TensorLayout | None:
    if hints.layouts is None:
        return None
    layout = hints.layouts[name]
    return None if layout is None else TensorLayout.from_tree(layout.with_sizes(hints.layouts.sizes).tree)


def find_own_tensors(
    tensors: Mapping[str, TensorParts], layouts: Mapping[str, TensorLayout]
) -> dict[GridPlace, list[ArchivedTensor]]:
    """Return for each file the tensors of which no other file has the same part."""
    found: dict[GridPlace, list[ArchivedTensor]] = {}
    for name, parts in tensors.items():
        is_cut = any(layouts[name].cut_axes)
        by_expert = any("ep" in axes for axes in layouts[name].cut_axes)
        keys = [(p.tensor if is_cut else 0, p.expert if by_expert else 0) for p in parts.places]
        counts = Counter(keys)
        for place, key, tensor in zip(parts.places, keys, parts.tensors, strict=True):
            if counts[key] == 1:
                found.setdefault(place, []).append(tensor)
    return found


def place_parts(parts: TensorParts, layout: TensorLayout, sizes: ParallelSizes, hints: Hints) -> StoredShard:
    """Return where a tensor's parts lie in the whole; copies of one part become replicas."""
    first = parts.held[0]
    for held in parts.held:
        if held.dtype != first.dtype:
            raise held.of(parts.name).disagreement(first.rank, "dtype", held.dtype, first.dtype)
    # Experts are cut by `etp`, whose ranks repeat along tp; other tensors by `tp`.
    lengths = {"tp": sizes.tensor, "ep": sizes.expert, "etp": sizes.expert_tensor}
    # A tensor that no axis cuts still needs a mesh: it is whole on each rank of tp.
    axes = tuple(axis for axis in lengths if any(axis in used for used in layout.cut_axes)) or ("tp",)
    mesh = _mesh(axes, tuple(lengths[axis] for axis in axes))
    try:
        places = []
        for place in parts.places:
            at = {"tp": place.tensor, "ep": place.expert, "etp": place.tensor % sizes.expert_tensor}
            places.append({axis: at[axis] for axis in axes})
        # One part per place determines the shape; the others are copies and must have the same shape.
        shapes = {mesh.rank_at(at): held.shape for at, held in zip(places, parts.held, strict=True)}
        shape = infer_shape(layout, mesh, shapes)
        nests = []
        for at, held in zip(places, parts.held, strict=True):
            part = local_part(layout, mesh, at, shape)
            if part is None or part.sums or part.shape != held.shape:
                raise held.of(parts.name).contradiction(
                    f"the part in {held.file} has another shape than its layout gives it",
                    str(list(held.shape)),
                    f"{None if part is None else list(part.shape)}, by {layout} of {list(shape)}",
                )
            nests.append(part.nests)
    except LayoutError as error:
        subject = first.of(parts.name)
        if _find_given(parts.name, hints) is None:
            raise subject.contradiction(error.message, error.got, error.want) from None
        step = "correct the layout file; its axes are tp and etp"
        raise subject.make(LayoutError, error.message, error.got, error.want, step) from None
    return pieces_of(parts.name, parts.held, shape, nests)


@lru_cache(maxsize=16)
def _mesh(axes: tuple[str, ...], lengths: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh(lengths, axes)


_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class MegatronLegacyReader:
    """The reader of Megatron's checkpoints with one file per rank (`xrank.readers.base.Reader`)."""

    name = "megatron-legacy"

    def recognise(self, path: str) -> str | None:
        """Return None for a checkpoint's folder, or a folder whose marker names a checkpoint."""
        return explain_mismatch(path, _holds, f"mp_rank_*/{FILE}")

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of a checkpoint lies; errors as in `Reader.read`."""
        folder = resolve_folder(path, _holds)
        found = [name for name in list_folders(folder) if places.is_present(os.path.join(folder, name, FILE))]
        # Every rank's arguments record the grid.
        first = read_rank_file(os.path.join(folder, found[0], FILE), 0)
        sizes = parallel_sizes(first.args, first.origin)
        cells = places_of(sizes, folder)
        check_grid(folder, found, sizes, cells)
        files = {}
        for place in cells:
            file = read_rank_file(os.path.join(folder, place.folder(sizes), FILE), place.rank(sizes))
            check_agreement(first.args, first.origin.path, file.args, file.origin.path)
            if repr(first.iteration) != repr(file.iteration):
                got, want = (f"iteration {quote(str(one.iteration))}" for one in (file, first))
                raise file.origin.contradiction(f"belongs to another iteration than {first.origin.path}", got, want)
            files[place] = file
        step = check_iteration(folder, first.iteration, first.origin.path)
        counts = _layers(files, sizes)
        starts = first_layers(counts, sizes, first.args, first.origin.path)
        # Before experts are numbered: their numbers in the whole model follow from equal counts on all ranks.
        _check_alike(files)
        records = Records()
        tensors = collect_parts(files, sizes, starts, records)
        layouts = layouts_of(tensors, sizes, hints, first)
        # Needs the layouts: tensors that ranks share do not tell their files apart.
        check_identities(files, sizes, find_own_tensors(tensors, layouts))
        shards = tuple(place_parts(tensors[name], layouts[name], sizes, hints) for name in tensors)
        aliases = _find_ties(tensors, first.args)
        return StoredModel(
            format=self.name,
            path=path,
            files=tuple(records.files),
            records=records.table(),
            shards=shards,
            aliases=aliases,
            world_size=sizes.world or len(cells),
            step=step,
            args=first.args,
            nbytes=records.nbytes,
            skipped_nbytes=max(nbytes_below(folder) - records.nbytes, 0),
            notes=_notes(files, records),
            details=_details(folder, found, sizes, cells, counts, starts, aliases),
        )


def _holds(path: str) -> bool:
    return places.is_folder(path) and any(
        places.is_present(os.path.join(path, name, FILE)) for name in list_folders(path)
    )  # fmt: skip


def _layers(files: Mapping[GridPlace, MegatronRankFile], sizes: ParallelSizes) -> dict[Chunk, int]:
    """Return the number of layers in each chunk, after checking that all its ranks agree."""
    counts: dict[Chunk, int] = {}
    for place, file in files.items():
        for number, chunk in enumerate(file.chunks):
            if sizes.pipeline * sizes.virtual > 1 and has_encoder(chunk):
                raise file.origin.usage(
                    "contains layers of an encoder, which each stage counts from 0: the number of layers in earlier "
                    "stages is unknown",
                    str(sizes),
                    "layers of a decoder, or one stage",
                    "save with --ckpt-format torch_dist",
                )
            count = count_layers(chunk, file.origin.path, place.rank(sizes))
            known = counts.setdefault((number, place.pipeline), count)
            if known != count:
                problem = "contains another number of layers than other ranks of its stage"
                want = f"{known}, as on the first rank of stage {place.pipeline}"
                raise file.origin.contradiction(problem, f"{count} layers", want)
    return counts


def _check_alike(files: Mapping[GridPlace, MegatronRankFile]) -> None:
    """Check that the ranks of a stage hold tensors of the same names; each rank counts its experts from 0."""
    first: dict[int, tuple[MegatronRankFile, list[set[str]]]] = {}
    for place, file in files.items():
        names = [set(chunk) for chunk in file.chunks]
        other, known = first.setdefault(place.pipeline, (file, names))
        for ours, theirs in zip(names, known, strict=True):
            if ours != theirs:
                name = min(ours ^ theirs)
                holder, lacking = (file, other) if name in ours else (other, file)
                problem = f"{holder.origin.path} contains it, but {lacking.origin.path} of its stage does not"
                subject = Subject(quote(name)[1:-1], lacking.origin.rank, lacking.origin.path)
                raise subject.contradiction(problem, "no part", "a part, or a copy")


def _find_ties(tensors: Mapping[str, TensorParts], args: Mapping[str, Any]) -> dict[str, str]:
    """Return the last stage's copy of the embedding if the two are one tensor (models/gpt/gpt_model.py)."""
    if args.get("untie_embeddings_and_output_weights") is not False:
        return {}
    pairs = {name: name.removesuffix(_HEAD) + _EMBEDDING for name in tensors if name.endswith(_HEAD)}
    return {head: embedding for head, embedding in pairs.items() if embedding in tensors}


def _notes(files: Mapping[GridPlace, MegatronRankFile], records: Records) -> tuple[tuple[str, str], ...]:
    notes = []
    num_extra = sum(file.num_extra for file in files.values())
    if num_extra:
        notes.append(("extra-state", f"{num_extra:,} _extra_state entries (Transformer Engine's own) were left out"))
    return (*notes, *records.notes())


def _details(
    folder: str,
    found: Sequence[str],
    sizes: ParallelSizes,
    cells: Sequence[GridPlace],
    counts: Mapping[Chunk, int],
    starts: Mapping[Chunk, int],
    aliases: Mapping[str, str],
) -> dict[str, Any]:
    own = os.path.basename(places.real(folder))
    siblings = sibling_iterations(os.path.dirname(places.real(folder)))
    stages = {}
    for (chunk, stage), count in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
        name = f"PP {stage}" + (f", chunk {chunk}" if sizes.virtual > 1 else "")
        start = starts[chunk, stage]
        stages[name] = f"layers {start}-{start + count - 1}" if count else "no layers"
    return {
        "iteration": own,
        "iterations": siblings if own in siblings else [own],
        "parallel": str(sizes),
        "grid": grid_text(found, sizes, cells),
        "stages": stages,
        "tied": dict(aliases),
    }
