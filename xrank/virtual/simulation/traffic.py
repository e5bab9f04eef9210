"""The traffic of a plan, by rank and round; the rates of a machine; and the time that they predict."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from xrank import dtypes
from xrank.engine.casts import SMALLEST_DENSITY
from xrank.engine.planner import Copies, Plan, TensorPlan
from xrank.engine.replicas import find_twins
from xrank.engine.rounds import Division, Round
from xrank.engine.windows import WINDOW_NBYTES
from xrank.errors import UsageError, option
from xrank.layout import DeviceMesh
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.stored_model import NO_CHECKSUM
from xrank.virtual.link_model import Kind, LinkModel, read_words, unit_seconds

FROM_FILES = -1
"""Value of `Flow.giver` for reads from files instead of a rank's memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Groups of reads; row i is by one rank from one place. In a round, pairs of ranks are unique and sorted."""

    taker: IntArray
    """The reading rank."""
    giver: IntArray
    """The rank whose memory is read, possibly the reading one, or `FROM_FILES`."""
    nbytes: IntArray
    messages: IntArray
    """Number of reads."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundTraffic:
    """Traffic of one round, after which the ranks wait for the slowest; arrays are indexed by rank."""

    written_nbytes: IntArray
    read_nbytes: IntArray
    """Bytes read from files."""
    reads: IntArray
    """Number of read calls on files."""
    own_nbytes: IntArray
    """Bytes read from the rank's own memory."""
    exchange: Flow
    """Reads from other ranks' memory."""

    @property
    def taken_nbytes(self) -> IntArray:
        """Bytes that each rank reads from others' memory."""
        return _sum_by_rank(len(self.reads), self.exchange.taker, self.exchange.nbytes)

    @property
    def given_nbytes(self) -> IntArray:
        """Bytes that others read from each rank's memory."""
        return _sum_by_rank(len(self.reads), self.exchange.giver, self.exchange.nbytes)

    @property
    def messages(self) -> IntArray:
        """Number of reads of each rank from others' memory."""
        return _sum_by_rank(len(self.reads), self.exchange.taker, self.exchange.messages)


def _sum_by_rank(num_ranks: int, rank: IntArray, amount: IntArray) -> IntArray:
    found = np.zeros(num_ranks, np.int64)
    np.add.at(found, rank, amount)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class ConversionTraffic:
    """Traffic of a whole conversion."""

    rounds: tuple[RoundTraffic, ...]
    compared_nbytes: IntArray
    """Bytes of its own memory that each rank digests before the first round, to compare replicas."""
    is_each_read: bool
    """Whether messages are exact, as in a refit; otherwise they and bytes read between wanted ones are estimated."""

    @property
    def num_ranks(self) -> int:
        """Number of working ranks."""
        return len(self.compared_nbytes)

    def total(self, name: str) -> IntArray:
        """Return the sum of an array of `RoundTraffic` over all rounds, by rank."""
        return sum((getattr(one, name) for one in self.rounds), np.zeros_like(self.compared_nbytes))


