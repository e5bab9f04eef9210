"""The tensors that an engine rank fills, and the copies that fill them: planned and proven once, run at each step.

Runs of bytes with both ends in rows in memory of this host go straight to their places, by the kernel. All other
tensors pass the executor's buffers: those that are cast, strided, padded, cut into tiny runs, on a device, or of ranks
on other hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.buffers import Source
from xrank.engine.executor import Budget, execute
from xrank.engine.planner import Copies, FilePlan, Plan, TensorPlan, make_plan
from xrank.engine.replicas import spread_copies
from xrank.engine.report import align_rows
from xrank.engine.tensor_target import TensorTarget, check_fillable
from xrank.engine.windows import share_all
from xrank.errors import UsageError
from xrank.layout import LayoutMap
from xrank.layout.nest_table import IntArray, NestTable, count_runs, int_array, run_lengths
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.ranks.loans import MAX_SPANS, PeerSource, SpanArray, SpanMemory
from xrank.ranks.memory import locate_elements
from xrank.readers.live.models import local_model
from xrank.readers.live.modules import FilledModule, check_materialized, count_changes, list_tensors
from xrank.recipes.load_plan import plan_load
from xrank.recipes.options import default_workers
from xrank.refit.directory import TrainerModel
from xrank.words import list_text, plural, size_text

if TYPE_CHECKING:
    import torch

    from xrank.refit.recording import Fill, Loader


_CALL_NBYTES = 8 << 20
"""Bytes of one call at most: threads share the calls, and look for failures between two of them."""
_CHECK_SECONDS = 0.02
"""Time between two looks at the other ranks while the kernel copies."""
_SMALLEST_RUN_NBYTES = 64
"""Mean length of a tensor's runs below which the buffers' strided copies are faster than a span for each run."""

MemoryPlaces: TypeAlias = dict[str, tuple[object, ...]]
"""Name -> dtype, shape, strides and address of the local tensor: both sides keep addresses over all steps."""


def list_places(model: FilledModule) -> MemoryPlaces:
    """Return the places of a model's tensors on this rank."""
    import torch

    places: MemoryPlaces = {}
    for number, (name, tensor) in enumerate(list_tensors(model)):
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
        key = name if name not in places else f"{name} ({number})"  # Megatron's chunks may repeat names
        address = local.data_ptr() if local.layout is torch.strided and local.device.type != "meta" else 0
        places[key] = (str(local.dtype), tuple(local.shape), tuple(local.stride()), address)
    return places


def find_moved(old: MemoryPlaces, new: MemoryPlaces) -> tuple[str, str, str] | None:
    """Return the first tensor in another place, with its old and its new one as text; None if all are the same."""

    def describe(place: tuple[object, ...] | None) -> str:
        return "no tensor" if place is None else "{}, shape {}, strides {}, at address {}".format(*place)

    if old == new:
        return None
    name = next(name for name in (*old, *new) if old.get(name) != new.get(name))
    return name, describe(old.get(name)), describe(new.get(name))


def count_versions(views: Sequence[torch.Tensor]) -> list[int]:
    """Return torch's counts of changes in place, 0 for inference tensors, which have none."""
    return [0 if view.is_inference() else view._version for view in views]


class TargetPlan(Struct, frozen=True, eq=False):
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
    cast: frozenset[str] = frozenset()
    """Tensors that another engine had cast before this rank copied them from it."""


class ModuleTarget:
    """A module or state dict with layouts that are known as for `xrank.load_model`."""

    def __init__(self, module: FilledModule, layouts: LayoutMap | None, mesh: Any, rank: int, world_size: int) -> None:
        check_materialized(module)
        self._module, self._layouts, self._mesh = module, layouts, mesh
        self._rank, self._world_size = rank, world_size

    def list_places(self) -> MemoryPlaces:
        """Return the places of all tensors now; if they change, `plan` must be called again."""
        return list_places(self._module)

    def plan(self, model: TrainerModel) -> TargetPlan:
        """Return the proven copies from a trainer's model."""
        local = local_model(
            self._module, layouts=self._layouts, mesh=self._mesh, rank=self._rank, world_size=self._world_size
        )
        source = model.name_as(local.find_global_shapes(has_layouts=self._layouts is not None))
        load = plan_load(local, source, self._layouts, model.padded_names)
        if load.missing:
            raise UsageError(
                f"{load.missing[0]}: the trainer has no such tensor",
                tensor=load.missing[0],
                got=f"{list_text(load.missing)} only in the engine",
                next_step="give both sides the same model, and tie the same tensors in the engine as in the trainer",
            )
        for view, tensor in zip(load.views, load.plan.tensors, strict=True):
            check_fillable(tensor.output.name, local.views[view])
        held = set(load.names)
        unused = tuple(shard.name for shard in source.shards if shard.name not in held)
        return TargetPlan(load.plan, tuple(local.views[view] for view in load.views), unused)

    def begin(self, planned: TargetPlan) -> None:
        """Prepare the tensors before the copies."""

    def finish(self, planned: TargetPlan) -> None:
        """Complete the tensors after the copies, and count their changes for autograd."""
        count_changes(self._module, planned.tensors)


