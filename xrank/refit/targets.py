"""The memory of a model's tensors. Both sides keep addresses, so they must notice when a tensor gets another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from xrank import dtypes
from xrank.decisions.load_plan import plan_load
from xrank.errors import UsageError
from xrank.layout import LayoutMap
from xrank.layout.nest_table import IntArray, NestTable
from xrank.lending.tensor_target import TensorTarget, check_fillable
from xrank.plan.executor import Budget, execute
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.planner import Copies, FilePlan, Plan, TensorPlan, make_plan
from xrank.plan.source import StoredModel
from xrank.plan.windows import share_all
from xrank.ranks.loans import PeerSource, SpanMemory
from xrank.ranks.peer_memory import MAX_SPANS, SpanArray
from xrank.ranks.tensor_bytes import locate_elements
from xrank.readers.live.local_model import local_model
from xrank.readers.live.module_tensors import FilledModule, check_materialised, count_changes, list_tensors
from xrank.refit.directory import TrainerModel
from xrank.words import list_text

if TYPE_CHECKING:
    import torch

    from xrank.refit.recording import Fill, Recording


MemoryPlaces: TypeAlias = dict[str, tuple[object, ...]]
"""Name -> dtype, shape, strides and address of the local tensor."""


def list_places(model: FilledModule) -> MemoryPlaces:
    """Return the places of a model's tensors on this rank."""
    places: MemoryPlaces = {}
    for number, (name, tensor) in enumerate(list_tensors(model)):
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
        key = name if name not in places else f"{name} ({number})"  # Megatron's chunks may repeat names
        places[key] = (str(local.dtype), tuple(local.shape), tuple(local.stride()), _address(local))
    return places


def find_moved(old: MemoryPlaces, new: MemoryPlaces) -> tuple[str, str, str] | None:
    """Return the first tensor in another place, with its old and its new one as text; None if all are the same."""
    if old == new:
        return None
    name = next(name for name in (*old, *new) if old.get(name) != new.get(name))
    return name, _describe(old.get(name)), _describe(new.get(name))


def count_versions(views: Sequence[torch.Tensor]) -> list[int]:
    """Return torch's counts of changes in place, 0 for inference tensors, which have none."""
    return [0 if view.is_inference() else view._version for view in views]


def _describe(place: tuple[object, ...] | None) -> str:
    if place is None:
        return "no tensor"
    dtype, shape, strides, address = place
    return f"{dtype}, shape {shape}, strides {strides}, at address {address}"


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is _strided() and tensor.device.type != "meta" else 0


def _strided() -> torch.layout:
    import torch

    return torch.strided


Loader: TypeAlias = "Callable[[Iterable[tuple[str, torch.Tensor]]], object]"
"""An engine's function that takes a model's tensors by Hugging Face's names, such as ``model.load_weights``."""


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """The proven copies that fill an engine rank's tensors."""

    plan: Plan
    """One file for each of `tensors`."""
    tensors: tuple[torch.Tensor, ...]
    """Detached."""
    unused: tuple[str, ...] = ()
    """Tensors of the trainer of which the rank holds no part."""
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors among `tensors` that the loader takes whole afterwards."""
    fills: tuple[Fill, ...] = ()
    """Constants that the loader writes."""
    cast: frozenset[str] = frozenset()
    """Tensors that another engine had cast before this rank copied them from it."""


class Target(Protocol):
    """The tensors of an engine rank."""

    def list_places(self) -> MemoryPlaces:
        """Return the places of all tensors now; if they change, `plan` must be called again."""

    def plan(self, model: TrainerModel) -> Filling:
        """Return the proven copies from a trainer's model."""

    def begin(self, filling: Filling) -> None:
        """Prepare the tensors before the copies."""

    def finish(self, filling: Filling) -> None:
        """Complete the tensors after the copies, and count their changes for autograd."""


