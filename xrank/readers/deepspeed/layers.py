"""A pipeline's layers: each lies in a file of its own, under the names that it has without the pipeline.

deepspeed/runtime/pipe/module.py: save_state_dict writes them; functions, and a tied layer that a function of the user
runs, leave no file. PipelineModule names a tensor ``<layer>.<name>``, and one of a tied layer
``tied_modules.<key>.<name>``. The key is recorded by the names of buffers and of trained parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from xrank.dtypes import dtype
from xrank.errors import ContradictionError, IncompleteError, UsageError
from xrank.formats.regular_file import Origin
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.readers.deepspeed.state_dicts import check_name, check_table, check_tensors
from xrank.readers.deepspeed.states import Shape
from xrank.words import list_text, numbers_text, plural

_TIED = "tied_modules."
_AGAIN = "all files must come from one save of one run; copy them again"


@dataclass(frozen=True, slots=True)
class Layer:
    """Content of a ``layer_<number>-model_states.pt``."""

    number: int
    origin: Origin
    archive: TorchArchive
    tensors: Mapping[str, ArchivedTensor]
    """The layer's state dict."""


def read_layer(number: int, path: str) -> Layer:
    """Return the content of a layer's file, from its metadata alone.

    Raises:
        ContradictionError: it is another layer's file.
        CorruptError, UnsafeError: it is damaged, or contains code where data are needed.
    """
    archive, origin = read_archive(path), Origin(path)
    check_name(archive, origin)
    return Layer(number, origin, archive, check_tensors(check_table(archive.value, "the layer", origin), origin))


def is_tied(name: str) -> bool:
    """Return whether a tensor belongs to a tied layer, of which several stages have a copy."""
    return name.startswith(_TIED)


def find_prefixes(
    layers: Mapping[int, Layer], trained: Mapping[str, Shape | None], buffers: Iterable[str], folder: str
) -> dict[int, str]:
    """Return the prefix of each layer's names in the pipeline's state dict.

    Args:
        layers: the layers with a file, by number.
        trained: names of trained parameters, with their shapes where they are recorded.
        buffers: names of buffers.
        folder: the checkpoint's folder.

    Raises:
        IncompleteError: a layer's file is missing.
        ContradictionError: a layer lacks a tensor, or has another shape of it.
        UsageError: several tied layers look alike, or a tensor belongs to no layer.
    """
    plain: dict[int, dict[str, Shape | None]] = {}
    tied: dict[str, dict[str, Shape | None]] = {}
    for name, shape in {**dict.fromkeys(buffers), **trained}.items():
        first, _, rest = name.removeprefix(_TIED).partition(".")
        if is_tied(name):
            tied.setdefault(first, {})[rest] = shape
        elif first.isdecimal():
            plain.setdefault(int(first), {})[rest] = shape
        else:
            raise _stray_error(name, folder)
    for number, tensors in plain.items():
        if number not in layers:
            raise _absent_error(f"{number}.{next(iter(tensors))}", f"layer_{number:02d}*-model_states.pt", folder)
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
            raise _lookalike_error(layers[numbers[0]], keys)
        for at, number in enumerate(numbers):
            found[number] = f"{_TIED}{keys[min(at, len(keys) - 1)]}."
    _check_copies([layers[number] for number in sorted(layers)], found)
    # A tied layer may leave no file, but its buffers lie in no other place.
    for name in buffers:
        if is_tied(name) and not any(name.startswith(prefix) for prefix in found.values()):
            raise _absent_error(name, "the file of a layer with it", folder)
    return found


def _fits(layer: Layer, tensors: Mapping[str, Shape | None]) -> bool:
    """Return whether a layer's file has all of these names, in these shapes."""
    held = layer.tensors
    return all(name in held and shape in (None, held[name].shape) for name, shape in tensors.items())


def _check_tensors(layer: Layer, tensors: Mapping[str, Shape | None]) -> None:
    for name, shape in tensors.items():
        held = layer.tensors.get(name)
        if held is None or shape not in (None, held.shape):
            raise ContradictionError(
                layer.origin.locate(f"differs from the model states in {layer.number}.{name}"),
                tensor=f"{layer.number}.{name}",
                file=layer.origin.path,
                got="no such tensor" if held is None else str(list(held.shape)),
                want="a tensor" if shape is None else str(list(shape)),
                next_step=_AGAIN,
            )


def _check_copies(layers: Sequence[Layer], prefixes: Mapping[int, str]) -> None:
    """Check that layers under one tied key have equal tensors: a pipeline may tie some of a layer's tensors alone."""
    first: dict[str, Layer] = {}
    for layer in layers:
        other = first.setdefault(prefixes[layer.number], layer)
        for name, tensor in layer.tensors.items():
            if name in other.tensors and _differs(layer, tensor, other, other.tensors[name]):
                full = prefixes[layer.number] + name
                raise layer.origin.usage(
                    f"contains other values of {full} than {other.origin.path}: its pipeline ties other tensors alone",
                    got=f"two tensors named {full}",
                    want="one",
                    next_step="give each layer a key of its own, or tie the tensor (tied_weight_attr), and save again",
                )


def _differs(one: Layer, a: ArchivedTensor, other: Layer, b: ArchivedTensor) -> bool:
    records = one.archive.records[a.key], other.archive.records[b.key]
    are_whole = all(
        record.nbytes == prod(tensor.shape) * dtype(tensor.dtype).nbytes
        for record, tensor in zip(records, (a, b), strict=True)
    )
    has_checksums = one.archive.has_checksums and other.archive.has_checksums
    return are_whole and has_checksums and records[0].crc32 != records[1].crc32


def _absent_error(name: str, file: str, folder: str) -> IncompleteError:
    return IncompleteError(
        f"{folder} contains no {file}, which holds {name}" if "*" in file else f"{folder}: no file holds {name}",
        tensor=name,
        file=folder,
        want=file,
        next_step="copy the layers' files from the nodes that saved them; nodes without a shared disk keep their own",
    )


def _stray_error(name: str, folder: str) -> UsageError:
    return UsageError(
        f"{name} belongs to no layer of the pipeline",
        tensor=name,
        file=folder,
        got=name,
        want=f"names like 0.weight or {_TIED}embed.weight",
        next_step="make the module with this parameter, such as the loss, a layer of the pipeline, and save again",
    )


def _lookalike_error(layer: Layer, keys: Sequence[str]) -> UsageError:
    return layer.origin.usage(
        f"may be any of {len(keys)} tied layers, which have tensors of the same names and shapes",
        got=list_text(keys),
        want="one",
        next_step="give the layers tensors of different names, and save again",
    )


def note_absent_layers(layers: Mapping[int, Layer]) -> tuple[tuple[str, str], ...]:
    """Return a note about numbers below the highest that have no file, if there are any."""
    absent = [number for number in range(max(layers, default=0)) if number not in layers]
    if not absent:
        return ()
    text = f"{plural(len(absent), 'layer')} without a file: {numbers_text(absent)}"
    return (("absent-layers", f"{text}. Functions and tied layers leave none; any other file must be copied, too"),)
