"""Dequantization: each quantized weight of a source as one floating-point tensor, decoded where it is read.

A weight's codes, scales and constants become one tensor under the plain name, so that every later step (recipes,
adapters, ties, casts, checks of the config) sees the model as it was before it was quantized. Nothing is decoded here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.encodings import Encoding
from xrank.engine.object_records import ObjectSource
from xrank.engine.quantized_records import describe_matrix
from xrank.engine.sources import open_source
from xrank.engine.windows import Read
from xrank.errors import AGAIN, ContradictionError, IncompleteError, UsageError
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.layout.stored_model import NO_CHECKSUM, QuantizedMatrix, RecordTable, StoredModel, StoredShard
from xrank.recipes.found_source import BaseModel, FoundSource
from xrank.recipes.options import KINDS
from xrank.recipes.quantization import (
    COPY_CODES,
    DECLARING_FILES,
    DECLARING_KEYS,
    StoredScheme,
    find_stored_scheme,
    is_quantized,
)
from xrank.words import list_text, plural


class _Types(Struct, frozen=True):
    """The types in which decoded weights are wanted."""

    plain: str
    """The type of the model's weights by its config.json."""
    choice: str = "keep"
    """`GatherOptions.dtype`, or ``"any"`` for a module whose types are not known."""

    def find(self, encoding: Encoding, scale_dtype: str) -> str:
        """Return the type in which a weight is decoded: for a cast in fp32, so that it is checked, and rounded once."""
        if encoding.rule.startswith("modelopt"):  # it computes in the type that it is told
            return KINDS.get(self.choice, self.plain)
        kind = encoding.decoded_dtype("F32", scale_dtype)
        if kind != "F32":
            return kind
        return self.plain if self.choice == "keep" else "BF16" if self.choice == "bf16" else "F32"


class StoredWeight(Struct, frozen=True):
    """A quantized weight, and the tensors that contain it."""

    name: str
    """Name of the weight in a model that is not quantized."""
    encoding: Encoding
    shape: tuple[int, ...]
    """Shape of the weight as it was encoded."""
    parts: tuple[str, ...]
    """Names of the tensors, in the order of `Encoding.outputs`."""
    num_packed: int
    """Codes in one element of their tensor."""
    is_transposed: bool = False
    """Whether the plain model has the transpose of each matrix."""

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Shape of the weight in a model that is not quantized."""
        return (*self.shape[:-2], *self.shape[:-3:-1]) if self.is_transposed else self.shape


def fold_model(model: StoredModel, weights: Sequence[StoredWeight], types: _Types, dropped: set[str]) -> StoredModel:
    """Return a model with one tensor for each quantized weight, whose bytes are decoded from those of its parts.

    Args:
        model: the model as it is quantized.
        weights: its quantized weights.
        types: the types in which weights are wanted.
        dropped: names of further tensors to leave out.

    Raises:
        UsageError: a part of a weight is not one stretch of bytes in a file without checksums.
    """
    shards, table = {shard.name: shard for shard in model.shards}, model.records
    find_record = _RecordFinder(model).find
    made: dict[str, StoredShard] = {}
    rows: list[tuple[int, int, int, int]] = []
    matrices: dict[int, QuantizedMatrix] = {}
    nests: dict[int, NestTable] = {}
    for weight in weights:
        parts = [shards[name] for name in weight.parts]
        stored = [find_record(part, weight.name) for part in parts]
        kind = types.find(weight.encoding, parts[1].dtype)
        sizes = (prod(weight.shape[:-2]), weight.shape[-2], weight.shape[-1])
        new, count = len(table) + len(rows), prod(sizes)
        described = [(record, part.dtype) for record, part in zip(stored, parts, strict=True)]
        how = (weight.encoding, kind, sizes, described, weight.num_packed)
        matrices[new] = describe_matrix(*how, is_transposed=weight.is_transposed)
        first = int(table.file[stored[0]]), int(table.offset[stored[0]])
        rows.append((*first, count * dtypes.dtype(kind).nbytes, NO_CHECKSUM))
        if count not in nests:
            nests[count] = NestTable.from_nests([Nest(0, 0, ((count, 1, 1),) if count > 1 else ())])
        where = parts[0].rank, int_array([new]), nests[count]
        made[weight.parts[0]] = StoredShard(weight.name, kind, weight.plain_shape, *where)
    left_out = dropped.union(*(weight.parts[1:] for weight in weights))
    file, offset, nbytes, crc32 = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    joined = table.join(RecordTable(file, offset, nbytes, crc32), 0)
    return replace(
        model,
        records=replace(joined, quantized={**table.quantized, **matrices}),
        shards=tuple(made.get(shard.name, shard) for shard in model.shards if shard.name not in left_out),
    )


class _RecordFinder:
    """Finds the record that contains a tensor, all of it and nothing else, as in every model folder."""

    def __init__(self, model: StoredModel) -> None:
        self._model = model
        table = model.records
        self._is_plain = (table.crc32 == NO_CHECKSUM) & (table.stored_nbytes == table.nbytes)

    def find(self, part: StoredShard, weight: str) -> int:
        """Return the record of a part of a weight; UsageError if it has several, or a checksum."""
        count = prod(part.shape)
        if len(part.record) == 1 and part.factor == 1.0 and not part.added:
            record, nest = int(part.record[0]), part.nests[0]
            is_whole = (nest.x, nest.y) == (0, 0) and nest.loops == (((count, 1, 1),) if count > 1 else ())
            nbytes = count * dtypes.dtype(part.dtype).nbytes
            if is_whole and self._is_plain[record] and self._model.records.nbytes[record] == nbytes:
                return record
        step = "gather the source as it is first, then dequantize the folder that this writes"
        problem = f"{weight}: a quantized weight is decoded from whole tensors in files of safetensors only"
        got = f"{part.name} in {self._model.format}, with several pieces or a checksum"
        raise UsageError(problem, tensor=part.name, file=self._model.path, got=got, next_step=step)


_OF_ACTIVATIONS = re.compile(
    r"(?:.*\.)?(?:[qkv]|kv_cache|prob|prob_output|output|act|(?:\w+_)?(?:input|activation))_(?:global_)?"
    r"(?:scale|zero_point)(?:_inv)?"
)
_CONFIG_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, global shape)."""