class ModuleTarget:
    """A module or state dict, whose layouts are known as for `xrank.load_model`.

    Args:
        module: the rank's part.
        layouts: the layouts of plain tensors, with their mesh.
        mesh: the mesh of a Megatron module.
        rank: this rank in the engine's world.
        world_size: the engine's number of ranks.

    Raises:
        UsageError: a tensor has no memory.
    """

    def __init__(self, module: FilledModule, layouts: LayoutMap | None, mesh: Any, rank: int, world_size: int) -> None:
        check_materialised(module)
        self._module, self._layouts, self._mesh = module, layouts, mesh
        self._rank, self._world_size = rank, world_size

    def list_places(self) -> MemoryPlaces:
        """Return the places of the module's tensors."""
        return list_places(self._module)

    def plan(self, model: TrainerModel) -> Filling:
        """Return the proven copies into the module; errors as `xrank.load_model`."""
        local = local_model(
            self._module, layouts=self._layouts, mesh=self._mesh, rank=self._rank, world_size=self._world_size
        )
        source = model.name_as(local.find_global_shapes(has_layouts=self._layouts is not None))
        load = plan_load(local, source, self._layouts, model.padded_names)
        if load.missing:
            raise UsageError(
                f"{load.missing[0]}: the trainer has no such tensor",
                tensor=load.missing[0],
                got=f"{list_text(load.missing)} in the engine alone",
                want="tensors that the trainer has",
                next_step="give both sides the same model, and tie the same tensors in the engine as in the trainer",
            )
        for view, tensor in zip(load.views, load.plan.tensors, strict=True):
            check_fillable(tensor.output.name, local.views[view])
        held = set(load.names)
        unused = tuple(shard.name for shard in source.shards if shard.name not in held)
        return Filling(load.plan, tuple(local.views[view] for view in load.views), unused)

    def begin(self, filling: Filling) -> None:
        """Do nothing: the copies fill all elements."""

    def finish(self, filling: Filling) -> None:
        """Count the changes of all tensors."""
        count_changes(self._module, filling.tensors)


class LoaderTarget:
    """The parameters that an engine's own loader fills. The loader runs once on stand-ins, which shows its copies.

    Args:
        module: the engine's module; the loader fills all of its parameters.
        load: the loader.

    Raises:
        UsageError: a parameter has no memory.
    """

    def __init__(self, module: FilledModule, load: Loader) -> None:
        check_materialised(module)
        self._module, self._load = module, load

    def list_places(self) -> MemoryPlaces:
        """Return the places of the module's tensors."""
        return list_places(self._module)

    def plan(self, model: TrainerModel) -> Filling:
        """Return the proven copies into the loader's parameters.

        Raises:
            UsageError: the loader leaves elements of a parameter unwritten, or writes some twice.
        """
        shards = {shard.name: shard for shard in model.source.shards}
        shapes = {name: (shard.dtype, tuple(shard.shape)) for name, shard in shards.items()}
        places = self.list_places()
        try:
            from xrank.refit.recording import record_loader  # it imports torch

            recording = record_loader(self._load, _list_parameters(self._module), shapes)
        finally:
            moved = find_moved(places, self.list_places())
            if moved is not None:
                raise UsageError(
                    f"{moved[0]}: the loader replaces the parameter in place of filling it",
                    tensor=moved[0],
                    got=moved[2],
                    want=moved[1],
                    next_step="make the engine's model anew, and give its tensors with layouts=, or use iter_model",
                )
        files: list[OutputFile] = []
        tensors: list[torch.Tensor] = []
        for copy in recording.copies:
            files.append(OutputFile.bare(copy.output))
            tensors.append(copy.target)
        whole = {name: _make_staging(name, shards[name].dtype, shapes[name][1]) for name in recording.whole}
        for name, tensor in whole.items():
            files.append(OutputFile.bare(OutputTensor(name, shards[name].dtype, shapes[name][1])))
            tensors.append(tensor)
        plan = make_plan(model.source, files)
        return Filling(plan, tuple(tensors), _find_unused(model.source, recording), whole, tuple(recording.fills))

    def begin(self, filling: Filling) -> None:
        """Write the loader's constants."""
        import torch

        with torch.no_grad():
            for fill in filling.fills:
                fill.target.fill_(fill.value)

    def finish(self, filling: Filling) -> None:
        """Let the loader take its whole tensors, and count the changes of all tensors."""
        import torch

        if filling.whole:
            with torch.no_grad():
                self._load(iter(list(filling.whole.items())))
        count_changes(self._module, ())


