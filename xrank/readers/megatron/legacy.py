"""Reads Megatron's checkpoints with one file per model-parallel rank (--ckpt-format torch)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from xrank.errors import AGAIN, ContradictionError, IncompleteError, LayoutError, option
from xrank.formats.pickles import inert_error
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.layout import TensorLayout
from xrank.layout.local_part import infer_shape, local_part
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.readers.base import RAISING, Faults, Hints, drop_outvoted
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
    ParallelSizes,
    check_iteration,
    describe_iteration,
    explain_mismatch,
    parallel_sizes,
    plain_args,
    resolve_folder,
)
from xrank.readers.placement import HeldTensor, pieces_of, shared_mesh
from xrank.readers.records import CopiedValues, Records, Subject, index_lost, nbytes_below
from xrank.storage import places
from xrank.storage.regular_file import Origin, quote
from xrank.words import likewise_text, list_text

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?", re.ASCII)
_MAX_RANKS = 1 << 20


class GridPlace(Struct, frozen=True, order=True):
    """Place of a file's rank in the grid; places sort like the ranks of a run without data parallelism."""

    pipeline: int
    expert: int
    tensor: int

    def rank(self, sizes: ParallelSizes) -> int:
        """Return the rank's number; tensor-parallel ranks vary fastest."""
        return self.tensor + sizes.tensor * (self.expert + sizes.expert * self.pipeline)

    def folder(self, sizes: ParallelSizes) -> str:
        """Return the name of the rank's folder."""
        name = f"mp_rank_{self.tensor:02d}"
        if sizes.pipeline > 1:
            name += f"_{self.pipeline:03d}"
        return f"{name}_{self.expert:03d}" if sizes.expert > 1 else name


def list_folders(folder: str) -> list[str]:
    """Return the names of the ranks' folders in a checkpoint."""
    names = filter(_FOLDER.fullmatch, places.list_names(folder))
    return sorted(name for name in names if places.is_folder(os.path.join(folder, name)))


