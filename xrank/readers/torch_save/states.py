"""The model in a file of ``torch.save``: a state dict, or a nested dict of a trainer with state dicts in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TypeAlias

from xrank.dtypes import dtype
from xrank.errors import UsageError
from xrank.formats.pickles import InertRecord, is_extra_state, refuse_inert
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import NAMES, ArchivedTensor, TorchArchive
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints
from xrank.readers.held_tensor import HeldTensor, pieces_of, whole
from xrank.readers.hugging_face.weight_files import check_placeholders
from xrank.readers.model_parts import ModelPart, SavedTree, part_details, part_notes, select_model
from xrank.readers.records import Records
from xrank.readers.saved_keys import leads_to_model
from xrank.readers.wrapper_names import is_of_lightning
from xrank.words import list_text

_Path: TypeAlias = tuple[str | int, ...]
_STEPS = ("global_step", "step", "iteration")


@dataclass(frozen=True, slots=True, eq=False)
class WholeState:
    """The model in one file."""

    archive: TorchArchive
    tensors: Mapping[str, ArchivedTensor]
    """By the names in its state dict."""
    others: tuple[str, ...]
    """Names of the values in its state dict that are not tensors."""
    part: ModelPart | None
    """The model among the parts of a nested dict; None where the whole file is one state dict."""

    @property
    def is_lightning(self) -> bool:
        """Whether the names are those of a LightningModule, of which the model is an attribute."""
        return self.part is not None and is_of_lightning(self.archive.value)

    @property
    def step(self) -> int | None:
        """The step beside the model."""
        value = self.archive.value if self.part is not None and isinstance(self.archive.value, dict) else {}
        return next((value[key] for key in _STEPS if type(value.get(key)) is int), None)


def select_state(archive: TorchArchive, wanted: str | None) -> WholeState:
    """Return the model in a file; the argument `wanted` is that of `select_model`.

    Raises:
        UnsafeError: the model, or a value of its state dict, is an object that only running code can make.
        UsageError: there is no dict, or no tensor with a name, or as `select_model`.
    """
    if not isinstance(archive.value, dict):
        refuse_inert(archive.value, archive.path)
        raise _no_names_error(archive, type(archive.value).__name__)
    leaves = dict(_walk(archive.value, ()))
    tensors = {path: value for path, value in leaves.items() if isinstance(value, ArchivedTensor)}
    if wanted is None and all(len(path) == 1 for path in tensors):
        refuse_inert(archive.value, archive.path)
        own = {path[0]: tensor for path, tensor in tensors.items()}
        others = [".".join(map(str, path)) for path in leaves if path not in tensors]
        part = None
    else:
        paths = {".".join(map(str, path)): path for path in leaves}
        part = _select_part(archive, leaves, paths, wanted)
        own = {name if type(paths[flat][-1]) is str else 0: tensors[paths[flat]] for name, flat in part.tensors.items()}
        others = list(part.values)
    named = {name: tensor for name, tensor in own.items() if isinstance(name, str)}
    if len(named) < len(own):
        raise _no_names_error(archive, "tensors with numbers")
    if not named:
        told = list_text([quote(name)[1:-1] for name in others], 3, empty="nothing")
        raise Origin(archive.path).usage("holds no tensor", got=told, want="a dict of tensors by name", next_step=NAMES)
    return WholeState(archive, MappingProxyType(named), tuple(quote(name)[1:-1] for name in others), part)


def _select_part(
    archive: TorchArchive, leaves: Mapping[_Path, object], paths: Mapping[str, _Path], wanted: str | None
) -> ModelPart:
    """Return the model in a nested dict; `paths` are the keys to each leaf by their text."""
    if len(paths) < len(leaves):
        raise Origin(archive.path).usage(
            "two of its values have one name",
            want="keys of which no two, joined by dots, are equal",
            next_step="save the model's state_dict() alone",
        )
    shapes = {name: leaf.shape for name, path in paths.items() if isinstance(leaf := leaves[path], ArchivedTensor)}
    values = [name for name in paths if name not in shapes]
    tree = SavedTree(archive.path, shapes, values, paths, lambda name: _nbytes(leaves[paths[name]]))
    # A whole module is an object. What lies beside it, such as averages, must not pass for the model.
    modules = [leaf for path, leaf in leaves.items() if isinstance(leaf, InertRecord) and leads_to_model(path)]
    try:
        part = select_model(tree, wanted)
    except UsageError:
        refuse_inert(modules, archive.path)
        raise
    if wanted is None and not leads_to_model(part.prefix):
        refuse_inert(modules, archive.path)
    kept = [flat for name, flat in part.values.items() if not is_extra_state(name)]
    refuse_inert([leaves[paths[flat]] for flat in kept], archive.path)
    return part


def _no_names_error(archive: TorchArchive, got: str) -> UsageError:
    what = "a tensor without a name" if got == "ArchivedTensor" else got
    return Origin(archive.path).usage(
        "is not a state dict", got=what, want="a dict of tensors by name", next_step=NAMES
    )


def _walk(value: object, path: _Path) -> Iterator[tuple[_Path, object]]:
    """Yield the keys to each leaf, and the leaf. The archive's reader has bounded depth and number."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, (*path, key if type(key) in (str, int) else quote(str(key))))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*path, index))
    else:
        yield path, value