def _list_parameters(module: FilledModule) -> list[tuple[str, torch.Tensor]]:
    """Return the distinct parameters of a module, or tensors of a state dict: no loader need fill buffers."""
    import torch

    named = list_tensors(module)
    if not isinstance(module, Mapping):
        named = [(name, tensor) for name, tensor in named if isinstance(tensor, torch.nn.Parameter)]
    found = {(tensor.data_ptr(), tensor.numel()): (name, tensor.detach()) for name, tensor in reversed(named)}
    return list(reversed(found.values()))


def _make_staging(name: str, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    import torch

    from xrank.dtypes import dtype as find_dtype

    return torch.empty(tuple(shape), dtype=getattr(torch, find_dtype(dtype).torch_name), device="cpu")


def _find_unused(source: StoredModel, recording: Recording) -> tuple[str, ...]:
    used = {copy.output.name for copy in recording.copies} | set(recording.whole)
    return tuple(shard.name for shard in source.shards if shard.name not in used)


_CALL_NBYTES = 8 << 20
"""Bytes of one call at most: threads share the calls, and look for failures between two of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of bytes; arrays of one length."""

    there: IntArray
    """Address in the other process."""
    here: IntArray
    """Address in this process."""
    nbytes: IntArray

    @property
    def total_nbytes(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one process_vm_readv(2)."""

    there: SpanArray
    here: SpanArray
    nbytes: int


def mean_run_nbytes(nests: NestTable, width: int) -> float:
    """Return the mean length of the runs that `find_runs` would return, before they are joined."""
    return int(nests.sizes.sum()) * width / max(1, int(count_runs(nests).sum()))


def count_runs(nests: NestTable) -> IntArray:
    """Return the number of runs of each nest, before they are joined."""
    return nests.sizes // np.maximum(1, _run_lengths(nests)[1])


def find_runs(nests: NestTable, width: int) -> Runs:
    """Return the runs of nests from one record (x) to one tensor (y), as byte offsets.

    Args:
        nests: canonical; addresses in elements.
        width: bytes of an element.
    """
    depth, lengths = _run_lengths(nests)
    nest, there, here = np.arange(len(nests)), nests.x, nests.y
    for level in range(int(depth.max(initial=0))):
        n, xs, ys = nests.loops[nest, level].T
        n = np.where(level < depth[nest], n, 1)
        each = np.repeat(np.arange(len(nest)), n)
        step = np.arange(len(each)) - (np.cumsum(n) - n)[each]
        nest, there, here = nest[each], there[each] + step * xs[each], here[each] + step * ys[each]
    return Runs(there * width, here * width, lengths[nest] * width)


def _run_lengths(nests: NestTable) -> tuple[IntArray, IntArray]:
    """Return the number of loops outside each nest's runs, and the elements of a run."""
    rows = np.arange(len(nests))
    depth = (nests.loops[:, :, 0] != 1).sum(axis=1)
    lengths = np.ones(len(nests), np.int64)
    if nests.loops.shape[1]:
        inner = nests.loops[rows, np.maximum(depth - 1, 0)]
        is_run = (depth > 0) & (inner[:, 1] == 1) & (inner[:, 2] == 1)
        lengths = np.where(is_run, inner[:, 0], 1)
        depth = depth - is_run
    return depth, lengths


def join_runs(parts: Sequence[Runs]) -> Runs:
    """Return all runs of one other process by rising address there; runs that continue each other become one."""
    there, here, nbytes = (np.concatenate([getattr(part, name) for part in parts]) for name in Runs.__slots__)
    order = np.argsort(there, kind="stable")
    there, here, nbytes = there[order], here[order], nbytes[order]
    is_first = np.ones(len(there), bool)
    is_first[1:] = (there[1:] != there[:-1] + nbytes[:-1]) | (here[1:] != here[:-1] + nbytes[:-1])
    first = np.flatnonzero(is_first)
    return Runs(there[first], here[first], np.add.reduceat(nbytes, first) if len(first) else nbytes)


def cut_calls(runs: Runs) -> Iterator[Call]:
    """Yield the calls that copy all runs, in order.

    Either side of a call is joined by itself: rows of a matrix that become columns elsewhere are one span here, and
    many there.
    """
    runs = _split_long(runs)
    ends = np.cumsum(runs.nbytes)
    begin = 0
    while begin < len(runs.nbytes):
        limit = (ends[begin - 1] if begin else 0) + _CALL_NBYTES
        end = min(begin + MAX_SPANS, int(np.searchsorted(ends, limit, side="right")))
        end = max(end, begin + 1)
        nbytes = runs.nbytes[begin:end]
        there, here = _join_side(runs.there[begin:end], nbytes), _join_side(runs.here[begin:end], nbytes)
        yield Call(there, here, int(nbytes.sum()))
        begin = end


def _split_long(runs: Runs) -> Runs:
    """Cut runs that are longer than a call."""
    counts = -(-runs.nbytes // _CALL_NBYTES)
    if (counts <= 1).all():
        return runs
    owner = np.repeat(np.arange(len(counts)), counts)
    skip = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * _CALL_NBYTES
    nbytes = np.minimum(_CALL_NBYTES, runs.nbytes[owner] - skip)
    return Runs(runs.there[owner] + skip, runs.here[owner] + skip, nbytes)


def _join_side(addresses: IntArray, nbytes: IntArray) -> SpanArray:
    is_first = np.ones(len(addresses), bool)
    is_first[1:] = addresses[1:] != addresses[:-1] + nbytes[:-1]
    first = np.flatnonzero(is_first)
    return np.ascontiguousarray(np.stack((addresses[first], np.add.reduceat(nbytes, first)), axis=1)).astype(np.uint64)


_CHECK_SECONDS = 0.02
"""Time between two looks at the other ranks while the kernel copies."""
_SMALLEST_RUN_NBYTES = 64
"""Mean length of a tensor's runs below which the buffers' strided copies are faster than a span for each run."""


@dataclass(slots=True, eq=False)
class Transfer:
    """The copies of one rank; see `make_transfer`."""

    nbytes: int
    """Bytes that the copies fill."""
    source: PeerSource
    """To be closed by the caller."""
    calls: list[tuple[SpanMemory, Call]]
    buffered: Plan | None
    buffered_tensors: tuple[torch.Tensor, ...]
    budget: Budget

    @property
    def direct_nbytes(self) -> int:
        """Bytes that the kernel copies straight to their places."""
        return sum(call.nbytes for _, call in self.calls)

    def run(self, check: Callable[[], object]) -> int:
        """Fill all tensors once, and return the number of bytes that were read.

        The bytes are those of one step only if the trainer's statuses are the same before and after.

        Args:
            check: called now and then between two calls of the kernel or windows, by one thread at a time; it may
                raise.

        Raises:
            LendingEndedError, UnreadableMemoryError: a trainer rank's memory cannot be read any more.
            RankFailedError, RankTimeoutError: as `PeerSource.read_into`.
        """
        self._run_calls(check)
        return self.direct_nbytes + self._run_buffered(check)

    def _run_calls(self, check: Callable[[], object]) -> None:
        lock, next_check = threading.Lock(), 0.0
        left: Iterator[tuple[SpanMemory, Call]] = iter(self.calls)
        failures: list[BaseException] = []

        def work() -> None:
            nonlocal next_check
            try:
                while True:
                    with lock:
                        if failures or (job := next(left, None)) is None:
                            return
                        if monotonic() >= next_check:
                            check()
                            next_check = monotonic() + _CHECK_SECONDS
                    memory, call = job
                    memory.copy_spans(call.there, call.here)
            except BaseException as error:  # raised below
                failures.append(error)

        helpers = [
            threading.Thread(target=work, name=f"xrank-refit-{i}", daemon=True)
            for i in range(min(self.budget.workers, len(self.calls)) - 1)
        ]
        for thread in helpers:
            thread.start()
        work()
        for thread in helpers:
            thread.join()
        if failures:
            raise failures[0]

    def _run_buffered(self, check: Callable[[], object]) -> int:
        if self.buffered is None:
            return 0
        source, target = _CountedSource(self.source), TensorTarget(dict(enumerate(self.buffered_tensors)))

        def cancelled() -> bool:
            check()
            return False

        try:
            execute(
                self.buffered,
                source,
                target,
                budget=self.budget,
                shares=share_all(self.buffered),
                cancelled=cancelled,
            )
        finally:
            target.finish()
        return source.nbytes


def make_transfer(plan: Plan, tensors: Sequence[torch.Tensor], source: PeerSource, budget: Budget) -> Transfer:
    """Return the copies of a proven plan; nothing is read yet.

    Args:
        plan: one file with one tensor for each of `tensors`. Its replicas are not read: they are compared by their own
            ranks.
        tensors: detached tensors to fill.
        source: reads the plan's records.
        budget: threads and buffers.
    """
    runs: dict[SpanMemory, list[Runs]] = {}
    buffered: list[TensorPlan] = []
    buffered_tensors: list[torch.Tensor] = []
    for one, tensor in zip(plan.tensors, tensors, strict=True):
        found = _find_direct(one, tensor, source)
        if found is None:
            buffered.append(_without_replicas(one))
            buffered_tensors.append(tensor)
            continue
        for memory, its in found:
            runs.setdefault(memory, []).append(its)
    calls = [(memory, call) for memory, parts in runs.items() for call in cut_calls(join_runs(parts))]
    files = tuple(FilePlan(OutputFile.bare(one.output), (one,)) for one in buffered)
    return Transfer(
        plan.nbytes,
        source,
        _interleave(calls),
        Plan(plan.source, files) if files else None,
        tuple(buffered_tensors),
        budget,
    )


def _find_direct(one: TensorPlan, tensor: torch.Tensor, source: PeerSource) -> list[tuple[SpanMemory, Runs]] | None:
    """Return the runs that fill a tensor; None if it must pass the buffers."""
    width = dtypes.dtype(one.output.dtype).nbytes
    if one.source_dtype != one.output.dtype or one.changed or one.update is not None or one.output.is_padded:
        return None
    here = locate_elements(tensor)[0]
    if here is None or mean_run_nbytes(one.copies.nests, width) < _SMALLEST_RUN_NBYTES:
        return None
    found: list[tuple[SpanMemory, Runs]] = []
    for record in np.unique(one.copies.record).tolist():
        place = source.find_memory(record)
        if place is None:
            return None
        memory, there = place
        its = find_runs(one.copies.nests.take(np.flatnonzero(one.copies.record == record)), width)
        found.append((memory, Runs(its.there + there, its.here + here, its.nbytes)))
    return found


def _without_replicas(one: TensorPlan) -> TensorPlan:
    none = np.zeros(0, np.int64)
    return replace(one, replicas=Copies(none, none, one.replicas.nests.take(none)))


def _interleave(calls: Sequence[tuple[SpanMemory, Call]]) -> list[tuple[SpanMemory, Call]]:
    """Return the calls with those of different processes in turn: two readers of one process wait for its lock."""
    by_memory: dict[SpanMemory, list[Call]] = {}
    for memory, call in calls:
        by_memory.setdefault(memory, []).append(call)
    turns = max(map(len, by_memory.values()), default=0)
    return [(memory, its[turn]) for turn in range(turns) for memory, its in by_memory.items() if turn < len(its)]


class _CountedSource:
    """A source that counts the bytes it reads."""

    def __init__(self, source: PeerSource) -> None:
        self._source, self._lock = source, threading.Lock()
        self.nbytes = 0

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Read as the source does."""
        self._count(len(into))
        self._source.read_into(record, start, into)

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Fetch as the source does."""
        self._count(nbytes)
        return self._source.fetch(record, start, nbytes, staging)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
