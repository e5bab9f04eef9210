"""Encodes tensors band by band: the executor makes a band of whole rows, which goes on as rows of the outputs.

No tensor is whole in memory: a band is about a megabyte, or the rows of one block. Where a scale follows from the
largest magnitude of whole tensors, a first pass over the source reads that alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple, replace

from xrank import dtypes
from xrank.engine.buffers import NullTarget, Source
from xrank.engine.encodings import EncodingError, errors_of
from xrank.engine.executor import Budget, Outcome, execute
from xrank.engine.faults import make_checksums
from xrank.engine.planner import FilePlan, Plan, TensorPlan
from xrank.engine.tensor_target import make_whole_tensors
from xrank.engine.transforms import TransformedTensor, Transforms, apply_transform
from xrank.engine.windows import RecordChecksums
from xrank.errors import UsageError, option
from xrank.layout.stored_model import NO_CHECKSUM
from xrank.ranks.memory import memory_at

if TYPE_CHECKING:
    import torch

Maxima: TypeAlias = dict[int, npt.NDArray[np.float32]]
"""Group -> largest magnitude of each matrix, over all tensors of the group."""
Put: TypeAlias = Callable[[TransformedTensor, int, int, memoryview], None]
"""Takes bytes of an output: the tensor, the number of the output, and the first byte in it. Any thread calls it."""

_MEMORY_OF_BAND = 5
"""Memory that a band takes while it is encoded, as a multiple of its bytes: itself, its values as floats, its codes."""
_SHARED_NBYTES = 256 << 20
"""Bytes of tensors that are read twice, one pass after the other: the second time they are still in the page cache."""


def encode_tensors(
    transforms: Transforms,
    numbers: Sequence[int],
    source: Source,
    budget: Budget,
    put: Put,
    *,
    maxima: Maxima | None = None,
    measures_errors: bool = False,
    checksums: RecordChecksums | None = None,
    replicas: Literal["verify", "pick"] = "verify",
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Encode tensors by number, and put their outputs; arguments and errors otherwise as `execute`.

    `maxima` keeps the largest magnitudes of groups for further calls; they hold until the source changes.
    """
    sources, outcome, before = transforms.sources, Outcome(), 0
    maxima = {} if maxima is None else maxima
    # Once for all parts: each has a state for every record of the source.
    checksums, unchecked = checksums or make_checksums(sources), _ignore_checksums(sources)
    for chosen in _split(transforms, numbers):
        known = budget_of_bands(sources, chosen, budget)
        if members := _list_unmeasured(transforms, chosen, maxima):
            measure = _Measure(members, _without_replicas(sources, members), maxima)
            execute(measure.plan, source, measure, budget=known, checksums=unchecked, cancelled=cancelled)
        target = _Encoder(transforms.tensors, sources, maxima, put, outcome.errors if measures_errors else None)
        done = execute(
            sources,
            source,
            target,
            budget=known,
            files=chosen,
            checksums=checksums,
            replicas=replicas,
            cancelled=cancelled,
            progress=lambda nbytes, before=before: progress(before + nbytes),  # type: ignore[misc]
        )
        before += sum(sources.files[number].output.nbytes for number in chosen)
        outcome.differences |= done.differences
    return outcome


