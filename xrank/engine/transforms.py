"""Transforms: a caller's function on whole tensors. Meta tensors reveal its outputs before any value moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.casts import LowRank
from xrank.engine.encodings import Encoding
from xrank.engine.hf_folder import lay_out
from xrank.engine.planner import FilePlan, Plan, TensorPlan, make_plan
from xrank.errors import UsageError
from xrank.layout.output_files import OutputFile, OutputTensor, Selection
from xrank.layout.stored_model import StoredModel
from xrank.ranks.memory import has_memory, kind_without_elements

if TYPE_CHECKING:
    import torch


Transform: TypeAlias = "Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]"
"""Function of a name and a whole tensor that returns tensors by name."""

_NEXT_STEP = (
    "compute names, shapes and dtypes only from those of the tensor; if tensor.is_meta, skip code that reads values, "
    "such as item() or an if; return a new tensor, as {name: the same tensor} copies it"
)


def probe_outputs(
    transform: Transform, name: str, dtype: str, shape: tuple[int, ...]
) -> tuple[OutputTensor, ...] | None:
    """Return the outputs of a transform for a tensor of that kind, by a call with a meta tensor; None: it is copied."""
    import torch

    try:
        # Inference mode does not count changes in place, so leave the caller's.
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty(shape, dtype=getattr(torch, dtypes.dtype(dtype).torch_name), device="meta")
            watch = _watch_changes(tensor)
            with watch:
                made = transform(name, tensor)
    except Exception as error:
        problem = f"transform does not describe its outputs for {name}: called with a tensor on the meta device, "
        problem += "which has a shape and a dtype but no values, it raised an error"
        raise UsageError(
            problem,
            tensor=name,
            got=f"{type(error).__name__}: {error}"[:300],
            want="the same outputs as for a tensor with values",
            next_step=_NEXT_STEP,
        ) from error
    checked = _check_outputs(name, made, is_probe=True)
    outputs = tuple(OutputTensor(*_kind(name, key, value)) for key, value in checked.items())
    # A tensor changed in place is not the one that the ranks hold.
    if set(made) == {name} and made[name] is tensor and not watch.has_changed:
        return None
    return outputs


def _watch_changes(watched: torch.Tensor) -> Any:
    """Return a context that sees changes to a tensor, also those that torch does not count, as through ``.data``."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    def find_place() -> tuple[Any, ...]:
        storage = watched.untyped_storage()._cdata
        return storage, watched.dtype, watched.shape, watched.stride(), watched.storage_offset(), watched._version

    class ChangeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        # The operators that such an operator runs come here again, one by one.
        supports_higher_order_operators = True
        is_written = False
        storage = watched.untyped_storage()  # a reference, so that no other storage gets its address
        place = find_place()

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Let compiled code run compiled, as it does without a watch."""
            return True

        @property
        def has_changed(self) -> bool:
            """Whether the body wrote to the tensor's storage, or replaced its storage, dtype or shape."""
            return self.is_written or find_place() != self.place

        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            given = kwargs or {}
            schema = getattr(func, "_schema", None)
            for position, argument in enumerate(schema.arguments if schema is not None else ()):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note(args[position] if position < len(args) else given.get(argument.name))
            return func(*args, **given)

        def _note(self, written: Any) -> None:
            for one in written if isinstance(written, list | tuple) else (written,):
                if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                    self.is_written |= one.untyped_storage()._cdata == self.storage._cdata

    return ChangeWatch()  # type: ignore[no-untyped-call]


def apply_transform(
    transform: Transform, name: str, tensor: torch.Tensor, outputs: tuple[OutputTensor, ...]
) -> list[torch.Tensor]:
    """Return the tensors that a transform makes of a tensor, in the order of `outputs`, which the probe returned."""
    import torch

    try:
        with torch.no_grad():
            made = transform(name, tensor)
    except Exception as error:
        error.add_note(f"in transform of {name}")
        raise
    told = {output.name: (output.name, output.dtype, output.shape) for output in outputs}
    found = {key: _kind(name, key, value) for key, value in _check_outputs(name, made).items()}
    for key in (*told, *found):
        if told.get(key) != found.get(key):
            raise UsageError(
                f"transform of {name} returns a different {key} than for meta tensors",
                tensor=name,
                got=_text(found.get(key)),
                want=f"{_text(told.get(key))}, as for a tensor on the meta device",
                next_step=_NEXT_STEP,
            )
    return [made[output.name] for output in outputs]


