"""The reader of DeepSpeed's checkpoints.

The weights are the fp32 ones that the optimizer trains, as in zero_to_fp32.py. Buffers and frozen parameters keep
their stored type. The optimizer's moments are left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import IncompleteError, UnsafeError
from xrank.formats.pickles import InertRecord, inert_error
from xrank.formats.torch_archive import ArchivedTensor, read_archive
from xrank.layout.nests import Nest
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.readers.base import Hints
from xrank.readers.claims import HeldTensor, pieces_of, whole
from xrank.readers.deepspeed.files import (
    DEALS,
    SLICES,
    UNIVERSAL_STAGES,
    Agreement,
    CheckpointFiles,
    ModelState,
    Shape,
    Shapes,
    check_same_step,
    explain_mismatch,
    list_files,
    read_model_state,
    resolve_folder,
)
from xrank.readers.deepspeed.parts import locate_trained_experts, locate_untrained, read_experts, read_pipeline
from xrank.readers.deepspeed.tensors import (
    Modules,
    Partitions,
    assemble,
    check_ranks,
    groups_of_slices,
    locate_trained,
    read_partitions,
    read_rank_modules,
    read_whole_modules,
    undo_dealing,
)
from xrank.readers.names import LIGHTNING_VERSION
from xrank.readers.records import ONE_SAVE, Records, Subject, nbytes_below
from xrank.storage import places
from xrank.storage.regular_file import Origin, quote

_CONVERT = "run ds_to_universal.py again"


def _locate_universal(folder: str, name: str, shape: Shape, records: Records, *, is_sliced: bool) -> StoredShard:
    """Return a trained tensor; the shapes of tensor-parallel slices do not determine the whole."""
    if os.path.basename(name) != name or name in ("", ".", "..") or not name.isprintable():
        raise UnsafeError(
            f"{folder}: a parameter's name is not the name of a folder: {quote(name)}",
            tensor=quote(name),
            file=folder,
            got=quote(name),
            want="a name without / in it",
            next_step="do not use this checkpoint: it was tampered with",
        )
    path = os.path.join(folder, "zero", name, "fp32.pt")
    if not places.is_present(path):
        step = f"{_CONVERT}, or copy the folder again from where it was made"
        raise Subject(name, None, path).incomplete(f"{path} is missing", None, "the parameter's fp32 weights", step)
    archive, origin = read_archive(path), Origin(path)
    value = archive.value
    entry: Mapping[object, object] = value if isinstance(value, dict) else {"param": value}
    tensor = entry.get("param")
    if isinstance(tensor, InertRecord):
        raise inert_error(tensor, origin)
    # torch calls an archive by its file's name, or "archive" if it was saved into a stream.
    if archive.name not in ("fp32", "archive"):
        got, want = f"a file saved as {quote(archive.name)}", "a file saved as fp32.pt"
        raise origin.contradiction("is another file, renamed or copied", got, want, _CONVERT, tensor=name)
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
        problem = f"{path} has another shape than the model states record"
        subject = Subject(name, None, path)
        raise subject.contradiction(problem, str(list(tensor.shape)), str(list(shape)), _CONVERT)
    held = HeldTensor.from_archive(tensor, rank=0, file=path, record=records.add_archive(archive)(tensor.key))
    count = prod(final)
    row = (Nest(0, 0, ((count, 1, 1),) if count > 1 else ()),) if count else ()
    return pieces_of(name, [held], final, [row if is_row else whole(tensor.shape)])


class DeepSpeedReader:
    """The reader of DeepSpeed's checkpoints (`xrank.readers.base.Reader`)."""

    name = "deepspeed"

    def recognise(self, path: str) -> str | None:
        """Return None for a checkpoint's folder, or a folder whose ``latest`` names a checkpoint."""
        return explain_mismatch(path)

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of a checkpoint lies; errors as in `Reader.read`."""
        files = list_files(resolve_folder(path))
        records = Records()
        content = _read_content(files, records)
        shards, aliases, absent = assemble(content.modules, content.trained)
        facts, partitions = content.modules.state.facts, content.partitions
        step, world_size = (facts.get(key) for key in ("global_steps", "dp_world_size"))
        num_ranks = len(partitions.all) if partitions is not None else world_size if type(world_size) is int else None
        first = partitions.all[0].facts if partitions is not None else None
        moment = check_same_step(files.tag, facts, content.modules.state.origin, first)
        return StoredModel(
            format=self.name,
            path=path,
            files=tuple(records.files),
            records=records.table(),
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


class _Content(Struct, frozen=True):
    """The tensors of a checkpoint."""

    modules: Modules
    trained: Mapping[str, StoredShard]
    """The fp32 weights."""
    partitions: Partitions | None
    """Partitions of all ranks; a pipeline's are its first stage's."""
    num_stages: int = 1
    num_experts: int = 0
    """Number of files of experts."""
    roundings: tuple[StoredShard, ...] = ()


def _read_content(files: CheckpointFiles, records: Records) -> _Content:
    agreement = Agreement()
    if files.is_universal:
        modules = _universal_modules(files, records, agreement)
        _check_dealing(files, modules)
        is_sliced = len(files.models) > 1
        shapes = _shapes_of(files, modules)
        trained = {
            name: _locate_universal(files.folder, name, shape, records, is_sliced=is_sliced)
            for name, shape in shapes.items()
        }
        _check_world(files, modules, None)
        return _Content(modules, trained, None)
    # Also where the files of a pipeline's layers, or those of experts, are missing.
    peeked = read_model_state(files.models[min(files.models)]) if files.models else None
    if files.layers or (peeked is not None and peeked.is_stage):
        pipeline = read_pipeline(files, records, agreement)
        _check_dp_size(pipeline.modules.state, pipeline.partitions)
        own = (pipeline.modules, pipeline.trained, pipeline.partitions)
        return _Content(*own, num_stages=pipeline.num_stages, roundings=pipeline.roundings)
    if files.sliced is not None:
        raise SLICES.make_error(Origin(files.sliced))
    if files.experts or (peeked is not None and max(peeked.num_experts, default=1) > 1):
        return _read_with_experts(files, records, agreement)
    if files.partitions:
        # First, because they show how many model states there should be, and whether these are cut.
        partitions = read_partitions(files.folder, files.partitions, records, agreement)
        modules = _modules(files, len(partitions.all), partitions.is_interleaved, records, agreement)
        _check_world(files, modules, partitions)
        groups = modules.state.groups
        if groups is None:  # BF16_Optimizer without ZeRO: engine.py: _common_checkpoint_state
            shapes = {name: tensor.shape for name, tensor in modules.state.module.items()}
            groups = groups_of_slices(partitions, shapes)
        return _Content(modules, locate_trained(partitions, groups), partitions)
    modules = _modules(files, 0, bool(files.rank_models), records, agreement)
    if modules.state.groups is not None:
        raise _partition_error(files, "model states alone")
    _check_world(files, modules, None)
    return _Content(modules, {}, None)


def _read_with_experts(files: CheckpointFiles, records: Records, agreement: Agreement) -> _Content:
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
    return _Content(modules, trained, partitions, num_experts=len(files.experts), roundings=roundings)


def _check_world(files: CheckpointFiles, modules: Modules, partitions: Partitions | None) -> None:
    """Check the run's sizes that the model states record."""
    origin, num_slices = modules.state.origin, modules.state.facts.get("mp_world_size")
    if not files.is_universal and type(num_slices) is int and num_slices > 1:
        raise SLICES.make_error(origin, f"one of {num_slices} slices (mp_world_size)")
    _check_dp_size(modules.state, partitions)


