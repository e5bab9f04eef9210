"""The plan of an output with transformed tensors, which lie in files of their own.

The files of copied tensors are planned as always. The plan of a transformed tensor has two parts: how the whole
tensor is read, as a file of its own that is never written; and where its outputs lie.
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


@dataclass(frozen=True, slots=True, eq=False)
class TransformedTensor:
    """A tensor that the transform changes."""

    number: int
    """Index of its file in `Transforms.sources`."""
    name: str
    file: int
    """Index of the plan's file that contains all outputs."""
    outputs: tuple[OutputTensor, ...]
    """The outputs as placed in the file, in the order that the transform returned them."""
    slots: tuple[int, ...]
    """Index of each output among the file's tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Transforms:
    """All tensors that a caller's function transforms."""

    function: Transform
    sources: Plan
    """Plan with one file per transformed tensor, without a header: the whole tensor as the ranks hold it."""
    tensors: tuple[TransformedTensor, ...]
    """The transformed tensors, ordered by number."""
    order: tuple[str, ...]
    """Names, as the ranks have them, of all tensors that are copied or transformed, in the model's order."""

    @property
    def made_of(self) -> dict[str, str]:
        """Output name -> name of the tensor that the transform made it from."""
        return {output.name: tensor.name for tensor in self.tensors for output in tensor.outputs}

    def find_by_files(self, files: Sequence[int]) -> list[TransformedTensor]:
        """Return the tensors whose outputs lie in these files of the plan."""
        wanted = set(files)
        return [tensor for tensor in self.tensors if tensor.file in wanted]

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
    stored: StoredModel, selection: Selection, function: Transform, max_shard_nbytes: int, stem: str
) -> tuple[Plan, Selection, Transforms]:
    """Return the plan of all files, the selection after the transform, and the transforms.

    Args:
        stored: the model as the ranks hold it.
        selection: the selection without the transform.
        function: the caller's transform.
        max_shard_nbytes: as in `lay_out`.
        stem: as in `lay_out`.

    Raises:
        UsageError: from `probe_outputs`; or two tensors would have one name, or no tensor is left.
        IncompleteError, ContradictionError: as in `make_plan`.
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
    files = lay_out(copied, max_shard_nbytes, list(apart.values()), stem=stem)
    names = {output.name for output in copied}
    # `lay_out` puts the files of the groups behind those of the copied tensors.
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
    """Return a plan of all tensors as the ranks hold them, for the comparison of their copies."""
    if transforms is None:
        return plan
    copied = (file for index, file in enumerate(plan.files) if index not in transforms.files)
    return replace(plan, files=(*copied, *transforms.sources.files))


def _place_outputs(
    apart: Mapping[str, tuple[OutputTensor, ...]], files: Sequence[OutputFile], first: int
) -> Iterator[TransformedTensor]:
    """Yield each transformed tensor with the places of its outputs, which lie in the files from number `first` on."""
    places = {
        tensor.name: (index, slot, tensor)
        for index, file in enumerate(files[first:], start=first)
        for slot, tensor in enumerate(file.tensors)
    }
    for number, (name, made) in enumerate(apart.items()):
        found = [places[output.name] for output in made]
        yield TransformedTensor(number, name, found[0][0], tuple(f[2] for f in found), tuple(f[1] for f in found))


def _file_plan(file: OutputFile, made_of: Mapping[str, TransformedTensor], sources: Plan) -> FilePlan:
    """Return the plan of a file for the manifest: each output refers to the pieces of its source tensor."""
    tensors = []
    for output in file.tensors:
        tensor = made_of[output.name]
        source = sources.files[tensor.number].tensors[0]
        # The comparison of replicas counts once, however many outputs a source tensor has.
        is_first = output.name == tensor.outputs[0].name
        replicas = source.replicas if is_first else _make_empty(source.replicas)
        tensors.append(TensorPlan(output, source.source_dtype, source.copies, replicas, source.tied))
    return FilePlan(file, tuple(tensors))


def _make_empty(copies: Copies) -> Copies:
    none = np.empty(0, np.int64)
    return Copies(none, none, copies.nests.take(none))


def _check_names(selection: Selection, told: Mapping[str, tuple[OutputTensor, ...]]) -> None:
    """Refuse a name that two tensors would share."""
    owners: dict[str, str] = {output.name: "" for output in selection.outputs if output.name not in told}
    owners |= {name: f"{target}, which it is tied to" for target, names in selection.tied.items() for name in names}
    for source, outputs in told.items():
        for output in outputs:
            if output.name in owners:
                other = owners[output.name] or "a tensor that is copied"
                raise UsageError(
                    f"{output.name}: two tensors would have this name",
                    tensor=output.name,
                    got=f"the output of transform for {source}, and {other}",
                    want="one tensor of a name",
                    next_step="let transform give other names",
                )
            owners[output.name] = f"its output for {source}"


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