def dequantize_source(found: FoundSource, dtype: str = "keep") -> FoundSource:
    """Return a source with floating-point weights in the place of quantized ones, and a config that declares none.

    Args:
        found: the source as it is quantized.
        dtype: the `GatherOptions.dtype` for which weights are decoded, ``"keep"`` for the type that config.json has;
            or ``"any"``.

    Raises:
        IncompleteError: a weight lacks its scales, or scales their weight.
        ContradictionError: tensors do not have the form that config.json declares.
        UsageError: the quantization is not one of those that xrank decodes.
    """
    tensors = {shard.name: (shard.dtype, shard.shape) for shard in found.model.shards}
    weights, dropped = find_weights(tensors, find_stored_scheme(found.config, found.companions), found.model.path)
    notes = [("dequantized", "no tensor is quantized; all are copied unchanged")]
    model = found.model
    if weights:
        _check_stated_shapes(model, weights)
        model = fold_model(model, weights, _Types(_find_plain_type(found.config), dtype), dropped)
        notes = [("dequantized", f"{plural(len(weights), 'quantized weight')} decoded, such as {weights[0].name}")]
    if dropped:
        notes.append(("scales-dropped", f"scales of activations are left out: {list_text(sorted(dropped), 3)}"))
    return replace(
        found,
        model=replace(model, notes=(*model.notes, *notes)),
        config=remove_quantization(found.config),
        config_path=None,
        companions=tuple(each for each in found.companions if each.name not in ("config.json", *DECLARING_FILES)),
    )


def decode_source(found: FoundSource) -> FoundSource:
    """Return a source with floating-point weights for a module that has only such; unchanged if it has only such."""
    return dequantize_source(found, "any") if is_quantized(found.model) else found