def _check_outputs(name: str, made: object, *, is_probe: bool = False) -> Mapping[str, torch.Tensor]:
    if not isinstance(made, Mapping):
        raise _output_error(name, f"returned {type(made).__name__}")
    for key, value in made.items():
        if not isinstance(key, str) or not key.isprintable() or ".." in re.split(r"[/\\]", key):
            raise _output_error(name, f"returned a tensor under {key!r}, which is not a name")
        if key == "__metadata__":
            raise _output_error(name, "returned __metadata__, a name that safetensors keeps for itself")
        fault = _fault(value, is_probe=is_probe)
        if fault is not None:
            raise _output_error(name, f"returned {fault} under {key!r}")
    return made


def _fault(value: object, *, is_probe: bool) -> str | None:
    """Describe a value that is not a dense tensor in memory; None if it is one. A probe also accepts meta tensors."""
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if is_probe and value.is_meta:
        return None if value.layout is torch.strided and not value.is_nested else "a tensor that is not dense"
    kind = kind_without_elements(value)
    if kind is not None:
        return f"a tensor that is {kind}"
    if not has_memory(value):
        return "a tensor whose storage was freed"
    # DTensors, and others that hold their values in further tensors, only report the size of their storage.
    return f"a {type(value).__name__} without memory" if value.numel() and not value.data_ptr() else None


def _output_error(name: str, what: str) -> UsageError:
    want = "a dict of names and dense tensors: {name: tensor} to copy it, {} to leave it out"
    problem, step = f"transform of {name} {what}", "correct the transform"
    return UsageError(problem, tensor=name, got=what, want=want, next_step=step)