class AdapterTarget(ModuleTarget):
    """Tensors that are made for a trainer's LoRA adapter, all of them whole."""

    def __init__(self) -> None:
        super().__init__({}, None, None, 0, 1)
        self.tensors: dict[str, torch.Tensor] = {}
        self.config_text: str | None = None

    def plan(self, model: TrainerModel) -> TargetPlan:
        """Make the tensors, and return the proven copies from a trainer's model."""
        import torch

        if not model.adapter_names:
            raise UsageError(
                "the trainer offers no LoRA adapter",
                got=f"{len(model.source.shards)} tensors of a model",
                want="the tensors of a PeftModel",
                next_step="let the trainer give its PeftModel to offer_weights, or use take_weights",
            )
        self.config_text = model.adapter_config
        self.tensors = self._module = {
            shard.name: torch.empty(shard.shape, dtype=getattr(torch, dtypes.dtype(shard.dtype).torch_name))
            for shard in model.source.shards
            if shard.name in model.adapter_names
        }
        return super().plan(model)


class LoaderTarget(ModuleTarget):
    """The parameters that an engine's own loader fills. The loader runs once on stand-ins, which shows its copies."""

    def __init__(self, module: FilledModule, load: Loader) -> None:
        super().__init__(module, None, None, 0, 1)
        self._load = load

    def plan(self, model: TrainerModel) -> TargetPlan:
        """Return the proven copies from a trainer's model."""
        import torch

        from xrank.refit.recording import record_loader  # it imports torch

        shapes = {shard.name: (shard.dtype, tuple(shard.shape)) for shard in model.source.shards}
        places = self.list_places()
        try:
            recording = record_loader(self._load, self._list_parameters(), shapes)
        finally:
            if (moved := find_moved(places, self.list_places())) is not None:
                raise UsageError(
                    f"{moved[0]}: the loader replaces the parameter instead of filling it",
                    tensor=moved[0],
                    got=moved[2],
                    want=moved[1],
                    next_step="create the engine's model again, and describe its tensors with layouts=, or use "
                    "iter_model",
                )
        outputs = [copy.output for copy in recording.copies]
        whole = {}
        for name in recording.whole:
            dtype, shape = shapes[name]
            outputs.append(OutputTensor(name, dtype, shape))
            whole[name] = torch.empty(shape, dtype=getattr(torch, dtypes.dtype(dtype).torch_name), device="cpu")
        used = {output.name for output in outputs}
        return TargetPlan(
            make_plan(model.source, list(map(OutputFile.bare, outputs))),
            (*(copy.target for copy in recording.copies), *whole.values()),
            tuple(name for name in shapes if name not in used),
            whole,
            tuple(recording.fills),
        )

    def begin(self, planned: TargetPlan) -> None:
        """Write the loader's constants."""
        import torch

        with torch.no_grad():
            for fill in planned.fills:
                fill.target.fill_(fill.value)

    def finish(self, planned: TargetPlan) -> None:
        """Let the loader take its whole tensors, and count the changes of all tensors."""
        import torch

        if planned.whole:
            with torch.no_grad():
                self._load(iter(list(planned.whole.items())))
        count_changes(self._module, ())

    def _list_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return the distinct parameters of a module, or tensors of a state dict: no loader need fill buffers."""
        import torch

        named = list_tensors(self._module)
        if not isinstance(self._module, Mapping):
            named = [(name, tensor) for name, tensor in named if isinstance(tensor, torch.nn.Parameter)]
        found = {(tensor.data_ptr(), tensor.numel()): (name, tensor.detach()) for name, tensor in reversed(named)}
        return list(reversed(found.values()))


class Runs(Struct, frozen=True, eq=False):
    """Runs of bytes; arrays of one length."""

    there: IntArray
    """Address in the other process."""
    here: IntArray
    """Address in this process."""
    nbytes: IntArray


class SpanCall(Struct, frozen=True, eq=False):
    """The arguments of one process_vm_readv(2)."""

    there: SpanArray
    here: SpanArray
    nbytes: int


def find_runs(nests: NestTable, width: int) -> Runs:
    """Return the runs of nests from a record (x) to a tensor (y), as byte offsets.

    The nests are canonical, with addresses in elements of `width` bytes.
    """
    depth, lengths = run_lengths(nests)
    nest, there, here = np.arange(len(nests)), nests.x, nests.y
    for level in range(int(depth.max(initial=0))):
        n, xs, ys = nests.loops[nest, level].T
        n = np.where(level < depth[nest], n, 1)
        each = np.repeat(np.arange(len(nest)), n)
        step = np.arange(len(each)) - (np.cumsum(n) - n)[each]
        nest, there, here = nest[each], there[each] + step * xs[each], here[each] + step * ys[each]
    return Runs(there * width, here * width, lengths[nest] * width)


def join_runs(parts: Sequence[Runs]) -> Runs:
    """Return all runs of one other process by rising address there; runs that continue each other become one."""
    there, here, nbytes = (np.concatenate([getattr(part, name) for part in parts]) for name in Runs.__struct_fields__)
    order = np.argsort(there, kind="stable")
    there, here, nbytes = there[order], here[order], nbytes[order]
    is_first = np.ones(len(there), bool)
    is_first[1:] = (there[1:] != there[:-1] + nbytes[:-1]) | (here[1:] != here[:-1] + nbytes[:-1])
    first = np.flatnonzero(is_first)
    return Runs(there[first], here[first], np.add.reduceat(nbytes, first) if len(first) else nbytes)


def cut_calls(runs: Runs) -> Iterator[SpanCall]:
    """Yield the calls that copy all runs, in order.

    Either side of a call is joined by itself: rows of a matrix that become columns elsewhere are one span here, and
    many there.
    """
    counts = -(-runs.nbytes // _CALL_NBYTES)
    if (counts > 1).any():  # runs that are longer than a call
        owner = np.repeat(np.arange(len(counts)), counts)
        skip = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * _CALL_NBYTES
        nbytes = np.minimum(_CALL_NBYTES, runs.nbytes[owner] - skip)
        runs = Runs(runs.there[owner] + skip, runs.here[owner] + skip, nbytes)
    ends = np.cumsum(runs.nbytes)
    begin = 0
    while begin < len(runs.nbytes):
        limit = (ends[begin - 1] if begin else 0) + _CALL_NBYTES
        end = min(begin + MAX_SPANS, int(np.searchsorted(ends, limit, side="right")))
        end = max(end, begin + 1)
        nbytes = runs.nbytes[begin:end]
        there, here = _join_side(runs.there[begin:end], nbytes), _join_side(runs.here[begin:end], nbytes)
        yield SpanCall(there, here, int(nbytes.sum()))
        begin = end


def _join_side(addresses: IntArray, nbytes: IntArray) -> SpanArray:
    is_first = np.ones(len(addresses), bool)
    is_first[1:] = addresses[1:] != addresses[:-1] + nbytes[:-1]
    first = np.flatnonzero(is_first)
    return np.ascontiguousarray(np.stack((addresses[first], np.add.reduceat(nbytes, first)), axis=1)).astype(np.uint64)


class Transfer(Struct, eq=False):
    """The copies of one rank; see `make_transfer`."""

    nbytes: int
    """Bytes that the copies fill."""
    source: PeerSource
    """To be closed by the caller."""
    calls: list[tuple[SpanMemory, SpanCall]]
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
        """
        self._run_calls(check)
        if self.buffered is None:
            return self.direct_nbytes
        source, target = CountedSource(self.source), TensorTarget(dict(enumerate(self.buffered_tensors)))
        shares = share_all(self.buffered)

        def cancelled() -> bool:
            check()
            return False

        try:
            execute(self.buffered, source, target, budget=self.budget, shares=shares, cancelled=cancelled)
        finally:
            target.finish()
        return self.direct_nbytes + source.nbytes

    def _run_calls(self, check: Callable[[], object]) -> None:
        lock, next_check = threading.Lock(), 0.0
        left: Iterator[tuple[SpanMemory, SpanCall]] = iter(self.calls)
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