def describe_states(
    format_name: str, path: str, states: Sequence[WholeState], hints: Hints, notes: Sequence[tuple[str, str]] = ()
) -> StoredModel:
    """Return the model whose files have these states, each tensor whole in one of them.

    Raises:
        UsageError: a tensor is a placeholder of ZeRO-3's.
    """
    records = Records()
    held: dict[str, HeldTensor] = {}
    for state in states:
        number = records.add_archive(state.archive)
        for name, tensor in state.tensors.items():
            held[name] = HeldTensor.from_archive(tensor, rank=0, file=state.archive.path, record=number(tensor.key))
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in held.items()}
    more = [*notes, *check_placeholders(kinds, {name: tensor.file for name, tensor in held.items()}, hints)]
    parts = [state.part for state in states if state.part is not None]
    for part in parts:
        more += part_notes(part)
    others = [name for state in states for name in state.others]
    if others:
        more.append(("left-out", f"{len(others)} values that are not tensors were left out: {list_text(others, 8)}"))
    more += records.notes()
    return StoredModel(
        format=format_name,
        path=path,
        files=tuple(records.files),
        records=records.table(),
        shards=tuple(pieces_of(name, [tensor], tensor.shape, [whole(tensor.shape)]) for name, tensor in held.items()),
        aliases=_aliases(held),
        step=states[0].step if len(states) == 1 else None,
        nbytes=records.nbytes,
        skipped_nbytes=sum(each.nbytes for part in parts for each in part.parts if not each.is_model),
        part=hints.part,
        notes=tuple(more),
        details=part_details(parts[0]) if parts else {},
        is_attribute=any(state.is_lightning for state in states),
    )


def stored_nbytes(model: StoredModel) -> int:
    """Return the bytes of a model's tensors, each tied one once."""
    return sum(prod(s.shape) * dtype(s.dtype).nbytes for s in model.shards if s.name not in model.aliases)


def _nbytes(tensor: object) -> int:
    assert isinstance(tensor, ArchivedTensor)
    return prod(tensor.shape) * dtype(tensor.dtype).nbytes


def _aliases(held: Mapping[str, HeldTensor]) -> dict[str, str]:
    """Return tied name -> the first name of the same view of the same record."""
    first: dict[object, str] = {}
    found = {}
    for name, tensor in held.items():
        # Empty tensors share a storage of no bytes and are not tied by that.
        if 0 in tensor.shape:
            continue
        key = (tensor.record, tensor.dtype, tensor.shape, tensor.strides, tensor.storage_offset)
        owner = first.setdefault(key, name)
        if owner != name:
            found[name] = owner
    return found
