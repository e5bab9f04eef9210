"""The reader of vLLM's sharded states: one safetensors file per tensor-parallel rank and part."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import AGAIN, ContradictionError, IncompleteError, LayoutError
from xrank.formats.safetensors_header import read_header
from xrank.layout import DeviceMesh
from xrank.layout.nests import row_major
from xrank.layout.stored_model import StoredModel
from xrank.readers.base import Hints
from xrank.readers.placement import HeldTensor, place_all
from xrank.readers.records import NO_CHECKSUMS, ONE_SAVE, Records, copied_error
from xrank.storage import places
from xrank.storage.regular_file import Origin, open_regular
from xrank.words import list_text, numbers_text, plural, ranks_text

# vllm/model_executor/model_loader/sharded_state_loader.py: TP_ONLY_PATTERN, PP_AND_TP_PATTERN.
_NAME = re.compile(
    r"model-(?:rank-([0-9]{1,6})|pp-([0-9]{1,6})-tp-([0-9]{1,6}))-part-([0-9]{1,6})\.safetensors", re.ASCII
)


class RankParts(Struct, frozen=True):
    """The files by rank, in the order of their parts."""

    files: Mapping[int, tuple[str, ...]]
    num_stages: int
    """Number of pipeline stages; a stage's ranks follow each other."""

    @property
    def tp_size(self) -> int:
        """Number of ranks that share a stage's tensors."""
        return len(self.files) // self.num_stages


def list_parts(folder: str) -> RankParts:
    """Return the files of a folder."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    matches = [match for name in sorted(places.list_names(folder)) if (match := _NAME.fullmatch(name))]
    for match in matches:
        place = (0, int(match[1])) if match[1] is not None else (int(match[2]), int(match[3]))
        found.setdefault(place, {})[int(match[4])] = os.path.join(folder, match[0])
    if len({match[1] is None for match in matches}) > 1:
        problem = "contains files with and without pipeline stages"
        got = "model-rank-* and model-pp-*"
        raise Origin(folder).contradiction(problem, got, "the files of one save", ONE_SAVE)
    num_stages, tp_size = (max(place[axis] for place in found) + 1 for axis in (0, 1))
    cells = [(stage, rank) for stage in range(num_stages) for rank in range(tp_size)]
    missing = [number for number, place in enumerate(cells) if place not in found]
    if missing:
        problem = f"{ranks_text(missing)} of {len(cells)} wrote no file"
        got = f"files of {ranks_text(set(range(len(cells))) - {*missing})}"
        step = "copy the missing files from the nodes that saved them"
        raise Origin(folder, missing[0]).incomplete(problem, got, f"files of each of {len(cells)} ranks", step)
    for number, place in enumerate(cells):
        parts = found[place]
        if len(parts) <= max(parts):
            absent = sorted(set(range(max(parts))) - {*parts})
            problem = f"rank {number} wrote no part {numbers_text(absent)}"
            got = f"parts {numbers_text(parts)}"
            step = "copy the missing files from the node that saved them"
            raise Origin(folder, number).incomplete(problem, got, f"parts 0-{max(parts)}", step)
    files = {n: tuple(file for _, file in sorted(found[place].items())) for n, place in enumerate(cells)}
    return RankParts(files, num_stages)


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose parameters are known. Other types have other parameters under the same names, as Phi-3 in its files."""
_SCALE = re.compile(r".*\.attn\._(k|v|q|prob)_scale")
"""Scales of quantized attention (vllm/model_executor/layers/attention), which are no weights."""
_VOCABULARY = re.compile(r"(model\.embed_tokens|lm_head)\.weight")
_COLUMN_PARALLEL = re.compile(r".*\.(o_proj|down_proj)\.weight")
_FUSED = re.compile(r"(?P<module>.*\.)(?P<kind>qkv_proj|gate_up_proj)(?P<rest>\.(weight|bias))")
_FIX = "put the config.json of this model into the folder"
_FROM_NODES = "copy the missing ranks' files from the nodes that saved them"
_ELSEWHERE = "gather the checkpoint that was trained, or give the Hugging Face folder that the engine loaded"