class Proof(Struct, frozen=True):
    """The result of a comparison; it is the same on all ranks of an engine."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> digest of the engine's values, which is that of the trainer's."""
    unproven: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> why it was not compared."""


class UpdateReport(Struct, frozen=True):
    """The result of `TakenWeights.update` on one engine rank."""

    step: int
    nbytes: int
    """Bytes that this rank holds and has filled."""
    moved_nbytes: int
    """Bytes that were read from trainer ranks for them."""
    direct_nbytes: int
    """Bytes of `moved_nbytes` that the kernel copied straight to their places."""
    seconds: float
    """Duration of the copies and their confirmation, without the wait for the step."""
    copy_seconds: float
    """Duration of the copies alone."""
    plan_seconds: float
    """Duration of the planning; 0 if an earlier update has planned."""
    whole: Mapping[str, int]
    """Tensors that the engine's loader took whole because their way could not be recorded, and their bytes."""
    unused: tuple[str, ...]
    """Tensors of the trainer of which this rank holds no part."""
    digests: Mapping[str, str]
    """Tensor -> digest of the values that all ranks of the engine hold; it is that of the trainer's values. It has all
    compared tensors of the engine; without ``proof=True`` none."""
    unproven: Mapping[str, str]
    """Tensor of this rank that ``proof=True`` has not compared -> the reason."""

    def __str__(self) -> str:
        """Return the report as lines for people; tensors are counted."""
        rows = [
            ("update", f"step {self.step}, {self.seconds:.2f} s, {self.plan_seconds:.2f} s of planning before"),
            ("moved", f"{size_text(self.moved_nbytes)} for {size_text(self.nbytes)} that this rank holds"),
        ]
        if self.digests or self.unproven:
            unproven = f"; not compared: {list_text(self.unproven, 3)}" if self.unproven else ""
            rows.append(("proof", f"{plural(len(self.digests), 'tensor')} equal to the trainer's{unproven}"))
        counted = ((self.whole, "taken whole by the loader"), (self.unused, "not held by this rank"))
        rows += [
            ("note", f"{plural(len(names), 'tensor')} {text}: {list_text(names, 3)}")
            for names, text in counted
            if names
        ]
        return align_rows(rows)