def _kind(name: str, key: str, value: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    torch_name = str(value.dtype).removeprefix("torch.")
    try:
        return key, dtypes.by_torch_name(torch_name).name, tuple(value.shape)
    except UsageError:
        raise _output_error(name, f"returned {key} of torch.{torch_name}, which safetensors does not support") from None


def _text(kind: tuple[str, str, tuple[int, ...]] | None) -> str:
    return "none" if kind is None else f"{kind[0]}, {kind[1]} {list(kind[2])}"


class Replacements(Struct, frozen=True, eq=False):
    """The tensors to replace by others, which a caller's function or an encoding makes."""

    outputs: Mapping[str, tuple[OutputTensor, ...]]
    """Name -> its outputs; none where it is left out."""
    function: Transform | None = None
    encodings: Mapping[str, Encoding] = {}
    """Name -> how it is encoded, where no function is called."""
    is_cast: bool = False
    """Whether tensors are cast before they are replaced, or are as the ranks have them."""
    groups: Sequence[Sequence[str]] = ()
    """Names of tensors that share their largest magnitude; tensors that are not listed share none."""


def probe_transform(function: Transform, stored: StoredModel, selection: Selection) -> Replacements:
    """Return what a caller's function replaces, by a call for each tensor."""
    shards = {shard.name: shard for shard in stored.shards}
    told: dict[str, tuple[OutputTensor, ...]] = {}
    for output in selection.outputs:
        shard = shards[output.name]
        made = probe_outputs(function, shard.name, shard.dtype, shard.shape)
        if made is not None:
            told[output.name] = made
    return Replacements(told, function)


class TransformedTensor(Struct, frozen=True, eq=False):
    """A tensor that is replaced by others."""

    number: int
    """Index of its file in `Transforms.sources`."""
    name: str
    file: int
    """Index of the plan's file that contains all outputs."""
    outputs: tuple[OutputTensor, ...]
    """The outputs as placed in the file, in the order that the transform returned them."""
    slots: tuple[int, ...]
    """Index of each output among the file's tensors."""
    group: int
    """Number of its group, the tensors of which one rank makes."""
    encoding: Encoding | None = None
    """None: the caller's function makes the outputs."""


class Transforms(Struct, frozen=True, eq=False):
    """All tensors that are replaced by others."""

    sources: Plan
    """Plan with one file per transformed tensor, without a header: the whole tensor, as it is transformed."""
    tensors: tuple[TransformedTensor, ...]
    """The transformed tensors, ordered by number."""
    order: tuple[str, ...]
    """Names, as the ranks have them, of all tensors that are copied or transformed, in the model's order."""
    function: Transform | None = None

    @property
    def made_of(self) -> dict[str, str]:
        """Output name -> name of the tensor that it was made from."""
        return {output.name: tensor.name for tensor in self.tensors for output in tensor.outputs}

    def describe_kinds(self, names: Iterable[str]) -> list[str]:
        """Return a short code for each name: "" if copied, "-" if left out, else a digest of its outputs."""
        kinds = {tensor.name: [(o.name, o.dtype, o.shape) for o in tensor.outputs] for tensor in self.tensors}
        found = {name: xxhash.xxh3_64_hexdigest(repr(made).encode()) for name, made in kinds.items()}
        ordered = set(self.order)
        return [found.get(name, "" if name in ordered else "-") for name in names]

    @property
    def files(self) -> set[int]:
        """Indices of the plan's files that contain transformed tensors only."""
        return {tensor.file for tensor in self.tensors}


def plan_transformed(
    stored: StoredModel,
    selection: Selection,
    replaced: Replacements,
    max_shard_nbytes: int,
    stem: str,
    *,
    max_memory_nbytes: int,
    updates: Mapping[str, LowRank] | None = None,
    beside: Sequence[OutputFile] = (),
) -> tuple[Plan, Selection, Transforms]:
    """Return the plan of all files, the selection after the replacement, and the transforms.

    Files `beside` are already laid out, of tensors that nothing replaces; `updates` are added before.
    """
    told = replaced.outputs
    _check_names(selection, told)
    laid_out = {tensor.name for file in beside for tensor in file.tensors}
    copied = [output for output in selection.outputs if output.name not in told]
    groups = _group_names(replaced)
    apart = [[output for name in names for output in told[name]] for names in groups]
    plain = [output for output in copied if output.name not in laid_out]
    files = lay_out(plain, max_shard_nbytes, apart, stem=stem)
    names = {output.name for output in plain}
    # `lay_out` puts the files of the groups behind those of the copied tensors.
    num_plain = sum(file.tensors[0].name in names for file in files)
    plan = make_plan(stored, [*files[:num_plain], *beside], tied=selection.tied, updates=updates)
    num_plain, files = num_plain + len(beside), files[num_plain:]
    kinds = {one.name: one.dtype for one in (selection.outputs if replaced.is_cast else stored.shards)}
    shapes = {output.name: output.shape for output in selection.outputs}
    members = [(number, name) for number, names in enumerate(groups) for name in names]
    nbytes = min(_BAND_NBYTES, max_memory_nbytes // _LEAST_BANDS)
    wholes = [
        OutputFile.bare(output, _find_window(replaced.encodings.get(name), output, nbytes))
        for _, name in members
        for output in [OutputTensor(name, kinds[name], shapes[name])]
    ]
    sources = make_plan(stored, wholes, tied=selection.tied, updates=updates)
    places = {
        tensor.name: (index, slot, tensor)
        for index, file in enumerate(files, start=num_plain)
        for slot, tensor in enumerate(file.tensors)
    }
    tensors: list[TransformedTensor] = []
    plans: dict[str, TensorPlan] = {}  # for the manifest, each output refers to the pieces of its source tensor
    for number, (group, name) in enumerate(members):
        indices, slots, outputs = zip(*(places[output.name] for output in told[name]), strict=True)
        encoding = replaced.encodings.get(name)
        tensors.append(TransformedTensor(number, name, indices[0], outputs, slots, group, encoding))
        source = sources.files[number].tensors[0]
        # The comparison of replicas counts once, however many outputs a source tensor has, and so does a merge. A
        # function's outputs each tell what they were made of; scales go with their codes.
        none = source.copies.take(np.empty(0, np.int64))
        copies, replicas, update = source.copies, source.replicas, source.update
        for output in outputs:
            plans[output.name] = TensorPlan(output, source.source_dtype, copies, replicas, source.tied, update)
            copies, replicas, update = (copies if encoding is None else none), none, None
    more = [FilePlan(file, tuple(plans[output.name] for output in file.tensors)) for file in files]
    order = tuple(output.name for output in selection.outputs if told.get(output.name) != ())
    transforms = Transforms(sources, tuple(tensors), order, replaced.function)
    return replace(plan, files=(*plan.files, *more)), _selection_after(selection, copied, told), transforms


def _group_names(replaced: Replacements) -> list[Sequence[str]]:
    """Return the groups of all tensors that have outputs, in the order of their first tensors."""
    grouped = {name: names for names in replaced.groups for name in names}
    found: dict[str, Sequence[str]] = {}
    for name, outputs in replaced.outputs.items():
        names = grouped.get(name, (name,))
        if outputs:
            found.setdefault(names[0], names)
    return list(found.values())


_BAND_NBYTES = 1 << 20
"""Bytes of a tensor that are encoded at once, unless the rows of one block have more."""
_LEAST_BANDS = 32
"""A band is at most this part of the memory, as each thread needs several times its bytes."""


def _find_window(encoding: Encoding | None, output: OutputTensor, nbytes: int) -> int:
    """Return the bytes of a tensor that are made at once: whole rows of blocks, where it is encoded."""
    if encoding is None:
        return 0
    *_, rows, columns = output.shape
    # A block ends with its matrix, so that a stack of matrices with a shorter last block is cut between matrices.
    unit = rows if len(output.shape) > 2 and rows % encoding.block_rows else encoding.block_rows
    unit_nbytes = unit * columns * dtypes.dtype(output.dtype).nbytes
    return max(1, nbytes // unit_nbytes) * unit_nbytes


def plan_held_tensors(plan: Plan, transforms: Transforms | None) -> Plan:
    """Return a plan of all tensors as the ranks hold them, for the comparison of their copies."""
    if transforms is None:
        return plan
    copied = (file for index, file in enumerate(plan.files) if index not in transforms.files)
    return replace(plan, files=(*copied, *transforms.sources.files))


def _check_names(selection: Selection, told: Mapping[str, tuple[OutputTensor, ...]]) -> None:
    """Refuse a name that two tensors would share."""
    owners: dict[str, str] = {output.name: "" for output in selection.outputs if output.name not in told}
    owners |= {name: f"{target}, which it is tied to" for target, names in selection.tied.items() for name in names}
    for source, outputs in told.items():
        for output in outputs:
            if output.name in owners:
                other = owners[output.name] or "a tensor that is copied"
                problem = f"{output.name}: two tensors would have this name"
                got = f"the output of transform for {source}, and {other}"
                step = "return different names from transform"
                raise UsageError(problem, tensor=output.name, got=got, want="one", next_step=step)
            owners[output.name] = f"its output for {source}"


def _selection_after(
    selection: Selection, copied: Sequence[OutputTensor], told: Mapping[str, tuple[OutputTensor, ...]]
) -> Selection:
    outputs = (*copied, *(output for made in told.values() for output in made))
    names = {output.name for output in outputs}
    tied = {target: others for target, others in selection.tied.items() if target in names}
    lost = [name for target, others in selection.tied.items() if target not in tied for name in others]
    excluded = (*selection.excluded, *(name for name, made in told.items() if not made), *lost)
    cast = {name: text for name, text in selection.cast.items() if name not in told}
    return replace(selection, outputs=outputs, tied=tied, excluded=excluded, cast=cast)