def dequantize_base(base: BaseModel) -> BaseModel:
    """Return a base model with floating-point weights in the place of quantized ones; errors as `dequantize_source`."""
    declared = find_stored_scheme(base.config, base.companions)
    weights, dropped = find_weights(base.tensors, declared, base.path)
    left_out = dropped.union(*(weight.parts for weight in weights))
    types = _Types(_find_plain_type(base.config))
    tensors = {name: tensor for name, tensor in base.tensors.items() if name not in left_out}
    for weight in weights:
        kind = types.find(weight.encoding, base.tensors[weight.parts[1]][0])
        tensors[weight.name] = kind, weight.plain_shape
    return replace(
        base,
        tensors=tensors,
        config=remove_quantization(base.config),
        companions=tuple(each for each in base.companions if each.name not in ("config.json", *DECLARING_FILES)),
        decode=lambda model: fold_model(model, weights, types, dropped),
    )


def remove_quantization(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a config without the quantization that it, or an object in it, declares."""
    if config is None:
        return None
    has_type = any({"dtype", "torch_dtype"} & {*section} for section in _list_sections(config))
    kept = {
        key: {k: v for k, v in value.items() if k not in DECLARING_KEYS} if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in DECLARING_KEYS
    }
    return kept if has_type else {**kept, "dtype": "bfloat16"}


def _find_plain_type(config: Mapping[str, Any] | None) -> str:
    named = (section.get(key) for section in _list_sections(config or {}) for key in ("dtype", "torch_dtype"))
    return next((_CONFIG_TYPES[name] for name in named if name in _CONFIG_TYPES), "BF16")


def _list_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [config, *(each for each in config.values() if isinstance(each, Mapping))]


def find_weights(tensors: _Tensors, declared: StoredScheme | None, path: str) -> tuple[list[StoredWeight], set[str]]:
    """Return the quantized weights among tensors, and the names of the scales of activations.

    `declared` is the quantization of the model at the path; errors are those of `dequantize_source`.
    """
    known = () if declared is None else declared.find_encodings()
    codes = {(each.suffixes[0], each.outputs("", "BF16", (128, 128))[0].dtype): each.suffixes[1] for each in known}
    scales = {name for name in tensors if _OF_ACTIVATIONS.fullmatch(name)}
    weights: list[StoredWeight] = []
    used: set[str] = set()
    for name in tensors:
        stems = {each: name.removesuffix(each.suffixes[1]) for each in known if _is_scale(each, name)}
        if name in scales or not stems:
            continue
        weight, lacking = None, list[list[str]]()
        for encoding, stem in stems.items():
            lacking.append([stem + suffix for suffix in encoding.suffixes if stem + suffix not in tensors])
            weight = weight or (None if lacking[-1] else _fit(encoding, stem, tensors))
        if weight is None:
            if all(lacking):
                raise _missing(min(lacking, key=len)[0], name, path)
            encoding = next(each for each, names in zip(stems, lacking, strict=True) if not names)
            raise _misfit(encoding, stems[encoding], tensors, path)
        weights.append(weight)
        used.update(weight.parts)
    modules = {weight.name.removesuffix("weight") for weight in weights if weight.name.endswith(".weight")}
    for name, (kind, _) in tensors.items():
        if name in used or name in scales:
            continue
        for (suffix, dtype), scale in codes.items():
            if name.endswith(suffix) and kind == dtype:
                raise _missing(name.removesuffix(suffix) + scale, name, path)
        prefix, last = name[: name.rfind(".") + 1], name[name.rfind(".") + 1 :]
        if prefix in modules and last != "bias":
            raise UsageError(
                f"{name}: a quantized weight with this tensor is not decoded",
                tensor=name,
                file=path,
                got=f"{last} beside the codes",
                want=f"{list_text([part.rpartition('.')[2] for part in weights[0].parts])}, and perhaps a bias",
                next_step=COPY_CODES,
            )
        if kind.startswith("F8"):
            raise UsageError(
                f"{name} is quantized, and nothing states how",
                tensor=name,
                file=path,
                got=f"{kind}, and a config.json that declares {'another' if known else 'no'} quantization",
                want="a quantization_config in config.json, or hf_quant_config.json next to it",
                next_step="put the config.json of the quantized model into the folder of its weights",
            )
    return weights, scales if weights else set()


def _is_scale(encoding: Encoding, name: str) -> bool:
    # Other tensors may be called scale, too.
    suffix = encoding.suffixes[1]
    return name.endswith(f"weight{suffix}" if suffix == "_scale" else suffix)


def _fit(encoding: Encoding, stem: str, tensors: _Tensors) -> StoredWeight | None:
    """Return a weight if its tensors have the types and shapes of an encoding."""
    names = tuple(stem + suffix for suffix in encoding.suffixes)
    num_packed = _count_packed(encoding, tuple(tensors[name] for name in names))
    if num_packed is None:
        return None
    is_stack = encoding.rule == "gpt-oss"
    *rows, columns = _codes_shape(encoding, tensors[names[0]][1])
    return StoredWeight(stem, encoding, (*rows, columns * num_packed), names, num_packed, is_stack)


def _codes_shape(encoding: Encoding, stored: tuple[int, ...]) -> tuple[int, ...]:
    # GPT-OSS has [experts, rows, blocks, bytes].
    return (*stored[:2], stored[2] * stored[3]) if encoding.rule == "gpt-oss" and len(stored) == 4 else stored


@lru_cache
def _count_packed(encoding: Encoding, kinds: tuple[tuple[str, tuple[int, ...]], ...]) -> int | None:
    """Return how many codes an element has, if the types and shapes of parts are those of an encoding; else None."""
    scale_dtype, shape = kinds[1][0], _codes_shape(encoding, kinds[0][1])
    is_float = dtypes.dtype(scale_dtype).is_float
    for num_packed in (1, 2, 4, 8) if is_float or encoding.rule != "own" else ():
        whole = (*shape[:-1], shape[-1] * num_packed) if shape else ()
        if encoding.misfit(whole) is not None:
            continue
        outputs = encoding.outputs("", scale_dtype, whole)
        wanted = [(output.dtype, output.shape) for output in outputs]
        if encoding.rule == "fp32" and is_float:  # Qwen's folders in fp8 have scales in bf16
            wanted[1] = scale_dtype, wanted[1][1]
        found = [(kinds[0][0], shape), *kinds[1:]]
        # The scale of a whole tensor has no dim, or one.
        if all(a == b or (a[0] == b[0] and prod(a[1]) == prod(b[1]) == 1) for a, b in zip(wanted, found, strict=True)):
            return num_packed
    return None


def _missing(name: str, other: str, path: str) -> IncompleteError:
    problem, got = f"{name}: no file holds this tensor of a quantized weight", f"{other} without it"
    want, step = "codes and scales of each weight", f"copy all files of the quantized model into {path}, then {AGAIN}"
    return IncompleteError(problem, tensor=name, file=path, got=got, want=want, next_step=step)


def _misfit(encoding: Encoding, stem: str, tensors: _Tensors, path: str) -> ContradictionError:
    names = [stem + suffix for suffix in encoding.suffixes]
    got = ", ".join(f"{n.rpartition('.')[2]} {tensors[n][0]} {list(tensors[n][1])}" for n in names)
    return ContradictionError(
        f"{names[1]}: it does not fit its weight by the quantization that config.json declares",
        tensor=names[1],
        file=path,
        got=got,
        want=f"{encoding.elements} codes, and a scale for blocks of {list(encoding.block)} (0: all)",
        next_step="put the config.json that was written with these weights into their folder",
    )


def _check_stated_shapes(model: StoredModel, weights: Sequence[StoredWeight]) -> None:
    """Compare the shapes that packed weights state in a tensor of their own with those of their codes and scales."""
    shards = {shard.name: shard for shard in model.shards}
    stating = [weight for weight in weights if weight.parts[-1].endswith("_shape")]
    stated = {weight.name: shards[weight.parts[-1]] for weight in stating}
    finder = _RecordFinder(model)
    with closing(open_source(model)) as source:
        if isinstance(source, ObjectSource):
            source.announce(Read(finder.find(shard, name), 0, 16, None) for name, shard in stated.items())
        for weight in stating:
            data = bytearray(16)
            source.read_into(finder.find(stated[weight.name], weight.name), 0, memoryview(data))
            got = struct.unpack("<2q", data)
            if got != weight.shape:
                raise ContradictionError(
                    f"{weight.parts[-1]} is not the shape of its weight",
                    tensor=weight.parts[-1],
                    file=model.path,
                    got=str(list(got)),
                    want=f"{list(weight.shape)}, from the shapes of {weight.parts[0]} and its scales",
                    next_step="copy the files of the quantized model again, all of one save",
                )