def encode_into(
    transforms: Transforms,
    numbers: Sequence[int],
    source: Source,
    budget: Budget,
    tensors: Mapping[str, torch.Tensor],
    *,
    maxima: Maxima | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Encode tensors by number into those of their outputs' names, which are contiguous and on the CPU."""
    memory = {name: memory_at(tensor.data_ptr(), tensor.nbytes) for name, tensor in tensors.items() if tensor.numel()}

    def put(tensor: TransformedTensor, number: int, first: int, data: memoryview) -> None:
        memory[tensor.outputs[number].name][first : first + len(data)] = data

    encode_tensors(transforms, numbers, source, budget, put, maxima=maxima, cancelled=cancelled)


def make_transformed_tensors(
    transforms: Transforms,
    tensors: Sequence[TransformedTensor],
    source: Source,
    budget: Budget,
    made: Mapping[str, torch.Tensor],
) -> None:
    """Make what replaces these tensors, by bands or by the caller's function, in the tensors of the outputs' names."""
    encoded = [one.number for one in tensors if one.encoding is not None]
    if encoded:
        encode_into(transforms, encoded, source, budget, made)
    if transforms.function is None:
        return
    for one in tensors:
        (whole,) = make_whole_tensors(transforms.sources, source, budget, [one.number])
        results = apply_transform(transforms.function, one.name, whole, one.outputs)
        for output, result in zip(one.outputs, results, strict=True):
            made[output.name].copy_(result.detach())


def budget_of_bands(sources: Plan, numbers: Sequence[int], budget: Budget) -> Budget:
    """Return the budget for the bands of these tensors: fewer threads, where all with their bands would not fit.

    UsageError if not even one fits.
    """
    largest = max((sources.files[number] for number in numbers), key=lambda file: file.output.window_nbytes)
    nbytes = _MEMORY_OF_BAND * largest.output.window_nbytes
    try:
        return Budget.from_memory(max(budget.allowed_nbytes, budget.nbytes), budget.workers, window_nbytes=nbytes)
    except UsageError as error:
        output = largest.tensors[0].output
        rows = largest.output.window_nbytes * output.shape[-2] // max(1, output.nbytes)
        raise UsageError(
            f"{output.name}: {rows} rows with common scales do not fit into the memory",
            tensor=output.name,
            got=f"{budget.allowed_nbytes:,} bytes",
            want=f"{nbytes * 5 // 4:,} bytes",
            next_step=f"give a larger {option('max_memory')}",
        ) from error


def _split(transforms: Transforms, numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield first all tensors that need one pass, then those that need two, in parts that fit the page cache."""
    one_pass = [number for number in numbers if not _is_shared(transforms.tensors[number])]
    if one_pass:
        yield one_pass
    part, nbytes = list[int](), 0
    two_passes = (number for number in numbers if _is_shared(transforms.tensors[number]))
    for _, group in groupby(two_passes, key=lambda number: transforms.tensors[number].group):
        members = list(group)
        size = sum(transforms.sources.files[number].output.nbytes for number in members)
        if part and nbytes + size > _SHARED_NBYTES:
            yield part
            part, nbytes = [], 0
        part += members
        nbytes += size
    if part:
        yield part


class _Bands(NullTarget):
    """A target that takes each window of a tensor as rows of its matrices."""

    def __init__(self, tensors: Sequence[TransformedTensor], plan: Plan) -> None:
        self._tensors, self.plan = tensors, plan
        """Tensors, and the plan with a file for each."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        output = self.plan.files[file].tensors[0].output
        *_, rows, columns = output.shape
        values = np.frombuffer(data, dtypes.numpy_dtype(output.dtype)).reshape(-1, columns)
        row = offset // (columns * dtypes.dtype(output.dtype).nbytes)
        while len(values):
            count = min(len(values), rows - row % rows)
            self.take(self._tensors[file], output.shape, values[:count], row)
            values, row = values[count:], row + count

    def take(self, tensor: TransformedTensor, shape: Sequence[int], values: npt.NDArray[np.generic], row: int) -> None:
        """Take rows of one matrix of a tensor of that shape; `row` counts those of all matrices."""
        raise NotImplementedError


def kind_of(name: str) -> str:
    """Return what a matrix is in its layer: the last part of its module's name, such as ``q_proj``."""
    return name.removesuffix(".weight").rpartition(".")[2]


def add_error(errors: dict[str, Sequence[float]], kind: str, error: EncodingError) -> None:
    """Add an error to those of its kind."""
    errors[kind] = astuple(EncodingError(*errors.get(kind, ())) + error)


class _Encoder(_Bands):
    def __init__(
        self,
        tensors: Sequence[TransformedTensor],
        plan: Plan,
        maxima: Maxima,
        put: Put,
        errors: dict[str, Sequence[float]] | None,
    ) -> None:
        super().__init__(tensors, plan)
        self._maxima, self._put, self._errors, self._lock = maxima, put, errors, Lock()

    def take(self, tensor: TransformedTensor, shape: Sequence[int], values: npt.NDArray[np.generic], row: int) -> None:
        assert tensor.encoding is not None, "the caller's function takes whole tensors"
        maximum = float(self._maxima[tensor.group][row // shape[-2]]) if tensor.encoding.is_shared else None
        parts = tensor.encoding.encode(values, row, shape, maximum, name=tensor.name)
        if self._errors is not None:
            found, kind = errors_of(tensor.encoding, values, parts, maximum), kind_of(tensor.name)
            with self._lock:
                add_error(self._errors, kind, found)
        for number, first, made in parts:
            data = np.ascontiguousarray(made).view(np.uint8).reshape(-1)
            self._put(tensor, number, first * made.dtype.itemsize, data.data)


class _Measure(_Bands):
    def __init__(self, tensors: Sequence[TransformedTensor], plan: Plan, maxima: Maxima) -> None:
        super().__init__(tensors, plan)
        self._maxima, self._lock = maxima, Lock()
        for tensor, file in zip(tensors, plan.files, strict=True):
            maxima[tensor.group] = np.zeros(prod(file.tensors[0].output.shape[:-2]), np.float32)

    def take(self, tensor: TransformedTensor, shape: Sequence[int], values: npt.NDArray[np.generic], row: int) -> None:
        assert tensor.encoding is not None, "the caller's function takes whole tensors"
        found = tensor.encoding.measure(values)
        with self._lock:
            place = self._maxima[tensor.group][row // shape[-2] :][:1]
            np.maximum(place, found, out=place)  # which keeps a NaN


def _is_shared(tensor: TransformedTensor) -> bool:
    return tensor.encoding is not None and tensor.encoding.is_shared


def _list_unmeasured(transforms: Transforms, numbers: Sequence[int], maxima: Maxima) -> list[TransformedTensor]:
    """Return all tensors of the groups of these whose largest magnitudes are needed and not known."""
    tensors = transforms.tensors
    groups = {tensors[number].group for number in numbers if _is_shared(tensors[number])} - maxima.keys()
    found: list[TransformedTensor] = []
    for group in sorted(groups):  # tensors are in the order of their groups
        first, last = (bisect(tensors, group, key=attrgetter("group")) for bisect in (bisect_left, bisect_right))
        found += tensors[first:last]
    return found


def _ignore_checksums(plan: Plan) -> RecordChecksums:
    """Return the state for a first pass: checksums and replicas are compared in the pass whose values are written."""
    records = plan.source.records
    return RecordChecksums(replace(records, crc32=np.full(len(records), NO_CHECKSUM)), lambda record, crc: None)


def _without_replicas(plan: Plan, tensors: Sequence[TransformedTensor]) -> Plan:
    """Return a plan of these tensors alone, whose replicas are not read."""
    none = np.empty(0, np.int64)

    def strip(tensor: TensorPlan) -> TensorPlan:
        return replace(tensor, replicas=tensor.replicas.take(none)) if len(tensor.replicas) else tensor

    files = (plan.files[tensor.number] for tensor in tensors)
    return replace(plan, files=tuple(FilePlan(file.output, tuple(map(strip, file.tensors))) for file in files))