def make_report(
    step: int, planned: TargetPlan, transfer: Transfer, moved: int, times: tuple[float, float, float], proof: Proof
) -> UpdateReport:
    """Return the report of a step; `times` are the seconds of all work on it, of its copies, and of the planning."""
    direct = transfer.direct_nbytes if moved else 0
    whole = {name: tensor.nbytes for name, tensor in planned.whole.items()}
    unused = planned.unused
    return UpdateReport(step, transfer.nbytes, moved, direct, *times, whole, unused, proof.digests, proof.unproven)


def make_transfer(planned: TargetPlan, number: int, source: PeerSource, max_memory_nbytes: int) -> Transfer:
    """Return the copies of a plan, spread over replicas by the rank's `number`; nothing is read yet.

    The replicas are not compared: their own ranks do that.
    """
    plan = spread_copies(planned.plan, number)
    runs: dict[SpanMemory, list[Runs]] = {}
    files: list[FilePlan] = []
    buffered: list[torch.Tensor] = []
    for one, tensor in zip(plan.tensors, planned.tensors, strict=True):
        found = _find_direct(one, tensor, source)
        if found is None:
            none = int_array([])
            one = replace(one, replicas=Copies(none, none, one.replicas.nests.take(none)))
            files.append(FilePlan(OutputFile.bare(one.output), (one,)))
            buffered.append(tensor)
            continue
        for memory, its in found:
            runs.setdefault(memory, []).append(its)
    calls = [[(memory, call) for call in cut_calls(join_runs(parts))] for memory, parts in runs.items()]
    # Calls of different processes in turn: two readers of one process wait for its lock.
    in_turn = [one for turn in zip_longest(*calls) for one in turn if one is not None]
    rest = Plan(plan.source, tuple(files)) if files else None
    budget = Budget.from_memory(max_memory_nbytes, default_workers())
    return Transfer(plan.nbytes, source, in_turn, rest, tuple(buffered), budget)


def _find_direct(one: TensorPlan, tensor: torch.Tensor, source: PeerSource) -> list[tuple[SpanMemory, Runs]] | None:
    """Return the runs that fill a tensor; None if it must pass the buffers."""
    width, nests = dtypes.dtype(one.output.dtype).nbytes, one.copies.nests
    if one.source_dtype != one.output.dtype or one.changed or one.update is not None or one.output.is_padded:
        return None
    here = locate_elements(tensor)[0]
    if here is None or int(nests.sizes.sum()) * width < _SMALLEST_RUN_NBYTES * max(1, int(count_runs(nests).sum())):
        return None
    found: list[tuple[SpanMemory, Runs]] = []
    for record in np.unique(one.copies.record).tolist():
        place = source.find_memory(record)
        if place is None:
            return None
        memory, there = place
        its = find_runs(nests.take(np.flatnonzero(one.copies.record == record)), width)
        found.append((memory, Runs(its.there + there, its.here + here, its.nbytes)))
    return found


class CountedSource:
    """A source that counts the bytes it reads."""

    def __init__(self, source: Source) -> None:
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
