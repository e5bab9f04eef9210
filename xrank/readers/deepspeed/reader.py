"""The reader of DeepSpeed's checkpoints, whole or in parts: experts, and the stages and layers of a pipeline.

The weights are the fp32 ones that the optimizer trains, as in zero_to_fp32.py. Buffers and frozen parameters keep
their stored type. The optimizer's moments are left out.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank.dtypes import dtype
from xrank.errors import ContradictionError, IncompleteError, UnsafeError
from xrank.formats.pickles import InertRecord, inert_error
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.layout.nest_table import int_array
from xrank.layout.nests import Nest, row_major
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.readers.base import RAISING, Faults, Hints
from xrank.readers.deepspeed.files import (
    DEALS,
    EXPERT_NAME,
    EXPERTS_LAST,
    SLICES,
    UNIVERSAL_STAGES,
    Agreement,
    CheckpointFiles,
    ModelState,
    Shape,
    Shapes,
    check_tensors,
    explain_mismatch,
    list_files,
    read_model_state,
    read_table,
    resolve_folder,
)
from xrank.readers.deepspeed.tensors import (
    Modules,
    Partitions,
    check_copies,
    groups_of_slices,
    locate_group,
    locate_trained,
    locate_whole,
    read_partitions,
    read_rank_modules,
    read_whole_modules,
    shapes_of_slices,
    undo_dealing,
)
from xrank.readers.names import LIGHTNING_VERSION
from xrank.readers.placement import HeldTensor, pieces_of, whole
from xrank.readers.records import ONE_SAVE, Records, Subject, is_telling, nbytes_below
from xrank.storage import places
from xrank.storage.regular_file import Origin, quote
from xrank.words import list_text, numbers_text, plural

_COPY = "copy the {}' files from the nodes that saved them; nodes without a shared disk keep their own"


class Expert(Struct, frozen=True):
    """Content of the file of one expert, or of one layer of a pipeline."""

    origin: Origin
    archive: TorchArchive
    tensors: Mapping[str, ArchivedTensor]
    """Tensors under their names in the whole model."""


class Experts(Struct, frozen=True):
    """The experts of all layers."""

    files: tuple[Expert, ...]
    counts: Mapping[str, int]
    """Name of a layer up to the expert's number -> the layer's number of experts."""


def read_experts(files: CheckpointFiles, state: ModelState) -> Experts:
    """Return the experts of all layers."""
    _check_numbers(files, state)
    found: list[Expert] = []
    names: dict[str, set[int]] = {}
    for (_, number), path in sorted(files.experts.items()):
        archive, origin, table = read_table(path, "the expert")
        tensors = check_tensors(table, origin)
        for name in tensors:
            match = EXPERT_NAME.search(name)
            if match is None or int(match[0]) != number:
                raise origin.contradiction(
                    f"contains a tensor that does not belong to expert {number}: {quote(name)[1:-1]}",
                    name,
                    f"names with deepspeed_experts.{number}.",
                    "copy the experts' files again from where they were saved",
                    tensor=name,
                )
            names.setdefault(name[: match.start()], set()).add(number)
        found.append(Expert(origin, archive, tensors))
    for prefix, numbers in names.items():
        if numbers != set(range(len(numbers))):
            missing = min(set(range(max(numbers))) - numbers)
            raise _absent_error(files, f"expert {missing} of {prefix.removesuffix('.')}", numbers)
    return Experts(tuple(found), {prefix: len(numbers) for prefix, numbers in names.items()})


def _check_numbers(files: CheckpointFiles, state: ModelState) -> None:
    """Check that each expert that the model states count has a file."""
    is_old = any(layer < 0 for layer, _ in files.experts)
    layers = {-1: max(state.num_experts)} if is_old and state.num_experts else dict(enumerate(state.num_experts))
    for layer, count in layers.items():
        there = {expert for at, expert in files.experts if at == layer}
        missing = sorted(set(range(count)) - there)
        beyond = sorted(there - set(range(count)))
        if missing:
            prefix = f"layer_{layer}_" if layer >= 0 else ""
            raise _absent_error(files, f"{prefix}expert_{missing[0]}_mp_rank_00_model_states.pt", there)
        if beyond:
            raise _beyond_error(files.experts[layer, beyond[0]], f"{count} experts in layer {layer} of experts")
    others = [path for (layer, _), path in files.experts.items() if layers and layer not in layers]
    if others:
        raise _beyond_error(others[0], f"{len(layers)} layers of experts")


def _absent_error(files: CheckpointFiles, what: str, there: set[int]) -> IncompleteError:
    return Origin(os.path.join(files.folder, what) if what.endswith(".pt") else files.folder).incomplete(
        f"{files.folder} contains no {what}",
        f"experts {numbers_text(there)}" if there else "no expert of this layer",
        "a file of each expert of each layer",
        _COPY.format("experts"),
    )


def _beyond_error(path: str, want: str) -> ContradictionError:
    return Origin(path).contradiction(
        "belongs to an expert that the model states do not count", os.path.basename(path), want, ONE_SAVE
    )


def locate_trained_experts(
    partitions: Partitions, state: ModelState, experts: Experts, dense: Mapping[str, Shape]
) -> dict[str, StoredShard]:
    """Return every tensor in the partitions of a model with experts, in stages 0 to 2; `dense` are other shapes."""
    first, num_ranks = partitions.all[0], len(partitions.all)
    found: dict[str, StoredShard] = {}
    shapes_of_experts = {name: tensor.shape for expert in experts.files for name, tensor in expert.tensors.items()}
    for number, count in enumerate(first.counts):
        num_groups = num_ranks // count  # group e has the e-th share of the experts
        groups = [list(range(place, num_ranks, num_groups)) for place in range(num_groups)]
        if state.facts.get(f"ds_config.{EXPERTS_LAST}") is True:
            groups = [list(range(place * count, (place + 1) * count)) for place in range(num_groups)]
        shapes: Shapes
        if state.groups is not None:
            shapes = state.groups[number] if number < len(state.groups) else {}
        else:
            shapes = shapes_of_slices(partitions.of(groups[0]).all, number, {**dense, **shapes_of_experts})
        for place, ranks in enumerate(groups):
            local = locate_group(partitions.of(ranks), number, shapes)
            for name, shard in local.items():
                own = _global_name(name, place, num_groups, experts, first.origin)
                shape = shapes_of_experts.get(own)
                if EXPERT_NAME.search(own) is not None and shape != shard.shape:
                    problem = f"records a different shape of {own} than the expert's file"
                    want = "a tensor in the expert's file" if shape is None else str(list(shape))
                    raise first.origin.contradiction(problem, str(list(shard.shape)), want, tensor=own)
                found[own] = replace(shard, name=own, rank=int_array(ranks)[shard.rank])
    check_copies(partitions)
    return found


def _global_name(name: str, place: int, num_groups: int, experts: Experts, origin: Origin) -> str:
    """Return the name in the whole model of a tensor in a group's partitions."""
    match = EXPERT_NAME.search(name)
    count = experts.counts.get(name[: match.start()]) if match is not None else None
    if match is None and num_groups == 1:
        return name  # a dense tensor
    if match is None or count is None or count % num_groups or int(match[0]) >= count // num_groups:
        raise origin.contradiction(
            f"records {quote(name)[1:-1]}, which the experts' files do not have",
            f"{name} in a group that {num_groups} sets of ranks have",
            f"a multiple of {num_groups} experts" if count else "the tensor of an expert",
            tensor=name,
        )
    number = place * (count // num_groups) + int(match[0])
    return f"{name[: match.start()]}{number}{name[match.end() :]}"


def locate_untrained(
    parts: Iterable[Expert], trained: Mapping[str, StoredShard], records: Records
) -> tuple[dict[str, StoredShard], tuple[StoredShard, ...]]:
    """Return the parts' tensors without fp32 weights, and a small one of each part's others, to compare them."""
    shards: dict[str, StoredShard] = {}
    roundings: list[StoredShard] = []
    for part in parts:
        index = records.add_archive(part.archive)
        for name, tensor in part.tensors.items():
            if name not in trained and name not in shards:  # a tied layer may have several files
                shards[name] = locate_whole(name, tensor, part.origin, index)
        telling = {n: t for n, t in part.tensors.items() if n in trained and is_telling(part.archive, t)}
        if telling:
            name = min(telling, key=lambda name: prod(telling[name].shape))
            roundings.append(locate_whole(name, telling[name], part.origin, index))
    return shards, tuple(roundings)


_TIED = "tied_modules."


class Layer(Expert, frozen=True):
    """Content of a ``layer_<number>-model_states.pt``; its tensors have the names in the layer."""

    number: int


def is_tied(name: str) -> bool:
    """Return whether a tensor belongs to a tied layer, of which several stages have a copy."""
    return name.startswith(_TIED)


def find_prefixes(
    layers: Mapping[int, Layer], trained: Mapping[str, Shape | None], buffers: Iterable[str], folder: str
) -> dict[int, str]:
    """Return the prefix of each layer's names in the pipeline's state dict."""
    plain: dict[int, dict[str, Shape | None]] = {}
    tied: dict[str, dict[str, Shape | None]] = {}
    for name, shape in {**dict.fromkeys(buffers), **trained}.items():
        first, _, rest = name.removeprefix(_TIED).partition(".")
        if is_tied(name):
            tied.setdefault(first, {})[rest] = shape
        elif first.isdecimal():
            plain.setdefault(int(first), {})[rest] = shape
        else:
            raise Origin(folder).usage(
                f"{name} belongs to no layer of the pipeline",
                name,
                f"names like 0.weight or {_TIED}embed.weight",
                "make the module with this parameter, such as the loss, a layer, and save again",
                tensor=name,
            )
    for number, tensors in plain.items():
        if number not in layers:
            raise _absent_layer_error(f"{number}.{next(iter(tensors))}", f"layer_{number:02d}*-model_states.pt", folder)
        _check_tensors(layers[number], tensors)
    found = {number: f"{number}." for number in layers}
    looks: dict[tuple[str, ...], list[int]] = {}
    for number, layer in layers.items():
        keys = tuple(key for key, tensors in tied.items() if _fits(layer, tensors))
        if number not in plain and keys:
            looks.setdefault(keys, []).append(number)
    for keys, numbers in looks.items():
        # Keys come in the order of first use. Their values are compared later (`StoredModel.roundings`).
        if len(keys) > 1 and len(keys) != len(numbers):
            raise layers[numbers[0]].origin.usage(
                f"may be any of {len(keys)} tied layers, which have tensors of the same names and shapes",
                list_text(keys),
                "one",
                "give the layers tensors of different names, and save again",
            )
        for at, number in enumerate(numbers):
            found[number] = f"{_TIED}{keys[min(at, len(keys) - 1)]}."
    _check_tied_copies([layers[number] for number in sorted(layers)], found)
    # A tied layer may leave no file, but its buffers lie in no other place.
    for name in buffers:
        if is_tied(name) and not any(name.startswith(prefix) for prefix in found.values()):
            raise _absent_layer_error(name, "the file of a layer with it", folder)
    return found


def _fits(layer: Layer, tensors: Mapping[str, Shape | None]) -> bool:
    """Return whether a layer's file has all of these names, in these shapes."""
    held = layer.tensors
    return all(name in held and shape in (None, held[name].shape) for name, shape in tensors.items())


def _check_tensors(layer: Layer, tensors: Mapping[str, Shape | None]) -> None:
    for name, shape in tensors.items():
        held = layer.tensors.get(name)
        if held is None or shape not in (None, held.shape):
            raise layer.origin.contradiction(
                f"differs from the model states in {layer.number}.{name}",
                "no such tensor" if held is None else str(list(held.shape)),
                "a tensor" if shape is None else str(list(shape)),
                tensor=f"{layer.number}.{name}",
            )


def _check_tied_copies(layers: Sequence[Layer], prefixes: Mapping[int, str]) -> None:
    """Check that layers under one tied key have equal tensors: a pipeline may tie some of a layer's tensors alone."""
    first: dict[str, Layer] = {}
    for layer in layers:
        other = first.setdefault(prefixes[layer.number], layer)
        for name, tensor in layer.tensors.items():
            if name in other.tensors and _differs(layer, tensor, other, other.tensors[name]):
                full = prefixes[layer.number] + name
                problem = (
                    f"contains different values of {full} than {other.origin.path}: its pipeline ties only other "
                    f"tensors"
                )
                step = "give each layer its own key, or tie the tensor (tied_weight_attr), and save again"
                raise layer.origin.usage(problem, f"two tensors named {full}", "one", step)


def _differs(one: Layer, a: ArchivedTensor, other: Layer, b: ArchivedTensor) -> bool:
    crc32s = set()
    for layer, tensor in ((one, a), (other, b)):
        record = layer.archive.records[tensor.key]
        if not layer.archive.has_checksums or record.nbytes != prod(tensor.shape) * dtype(tensor.dtype).nbytes:
            return False  # a part of a record has no checksum of its own
        crc32s.add(record.crc32)
    return len(crc32s) > 1


def _absent_layer_error(name: str, file: str, folder: str) -> IncompleteError:
    is_pattern = "*" in file
    problem = f"{folder} contains no {file}, where {name} should be" if is_pattern else f"no {name} in {folder}"
    return Subject(name, None, folder).incomplete(problem, None, file, _COPY.format("layers"))


class Content(Struct, frozen=True):
    """The tensors of a checkpoint."""

    modules: Modules
    """For a pipeline, the tensors of all layers without fp32 weights, and the first stage's state with all names."""
    trained: Mapping[str, StoredShard]
    """The fp32 weights."""
    partitions: Partitions | None
    """Partitions of all ranks; a pipeline's are its first stage's."""
    num_stages: int = 1
    num_experts: int = 0
    """Number of files of experts."""
    roundings: tuple[StoredShard, ...] = ()
    """A small tensor of each layer's or expert's file with fp32 weights elsewhere."""


def read_pipeline(files: CheckpointFiles, records: Records, agreement: Agreement) -> Content:
    """Return the tensors of a pipeline."""
    states = _read_states(files, agreement)
    stages: list[Partitions | None] = [None] * len(states)  # as without ZeRO and bf16
    for stage in range(len(states)) if files.stage_partitions else ():
        if stage not in files.stage_partitions:
            raise _absent_stage(files, stage, "optim_states")
        # Stages have groups of their own, so that their facts differ.
        stages[stage] = read_partitions(files.folder, files.stage_partitions[stage], records, Agreement())
    layers = {}
    for number, path in sorted(files.layers.items()):
        archive, origin, table = read_table(path, "the layer")
        layers[number] = Layer(origin, archive, check_tensors(table, origin), number)
    named = _trained_names(files, states, stages)
    buffers = [name for state in states for name in state.buffer_names]
    prefixes = find_prefixes(layers, named, buffers, files.folder)
    if not files.stage_partitions:
        _check_moments(files, states, layers)
    held = {prefixes[n] + name: t.shape for n, layer in layers.items() for name, t in layer.tensors.items()}
    trained: dict[str, StoredShard] = {}
    notes = []
    if absent := [number for number in range(max(layers, default=0)) if number not in layers]:
        text = f"{plural(len(absent), 'layer')} without a file: {numbers_text(absent)}"
        lost = f"{text}. Functions and tied layers have none; copy every other missing file, too"
        notes.append(("absent-layers", lost))
    for stage, (state, partitions) in enumerate(zip(states, stages, strict=True)):
        if partitions is None:
            continue
        groups = groups_of_slices(partitions, held) if state.groups is None else state.groups
        # Under the ranks in the run; what an earlier stage has is its tied copy.
        for name, shard in locate_trained(partitions, groups).items():
            trained.setdefault(name, replace(shard, rank=shard.rank + stage * len(partitions.all)))
        notes += check_same_step(files.tag, state.facts, state.origin, partitions.all[0].facts)
    parts = []
    for number, layer in layers.items():
        parts.append(replace(layer, tensors={prefixes[number] + name: t for name, t in layer.tensors.items()}))
    shards, roundings = locate_untrained(parts, trained, records)
    names = dict.fromkeys((*held, *trained))
    whole_state = replace(states[0], buffer_names=tuple(dict.fromkeys(buffers)), frozen={}, shared={})
    modules = Modules(whole_state, shards, {}, tuple(dict.fromkeys(notes)), tuple(names))
    return Content(modules, trained, stages[0], num_stages=len(states), roundings=roundings)


def _read_states(files: CheckpointFiles, agreement: Agreement) -> list[ModelState]:
    if not files.models:
        raise _absent_stage(files, 0, "model_states")
    states = {stage: read_model_state(path) for stage, path in sorted(files.models.items())}
    first = states[min(states)]
    for state in states.values():
        agreement.add(state.facts, state.origin)
        if not state.is_stage:
            raise SLICES.make_error(state.origin, "a module in addition to the files of a pipeline's layers")
    num_slices = first.facts.get("checkpoint_parallel_dimensions.tp_degree")
    num_stages = first.facts.get("mp_world_size")
    if type(num_slices) is int and num_slices > 1:
        raise SLICES.make_error(first.origin, f"layers in {num_slices} slices (tp_degree)")
    for stage in range(num_stages if type(num_stages) is int else max(states) + 1):
        if stage not in states:
            raise _absent_stage(files, stage, "model_states")
    if type(num_stages) is int and max(states) >= num_stages:
        raise states[max(states)].origin.contradiction(
            f"belongs to stage {max(states)}, but the pipeline has {num_stages}",
            f"files of stages {numbers_text(states)}",
            f"stages {numbers_text(range(num_stages))}",
            ONE_SAVE,
        )
    return list(states.values())


def _check_moments(files: CheckpointFiles, states: Sequence[ModelState], layers: Mapping[int, Layer]) -> None:
    """Check that the layers have a tensor for each moment of the optimizer; without ZeRO nothing else counts them."""
    wanted = Counter(shape for shape, _ in {moment for state in states for moment in state.moments})
    held = Counter(tensor.shape for layer in layers.values() for tensor in layer.tensors.values())
    lacking = wanted - held
    if lacking:
        shape = next(iter(lacking))
        raise Origin(files.folder).incomplete(
            "lacks files of layers: the optimizer trained tensors that none of them contains",
            f"layers {numbers_text(layers)}, with {held[shape]} tensors of shape {list(shape)}",
            f"{wanted[shape]} tensors of this shape",
            _COPY.format("layers"),
        )


def _trained_names(
    files: CheckpointFiles, states: Sequence[ModelState], stages: Sequence[Partitions | None]
) -> dict[str, Shape | None]:
    """Return the trained parameters' names, stage by stage, with their shapes where these are recorded."""
    found: dict[str, Shape | None] = {}
    for stage, (state, partitions) in enumerate(zip(states, stages, strict=True)):
        if partitions is None and state.groups is not None:
            raise _absent_stage(files, stage, "optim_states")
        for partition in partitions.all if partitions is not None and state.groups is None else ():
            found.update(dict.fromkeys(name for group in partition.slices or () for name in group))
        for group in state.groups or ():
            for name, shape in group.items():
                other = found.get(name)
                if name in found and (other != shape or not is_tied(name)):
                    raise state.origin.contradiction(
                        f"trains {name}, which an earlier stage trains, too",
                        str(list(shape)),
                        f"its own layers, or a tied layer of equal shape (there: {list(other or ())})",
                        ONE_SAVE,
                        tensor=name,
                    )
                found[name] = shape
    return found


def _absent_stage(files: CheckpointFiles, stage: int, kind: str) -> IncompleteError:
    prefix = "" if kind == "model_states" else "zero_pp_rank_0_"
    name = f"{prefix}mp_rank_{stage:02d}_{kind}.pt"
    return Origin(os.path.join(files.folder, name)).incomplete(
        f"is missing, which stage {stage} wrote",
        f"files of stages {numbers_text(files.models)}" if files.models else "none",
        "files of every stage",
        _COPY.format("stages"),
    )


_CONVERT = "run ds_to_universal.py again"


def locate_universal(
    folder: str, name: str, shape: Shape, records: Records, *, is_sliced: bool, kind: str = "fp32"
) -> StoredShard:
    """Return a trained tensor, or one of its moments; the shapes of slices do not determine the whole."""
    if os.path.basename(name) != name or name in ("", ".", "..") or not name.isprintable():
        raise UnsafeError(
            f"{folder}: a parameter's name is not the name of a folder: {quote(name)}",
            tensor=quote(name),
            file=folder,
            got=quote(name),
            want="a name without / in it",
            next_step="do not use this checkpoint: it was tampered with",
        )
    path = os.path.join(folder, "zero", name, f"{kind}.pt")
    if not places.is_present(path):
        step = f"{_CONVERT}, or copy the folder again from where it was made"
        raise Subject(name, None, path).incomplete(f"{path} is missing", None, f"the parameter's {kind}", step)
    archive, origin = read_archive(path), Origin(path)
    value = archive.value
    entry: Mapping[object, object] = value if isinstance(value, dict) else {"param": value}
    tensor = entry.get("param")
    if isinstance(tensor, InertRecord):
        raise inert_error(tensor, origin)
    # torch calls an archive by its file's name, or "archive" if it was saved into a stream.
    if archive.name not in (kind, "archive"):
        got, want = f"a file saved as {quote(archive.name)}", f"a file saved as {kind}.pt"
        raise origin.contradiction("is a different file, renamed or copied", got, want, _CONVERT, tensor=name)
    if not isinstance(tensor, ArchivedTensor):
        raise origin.corrupt("contains no tensor", type(tensor).__name__, "a tensor, or a dict with param")
    # ds_to_universal.py cuts the padding off a `vocab_tensor`, so its rows may be fewer than the model states'.
    is_row = tensor.shape == (prod(shape),) and (tensor.strides == (1,) or prod(shape) <= 1)
    if is_row:
        # Stage 3's elements lost their shape; the model states have it.
        final = shape
    elif tensor.shape == shape or is_sliced or (entry.get("vocab_tensor") is True and tensor.shape[1:] == shape[1:]):
        final = tensor.shape
    else:
        problem = f"{path} does not have the shape that the model states record"
        subject = Subject(name, None, path)
        raise subject.contradiction(problem, str(list(tensor.shape)), str(list(shape)), _CONVERT)
    held = HeldTensor.from_archive(tensor, rank=0, file=path, record=records.add_archive(archive)(tensor.key))
    count = prod(final)
    row = (Nest(0, 0, ((count, 1, 1),) if count > 1 else ()),) if count else ()
    return pieces_of(name, [held], final, [row if is_row else whole(tensor.shape)])


_STEP = re.compile(r"(?:state|param_groups)\.[^.]*\.step")
_TAG_STEP = re.compile(r"global_step(\d{1,18})", re.ASCII)


def check_same_step(
    tag: str, modules: Mapping[str, object], origin: Origin, partition: Mapping[str, object] | None
) -> tuple[tuple[str, str], ...]:
    """Return notes on files that may belong to different steps."""
    step = modules.get("global_steps")
    if type(step) is not int:
        return ()
    notes = []
    named = _TAG_STEP.match(tag)
    # The user chooses the tag, so it proves nothing.
    if named is not None and int(named[1]) != step:
        notes.append(("another-step", f"the folder is named {tag}, and the model states in it are of step {step:,}"))
    skipped = modules.get("skipped_steps")
    # A step with overflowing gradients is counted but skipped.
    wanted = {step, step - skipped} if type(skipped) is int else {step}
    recorded = [value for path, value in (partition or {}).items() if _STEP.fullmatch(path)]
    counts = [int(value) for value in recorded if isinstance(value, (int, float)) and not isinstance(value, bool)]
    # An optimizer that is behind may have been begun anew; one that is ahead cannot be of this save.
    if counts and max(counts) > step:
        raise origin.contradiction(
            "belongs to an earlier step than the optimizer states",
            f"global_steps {step:,}",
            f"{max(counts):,} or more, the steps that the optimizer has taken",
        )
    if recorded and wanted.isdisjoint(counts):
        # torch's optimizers count in a tensor of type F32, whose fact is its checksum. A damaged step may exceed F32.
        in_f32 = (np.float32(count).tobytes() for count in wanted if abs(count) < 1 << 63)
        if not {f"F32 of CRC {zlib.crc32(each):08x}" for each in in_f32} & {*map(str, recorded)}:
            problem = f"the optimizer has not taken the {step:,} steps of the model states"
            notes.append(("another-step", f"{problem}: it was restarted, or its files belong to a different step"))
    return tuple(notes)


def assemble(
    modules: Modules, trained: Mapping[str, StoredShard], faults: Faults = RAISING
) -> tuple[tuple[StoredShard, ...], Mapping[str, str], tuple[str, ...]]:
    """Return all tensors of the model in the order of its state dict, the ties among them, and names without tensors.

    A trainer of adapters leaves frozen parameters out (``exclude_frozen_parameters``), but not the names of tensors
    that are tied to them: DeepSpeed goes by `named_parameters`, which lists one name of a tie.
    """
    state = modules.state
    found = {**modules.shards, **trained}
    aliases: dict[str, str] = {}
    for alias, owner in modules.shared.items():
        if alias not in found and owner in found:
            found[alias] = replace(found[owner], name=alias)
            aliases[alias] = owner
    known = {*found, *state.module, *state.frozen}
    absent = tuple(alias for alias, owner in state.shared.items() if owner not in known and alias not in found)
    for name in (*state.module, *state.frozen, *modules.shared):
        if name not in found and name not in absent:
            error = state.origin.contradiction(
                f"lists {name}, but the checkpoint contains no data for it",
                "an empty tensor" if name in state.module else "nothing",
                "trained weights in a partition, a frozen piece, or a tie to another parameter",
                "save again with a newer DeepSpeed, without exclude_frozen_parameters, and with every parameter "
                "either frozen or in the optimizer: stage 3 saves no others",
                tensor=name,
            )
            faults.add(error)
            absent = (*absent, name)
    # The state dict determines the order; tensors that it lacks follow.
    order = dict.fromkeys((*modules.names, *found))
    return tuple(found[name] for name in order if name in found), aliases, absent


class DeepSpeedReader:
    """The reader of DeepSpeed's checkpoints (`xrank.readers.base.Reader`)."""

    name = "deepspeed"

    def recognize(self, path: str) -> str | None:
        """Return None for a checkpoint's folder, or a folder whose ``latest`` names a checkpoint."""
        return explain_mismatch(path)

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of a checkpoint lies; errors as in `Reader.read`."""
        files = list_files(resolve_folder(path))
        records = Records()
        content = read_content(files, records, hints.faults)
        return self.describe(path, files, content, records, hints.faults)

    def describe(
        self, path: str, files: CheckpointFiles, content: Content, records: Records, faults: Faults = RAISING
    ) -> StoredModel:
        """Return the model of a checkpoint's content; the records may be of more tensors."""
        shards, aliases, absent = assemble(content.modules, content.trained, faults)
        facts, partitions = content.modules.state.facts, content.partitions
        step, world_size = (facts.get(key) for key in ("global_steps", "dp_world_size"))
        num_ranks = len(partitions.all) if partitions is not None else world_size if type(world_size) is int else None
        first = partitions.all[0].facts if partitions is not None else None
        moment = check_same_step(files.tag, facts, content.modules.state.origin, first)
        return StoredModel(
            format=self.name,
            path=path,
            files=tuple(records.files),
            records=records.table(faults.files),
            shards=shards,
            aliases=aliases,
            world_size=None if num_ranks is None else num_ranks * content.num_stages,
            step=step if type(step) is int else None,
            nbytes=records.nbytes,
            skipped_nbytes=nbytes_below(files.folder) - records.nbytes,
            notes=tuple(dict.fromkeys((*content.modules.notes, *moment, *records.notes()))),
            details=_details(files, content, aliases),
            roundings=content.roundings,
            absent=absent,
            is_attribute=LIGHTNING_VERSION in facts,
        )


def read_content(files: CheckpointFiles, records: Records, faults: Faults = RAISING) -> Content:
    """Return the tensors of a checkpoint, and add their files and records."""
    agreement = Agreement()
    if files.is_universal:
        if files.partitions:
            first = next(iter(files.partitions.values()))
            problem = "is next to a universal checkpoint"
            raise Origin(first).contradiction(problem, "zero/ and *_optim_states.pt", "one of both", ONE_SAVE)
        num_ranks = len(files.rank_models)
        if num_ranks:
            # The last ranks' files may be lost, so the size that any file records goes before the highest name.
            recorded = read_model_state(files.rank_models[min(files.rank_models)]).facts.get("dp_world_size")
            num_ranks = recorded if type(recorded) is int and recorded > 0 else max(files.rank_models) + 1
        modules = _modules(files, num_ranks, bool(num_ranks), records, agreement, faults)
        _check_dealing(files, modules)
        is_sliced = len(files.models) > 1
        shapes = _shapes_of(files, modules)
        trained: dict[str, StoredShard] = {}
        for name, shape in shapes.items():
            path = os.path.join(files.folder, "zero", name, "fp32.pt")
            with faults.losing(path):
                trained[name] = locate_universal(files.folder, name, shape, records, is_sliced=is_sliced)
            if path in faults.files:
                lost = HeldTensor(0, path, records.add_lost(path), "F32", shape, row_major(shape), 0)
                trained[name] = pieces_of(name, [lost], shape, [whole(shape)])
        _check_world(files, modules, None)
        return Content(modules, trained, None)
    # Also where the files of a pipeline's layers, or those of experts, are missing.
    peeked = None
    with faults.losing(*files.models.values()):
        peeked = read_model_state(files.models[min(files.models)]) if files.models else None
    if files.layers or (peeked is not None and peeked.is_stage):
        pipeline = read_pipeline(files, records, agreement)
        _check_dp_size(pipeline.modules.state, pipeline.partitions)
        return pipeline
    if files.sliced is not None:
        raise SLICES.make_error(Origin(files.sliced))
    if files.experts or (peeked is not None and max(peeked.num_experts, default=1) > 1):
        return _read_with_experts(files, records, agreement)
    if files.partitions:
        # First, because they show how many model states there should be, and whether these are cut.
        partitions = read_partitions(files.folder, files.partitions, records, agreement, faults=faults)
        modules = _modules(files, len(partitions.all), partitions.all[0].is_interleaved, records, agreement, faults)
        _check_world(files, modules, partitions)
        groups = modules.state.groups
        if groups is None:  # BF16_Optimizer without ZeRO: engine.py: _common_checkpoint_state
            shapes = {name: tensor.shape for name, tensor in modules.state.module.items()}
            groups = groups_of_slices(partitions, shapes)
        return Content(modules, locate_trained(partitions, groups), partitions)
    modules = _modules(files, 0, bool(files.rank_models), records, agreement, faults)
    if modules.state.groups is not None:
        raise _partition_error(files, "model states alone")
    _check_world(files, modules, None)
    return Content(modules, {}, None)


def _read_with_experts(files: CheckpointFiles, records: Records, agreement: Agreement) -> Content:
    modules = _modules(files, 0, bool(files.rank_models), records, agreement)
    experts = read_experts(files, modules.state)
    num_ranks, partitions = modules.state.facts.get("dp_world_size"), None
    trained: dict[str, StoredShard] = {}
    if files.partitions:
        # Groups of experts have fewer partitions than there are ranks, so that only the model states know these.
        if type(num_ranks) is not int or num_ranks < 1:
            raise modules.state.origin.corrupt("does not record the number of ranks", ascii(num_ranks)[:200])
        partitions = read_partitions(files.folder, files.partitions, records, agreement, num_ranks=num_ranks)
        dense = {name: tensor.shape for name, tensor in modules.state.module.items()}
        trained = locate_trained_experts(partitions, modules.state, experts, dense)
    elif modules.state.groups is not None:
        raise _partition_error(files, "model states alone")
    _check_world(files, modules, partitions)
    shards, roundings = locate_untrained(experts.files, trained, records)
    modules = replace(modules, shards={**modules.shards, **shards})
    return Content(modules, trained, partitions, num_experts=len(files.experts), roundings=roundings)


def _check_world(files: CheckpointFiles, modules: Modules, partitions: Partitions | None) -> None:
    origin, num_slices = modules.state.origin, modules.state.facts.get("mp_world_size")
    if not files.is_universal and type(num_slices) is int and num_slices > 1:
        raise SLICES.make_error(origin, f"one of {num_slices} slices (mp_world_size)")
    _check_dp_size(modules.state, partitions)


def _check_dp_size(state: ModelState, partitions: Partitions | None) -> None:
    num_ranks, origin = state.facts.get("dp_world_size"), state.origin
    if partitions is not None and type(num_ranks) is int and num_ranks != len(partitions.all):
        raise origin.contradiction(
            "belongs to a run with a different number of ranks than the partitions",
            f"dp_world_size {num_ranks}",
            f"{len(partitions.all)}, the number of partitions",
            "all files must come from one save; runs with MiCS, whose partitions repeat, are not read",
        )


def _modules(
    files: CheckpointFiles,
    num_ranks: int,
    is_cut: bool,
    records: Records,
    agreement: Agreement,
    faults: Faults = RAISING,
) -> Modules:
    """Return the model states: one file per rank in stage 3, one file in other stages."""
    if files.models and files.rank_models:
        problem = f"belongs to stage 3, and {next(iter(files.models.values()))} to a different stage"
        other = next(iter(files.rank_models.values()))
        raise Origin(other).contradiction(problem, "model states of two kinds", "those of one save", ONE_SAVE)
    if is_cut:
        if not num_ranks:
            raise _partition_error(files, "stage 3's model states, whose tensors are empty")
        return read_rank_modules(files.folder, files.rank_models, num_ranks, records, agreement, faults)
    if 0 not in files.models:
        path = os.path.join(files.folder, "mp_rank_00_model_states.pt")
        want = "the model states, which name the weights"
        raise Origin(path).incomplete("is missing from the checkpoint", None, want, "copy the file from rank 0's node")
    modules = read_whole_modules(files.models[0], records, agreement)
    if modules.state.is_stage:
        raise UNIVERSAL_STAGES.make_error(modules.state.origin)
    return modules


def _partition_error(files: CheckpointFiles, got: str) -> IncompleteError:
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    return IncompleteError(
        f"{files.folder} contains neither {name} nor a similar *_optim_states.pt with the fp32 weights",
        rank=0,
        file=os.path.join(files.folder, name),
        got=got,
        want="a *_optim_states.pt of every rank",
        next_step="copy the optimizer states from where they were saved",
    )


def _shapes_of(files: CheckpointFiles, modules: Modules) -> Shapes:
    """Return the shapes of a universal checkpoint's parameters, of all slices."""
    if modules.state.groups is None:
        raise modules.state.origin.usage(
            "does not record which parameters were trained",
            "no param_shapes",
            next_step="convert the checkpoint again with a newer ds_to_universal.py",
        )
    shapes = {name: shape for group in modules.state.groups for name, shape in group.items()}
    num_slices = modules.state.facts.get("mp_world_size", 1)
    if len(files.models) <= 1 and num_slices in (1, None):
        return shapes
    if type(num_slices) is int and set(files.models) != set(range(num_slices)):
        missing = sorted(set(range(num_slices)) - set(files.models))
        name = f"mp_rank_{missing[0] if missing else max(files.models):02d}_model_states.pt"
        raise Origin(os.path.join(files.folder, name)).incomplete(
            f"is missing, or there are files of more than {num_slices} slices",
            f"{len(files.models)} slices",
            f"{num_slices}",
            "copy the folder again from where it was made",
        )
    if modules.shards or modules.shared:
        name = next(iter((*modules.shards, *modules.shared)))
        raise modules.state.origin.usage(
            f"{name}: universal checkpoints of several slices do not record how buffers, ties and frozen parameters "
            "were sliced",
            f"{num_slices} slices",
            "one slice, or only trained parameters",
            "save from a run without tensor parallelism",
            tensor=name,
        )
    # For the names: the shapes are those of slices, and `is_sliced` keeps them from being compared.
    for rank in sorted(files.models)[1:]:
        for group in read_model_state(files.models[rank], rank).groups or ():
            shapes.update(group)
    return shapes


def _check_dealing(files: CheckpointFiles, modules: Modules) -> None:
    """Refuse a universal checkpoint of a run whose `round_robin_gradients` moved parameters.

    DeepSpeed records the places of the parameters before they are dealt to ranks in turn. ds_to_universal.py follows
    that record (0.19.8), so each fp32.pt contains elements of other parameters.
    """
    facts, groups = modules.state.facts, modules.state.groups or ()
    num_ranks, stage = facts.get("dp_world_size"), modules.state.config_stage
    # Stage 3 does not deal parameters, nor does BF16_Optimizer, which sums gradients in fp32.
    sums = str(facts.get("ds_config.data_types.grad_accum_dtype"))
    deals = stage == 2 or (stage == 1 and not (facts.get("ds_config.bf16.enabled") and sums in ("fp32", "float32")))
    if not deals or not facts.get(f"ds_config.zero_optimization.{DEALS}") or type(num_ranks) is not int:
        return
    if any(list(undo_dealing(group, num_ranks)) != list(group) for group in groups):
        raise modules.state.origin.usage(
            f"was trained with {DEALS}, and ds_to_universal.py mixes up the parameters of such runs",
            f"parameters dealt to {num_ranks} ranks; their files in zero/ contain other parameters' elements",
            "a checkpoint that was not converted to universal",
            f"gather the checkpoint from which {files.tag} was made",
        )


def _details(files: CheckpointFiles, content: Content, aliases: Mapping[str, str]) -> dict[str, Any]:
    state, partitions = content.modules.state, content.partitions
    stage = state.config_stage
    if partitions is not None and partitions.all[0].stage is not None:
        stage = partitions.all[0].stage
    more = {"pipeline stages": content.num_stages, "layers": len(files.layers)} if content.num_stages > 1 else {}
    return {
        "tag": files.tag,
        "stage": "universal" if files.is_universal else f"ZeRO {stage}" if stage else "no ZeRO",
        "DeepSpeed": state.facts.get("ds_version"),
        "partitions": 0 if partitions is None else len(partitions.all) * content.num_stages,
        "groups": len(state.groups or ()),
        "frozen": len(state.frozen),
        "buffers": sum(name in content.modules.shards for name in state.buffer_names),
        "shared": dict(aliases),
        **more,
        **({"expert files": content.num_experts} if content.num_experts else {}),
    }
