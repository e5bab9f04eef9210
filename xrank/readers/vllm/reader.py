"""The reader of vLLM's ``sharded_state`` (vllm/model_executor/model_loader/sharded_state_loader.py: save_model).

Each rank saved its parameters as they lie in the engine: fused, cut by tensor parallelism, without a record of the
whole. config.json gives the sizes by which they are taken apart, and a recipe proves every shape that results.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xrank.errors import AGAIN, ContradictionError, IncompleteError, LayoutError, UsageError
from xrank.formats.regular_file import open_regular
from xrank.formats.safetensors_header import HeaderTensor, read_header
from xrank.layout.nests import row_major
from xrank.plan.source import StoredModel
from xrank.readers.advice import ONE_SAVE
from xrank.readers.base import Hints
from xrank.readers.held_tensor import HeldTensor
from xrank.readers.placement import place_all
from xrank.readers.records import Records
from xrank.readers.vllm.files import RankParts, is_state_name, list_parts
from xrank.readers.vllm.parameters import is_left_out, read_sizes, split_parameter
from xrank.stores import places
from xrank.words import list_text, plural

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ELSEWHERE = "gather the checkpoint that was trained, or give the Hugging Face folder that the engine loaded"
_COMPARED_NBYTES = 1 << 16
_BY_COLUMNS = (".o_proj.weight", ".down_proj.weight")
_Parameters = dict[str, HeldTensor]


class VllmReader:
    """The reader of vLLM's ``sharded_state`` (`xrank.readers.base.Reader`)."""

    name = "vllm"

    def recognise(self, path: str) -> str | None:
        """Return None for a folder with a rank's part."""
        if not places.is_folder(path):
            return "not a folder"
        return (
            None if any(map(is_state_name, places.list_names(path))) else "no model-rank-<rank>-part-<part>.safetensors"
        )

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every piece lies; errors as in `Reader.read`."""
        listed, records = list_parts(path), Records()
        ranks = [_read_rank(rank, files, records) for rank, files in listed.files.items()]
        _check_ranks(path, listed, ranks)
        _refuse_kernel_forms(path, ranks)
        _check_copies(listed, ranks, records)
        if hints.config is None:
            raise LayoutError(
                f"{path}: only the model's config.json determines how vLLM cut its parameters",
                file=path,
                got="no config.json",
                want="the config.json that the engine loaded",
                next_step=f"put it into {path}, then {AGAIN}",
            )
        sizes = read_sizes(hints.config, listed.tp_size, path)
        held: dict[str, list[HeldTensor]] = {}
        for rank, parameters in enumerate(ranks):
            mesh = sizes.mesh(rank - rank % listed.tp_size)
            for name, parameter in parameters.items():
                if not is_left_out(name):
                    for own, part in split_parameter(name, replace(parameter, mesh=mesh), sizes):
                        held.setdefault(own, []).append(part)
        held = _name_tied(held, hints.config)
        placement = place_all(held, replace(hints, layouts=None, shapes={}), world_size=len(ranks))
        recipe = _prove({shard.name: shard.shape for shard in placement.shards}, path, hints)
        left_out = sum(map(is_left_out, ranks[0]))
        notes = [
            ("no-checksums", "safetensors files hold no checksums; damage inside a tensor can't be seen"),
            ("inferred-shapes", f"shapes, which vLLM does not record, are by config.json's sizes those of {recipe}"),
        ]
        if left_out:
            notes.append(
                ("left-out", f"{plural(left_out, 'scale')} of the engine's attention on each rank, no weights")
            )
        return StoredModel(
            format=self.name,
            path=path,
            files=tuple(records.files),
            records=records.table(),
            shards=placement.shards,
            world_size=len(ranks),
            nbytes=records.nbytes,
            notes=tuple(notes),
            layouts=placement.layouts,
            details={"tensor-parallel ranks": listed.tp_size, "pipeline stages": listed.num_stages},
        )


def _read_rank(rank: int, files: Sequence[str], records: Records) -> _Parameters:
    """Return a rank's parameters in all of its parts."""
    found: _Parameters = {}
    for file in files:
        header = read_header(file)
        record_of = records.add_safetensors(header)
        for tensor in header.tensors:
            if tensor.name in found:
                raise found[tensor.name].contradiction(
                    tensor.name,
                    f"rank {rank} saved it in two parts",
                    got=f"{os.path.basename(found[tensor.name].file)} and {os.path.basename(file)}",
                    want="one part",
                    next_step=ONE_SAVE,
                )
            found[tensor.name] = _hold(rank, file, tensor, record_of(tensor))
    return found


def _hold(rank: int, file: str, tensor: HeaderTensor, record: int) -> HeldTensor:
    return HeldTensor(rank, file, record, tensor.dtype, tensor.shape, row_major(tensor.shape), 0)