def build_round(written_nbytes: IntArray, flows: Iterable[Flow]) -> RoundTraffic:
    """Build a round from the bytes written by each rank and all reads."""
    num_ranks = len(written_nbytes)
    none = np.zeros(0, np.int64)
    parts = [(flow.taker, flow.giver, flow.nbytes, flow.messages) for flow in flows]
    taker, giver, nbytes, messages = (np.concatenate([none, *c]) for c in zip(*(parts or [(none,) * 4]), strict=True))
    files, own = np.flatnonzero(giver == FROM_FILES), np.flatnonzero(giver == taker)
    others = np.flatnonzero((giver != FROM_FILES) & (giver != taker))
    # Sum the flows of each (taker, giver) pair: sort by a combined key, then reduce runs of equal keys.
    keys = taker[others] * num_ranks + giver[others]
    order = np.argsort(keys, kind="stable")
    keys, others = keys[order], others[order]
    firsts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    both = [np.add.reduceat(each[others], firsts) if len(firsts) else none for each in (nbytes, messages)]
    return RoundTraffic(
        written_nbytes,
        _sum_by_rank(num_ranks, taker[files], nbytes[files]),
        _sum_by_rank(num_ranks, taker[files], messages[files]),
        _sum_by_rank(num_ranks, taker[own], nbytes[own]),
        Flow(keys[firsts] // num_ranks, keys[firsts] % num_ranks, *both),
    )


_MAX_PAIRS = 1 << 21
"""Approximate number of (window, piece) pairs computed at once, to bound memory."""


def count_rounds(
    plan: Plan, division: Division, holder: IntArray | None, staging_nbytes: int
) -> tuple[RoundTraffic, ...]:
    """Count the traffic of a division's ranks per round.

    Bytes are exact for pieces without gaps in the source; for others, the bytes between wanted ones are estimated.
    Messages are estimated: one per window and piece, plus two per window edge that probably cuts a row. `holder` is the
    rank whose memory contains each record, None for files; `staging_nbytes` is the size of each worker's buffer.
    """
    rest = [] if holder is not None else list(_count_rest(plan, division, staging_nbytes))
    rounds = []
    for number, one in enumerate(division.rounds):
        flows = [flow for at, flow in rest if at == number]
        for index in one.files:
            runs = _Runs(one, index)
            for tensor in plan.files[index].tensors:
                if holder is None:
                    flows += _count_from_files(tensor, runs, staging_nbytes)
                else:
                    flows += _count_from_memory(tensor, runs, holder, staging_nbytes)
        written = np.zeros(len(one.shares), np.int64)
        for rank, share in enumerate(one.shares):
            for index, ranges in share.items():
                end = plan.files[index].output.nbytes
                written[rank] += sum(min(r.stop * WINDOW_NBYTES, end) - r.start * WINDOW_NBYTES for r in ranges)
        rounds.append(build_round(written, flows))
    return tuple(rounds)


def count_compared_nbytes(plan: Plan, holder: IntArray, num_ranks: int) -> IntArray:
    """Count the bytes that each rank digests of its own memory to compare replicas."""
    found = np.zeros(num_ranks, np.int64)
    for tensor in plan.tensors:
        if not len(tensor.replicas):
            continue
        width = dtypes.dtype(tensor.source_dtype).nbytes
        twin = find_twins(tensor)
        rows = np.flatnonzero(twin >= 0)
        rows = rows[tensor.replicas.record[rows] != tensor.copies.record[twin[rows]]]  # the same memory is equal
        first = np.zeros(len(tensor.copies), np.bool_)
        first[twin[rows]] = True
        for copies, chosen in ((tensor.replicas, rows), (tensor.copies, np.flatnonzero(first))):
            np.add.at(found, holder[copies.record[chosen]], copies.nests.sizes[chosen] * width)
    return found


def elements_below(nests: NestTable, rows: IntArray, address: IntArray) -> IntArray:
    """Count the elements of each row below the paired y address; rows may repeat."""
    loops = nests.loops[rows][:, :, [0, 2]]
    order = np.argsort(-loops[:, :, 1], axis=1, kind="stable")  # falling stride; single iterations come last
    loops = np.take_along_axis(loops, order[:, :, None], axis=1)
    left = address - nests.y[rows]
    is_below = left > 0
    found = np.zeros(len(rows), np.int64)
    for column in range(loops.shape[1]):
        # Like digits of a number: each stride, from the largest, contributes its full repetitions below the address.
        count, stride = loops[:, column, 0], np.maximum(loops[:, column, 1], 1)
        whole = np.minimum((left - 1) // stride, count - 1)
        found += whole * loops[:, column + 1 :, 0].prod(axis=1)
        left = left - whole * stride
    return np.where(is_below, found + 1, 0)


def compute_read_overhead(nests: NestTable, staging_elements: int) -> npt.NDArray[np.float64]:
    """Return, for each nest, the elements read per wanted element, by the rule of `xrank.engine.casts`."""
    loops = nests.loops[:, :, :2]
    order = np.argsort(np.where(loops[:, :, 0] > 1, loops[:, :, 1], 0), axis=1, kind="stable")  # inner loops first
    loops = np.take_along_axis(loops, order[:, :, None], axis=1)
    span, wanted = np.ones(len(nests), np.int64), np.ones(len(nests), np.int64)
    goes_on = np.ones(len(nests), np.bool_)
    for column in range(loops.shape[1]):
        count, stride = loops[:, column, 0], np.maximum(loops[:, column, 1], 1)
        fits = np.minimum(count, np.maximum(staging_elements - span, 0) // stride + 1)
        whole = (fits - 1) * stride + span
        joins = goes_on & (whole <= SMALLEST_DENSITY * wanted * fits)
        # A loop joins the span while reading its gaps costs less than separate reads, as the executor decides.
        span, wanted = np.where(joins, whole, span), np.where(joins, wanted * fits, wanted)
        goes_on = joins & (fits == count)
    return span / wanted


class _Runs:
    """A file's windows as runs of adjacent windows of one rank, in ascending order."""

    def __init__(self, one: Round, index: int) -> None:
        found = sorted(
            (each.start, each.stop, rank) for rank, share in enumerate(one.shares) for each in share.get(index, ())
        )
        self.start, self.stop, self.maker = np.array(found, np.int64).reshape(-1, 3).T


def _pairs(tensor: TensorPlan, copies: Copies, runs: _Runs) -> Iterator[tuple[IntArray, IntArray, IntArray, IntArray]]:
    """Yield arrays (piece, run, elements, messages) of all overlaps of pieces and runs, in several batches."""
    output = tensor.output
    width = dtypes.dtype(output.dtype).nbytes
    first = (output.offset + copies.nests.y * width) // WINDOW_NBYTES
    last = (output.offset + copies.nests.y_ends * width - 1) // WINDOW_NBYTES
    low, high = np.searchsorted(runs.stop, first, "right"), np.searchsorted(runs.start, last, "right")
    counts = np.maximum(high - low, 0)
    ends = np.cumsum(counts)
    reach = copies.nests.y_ends - copies.nests.y
    # Probability that a window edge cuts a row: 0 for a dense piece, otherwise its density.
    cut = np.where(reach == copies.nests.sizes, 0.0, copies.nests.sizes / np.maximum(reach, 1))
    begin = 0
    while begin < len(copies):
        # Batches bound the memory of the pair arrays.
        end = max(begin + 1, int(np.searchsorted(ends, (ends[begin - 1] if begin else 0) + _MAX_PAIRS, "right")))
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
        # A window reads its whole rows at once, but each row that its edges cut separately.
        messages = windows + np.round(2 * cut[piece] * (windows - 1)).astype(np.int64)
        some = elements > 0
        yield piece[some], run[some], elements[some], np.minimum(messages, elements)[some]


def _count_from_files(tensor: TensorPlan, runs: _Runs, staging_nbytes: int) -> Iterator[Flow]:
    width = dtypes.dtype(tensor.source_dtype).nbytes
    for copies in (tensor.copies, tensor.replicas):
        along = compute_read_overhead(copies.nests, staging_nbytes // width)
        for piece, run, elements, messages in _pairs(tensor, copies, runs):
            nbytes = (elements * along[piece]).astype(np.int64) * width
            yield Flow(runs.maker[run], np.full(len(run), FROM_FILES, np.int64), nbytes, messages)


def _count_from_memory(tensor: TensorPlan, runs: _Runs, holder: IntArray, staging_nbytes: int) -> Iterator[Flow]:
    """Yield the reads from memory: a rank's own replica if it has one; replicas without a twin only for comparison."""
    width = dtypes.dtype(tensor.source_dtype).nbytes
    num_ranks = int(max(holder.max(initial=0), runs.maker.max(initial=0))) + 1
    twin = find_twins(tensor) if len(tensor.replicas) else np.zeros(0, np.int64)
    has_twin = np.flatnonzero(twin >= 0)
    # Sorted keys (piece, rank) of replicas: one search finds the ranks that have their own.
    own = np.sort(twin[has_twin] * num_ranks + holder[tensor.replicas.record[has_twin]])
    along = compute_read_overhead(tensor.copies.nests, staging_nbytes // width)
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


def _count_rest(plan: Plan, division: Division, staging_nbytes: int) -> Iterator[tuple[int, Flow]]:
    """Yield (round, reads) of bytes that no copy needs, mostly padding, in records with checksums."""
    records = plan.source.records
    is_alone = all(len(one.shares) == 1 for one in division.rounds)
    done = records.crc32 == NO_CHECKSUM
    wanted = np.zeros(len(records), np.int64)
    for number, one in enumerate(division.rounds):
        for index in one.files:
            touched = np.zeros(len(records), np.bool_)
            for tensor in plan.files[index].tensors:
                width = dtypes.dtype(tensor.source_dtype).nbytes
                for copies in (tensor.copies, tensor.replicas):
                    # Reads across gaps are not checksummed.
                    is_dense = compute_read_overhead(copies.nests, staging_nbytes // width) == 1
                    np.add.at(wanted, copies.record[is_dense], copies.nests.sizes[is_dense] * width)
                    touched[copies.record] = True
            if is_alone:  # it finishes each file alone, so later files may read the same bytes again
                yield number, _flow_of_rest(touched & ~done, wanted, records.nbytes, np.zeros_like(wanted))
                done |= touched
        if not is_alone:
            # If several ranks read a record, none of them knows the remaining bytes, so the first rank reads them.
            taker = np.where(division.left_open, 0, division.first_rank)
            yield number, _flow_of_rest(~done & (division.last_round == number), wanted, records.nbytes, taker)


def _flow_of_rest(chosen: npt.NDArray[np.bool_], wanted: IntArray, nbytes: IntArray, taker: IntArray) -> Flow:
    rows = np.flatnonzero(chosen & (nbytes > wanted))
    ones = np.ones(len(rows), np.int64)
    return Flow(taker[rows], FROM_FILES * ones, nbytes[rows] - wanted[rows], ones)


NO_LIMIT = 1e18
"""Bytes per second of work that is known to be free; an unknown rate is None, or no bandwidth."""

_RATES = ("read", "write", "memory", "all_read", "all_write")
_KINDS: dict[str, Kind] = {"start": "seconds", **dict.fromkeys(_RATES, "bandwidth")}


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates in bytes per second, and times in seconds; None is an unknown rate."""

    read: float | None = None
    """Reading from files, by one rank."""
    write: float | None = None
    """Writing to files, by one rank, including the sync."""
    memory: float | None = None
    """Copying or digesting a rank's own memory."""
    all_read: float | None = None
    """Reading from files, by all ranks together; None means no common limit."""
    all_write: float | None = None
    link: LinkModel = field(default_factory=LinkModel)
    """Links between ranks; latency applies to each read of another's memory, and an infinite bandwidth is unknown."""
    start_seconds: float = 0.0
    """Time before and after the work: starting, meeting, planning, and making the output visible."""

    def to_dict(self) -> dict[str, Any]:
        """Return the rates for JSON."""

        def finite(rate: float | None) -> float | None:
            return None if rate is None or rate >= NO_LIMIT else rate

        def link_facts(latency: float, bandwidth: float) -> dict[str, Any]:
            return {"latency_seconds": latency, "bandwidth_nbytes_per_second": finite(bandwidth)}

        return {
            **{f"{name}_nbytes_per_second": finite(getattr(self, name)) for name in _RATES},
            **link_facts(*self.link.link()),
            "axes": {axis: link_facts(*link) for axis, link in self.link.axes.items()},
            "start_seconds": self.start_seconds,
        }


def read_rates(source: str | os.PathLike[str]) -> Rates:
    """Read rates: words of the form name=value, or the path of a TOML file with the same.

    ``read write memory all_read all_write start`` as in `Rates`; ``bandwidth latency`` of a link, and
    ``tp.bandwidth tp.latency`` along the axis ``tp``, as in `LinkModel.read`.

    >>> read_rates("read=2GB/s start=500ms").start_seconds
    0.5
    """
    try:
        values, general, axes = read_words(source, _KINDS)
    except UsageError as error:
        error.about(next_step=f"correct {option('link')}, or the file it names")
        raise
    rates = {name: values.get(name) for name in _RATES}
    return Rates(**rates, link=LinkModel(*general, axes), start_seconds=values.get("start", 0.0))


FloatArray: TypeAlias = npt.NDArray[np.float64]

PARTS = ("compare", "read", "exchange", "write")

ASSUMED = (
    "a rank's reads, exchanges and writes follow one another; ranks work at once, and wait each round for the slowest",
    "one rank's links and files slow no other's, but for all_read and all_write, which ranks share evenly",
    "every byte is read anew, and written once: no cache is warm, and no extent is shared",
)


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Predicted time of a conversion."""

    parts: dict[str, FloatArray]
    """Seconds of each rank by name of `PARTS`; the rest of `seconds` is waiting."""
    start_seconds: float
    seconds: float
    """Seconds from the start of the first rank to the end of the last."""

    @property
    def busy(self) -> FloatArray:
        """Seconds that each rank works, without its waiting."""
        return sum((self.parts[name] for name in PARTS), np.zeros_like(self.parts[PARTS[0]]))


def predict(traffic: ConversionTraffic, rates: Rates, mesh: DeviceMesh | None) -> Prediction:
    """Predict the time of traffic; the mesh of the ranks is for rates along its axes."""
    is_exchanged = any(len(one.exchange.taker) for one in traffic.rounds)
    places = _axis_places(rates, mesh, traffic.num_ranks) if is_exchanged else {}
    parts = {name: np.zeros(traffic.num_ranks) for name in PARTS}
    parts["compare"] += _seconds("memory", traffic.compared_nbytes, rates.memory)
    total = rates.start_seconds + float(parts["compare"].max(initial=0.0))
    for one in traffic.rounds:
        made = {
            "read": _seconds("read", one.read_nbytes, _limit_rate(rates.read, rates.all_read, one.read_nbytes))
            + _seconds("memory", one.own_nbytes, rates.memory),
            "exchange": _exchange_seconds(one.exchange, rates.link, places, traffic.num_ranks),
            "write": _seconds(
                "write", one.written_nbytes, _limit_rate(rates.write, rates.all_write, one.written_nbytes)
            ),
        }
        for name, seconds in made.items():
            parts[name] += seconds
        # The ranks wait for the slowest at the end of a round.
        total += float(sum(made.values(), np.zeros(traffic.num_ranks)).max(initial=0.0))
    return Prediction(parts, rates.start_seconds, total)


def _limit_rate(own: float | None, of_all: float | None, nbytes: IntArray) -> float | None:
    """Return the rate of one rank; active ranks share the common rate evenly."""
    if of_all is None:
        return own
    each = of_all / max(1, int(np.count_nonzero(nbytes)))
    return each if own is None else min(own, each)


def _seconds(name: str, nbytes: IntArray, rate: float | None) -> FloatArray:
    if rate is None:
        if nbytes.any():
            raise _unknown_rate(name)
        return np.zeros(len(nbytes))
    return nbytes / rate


def _unknown_rate(name: str) -> UsageError:
    return UsageError(
        f"{option('link')} lacks {name}, which this operation needs",
        got=f"rates without {name}",
        want=f"{name}=2GB/s, or whatever the machine does",
        next_step=f"add {name} to {option('link')}; or omit it, for only bytes and messages",
    )


def _axis_places(rates: Rates, mesh: DeviceMesh | None, num_ranks: int) -> dict[str, IntArray]:
    """Return each rank's place along the axes of the mesh, if links along axes have rates of their own."""
    for axis in rates.link.axes:
        if mesh is None or axis not in mesh.axis_names:
            raise UsageError(
                f"{option('link')} has the axis {axis!r}, but the mesh of the ranks does not",
                got=f"{axis}.bandwidth or {axis}.latency",
                want="no axis, as no mesh is known" if mesh is None else f"an axis of {mesh.grid!r}",
                next_step=f"correct the axis in {option('link')}, or leave it out",
            )
    places: dict[str, IntArray] = {}
    if mesh is not None and rates.link.axes:
        at = np.unravel_index(np.arange(mesh.size), mesh.shape)
        for axis, along in zip(mesh.axis_names, at, strict=True):
            places[axis] = np.zeros(num_ranks, np.int64)
            places[axis][int_array(mesh.ranks)] = along
    return places


def _exchange_seconds(exchange: Flow, link: LinkModel, places: dict[str, IntArray], num_ranks: int) -> FloatArray:
    """Return each rank's seconds: the longer of its own reads and of others' reads from it."""
    a_byte, a_message = np.zeros(len(exchange.taker)), np.zeros(len(exchange.taker))
    chosen = {axis: at[exchange.taker] != at[exchange.giver] for axis, at in places.items()}
    for axis, along in chosen.items() or [("", np.ones(len(exchange.taker), np.bool_))]:
        if not along.any():
            continue
        latency, bandwidth = link.link((axis,))
        if bandwidth == inf:
            raise _unknown_rate("bandwidth")
        # If ranks differ along several axes, the slowest counts, as in `LinkModel.link`.
        a_byte[along] = np.maximum(a_byte[along], 1 / bandwidth)
        a_message[along] = np.maximum(a_message[along], latency)
    moved = exchange.nbytes * a_byte
    taken = np.bincount(exchange.taker, moved + exchange.messages * a_message, num_ranks)
    # A rank serves others while it reads, so the longer of both counts.
    return np.maximum(taken, np.bincount(exchange.giver, moved, num_ranks))


class Sample(NamedTuple):
    """A measured conversion."""

    traffic: ConversionTraffic
    seconds: float


def fit_rates(samples: Sequence[Sample]) -> Rates:
    """Fit rates to the samples' times by least squares, with equal weights.

    A rate that no sample exercises is unknown; a rate that the samples do not need has no limit. If two kinds of work
    always occur in one proportion, their rates are valid only for work in that proportion.
    """
    if not samples or not all(sample.seconds > 0 for sample in samples):
        raise UsageError("fitting rates needs measured times", want="samples of more than 0 seconds")
    seconds = np.array([sample.seconds for sample in samples])
    # Dividing by the seconds gives samples equal weights in the least squares.
    amounts = []
    for traffic, _ in samples:
        # The busiest ranks' amounts, round by round: starts, from memory, from files, written, exchanged, messages.
        rounds = traffic.rounds
        kinds = (
            [traffic.compared_nbytes, *(one.own_nbytes for one in rounds)],
            [one.read_nbytes for one in rounds],
            [one.written_nbytes for one in rounds],
            [np.maximum(one.taken_nbytes, one.given_nbytes) for one in rounds],
            [one.messages for one in rounds],
        )
        amounts.append([1.0, *(float(sum(int(each.max(initial=0)) for each in kind)) for kind in kinds)])
    columns = np.array(amounts) / seconds[:, None]
    is_used = columns.any(axis=0)
    start, *others, latency = map(float, unit_seconds(columns))
    memory, read, write, bandwidth = (
        (1 / one if one else NO_LIMIT) if known else None for one, known in zip(others, is_used[1:5], strict=True)
    )
    # An infinite bandwidth means unknown in `Rates`.
    link = LinkModel(latency, inf if bandwidth is None else bandwidth)
    return Rates(read=read, write=write, memory=memory, link=link, start_seconds=start)
