"""The reads of a conversion counted in arrays: bytes to the byte, for thousands of ranks in seconds.

Where the windows of one rank stand side by side, what they take of a piece is counted at once. Bytes are exact where
pieces have no gaps on the side of the source; of others what a read takes along is estimated. So are messages: one for
each window and piece, and two for each edge of a window that is likely to cut a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from xrank import dtypes
from xrank.layout.nest_table import IntArray, NestTable
from xrank.plan.division import Division, Round
from xrank.plan.planner import Copies, FilePlan, Plan, TensorPlan
from xrank.plan.replicas import twins
from xrank.plan.source import NO_CHECKSUM
from xrank.plan.tiles import SMALLEST_DENSITY
from xrank.plan.windows import WINDOW_NBYTES
from xrank.simulation.traffic import FROM_FILES, Flow, RoundTraffic, round_of, written_nbytes

__all__ = ["compared_nbytes", "counted_rounds", "elements_below", "num_places", "taken_along"]

_MOST_PAIRS = 1 << 21
"""Of windows and pieces that are looked at in one go, about."""


def num_places(plan: Plan) -> int:
    """Return how many (window, piece) places there are, about: what following each read costs."""
    found = 0
    for tensor in plan.tensors:
        width = dtypes.dtype(tensor.output.dtype).nbytes
        for copies in (tensor.copies, tensor.replicas):
            reach = (copies.nests.y_ends - copies.nests.y) * width
            found += int((reach // WINDOW_NBYTES + 1).sum())
    return found


def counted_rounds(
    plan: Plan, division: Division, holder: IntArray | None, staging_nbytes: int
) -> tuple[RoundTraffic, ...]:
    """Return what the ranks of a division move, round by round; arguments as `followed_rounds`."""
    rest = [] if holder is not None else list(_rest(plan, division, staging_nbytes))
    rounds = []
    for number, one in enumerate(division.rounds):
        flows = [flow for at, flow in rest if at == number]
        for index in one.files:
            runs = _Runs(one, index)
            for tensor in plan.files[index].tensors:
                if holder is None:
                    flows += _from_files(tensor, runs, staging_nbytes)
                else:
                    flows += _from_memory(tensor, runs, holder, staging_nbytes)
        rounds.append(round_of(written_nbytes(plan, one), flows))
    return tuple(rounds)


def compared_nbytes(plan: Plan, holder: IntArray, num_ranks: int) -> IntArray:
    """Return by rank the bytes that it digests of what it holds, so that replicas can be compared."""
    found = np.zeros(num_ranks, np.int64)
    for tensor in plan.tensors:
        if not len(tensor.replicas):
            continue
        width = dtypes.dtype(tensor.source_dtype).nbytes
        twin = twins(tensor)
        rows = np.flatnonzero(twin >= 0)
        rows = rows[tensor.replicas.record[rows] != tensor.copies.record[twin[rows]]]  # one place in memory is equal
        first = np.zeros(len(tensor.copies), np.bool_)
        first[twin[rows]] = True
        for copies, chosen in ((tensor.replicas, rows), (tensor.copies, np.flatnonzero(first))):
            np.add.at(found, holder[copies.record[chosen]], copies.nests.sizes[chosen] * width)
    return found


def elements_below(nests: NestTable, rows: IntArray, address: IntArray) -> IntArray:
    """Return how many elements of those rows, which may repeat, lie at y addresses below others, pair by pair."""
    loops = nests.loops[rows][:, :, [0, 2]]
    order = np.argsort(-loops[:, :, 1], axis=1, kind="stable")  # falling stride; single iterations come last
    loops = np.take_along_axis(loops, order[:, :, None], axis=1)
    left = address - nests.y[rows]
    is_below = left > 0
    found = np.zeros(len(rows), np.int64)
    for column in range(loops.shape[1]):
        count, stride = loops[:, column, 0], np.maximum(loops[:, column, 1], 1)
        whole = np.minimum((left - 1) // stride, count - 1)
        found += whole * loops[:, column + 1 :, 0].prod(axis=1)
        left = left - whole * stride
    return np.where(is_below, found + 1, 0)


def taken_along(nests: NestTable, staging_elements: int) -> npt.NDArray[np.float64]:
    """Return how many elements are read for each that is wanted, nest by nest, by the rule of `xrank.plan.tiles`."""
    loops = nests.loops[:, :, :2]
    order = np.argsort(np.where(loops[:, :, 0] > 1, loops[:, :, 1], 0), axis=1, kind="stable")  # inner ones first
    loops = np.take_along_axis(loops, order[:, :, None], axis=1)
    span, wanted = np.ones(len(nests), np.int64), np.ones(len(nests), np.int64)
    goes_on = np.ones(len(nests), np.bool_)
    for column in range(loops.shape[1]):
        count, stride = loops[:, column, 0], np.maximum(loops[:, column, 1], 1)
        fits = np.minimum(count, np.maximum(staging_elements - span, 0) // stride + 1)
        whole = (fits - 1) * stride + span
        joins = goes_on & (whole <= SMALLEST_DENSITY * wanted * fits)
        span, wanted = np.where(joins, whole, span), np.where(joins, wanted * fits, wanted)
        goes_on = joins & (fits == count)
    return span / wanted


class _Runs:
    """A file's windows as runs of neighbours that one rank makes, by rising window."""

    def __init__(self, one: Round, index: int) -> None:
        found = sorted(
            (each.start, each.stop, rank) for rank, share in enumerate(one.shares) for each in share.get(index, ())
        )
        self.start, self.stop, self.maker = np.array(found, np.int64).reshape(-1, 3).T


