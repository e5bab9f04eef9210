"""The plan of an output of which some tensors are transformed; they lie in files of their own.

The files of what is copied are planned as always. Of a transformed tensor the plan says two things: how the whole
tensor is read, as a file of its own that is never written; and where what is made of it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from xrank.decisions.selection import Selection
from xrank.decisions.transforms import Transform, probe_outputs
from xrank.errors import UsageError
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.planner import Copies, FilePlan, Plan, TensorPlan, make_plan
from xrank.plan.source import StoredModel
from xrank.writers.hf_folder import lay_out

__all__ = ["TransformedTensor", "Transforms", "plan_held_tensors", "plan_transformed"]


@dataclass(frozen=True, slots=True, eq=False)
class TransformedTensor:
    """A tensor that is transformed."""

    number: int
    """Of the file of `Transforms.sources` that it is."""
    name: str
    file: int
    """In the plan, the one file that all outputs lie in."""
    outputs: tuple[OutputTensor, ...]
    """At their places, in the order that the transform told."""
    slots: tuple[int, ...]
    """Of each output, its number in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class Transforms:
    """All that a caller's function is called for."""

    function: Transform
    sources: Plan
    """For each transformed tensor a file without a header: the whole tensor as the ranks hold it."""
    tensors: tuple[TransformedTensor, ...]
    """By number."""
    order: tuple[str, ...]
    """Names, as the ranks have them, of all tensors that are copied or transformed, in the model's order."""

    @property
    def made_of(self) -> dict[str, str]:
        """Output name -> name of the tensor that it is made of."""
        return {output.name: tensor.name for tensor in self.tensors for output in tensor.outputs}

    def find_by_files(self, files: Sequence[int]) -> list[TransformedTensor]:
        """Return the tensors whose outputs lie in these files of the plan."""
        wanted = set(files)
        return [tensor for tensor in self.tensors if tensor.file in wanted]

    def describe_kinds(self, names: Iterable[str]) -> list[str]:
        """Return of each name what becomes of it, in few letters: "" for what is copied, "-" for what is left out."""
        kinds = {tensor.name: [(o.name, o.dtype, o.shape) for o in tensor.outputs] for tensor in self.tensors}
        found = {name: xxhash.xxh3_64_hexdigest(repr(made).encode()) for name, made in kinds.items()}
        ordered = set(self.order)
        return [found.get(name, "" if name in ordered else "-") for name in names]

    @property
    def files(self) -> set[int]:
        """The files of the plan that hold what is transformed, and nothing else."""
        return {tensor.file for tensor in self.tensors}


def plan_transformed(
    stored: StoredModel, selection: Selection, function: Transform, max_shard_nbytes: int
) -> tuple[Plan, Selection, Transforms]:
    """Return the plan of all files, what the output has then, and what is transformed.

    Args:
        stored: what the ranks hold.
        selection: what the output would have without the transform.
        function: the caller's.
        max_shard_nbytes: as `lay_out`.

    Raises:
        UsageError: from `probe_outputs`; or two tensors would have one name, or none is left.
        IncompleteError, ContradictionError: as `make_plan`.
    """
    shards = {shard.name: shard for shard in stored.shards}
    told: dict[str, tuple[OutputTensor, ...]] = {}
    for output in selection.outputs:
        shard = shards[output.name]
        made = probe_outputs(function, shard.name, shard.dtype, shard.shape)
        if made is not None:
            told[output.name] = made
    _check_names(selection, told)
    copied = [output for output in selection.outputs if output.name not in told]
    apart = {name: made for name, made in told.items() if made}
    files = lay_out(copied, max_shard_nbytes, list(apart.values()))
    names = {output.name for output in copied}
    num_plain = sum(file.tensors[0].name in names for file in files)
    plan = make_plan(stored, files[:num_plain], tied=selection.tied)
    wholes = [OutputTensor(name, shards[name].dtype, shards[name].shape) for name in apart]
    sources = make_plan(stored, list(map(OutputFile.bare, wholes)), tied=selection.tied)
    tensors = tuple(_place_outputs(apart, files, num_plain))
    made_of = {output.name: tensor for tensor in tensors for output in tensor.outputs}
    more = [_file_plan(file, made_of, sources) for file in files[num_plain:]]
    order = tuple(output.name for output in selection.outputs if told.get(output.name) != ())
    transforms = Transforms(function, sources, tensors, order)
    return replace(plan, files=(*plan.files, *more)), _selection_after(selection, copied, told), transforms


def plan_held_tensors(plan: Plan, transforms: Transforms | None) -> Plan:
    """Return a plan of all tensors as the ranks hold them, for whoever compares their copies."""
    if transforms is None:
        return plan
    copied = (file for index, file in enumerate(plan.files) if index not in transforms.files)
    return replace(plan, files=(*copied, *transforms.sources.files))


def _place_outputs(
    apart: Mapping[str, tuple[OutputTensor, ...]], files: Sequence[OutputFile], first: int
) -> Iterator[TransformedTensor]:
    """Yield where everything lies that is made of each tensor; the files that hold it begin with number `first`."""
    places = {
        tensor.name: (index, slot, tensor)
        for index, file in enumerate(files[first:], start=first)
        for slot, tensor in enumerate(file.tensors)
    }
    for number, (name, made) in enumerate(apart.items()):
        found = [places[output.name] for output in made]
        yield TransformedTensor(number, name, found[0][0], tuple(f[2] for f in found), tuple(f[1] for f in found))


def _file_plan(file: OutputFile, made_of: Mapping[str, TransformedTensor], sources: Plan) -> FilePlan:
    """Return what the manifest is to say of a file: each tensor is of the pieces of what it is made of."""
    tensors = []
    for output in file.tensors:
        tensor = made_of[output.name]
        source = sources.files[tensor.number].tensors[0]
        # What was compared counts once, however many tensors are made of it.
        is_first = output.name == tensor.outputs[0].name
        replicas = source.replicas if is_first else _make_empty(source.replicas)
        tensors.append(TensorPlan(output, source.source_dtype, source.copies, replicas, source.tied))
    return FilePlan(file, tuple(tensors))


def _make_empty(copies: Copies) -> Copies:
    none = np.empty(0, np.int64)
    return Copies(none, none, copies.nests.take(none))


def _check_names(selection: Selection, told: Mapping[str, tuple[OutputTensor, ...]]) -> None:
    """Refuse a name that two tensors would have."""
    owners: dict[str, str] = {output.name: "" for output in selection.outputs if output.name not in told}
    owners |= {name: f"{target}, which it is tied to" for target, names in selection.tied.items() for name in names}
    for source, outputs in told.items():
        for output in outputs:
            if output.name in owners:
                other = owners[output.name] or "a tensor that is copied"
                raise UsageError(
                    f"{output.name}: two tensors would have this name",
                    tensor=output.name,
                    got=f"what transform makes of {source}, and {other}",
                    want="one tensor of a name",
                    next_step="let transform give other names",
                )
            owners[output.name] = f"what it makes of {source}"


def _selection_after(
    selection: Selection, copied: Sequence[OutputTensor], told: Mapping[str, tuple[OutputTensor, ...]]
) -> Selection:
    outputs = (*copied, *(output for made in told.values() for output in made))
    names = {output.name for output in outputs}
    tied = {target: others for target, others in selection.tied.items() if target in names}
    lost = [name for target, others in selection.tied.items() if target not in tied for name in others]
    return replace(
        selection,
        outputs=outputs,
        tied=tied,
        excluded=(*selection.excluded, *(name for name, made in told.items() if not made), *lost),
        cast={name: text for name, text in selection.cast.items() if name not in told},
    )
