"""Tensors with a low-rank update: their factors stay in memory while some worker needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakValueDictionary

from xrank import dtypes
from xrank.plan.low_rank import Factors, read_factors
from xrank.plan.planner import Plan, TensorPlan, UpdatePlan
from xrank.plan.windows import PreparedTensor


class MergedTensor:
    """A tensor and its update; any thread may use it."""

    def __init__(self, plan: TensorPlan, update: UpdatePlan) -> None:
        self.plan, self.update = plan, update
        self.stored = PreparedTensor(replace(plan, output=replace(plan.output, dtype=plan.source_dtype), update=None))
        """The tensor as the source stores it."""
        self._factors: Factors | None = None
        self._lock = threading.Lock()

    def factors(self, read: Callable[[PreparedTensor], memoryview]) -> Factors:
        """Return the factors; the first caller reads them, other threads wait."""
        # Under the lock: a second reader would double the memory that `factors_nbytes` promises.
        with self._lock:
            if self._factors is None:
                a, b = self.update.a, self.update.b
                self._factors = read_factors(
                    read(PreparedTensor(a)),
                    a.source_dtype,
                    read(PreparedTensor(b)),
                    b.source_dtype,
                    a.output.shape[0],
                    self.update.rule,
                    kind=_kind(self.plan),
                )
            return self._factors


class MergedTensors:
    """The tensors whose factors are in memory: each as long as a worker refers to it."""

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[tuple[int, int], MergedTensor] = WeakValueDictionary()
        self._lock = threading.Lock()

    def get(self, file: int, tensor: int, plan: TensorPlan) -> MergedTensor:
        """Return a tensor of a file; the same object for all callers while one of them refers to it."""
        with self._lock:
            found = self._alive.get((file, tensor))
            if found is None:
                assert plan.update is not None
                found = self._alive[file, tensor] = MergedTensor(plan, plan.update)
            return found


def factors_nbytes(plan: Plan) -> int:
    """Return the peak bytes of the largest pair of factors, as stored and as multiplied."""
    return max((_nbytes(tensor, tensor.update) for tensor in plan.tensors if tensor.update is not None), default=0)


def _nbytes(tensor: TensorPlan, update: UpdatePlan) -> int:
    width = dtypes.dtype(_kind(tensor)).nbytes
    pair = (update.a.output, update.b.output)
    # While a factor is transposed and made contiguous, memory contains it twice.
    return sum(part.nbytes + 2 * part.num_elements * width for part in pair)


def _kind(plan: TensorPlan) -> str:
    """Return the element type in which a tensor is merged."""
    return "F64" if plan.source_dtype == "F64" else "F32"