def _pairs(tensor: TensorPlan, copies: Copies, runs: _Runs) -> Iterator[tuple[IntArray, IntArray, IntArray, IntArray]]:
    """Yield (piece, run, elements, messages) of all runs that take anything of a piece, in several goes."""
    output = tensor.output
    width = dtypes.dtype(output.dtype).nbytes
    first = (output.offset + copies.nests.y * width) // WINDOW_NBYTES
    last = (output.offset + copies.nests.y_ends * width - 1) // WINDOW_NBYTES
    low, high = np.searchsorted(runs.stop, first, "right"), np.searchsorted(runs.start, last, "right")
    counts = np.maximum(high - low, 0)
    ends = np.cumsum(counts)
    reach = copies.nests.y_ends - copies.nests.y
    cut = np.where(reach == copies.nests.sizes, 0.0, copies.nests.sizes / np.maximum(reach, 1))
    begin = 0
    while begin < len(copies):
        end = max(begin + 1, int(np.searchsorted(ends, (ends[begin - 1] if begin else 0) + _MOST_PAIRS, "right")))
        chosen = np.arange(begin, end)
        piece = np.repeat(chosen, counts[chosen])
        run = low[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(counts[chosen]) - counts[chosen], counts[chosen])
        begin = end
        edges = [
            np.clip((edge[run] * WINDOW_NBYTES - output.offset) // width, 0, output.num_elements)
            for edge in (runs.start, runs.stop)
        ]
        elements = elements_below(copies.nests, piece, edges[1]) - elements_below(copies.nests, piece, edges[0])
        windows = np.minimum(runs.stop[run], last[piece] + 1) - np.maximum(runs.start[run], first[piece])
        # A window reads whole rows at once, and by itself each row that its edges cut.
        messages = windows + np.round(2 * cut[piece] * (windows - 1)).astype(np.int64)
        some = elements > 0
        yield piece[some], run[some], elements[some], np.minimum(messages, elements)[some]


def _from_files(tensor: TensorPlan, runs: _Runs, staging_nbytes: int) -> Iterator[Flow]:
    width = dtypes.dtype(tensor.source_dtype).nbytes
    for copies in (tensor.copies, tensor.replicas):
        along = taken_along(copies.nests, staging_nbytes // width)
        for piece, run, elements, messages in _pairs(tensor, copies, runs):
            nbytes = (elements * along[piece]).astype(np.int64) * width
            yield Flow(runs.maker[run], np.full(len(run), FROM_FILES, np.int64), nbytes, messages)


def _from_memory(tensor: TensorPlan, runs: _Runs, holder: IntArray, staging_nbytes: int) -> Iterator[Flow]:
    """Yield what ranks read of a tensor: their own replica where they have one. Those without a twin are compared."""
    width = dtypes.dtype(tensor.source_dtype).nbytes
    num_ranks = int(max(holder.max(initial=0), runs.maker.max(initial=0))) + 1
    twin = twins(tensor) if len(tensor.replicas) else np.zeros(0, np.int64)
    has_twin = np.flatnonzero(twin >= 0)
    own = np.sort(twin[has_twin] * num_ranks + holder[tensor.replicas.record[has_twin]])
    along = taken_along(tensor.copies.nests, staging_nbytes // width)
    for piece, run, elements, messages in _pairs(tensor, tensor.copies, runs):
        maker, keys = runs.maker[run], piece * num_ranks + runs.maker[run]
        at = np.minimum(np.searchsorted(own, keys), max(len(own) - 1, 0))
        is_own = own[at] == keys if len(own) else np.zeros(len(keys), np.bool_)
        giver = np.where(is_own, maker, holder[tensor.copies.record[piece]])
        yield Flow(maker, giver, (elements * along[piece]).astype(np.int64) * width, messages)
    rest = np.flatnonzero(twin < 0)
    if len(rest):
        replicas = tensor.replicas
        left = Copies(replicas.rank[rest], replicas.record[rest], replicas.nests.take(rest))
        for piece, run, elements, messages in _pairs(tensor, left, runs):
            yield Flow(runs.maker[run], holder[left.record[piece]], elements * width, messages)


def _rest(plan: Plan, division: Division, staging_nbytes: int) -> Iterator[tuple[int, Flow]]:
    """Yield (round, reads) of what no copy needs of records with checksums: padding, above all."""
    records = plan.source.records
    is_alone = all(len(one.shares) == 1 for one in division.rounds)
    done = records.crc32 == NO_CHECKSUM
    wanted = np.zeros(len(records), np.int64)
    for number, one in enumerate(division.rounds):
        for index in one.files:
            touched = _add_wanted(plan.files[index], wanted, staging_nbytes)
            if is_alone:  # it ends file by file, and reads then what the next files may read once more
                yield number, _flow_of_rest(touched & ~done, wanted, records.nbytes, np.zeros_like(wanted))
                done |= touched
        if not is_alone:
            # Of several who read of a record none can tell what is left: the first rank reads it.
            taker = np.where(division.left_open, 0, division.first_rank)
            yield number, _flow_of_rest(~done & (division.last_round == number), wanted, records.nbytes, taker)


def _add_wanted(file: FilePlan, wanted: IntArray, staging_nbytes: int) -> npt.NDArray[np.bool_]:
    """Add by record the bytes that a file's reads check on their way; say of which records any are read.

    What is read with gaps between is not checked.
    """
    touched = np.zeros(len(wanted), np.bool_)
    for tensor in file.tensors:
        width = dtypes.dtype(tensor.source_dtype).nbytes
        for copies in (tensor.copies, tensor.replicas):
            is_dense = taken_along(copies.nests, staging_nbytes // width) == 1
            np.add.at(wanted, copies.record[is_dense], copies.nests.sizes[is_dense] * width)
            touched[copies.record] = True
    return touched


def _flow_of_rest(chosen: npt.NDArray[np.bool_], wanted: IntArray, nbytes: IntArray, taker: IntArray) -> Flow:
    rows = np.flatnonzero(chosen & (nbytes > wanted))
    ones = np.ones(len(rows), np.int64)
    return Flow(taker[rows], FROM_FILES * ones, nbytes[rows] - wanted[rows], ones)