def places_of(sizes: ParallelSizes, folder: str) -> tuple[GridPlace, ...]:
    """Return the places for which a run writes files."""
    if sizes.tensor * sizes.pipeline * sizes.expert > _MAX_RANKS:
        step = "copy the folder again from where it was written"
        raise Origin(folder).usage("its args record more than a million ranks", str(sizes), next_step=step)
    pairs: Iterable[tuple[int, int]] = product(range(sizes.tensor), range(sizes.expert))
    if sizes.expert > 1 and sizes.expert_tensor != sizes.tensor:
        if sizes.tensor % sizes.expert_tensor or sizes.world is None or sizes.world % sizes.pipeline:
            raise Origin(folder).usage(
                "its experts are split over a different number of ranks than other layers, which is not supported",
                f"{sizes}, world size {sizes.world}",
                "ETP that divides TP, and a world size",
                "save with --ckpt-format torch_dist",
            )
        # The writers are the first ranks of each data-parallel group. Dense layers and experts divide the ranks of a
        # stage in two ways (parallel_state.py: RankGenerator); tensor parallelism varies fastest in both. The world
        # size comes from a file, which may be damaged: the loop must end.
        pairs = (
            (rank % sizes.tensor, rank // sizes.expert_tensor % sizes.expert)
            for rank in range(min(sizes.world // sizes.pipeline, _MAX_RANKS))
            if rank < sizes.tensor * sizes.context or rank < sizes.expert_tensor * sizes.expert
        )
    return tuple(sorted(GridPlace(p, expert, tensor) for tensor, expert in set(pairs) for p in range(sizes.pipeline)))


def check_grid(
    folder: str,
    found: Sequence[str],
    sizes: ParallelSizes,
    cells: Sequence[GridPlace],
    faults: Faults = RAISING,
) -> None:
    """Check that exactly the files of the run's ranks are present."""
    wanted = {place.folder(sizes): place for place in cells}
    missing = [name for name in wanted if not places.is_present(os.path.join(folder, name, FILE))]
    for group in [missing] if faults.raises and missing else [[name] for name in missing]:
        place, file = wanted[group[0]], os.path.join(folder, group[0], FILE)
        files = list_text((f"{name}/{FILE}" for name in group), 3)
        error = IncompleteError(
            f"{files}: not in {folder} (TP {place.tensor}, PP {place.pipeline}, EP {place.expert})",
            rank=place.rank(sizes),
            file=file,
            got=f"{len(wanted) - len(missing)} files; missing: {list_text(missing, 16)}",
            want=f"{len(wanted)}, for {sizes}",
            next_step=f"copy {group[0]} from where it was written, then {AGAIN}; nothing was written",
        )
        faults.lose(error, file)
    surplus = [name for name in found if name not in wanted]
    if surplus:
        strange = Origin(os.path.join(folder, surplus[0])).contradiction(
            "is not a rank of this run",
            list_text(surplus),
            f"{len(wanted)} folders for {sizes}",
            "move the folders of another run elsewhere, or give the path of the checkpoint's own folder",
        )
        faults.lose(strange, *(os.path.join(folder, name, FILE) for name in surplus))


Chunk = tuple[int, int]
"""Virtual chunk and pipeline stage. Sorted, the chunks contain a model's layers in order."""

_ENCODER_LAYER = re.compile(r"encoder\.layers\.(0|[1-9]\d{0,8})\..*", re.ASCII)

# With these settings, num_layers alone does not determine a stage's share (megatron/training/arguments.py).
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_split_rank",
)
_FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
_LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")


def count_layers(names: Iterable[str], file: str, rank: int) -> int:
    """Return the number of layers in a chunk: the decoder's, or in a model without one (BERT) the encoder's."""
    held = tuple(names)
    stack = "decoder" if any(map(LAYER.fullmatch, held)) else "encoder"
    pattern = LAYER if stack == "decoder" else _ENCODER_LAYER
    numbers = {int(found[1]) for name in held if (found := pattern.fullmatch(name))}
    missing = next((layer for layer in range(len(numbers)) if layer not in numbers), None)
    if missing is not None:
        raise Origin(file, rank).contradiction(
            f"contains nothing of {stack}.layers.{missing}, but contains later layers",
            f"{len(numbers)} layers, up to {max(numbers)}",
            "layers counted from 0 on",
            "copy the file again from where it was written",
            tensor=f"{stack}.layers.{missing}",
        )
    return len(numbers)


def first_layers(
    counts: Mapping[Chunk, int], sizes: ParallelSizes, args: Mapping[str, Any], file: str
) -> dict[Chunk, int]:
    """Return the number of each chunk's first layer in the whole model."""
    num_layers = args.get("num_layers")
    if type(num_layers) is int and sum(counts.values()) != num_layers:
        total = sum(counts.values())
        raise _contradiction("all stages together do not contain", total, num_layers, "args.num_layers", file)
    # The files' own counts decide; the arguments can only contradict them, because they leave uneven splits open.
    expected = _expect_counts(sizes, args)
    first, total = {}, 0
    for chunk in sorted(counts):
        if expected is not None and counts[chunk] != expected[chunk]:
            where = f"pipeline stage {chunk[1]}" + (f", chunk {chunk[0]}," if sizes.virtual > 1 else "")
            raise _contradiction(f"{where} does not contain", counts[chunk], expected[chunk], "its args", file)
        first[chunk] = total
        total += counts[chunk]
    return first


def _contradiction(what: str, got: int, want: int, source: str, file: str) -> ContradictionError:
    return Origin(file).contradiction(f"{what} the number of layers in {source}", f"{got} layers", f"{want} layers")


def _expect_counts(sizes: ParallelSizes, args: Mapping[str, Any]) -> dict[Chunk, int] | None:
    """Return each chunk's number of layers by the arguments; None if they do not determine it in a simple way."""
    total = args.get("num_layers")
    if type(total) is not int or any(args.get(key) for key in _UNEVEN):
        return None
    ends: dict[int, int] = {}
    for stage, keys in ((0, _FIRST), (sizes.pipeline - 1, _LAST)):
        number = next((args[key] for key in keys if args.get(key) is not None), None)
        if type(number) is int:
            ends[stage] = number
    middle = sizes.pipeline - len(ends)
    rest = total - sum(ends.values())
    if rest < 0 or (middle and rest % middle) or (not middle and rest):
        return None
    stages = {stage: ends.get(stage, rest // middle if middle else 0) for stage in range(sizes.pipeline)}
    if any(count % sizes.virtual for count in stages.values()):
        return None
    return {(chunk, stage): count // sizes.virtual for stage, count in stages.items() for chunk in range(sizes.virtual)}


# Arguments in which ranks of one run may differ: identity, place and time.
_OWN = re.compile(r"(?:.*_)?(?:rank|host|hostname|device|pid|port|addr|time|start_time|timestamp)(?:_.*)?")
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
    is_lost: bool = False
    """Whether it stands for a lost file, with the tensors of another rank's in their shapes."""


def read_rank_file(path: str, rank: int | None) -> MegatronRankFile:
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
        raise origin.usage("has a different version of the format", got, str(_VERSION), step)
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


def check_agreement(first: MegatronRankFile, file: MegatronRankFile) -> None:
    """Check that two ranks' files are those of one run and iteration."""
    for key in sorted({*first.args, *file.args}):
        ours, theirs = (one.args.get(key, "<missing>") for one in (file, first))
        # repr compares types, too, and makes NaN equal NaN.
        if not _OWN.fullmatch(key) and repr(ours) != repr(theirs):
            problem = f"belongs to a different run than {first.origin.path}: args.{quote(key)[1:-1]} differs"
            want = f"{ascii(theirs)[:200]}, as in {first.origin.path}"
            raise Origin(file.origin.path).contradiction(problem, ascii(ours)[:200], want)
    if repr(first.iteration) != repr(file.iteration):
        got, want = (f"iteration {quote(str(one.iteration))}" for one in (file, first))
        raise file.origin.contradiction(f"belongs to a different iteration than {first.origin.path}", got, want)


def check_identities(
    files: Mapping[GridPlace, MegatronRankFile],
    sizes: ParallelSizes,
    tensors: Mapping[str, TensorParts],
    layouts: Mapping[str, TensorLayout],
    faults: Faults = RAISING,
) -> None:
    """Check that each file is its rank's: by the rank in its args, else by the tensors of which it has its own part."""
    files = {place: file for place, file in files.items() if not file.is_lost}
    if check_recorded_ranks(files, sizes, faults):
        return
    own: dict[GridPlace, list[ArchivedTensor]] = {}
    for name, parts in tensors.items():
        is_cut = any(layouts[name].cut_axes)
        by_expert = any("ep" in axes for axes in layouts[name].cut_axes)
        keys = [(p.tensor if is_cut else 0, p.expert if by_expert else 0) for p in parts.places]
        counts = Counter(keys)
        for place, key, tensor in zip(parts.places, keys, parts.tensors, strict=True):
            if counts[key] == 1:
                own.setdefault(place, []).append(tensor)
    copies = CopiedValues(faults)
    for place, file in files.items():
        held = own.get(place, ())
        copies.add(file.archive, held, sum(prod(tensor.shape) for tensor in held), file.origin)


def check_recorded_ranks(files: Mapping[GridPlace, MegatronRankFile], sizes: ParallelSizes, faults: Faults) -> bool:
    """Return whether the files' args record their ranks, after checking that each fits its place."""
    recorded = {place: file.args.get("rank") for place, file in files.items()}
    # A converter writes the same rank into all files, so equal ranks prove nothing.
    if len(files) > 1 and len({repr(rank) for rank in recorded.values()}) > 1:
        seen: dict[object, str] = {}
        for place, rank in recorded.items():
            origin = files[place].origin
            if type(rank) is not int or rank in seen or not _fits(rank, place, sizes, files[place].args):
                error = origin.contradiction(
                    "is another rank's file, or several runs' files are mixed",
                    f"args.rank {quote(str(rank))}",
                    f"a rank that fits TP {place.tensor}, PP {place.pipeline}, EP {place.expert} of {sizes}",
                    f"copy {place.folder(sizes)} again from where it was written",
                )
                is_doubtful = type(rank) is int and rank in seen and _fits(rank, place, sizes, files[place].args)
                faults.lose(error, origin.path, *([seen[rank]] if is_doubtful else []))  # one of the two is a copy
            else:
                seen[rank] = origin.path
        return True
    return False


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
        index = index_lost(file.origin.path, records) if file.is_lost else records.add_archive(file.archive)
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
    names = (name for chunk in found.values() for name in chunk)
    return {name: by_name[name] for name in sorted(names, key=_model_order)}


def _model_order(name: str) -> tuple[int, int]:
    """Sort the embedding first, then layers by number, then the rest; names of one layer keep the files' order."""
    layer = LAYER.fullmatch(name)
    return (1, int(layer[1])) if layer else (0 if name.startswith("embedding.") else 2, 0)


def _num_experts(chunk: Mapping[str, ArchivedTensor], file: MegatronRankFile, sizes: ParallelSizes) -> int:
    """Return the number of experts that a rank holds in each layer of a chunk, checked against the arguments."""
    for name in chunk:
        try:
            expert_in(name)
        except ValueError:
            raise file.origin.layout(
                f"{quote(name)[1:-1]}: it is unknown how Megatron splits a tensor of this name",
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
            f"it is unknown how Megatron splits a tensor of this name{more}",
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
    mesh = shared_mesh(tuple(lengths[axis] for axis in axes), axes)
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
                    f"the part in {held.file} does not have the shape that its layout gives",
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


_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class MegatronLegacyReader:
    """The reader of Megatron's checkpoints with one file per rank (`xrank.readers.base.Reader`)."""

    name = "megatron-legacy"

    def recognize(self, path: str) -> str | None:
        """Return None for a checkpoint's folder, or a folder whose marker names a checkpoint."""
        return explain_mismatch(path, _holds, f"mp_rank_*/{FILE}")

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of a checkpoint lies; errors as in `Reader.read`."""
        folder = resolve_folder(path, _holds)
        found = [name for name in list_folders(folder) if places.is_present(os.path.join(folder, name, FILE))]
        faults, read = hints.faults, dict[str, MegatronRankFile]()
        for name in found[:1] if faults.raises else found:
            with faults.losing(os.path.join(folder, name, FILE)):
                read[name] = read_rank_file(os.path.join(folder, name, FILE), 0 if faults.raises else None)
        read = drop_outvoted(read, _shared_args, faults)
        if not read:
            raise faults.errors[0]
        # Every rank's arguments record the grid.
        first = next(iter(read.values()))
        sizes = parallel_sizes(first.args, first.origin)
        cells = places_of(sizes, folder)
        check_grid(folder, found, sizes, cells, faults)
        files = {}
        for place in cells:
            file = os.path.join(folder, place.folder(sizes), FILE)
            if faults.raises:
                files[place] = read_rank_file(file, place.rank(sizes))
                check_agreement(first, files[place])
            elif place.folder(sizes) in read:
                files[place] = replace(read[place.folder(sizes)], origin=Origin(file, place.rank(sizes)))
        if not faults.raises:
            check_recorded_ranks(files, sizes, faults)
            files = {place: file for place, file in files.items() if file.origin.path not in faults.files}
        files = drop_outvoted(files, lambda file: _names_of_stage(file, files), faults)
        if not files:
            raise faults.errors[0]
        files = _with_lost(folder, files, sizes, cells)
        step = check_iteration(folder, first.iteration, first.origin.path)
        counts = _layers(files, sizes)
        starts = first_layers(counts, sizes, first.args, first.origin.path)
        # Before experts are numbered: their numbers in the whole model follow from equal counts on all ranks.
        _check_alike(files)
        records = Records()
        tensors = collect_parts(files, sizes, starts, records)
        layouts = layouts_of(tensors, sizes, hints, first)
        # Needs the layouts: tensors that ranks share do not tell their files apart.
        check_identities(files, sizes, tensors, layouts, faults)
        placed = {}
        for name in tensors:
            with faults.losing():
                placed[name] = place_parts(tensors[name], layouts[name], sizes, hints)
        shards = tuple(placed.values())
        pairs = {name: name.removesuffix(_HEAD) + _EMBEDDING for name in tensors if name.endswith(_HEAD)}
        # The last stage's copy of the embedding, if the two are one tensor (models/gpt/gpt_model.py).
        is_tied = first.args.get("untie_embeddings_and_output_weights") is False
        aliases = {head: target for head, target in pairs.items() if is_tied and target in tensors}
        num_extra = sum(file.num_extra for file in files.values())
        text = f"{num_extra:,} _extra_state entries (Transformer Engine's own) were left out"
        return StoredModel(
            format=self.name,
            path=path,
            files=tuple(records.files),
            records=records.table(faults.files),
            shards=shards,
            absent=tuple(name for name in tensors if name not in placed),
            aliases=aliases,
            world_size=sizes.world or len(cells),
            step=step,
            args=first.args,
            nbytes=records.nbytes,
            skipped_nbytes=max(nbytes_below(folder) - records.nbytes, 0),
            notes=(*([("extra-state", text)] if num_extra else []), *records.notes()),
            details=_details(folder, set(found), sizes, cells, counts, starts, aliases),
        )


def _shared_args(file: MegatronRankFile) -> dict[str, object]:
    args = {key: value for key, value in file.args.items() if not _OWN.fullmatch(key)}
    return {**args, "the iteration": file.iteration}


def _names_of_stage(file: MegatronRankFile, files: Mapping[GridPlace, MegatronRankFile]) -> dict[str, object]:
    stage = next(place.pipeline for place, one in files.items() if one is file)
    return {f"names in stage {stage}": [sorted(chunk) for chunk in file.chunks]}


def _with_lost(
    folder: str, files: Mapping[GridPlace, MegatronRankFile], sizes: ParallelSizes, cells: Sequence[GridPlace]
) -> dict[GridPlace, MegatronRankFile]:
    """Return the files with one for each place without: that of a rank with tensors of the same shapes.

    Where a whole stage is lost, another stage shows the layers, and tensors outside of layers remain unknown.
    """
    found: dict[GridPlace, MegatronRankFile] = {}
    for place in cells:
        if place in files:
            found[place] = files[place]
            continue
        origin = Origin(os.path.join(folder, place.folder(sizes), FILE), place.rank(sizes))
        # Nearest: the same stage and experts, then the same stage.
        near = min(files, key=lambda other: (other.pipeline != place.pipeline, other.expert != place.expert))
        chunks = files[near].chunks
        if near.pipeline != place.pipeline:
            counts = _expect_counts(sizes, files[near].args) or {}
            kept = []
            for number, chunk in enumerate(chunks):
                layers = {name: LAYER.fullmatch(name) for name in chunk}
                wanted = counts.get((number, place.pipeline), 0)
                kept.append({name: chunk[name] for name, layer in layers.items() if layer and int(layer[1]) < wanted})
            chunks = tuple(kept)
        found[place] = replace(files[near], origin=origin, chunks=chunks, num_extra=0, is_lost=True)
    return found


def _holds(path: str) -> bool:
    names = list_folders(path) if places.is_folder(path) else ()
    return any(places.is_present(os.path.join(path, name, FILE)) for name in names)


def _layers(files: Mapping[GridPlace, MegatronRankFile], sizes: ParallelSizes) -> dict[Chunk, int]:
    """Return the number of layers in each chunk, after checking that all its ranks agree."""
    counts: dict[Chunk, int] = {}
    for place, file in files.items():
        for number, chunk in enumerate(file.chunks):
            if sizes.pipeline * sizes.virtual > 1 and any(map(_ENCODER_LAYER.fullmatch, chunk)):  # BERT, T5
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
                problem = "contains a different number of layers than other ranks of its stage"
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


def _details(
    folder: str,
    found: Collection[str],
    sizes: ParallelSizes,
    cells: Sequence[GridPlace],
    counts: Mapping[Chunk, int],
    starts: Mapping[Chunk, int],
    aliases: Mapping[str, str],
) -> dict[str, Any]:
    # The tensor-parallel ranks with and without files, by stage and expert rank.
    rows: dict[tuple[int, int], list[str]] = {}
    for place in cells:
        state = "present" if place.folder(sizes) in found else "missing"
        rows.setdefault((place.pipeline, place.expert), []).append(f"TP {place.tensor} {state}")
    stages = {}
    for (chunk, stage), count in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
        name = f"PP {stage}" + (f", chunk {chunk}" if sizes.virtual > 1 else "")
        start = starts[chunk, stage]
        stages[name] = f"layers {start}-{start + count - 1}" if count else "no layers"
    return {
        **describe_iteration(folder),
        "parallel": str(sizes),
        "grid": [f"PP {stage}, EP {expert}: {', '.join(row)}" for (stage, expert), row in sorted(rows.items())],
        "stages": stages,
        "tied": dict(aliases),
    }