class Sizes(Struct, frozen=True):
    """Sizes of the model by config.json, and the number of ranks that share its tensors."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tp_size: int

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share a head of keys and values."""
        return max(1, self.tp_size // self.num_kv_heads)

    def mesh(self, first_rank: int) -> DeviceMesh:
        """Return the mesh of a stage's ranks; those with the same heads of keys and values follow each other."""
        shape = (self.tp_size // self.num_replicas, self.num_replicas)
        return DeviceMesh(shape, ("kvs", "rep"), list(range(first_rank, first_rank + self.tp_size)))


def read_sizes(config: Mapping[str, Any], tp_size: int, folder: str) -> Sizes:
    """Return the sizes in a model's config."""
    if config.get("model_type") not in MODEL_TYPES:
        raise Origin(folder).layout(
            f"it is unknown how vLLM splits the parameters of model_type {config.get('model_type')!r}",
            repr(config.get("model_type")),
            f"model_type {', '.join(MODEL_TYPES)}",
            _ELSEWHERE,
        )
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim")
    if not width and type(hidden) is int and type(heads) is int and heads > 0 and hidden % heads == 0:
        width = hidden // heads
    found: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width or None}
    found["vocab_size"] = config.get("vocab_size")
    for key, size in found.items():
        if type(size) is not int or size < 1:
            problem = f"config.json gives no {key}, which determines how parameters were split"
            raise Origin(folder).layout(problem, repr(size), f"a number for {key}", f"{_FIX}, then {AGAIN}")
    num_heads, num_kv_heads, head_dim, vocabulary = found.values()
    sizes = Sizes(num_heads, num_kv_heads, head_dim, vocabulary, tp_size)
    shared = sizes.num_kv_heads % tp_size and tp_size % sizes.num_kv_heads
    if sizes.num_heads % tp_size or shared:
        raise Origin(folder).incomplete(
            f"{tp_size} ranks cannot share {sizes.num_heads} heads with {sizes.num_kv_heads} of keys and values",
            f"files of {tp_size} ranks",
            "the files of all ranks, and this model's config.json",
            _FROM_NODES,
        )
    return sizes


def split_parameter(name: str, held: HeldTensor, sizes: Sizes) -> Iterator[tuple[str, HeldTensor]]:
    """Yield the tensors of Hugging Face in a rank's parameter, each with its layout."""
    fused = _FUSED.fullmatch(name)
    if fused is None or not held.shape:
        yield name, replace(held, layout=_layout_of(name, held, sizes))
        return
    kv_heads = max(1, sizes.num_kv_heads // sizes.tp_size)
    if fused["kind"] == "qkv_proj":
        q, kv = sizes.num_heads // sizes.tp_size * sizes.head_dim, kv_heads * sizes.head_dim
        parts = [("q_proj", q, "n/kvs/rep"), ("k_proj", kv, "n/kvs"), ("v_proj", kv, "n/kvs")]
    else:
        half = held.shape[0] // 2
        parts = [("gate_proj", half, "n/kvs/rep"), ("up_proj", half, "n/kvs/rep")]
    rows = sum(count for _, count, _ in parts)
    if rows != held.shape[0]:
        # More ranks would have fewer rows each.
        raise held.of(name).make(
            IncompleteError if held.shape[0] < rows else ContradictionError,
            f"rank {held.rank} does not have the number of rows that config.json gives each of {sizes.tp_size} ranks",
            f"{held.shape[0]} rows",
            f"{rows} rows",
            f"copy the files of missing ranks into the folder; if all are there, {_FIX}",
        )
    first, width = 0, row_major(held.shape)[0]
    for module, count, cut in parts:
        start = held.storage_offset + first * width
        shape = (count, *held.shape[1:])
        layout = f"[{', '.join((cut, *('m' for _ in held.shape[1:])))}]"
        own = replace(held, shape=shape, strides=row_major(shape), storage_offset=start, layout=layout)
        yield f"{fused['module']}{module}{fused['rest']}", own
        first += count


def _layout_of(name: str, held: HeldTensor, sizes: Sizes) -> str:
    if _VOCABULARY.fullmatch(name) and len(held.shape) == 2:
        total = held.shape[0] * sizes.tp_size
        if total < sizes.vocabulary:
            raise held.of(name).incomplete(
                f"{sizes.tp_size} ranks have {total} rows of it, fewer than the vocabulary",
                f"{total} rows",
                f"vocab_size {sizes.vocabulary} or more, by config.json",
                _FROM_NODES,
            )
        if total - sizes.vocabulary >= 64 * sizes.tp_size:
            problem = f"{sizes.tp_size} ranks have more rows of it than a padded vocabulary"
            raise held.of(name).contradiction(problem, f"{total} rows", f"vocab_size {sizes.vocabulary}, padded", _FIX)
        return f"[pad({sizes.vocabulary}, {total})/kvs/rep, h]"
    if _COLUMN_PARALLEL.fullmatch(name) and len(held.shape) == 2:
        return "[h, n/kvs/rep]"
    return f"[{', '.join(f'd{dim}' for dim in range(len(held.shape)))}]"


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_NBYTES = 1 << 16
_BY_COLUMNS = (".o_proj.weight", ".down_proj.weight")
_Parameters = dict[str, HeldTensor]


class VllmReader:
    """The reader of vLLM's ``sharded_state`` (`xrank.readers.base.Reader`)."""

    name = "vllm"

    def recognize(self, path: str) -> str | None:
        """Return None for a folder with a rank's part."""
        if not places.is_folder(path):
            return "not a folder"
        if any(map(_NAME.fullmatch, places.list_names(path))):
            return None
        return "no model-rank-<rank>-part-<part>.safetensors"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every piece lies; errors as in `Reader.read`."""
        listed, records = list_parts(path), Records()
        ranks = [_read_rank(rank, files, records) for rank, files in listed.files.items()]
        _check_ranks(path, listed, ranks)
        _refuse_kernel_forms(path, ranks)
        _check_copies(listed, ranks, records)
        if hints.config is None:
            problem = "only the model's config.json determines how vLLM split its parameters"
            want = "the config.json that the engine loaded"
            raise Origin(path).layout(problem, "no config.json", want, f"put it into {path}, then {AGAIN}")
        sizes = read_sizes(hints.config, listed.tp_size, path)
        held: dict[str, list[HeldTensor]] = {}
        for rank, parameters in enumerate(ranks):
            mesh = sizes.mesh(rank - rank % listed.tp_size)
            for name, parameter in parameters.items():
                if not _SCALE.fullmatch(name):
                    for own, part in split_parameter(name, replace(parameter, mesh=mesh), sizes):
                        held.setdefault(own, []).append(part)
        # vLLM saves one of two names of the same memory, the first by the alphabet (_filter_subtensors).
        if hints.config.get("tie_word_embeddings") is True and _HEAD in held and _EMBEDDING not in held:
            held = {_EMBEDDING if name == _HEAD else name: parts for name, parts in held.items()}
        placement = place_all(held.items, replace(hints, layouts=None, shapes={}), world_size=len(ranks))
        recipe = _prove({shard.name: shard.shape for shard in placement.shards}, path, hints)
        text = f"vLLM does not record shapes; those of {recipe} with the sizes in config.json are used"
        notes = [NO_CHECKSUMS, ("inferred-shapes", text)]
        left_out = sum(_SCALE.fullmatch(name) is not None for name in ranks[0])
        if left_out:
            text = f"{plural(left_out, 'scale')} of the engine's attention on each rank left out: not weights"
            notes.append(("left-out", text))
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
    found: _Parameters = {}
    for file in files:
        header = read_header(file)
        record_of = records.add_safetensors(header)
        for tensor in header.tensors:
            if tensor.name in found:
                other = found[tensor.name]
                got = f"{os.path.basename(other.file)} and {os.path.basename(file)}"
                problem = f"rank {rank} saved it in two parts"
                raise other.of(tensor.name).contradiction(problem, got, "one part", ONE_SAVE)
            strides = row_major(tensor.shape)
            found[tensor.name] = HeldTensor(rank, file, record_of(tensor.name), tensor.dtype, tensor.shape, strides, 0)
    return found


def _check_ranks(folder: str, listed: RankParts, ranks: Sequence[_Parameters]) -> None:
    """Check that the ranks of a stage have the same parameters, in the same shapes."""
    for rank, own in enumerate(ranks):
        first = ranks[rank - rank % listed.tp_size]
        missing = [name for name in (*first, *own) if (name in first) != (name in own)]
        if missing:
            absent = rank if missing[0] in first else rank - rank % listed.tp_size
            raise Origin(folder, absent).incomplete(
                f"rank {absent} has no {missing[0]}, which other ranks have: a part of it is missing",
                list_text(map(os.path.basename, listed.files[absent])),
                "all parts of each rank",
                "copy the rank's files again from the node that saved them",
                tensor=missing[0],
            )
        for name, parameter in own.items():
            got, want = (f"{one.dtype} {list(one.shape)}" for one in (parameter, first[name]))
            if got != want:
                raise parameter.of(name).disagreement(first[name].rank, "type or shape", got, want, ONE_SAVE)


def _check_copies(listed: RankParts, ranks: Sequence[_Parameters], records: Records) -> None:
    """Check that no rank's file is a copy of another's: nothing in a file names its rank, but weights differ."""
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
            got = f"the same {len(start):,} first bytes as in {other.file}"
            origin, from_origin = (Origin(one.file, one.rank) for one in (held, other))
            raise copied_error(origin, from_origin, got, "its own columns")


def _refuse_kernel_forms(folder: str, ranks: Sequence[_Parameters]) -> None:
    """Refuse parameters whose values a kernel has put into an order of its own, which nothing records.

    vllm/model_executor/layers/fused_moe/oracle/unquantized.py: convert_to_unquantized_kernel_format exchanges or
    interleaves rows of experts, by the GPU. vllm/model_executor/layers/utils.py: dispatch_cpu_unquantized_gemm packs
    linear layers on a CPU, and leaves empty parameters, which are not saved.
    """
    names = {name for parameters in ranks for name in parameters}
    experts = next((name for name in sorted(names) if re.search(r"\.w(13|2)_(weight|bias)$", name)), None)
    if experts is not None:
        problem = "vLLM's kernels keep experts in an order that depends on the GPU, and no file records it"
        raise Origin(folder).usage(problem, experts, "a model without experts", _ELSEWHERE, tensor=experts)
    if _EMBEDDING in names and not any(name.endswith(_BY_COLUMNS) for name in names):
        raise Origin(folder).usage(
            "contains no linear layer: vLLM packs them on a CPU, and does not save packed layers",
            list_text(sorted(name for name in names if not _SCALE.fullmatch(name)), 3),
            "parameters such as model.layers.0.self_attn.o_proj.weight",
            _ELSEWHERE,
        )


def _prove(shapes: Mapping[str, tuple[int, ...]], folder: str, hints: Hints) -> str:
    """Return the name of the recipe that proves the shapes."""
    try:
        recipe = hints.prove_shapes(shapes) if hints.prove_shapes is not None else None
    except (IncompleteError, ContradictionError, LayoutError) as error:
        error.about(file=folder)
        raise
    if recipe is None:
        raise Origin(folder).layout(
            "no recipe has all of its tensors, so their shapes cannot be proven",
            list_text(shapes, 3),
            "tensors of a model type whose sizes a recipe knows",
            _ELSEWHERE,
        )
    return recipe