def _check_ranks(folder: str, listed: RankParts, ranks: Sequence[_Parameters]) -> None:
    """Check that the ranks of a stage have the same parameters, in the same shapes."""
    for rank, own in enumerate(ranks):
        first = ranks[rank - rank % listed.tp_size]
        missing = [name for name in (*first, *own) if (name in first) != (name in own)]
        if missing:
            absent = rank if missing[0] in first else rank - rank % listed.tp_size
            raise IncompleteError(
                f"rank {absent} has no {missing[0]}, which other ranks have: a part of it is missing",
                tensor=missing[0],
                rank=absent,
                file=folder,
                got=list_text(map(os.path.basename, listed.files[absent])),
                want="all parts of each rank",
                next_step="copy the rank's files again from the node that saved them",
            )
        for name, parameter in own.items():
            if (parameter.dtype, parameter.shape) != (first[name].dtype, first[name].shape):
                raise ContradictionError(
                    f"{name}: ranks {first[name].rank} and {rank} disagree about its type or shape",
                    tensor=name,
                    rank=rank,
                    file=parameter.file,
                    got=f"{parameter.dtype} {list(parameter.shape)}",
                    want=f"{first[name].dtype} {list(first[name].shape)}",
                    next_step=ONE_SAVE,
                )


def _check_copies(listed: RankParts, ranks: Sequence[_Parameters], records: Records) -> None:
    """Check that no rank's file is a copy of another's: nothing in a file names its rank, but weights differ.

    Raises:
        ContradictionError: two ranks of a stage have equal columns of a weight.
    """
    seen: dict[tuple[int, bytes], HeldTensor] = {}
    for rank, parameters in enumerate(ranks if listed.tp_size > 1 else ()):
        held = next((held for name, held in parameters.items() if name.endswith(_BY_COLUMNS)), None)
        if held is None:
            continue
        with open_regular(held.file) as file:
            start = records.read_bytes(held.record, file, _COMPARED_NBYTES)
        if len(set(start)) <= 2:
            continue  # zeros, or another constant
        other = seen.setdefault((rank // listed.tp_size, start), held)
        if other is not held:
            raise ContradictionError(
                f"{held.file} is a copy of rank {other.rank}'s file",
                rank=rank,
                file=held.file,
                got=f"the same {len(start):,} first bytes as in {other.file}",
                want="columns of its own",
                next_step=f"copy rank {rank}'s file, or rank {other.rank}'s, again from where it was saved",
            )


def _refuse_kernel_forms(folder: str, ranks: Sequence[_Parameters]) -> None:
    """Refuse parameters whose values a kernel has put into an order of its own, which nothing records.

    vllm/model_executor/layers/fused_moe/oracle/unquantized.py: convert_to_unquantized_kernel_format exchanges or
    interleaves rows of experts, by the GPU. vllm/model_executor/layers/utils.py: dispatch_cpu_unquantized_gemm packs
    linear layers on a CPU, and leaves empty parameters, which are not saved.
    """
    names = {name for parameters in ranks for name in parameters}
    experts = next((name for name in sorted(names) if re.search(r"\.w(13|2)_(weight|bias)$", name)), None)
    if experts is not None:
        raise UsageError(
            f"{folder}: vLLM's kernels keep experts in an order that depends on the GPU, and no file records it",
            tensor=experts,
            file=folder,
            got=experts,
            want="a model without experts",
            next_step=_ELSEWHERE,
        )
    if _EMBEDDING in names and not any(name.endswith(_BY_COLUMNS) for name in names):
        raise UsageError(
            f"{folder} holds no linear layer: vLLM packs them on a CPU, and does not save packed layers",
            file=folder,
            got=list_text(sorted(name for name in names if not is_left_out(name)), 3),
            want="parameters such as model.layers.0.self_attn.o_proj.weight",
            next_step=_ELSEWHERE,
        )


def _name_tied(held: Mapping[str, list[HeldTensor]], config: Mapping[str, Any]) -> dict[str, list[HeldTensor]]:
    """Return the parts with a tied embedding under its own name.

    vLLM saves one of two names of the same memory, the first by the alphabet (_filter_subtensors).
    """
    is_tied = config.get("tie_word_embeddings") is True and _HEAD in held and _EMBEDDING not in held
    return {_EMBEDDING if is_tied and name == _HEAD else name: parts for name, parts in held.items()}


def _prove(shapes: Mapping[str, tuple[int, ...]], folder: str, hints: Hints) -> str:
    """Return the name of the recipe that proves the shapes.

    Raises:
        IncompleteError, ContradictionError: the shapes contradict config.json.
        LayoutError: no recipe knows all names.
    """
    try:
        recipe = hints.prove_shapes(shapes) if hints.prove_shapes is not None else None
    except (IncompleteError, ContradictionError, LayoutError) as error:
        error.about(file=folder)
        raise
    if recipe is None:
        raise LayoutError(
            f"{folder}: no recipe knows all of its tensors, so that nothing proves their shapes",
            file=folder,
            got=list_text(shapes, 3),
            want="tensors of a model type whose sizes a recipe knows",
            next_step=_ELSEWHERE,
        )
    return recipe