def _check_dp_size(state: ModelState, partitions: Partitions | None) -> None:
    num_ranks, origin = state.facts.get("dp_world_size"), state.origin
    if partitions is not None and type(num_ranks) is int and num_ranks != len(partitions.all):
        raise origin.contradiction(
            "belongs to a run of another size than the partitions",
            f"dp_world_size {num_ranks}",
            f"{len(partitions.all)}, the number of partitions",
            "all files must come from one save; runs with MiCS, whose partitions repeat, are not read",
        )


def _modules(files: CheckpointFiles, num_ranks: int, is_cut: bool, records: Records, agreement: Agreement) -> Modules:
    """Return the model states: one file per rank in stage 3, one file in other stages."""
    if files.models and files.rank_models:
        problem = f"belongs to stage 3, and {next(iter(files.models.values()))} to another stage"
        other = next(iter(files.rank_models.values()))
        raise Origin(other).contradiction(problem, "model states of two kinds", "those of one save", ONE_SAVE)
    if is_cut:
        if not num_ranks:
            raise _partition_error(files, "stage 3's model states, whose tensors are empty")
        check_ranks(files.folder, files.rank_models, num_ranks, "model_states")
        return read_rank_modules([files.rank_models[rank] for rank in range(num_ranks)], records, agreement)
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
        f"{files.folder} contains no {name} nor another *_optim_states.pt, which would contain the fp32 weights",
        rank=0,
        file=os.path.join(files.folder, name),
        got=got,
        want="a *_optim_states.pt of every rank",
        next_step="copy the optimizer states from where they were saved",
    )


def _universal_modules(files: CheckpointFiles, records: Records, agreement: Agreement) -> Modules:
    if files.partitions:
        first = next(iter(files.partitions.values()))
        problem = "lies beside a universal checkpoint"
        raise Origin(first).contradiction(problem, "zero/ and *_optim_states.pt", "one of both", ONE_SAVE)
    num_ranks = len(files.rank_models)
    if num_ranks:
        # The last ranks' files may be lost, so the size that any file records goes before the highest name.
        recorded = read_model_state(files.rank_models[min(files.rank_models)]).facts.get("dp_world_size")
        num_ranks = recorded if type(recorded) is int and recorded > 0 else max(files.rank_models) + 1
    return _modules(files, num_ranks, bool(num_ranks), records, agreement)


def _shapes_of(files: CheckpointFiles, modules: Modules) -> Shapes:
    """Return the shapes of a universal checkpoint's parameters, of all slices."""
    if modules.state.groups is None:
        raise modules.state.origin.usage(
            "does not record which parameters were trained",
            "no param_shapes",
            next_step="convert the checkpoint again with a newer ds_to_universal.py",
        )
    shapes = dict(modules.trained)
    num_slices = modules.state.facts.get("mp_world_size", 1)
    if len(files.models) <= 1 and num_slices in (1, None):
        return shapes
    if type(num_slices) is int and set(files.models) != set(range(num_slices)):
        missing = sorted(set(range(num_slices)) - set(files.models))
        name = f"mp_rank_{missing[0] if missing else max(files.models):02d}_model_states.pt"
        raise Origin(os.path.join(files.folder, name)).incomplete(
            f"is missing, or there are files of more slices than {num_slices}",
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
            "one, or trained parameters alone",
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
            f"parameters dealt to {num_ranks} ranks; their files in zero/ contain elements of others",
            "a checkpoint that was not made universal",
            f"gather the checkpoint from which {files.tag} was made",
        )


def _details(files: CheckpointFiles, content: _Content, aliases: Mapping[str, str]) -> dict[str, Any]:
    state, partitions = content.modules.state, content.partitions
    stage = state.config_stage
    if partitions is not None and partitions.stage is not None:
        stage = partitions.stage
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
