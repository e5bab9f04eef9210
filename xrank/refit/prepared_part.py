"""Pieces of a tensor as rectangles of a matrix, whose elements lie at even distances in a record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from xrank import dtypes
from xrank.errors import UsageError
from xrank.layout.nest_table import IntArray, NestTable
from xrank.lending.lent_model import LentModel
from xrank.making.whole_tensors import WholeTensors
from xrank.plan.executor import Budget
from xrank.plan.planner import Copies, TensorPlan
from xrank.ranks.loans import MemoryOffer, PeerSource
from xrank.ranks.team import Team
from xrank.ranks.tensor_bytes import LocalBytes, local_bytes
from xrank.recipes.options import default_workers
from xrank.recipes.quantization import BlockGrid, Quantization
from xrank.recipes.transforms import TransformedTensor, Transforms, apply_transform
from xrank.refit.directory import MADE

if TYPE_CHECKING:
    import torch


_Loop = tuple[int, int, int]
"""Count, stride in the record, and stride in the matrix, as of a nest."""


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """Rows and columns at even distances; element (i, j) is at ``x + i * x_row + j * x_column`` of the record."""

    x: int
    row: int
    num_rows: int
    row_step: int
    x_row: int
    column: int
    num_columns: int
    column_step: int
    x_column: int


def cut_matrix_tiles(x: int, y: int, loops: Sequence[_Loop], columns: int) -> Iterator[MatrixTile]:
    """Yield the rectangles of a nest from a record (x) to a row-major matrix (y) of so many columns."""
    across = [loop for loop in loops if loop[2] % columns]
    down = [loop for loop in loops if not loop[2] % columns]
    column = y % columns
    if column + sum((n - 1) * ys for n, _, ys in across) < columns:
        yield from _make_tiles(x, y, down, across, columns)
    elif len(across) == 1 and columns % across[0][2] == 0:
        yield from _cut_at_rows(x, y, down, across[0], columns)
    else:  # loops that cross the ends of rows in another way
        n, xs, ys = across[0]
        for i in range(n):
            yield from cut_matrix_tiles(x + i * xs, y + i * ys, [*down, *across[1:]], columns)


def _cut_at_rows(x: int, y: int, down: Sequence[_Loop], run: _Loop, columns: int) -> Iterator[MatrixTile]:
    """Yield the rectangles of a run over several rows: its first row, whole ones, and its last row."""
    n, xs, ys = run
    width = columns // ys
    head = min(n, -(-(columns - y % columns) // ys)) % width
    middle, tail = divmod(n - head, width)
    if head:
        yield from _make_tiles(x, y, down, [(head, xs, ys)], columns)
    x, y = x + head * xs, y + head * ys
    if middle:
        yield from _make_tiles(x, y, [(middle, width * xs, columns), *down], [(width, xs, ys)], columns)
    if tail:
        x, y = x + middle * width * xs, y + middle * columns
        yield from _make_tiles(x, y, down, [(tail, xs, ys)], columns)


def _make_tiles(x: int, y: int, down: Sequence[_Loop], across: Sequence[_Loop], columns: int) -> Iterator[MatrixTile]:
    """Yield one tile for each step of all loops but the longest one in either direction."""
    row_loop, rows = _take_longest(down)
    column_loop, others = _take_longest(across)
    for at in product(*(range(n) for n, _, _ in (*rows, *others))):
        steps = list(zip(at, (*rows, *others), strict=True))
        here, there = x + sum(i * xs for i, (_, xs, _) in steps), y + sum(i * ys for i, (_, _, ys) in steps)
        yield MatrixTile(
            here,
            there // columns,
            row_loop[0],
            row_loop[2] // columns,
            row_loop[1],
            there % columns,
            column_loop[0],
            column_loop[2],
            column_loop[1],
        )


def _take_longest(loops: Sequence[_Loop]) -> tuple[_Loop, list[_Loop]]:
    if not loops:
        return (1, 0, 0), []
    at = max(range(len(loops)), key=lambda i: loops[i][0])
    return loops[at], [loop for i, loop in enumerate(loops) if i != at]


_CHUNK_ELEMENTS = 1 << 19
"""Elements that are measured or encoded at once."""

Maxima: TypeAlias = npt.NDArray[np.float32]
Box: TypeAlias = tuple[int, int, int, int]
"""First and end row, first and end column of blocks."""
ReadMaxima: TypeAlias = Callable[[int, int, int], Maxima]
"""Position of a rank, first number and count in its maxima -> the numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A tensor of which this rank quantises a part."""

    name: str
    grid: BlockGrid
    box: Box
    """Blocks that have elements on this rank, and blocks between them."""
    start: int
    """Position of their maxima in this rank's."""
    needed: Box
    """Blocks whose scales this rank needs."""
    shared: tuple[tuple[int, int, Box], ...]
    """Position, start of its maxima, and blocks of each other rank that has elements of these."""
    pieces: tuple[tuple[int, MatrixTile], ...]
    """View of this rank, and a rectangle in it."""
    owns_scales: bool
    """Whether this rank lends the scales of the whole tensor."""


def plan_quantized(
    tensors: Sequence[TensorPlan], quantization: Quantization, holder: IntArray, position: int
) -> tuple[list[QuantizedTensor], int]:
    """Return the quantised tensors of which a rank has a part, and the number of its maxima.

    Args:
        tensors: the plans of all of the model's tensors; a plan covers its whole tensor.
        quantization: the quantization.
        holder: record -> position of the rank that holds it.
        position: this rank's.

    Raises:
        UsageError: a tensor's values are changed under its Hugging Face name, or it is tied to another one.
    """
    filled = np.zeros(max(int(holder.max(initial=0)), position) + 1, np.int64)
    first = int(np.searchsorted(holder, position))
    found = []
    for one in tensors:
        name, shape = one.output.name, one.output.shape
        if not quantization.applies_to(name, one.source_dtype, shape):
            continue
        _check_plain(one)
        grid = quantization.find_grid(shape)
        holders, boxes = _find_boxes([one.copies, one.replicas], holder, grid)
        sizes = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
        starts = filled[holders]
        filled[holders] += sizes
        at = np.flatnonzero(holders == position)
        if not len(at):
            continue
        owner = int(holders[crc32(name.encode()) % len(holders)])
        box = _as_box(boxes[at[0]])
        needed = (0, grid.shape[0], 0, grid.shape[1]) if owner == position else box
        primary = set(np.unique(holder[one.copies.record]).tolist()) - {position}
        others = [
            (int(other), int(start), _as_box(its))
            for other, start, its in zip(holders, starts, boxes, strict=True)
            if int(other) in primary and _meet(needed, _as_box(its))
        ]
        pieces = _cut_pieces(one, holder, position, first, grid.columns)
        found.append(
            QuantizedTensor(
                name, grid, box, int(starts[at[0]]), needed, tuple(others), tuple(pieces), owner == position
            )
        )
    return found, int(filled[position])


class QuantizedPart:
    """Measures and encodes this rank's elements at each step.

    Args:
        quantization: the quantization.
        tensors: of `plan_quantized`.
        maxima: this rank's maxima, which the other ranks read.
        views: this rank's tensors.
        codes: view -> its quantised elements, which are lent.
        scales: name -> the scales of a whole tensor, which are lent; of the tensors that own them.
    """

    def __init__(
        self,
        quantization: Quantization,
        tensors: Sequence[QuantizedTensor],
        maxima: Maxima,
        views: Sequence[torch.Tensor],
        codes: Mapping[int, torch.Tensor],
        scales: Mapping[str, torch.Tensor],
    ) -> None:
        self._quantization, self._tensors, self._maxima = quantization, tensors, maxima
        self._views, self._codes, self._scales = views, codes, scales

    def measure(self) -> None:
        """Fill the maxima from the present values."""
        self._maxima[:] = 0
        for tensor in self._tensors:
            into = _select(self._maxima, tensor.start, tensor.box)
            for view, tile in tensor.pieces:
                for part in _cut_rows(tile):
                    rows, columns = _find_blocks(part, tensor.grid)
                    _raise_maxima(into, tensor.box, rows, columns, _take(self._views[view], part))

    def encode(self, read: ReadMaxima) -> None:
        """Fill the codes and scales from the present values and all ranks' maxima.

        Raises:
            ContradictionError: a value is not finite.
        """
        import torch

        for tensor in self._tensors:
            maxima = torch.from_numpy(self._join_maxima(tensor, read))
            scales, factors = self._quantization.find_scales(tensor.name, maxima)
            if tensor.owns_scales:
                lent = self._scales[tensor.name]
                lent.copy_(scales.view(lent.shape))
            for view, tile in tensor.pieces:
                for part in _cut_rows(tile):
                    rows, columns = _find_blocks(part, tensor.grid)
                    at = (
                        torch.from_numpy(rows - tensor.needed[0])[:, None],
                        torch.from_numpy(columns - tensor.needed[2]),
                    )
                    values = _take(self._views[view], part)
                    codes = self._quantization.encode(values, factors[at].to(values.device))
                    _take(self._codes[view], part).copy_(codes)

    def _join_maxima(self, tensor: QuantizedTensor, read: ReadMaxima) -> Maxima:
        """Return the maxima of the blocks that the tensor needs, over all ranks."""
        r0, r1, c0, c1 = tensor.needed
        joined = np.zeros((r1 - r0, c1 - c0), np.float32)
        _raise_box(joined, tensor.needed, _select(self._maxima, tensor.start, tensor.box), tensor.box)
        for position, start, box in tensor.shared:
            theirs = read(position, start, _count(box)).reshape(box[1] - box[0], box[3] - box[2])
            _raise_box(joined, tensor.needed, theirs, box)
        return joined


def _check_plain(one: TensorPlan) -> None:
    if one.changed or one.update is not None or one.tied:
        raise UsageError(
            f"{one.output.name} cannot be quantised part by part",
            tensor=one.output.name,
            got="a tensor that is tied to another one" if one.tied else "a recipe that changes its values",
            want="a tensor whose values are those of the ranks",
            next_step="name it in keep of the Quantization, or give a function as transform=, which gets whole tensors",
        )


def _find_boxes(parts: Sequence[Copies], holder: IntArray, grid: BlockGrid) -> tuple[IntArray, IntArray]:
    """Return the positions of the ranks that hold elements, and the blocks between the first and the last of each."""
    owners = np.concatenate([holder[part.record] for part in parts])
    boxes = np.concatenate([_find_nest_boxes(part.nests, grid) for part in parts])
    holders, at = np.unique(owners, return_inverse=True)
    found = np.empty((len(holders), 4), np.int64)
    found[:, (0, 2)], found[:, (1, 3)] = np.iinfo(np.int64).max, 0
    for side, ufunc in enumerate((np.minimum, np.maximum, np.minimum, np.maximum)):
        column = found[:, side].copy()
        ufunc.at(column, at, boxes[:, side])
        found[:, side] = column
    return holders, found


def _find_nest_boxes(nests: NestTable, grid: BlockGrid) -> IntArray:
    """Return first and end row, first and end column of the blocks of each nest."""
    n, ys = nests.loops[:, :, 0], nests.loops[:, :, 2]
    column = nests.y % grid.columns
    across = np.where(ys % grid.columns != 0, (n - 1) * ys, 0).sum(axis=1)
    last = nests.y + ((n - 1) * ys).sum(axis=1)
    is_inside = column + across < grid.columns
    return np.stack(
        (
            _row_blocks(nests.y // grid.columns, grid),
            _row_blocks(last // grid.columns, grid) + 1,
            np.where(is_inside, column, 0) // grid.block_columns,
            np.where(is_inside, column + across, grid.columns - 1) // grid.block_columns + 1,
        ),
        axis=1,
    )


def _cut_pieces(
    one: TensorPlan, holder: IntArray, position: int, first: int, columns: int
) -> Iterator[tuple[int, MatrixTile]]:
    for part in (one.copies, one.replicas):
        for row in np.flatnonzero(holder[part.record] == position).tolist():
            nest = part.nests[row]
            for tile in cut_matrix_tiles(nest.x, nest.y, nest.loops, columns):
                yield int(part.record[row]) - first, tile


def _cut_rows(tile: MatrixTile) -> Iterator[MatrixTile]:
    """Yield the tile in parts of a bounded number of elements."""
    step = max(1, _CHUNK_ELEMENTS // tile.num_columns)
    for low in range(0, tile.num_rows, step):
        yield replace(
            tile,
            x=tile.x + low * tile.x_row,
            row=tile.row + low * tile.row_step,
            num_rows=min(step, tile.num_rows - low),
        )


def _find_blocks(tile: MatrixTile, grid: BlockGrid) -> tuple[IntArray, IntArray]:
    """Return the row of blocks of each row, and the column of blocks of each column."""
    rows = tile.row + np.arange(tile.num_rows, dtype=np.int64) * tile.row_step
    columns = tile.column + np.arange(tile.num_columns, dtype=np.int64) * tile.column_step
    return _row_blocks(rows, grid), columns // grid.block_columns


def _row_blocks(rows: IntArray, grid: BlockGrid) -> IntArray:
    matrix: IntArray = rows // grid.rows
    row: IntArray = rows % grid.rows
    return matrix * grid.block_rows_of_matrix + row // grid.block_rows


def _take(tensor: torch.Tensor, tile: MatrixTile) -> torch.Tensor:
    """Return the elements of a tile, in place if the tensor's are in a row."""
    flat = tensor.contiguous()
    return flat.as_strided(
        (tile.num_rows, tile.num_columns), (tile.x_row, tile.x_column), flat.storage_offset() + tile.x
    )


def _raise_maxima(into: Maxima, box: Box, rows: IntArray, columns: IntArray, values: torch.Tensor) -> None:
    """Raise maxima of blocks to the magnitudes of values, whose blocks are these."""
    import torch

    row_starts, column_starts = _run_starts(rows), _run_starts(columns)
    ends = [*column_starts[1:], len(columns)]
    by_block = [
        values[:, low:high].abs().amax(dim=1) for low, high in zip(column_starts, ends, strict=True)
    ]  # of rows, before those of a block of rows are joined
    largest = torch.stack(by_block, dim=1).float().cpu().numpy()
    largest = np.maximum.reduceat(largest, row_starts, axis=0)
    at = np.ix_(rows[row_starts] - box[0], columns[column_starts] - box[2])
    into[at] = np.maximum(into[at], largest)


def _run_starts(blocks: IntArray) -> list[int]:
    """Return the first index of each run of equal numbers."""
    return [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist()]


def _raise_box(into: Maxima, region: Box, values: Maxima, box: Box) -> None:
    """Raise maxima of a region of blocks to those of a box, where they meet."""
    r0, r1 = max(region[0], box[0]), min(region[1], box[1])
    c0, c1 = max(region[2], box[2]), min(region[3], box[3])
    if r0 < r1 and c0 < c1:
        part = into[r0 - region[0] : r1 - region[0], c0 - region[2] : c1 - region[2]]
        np.maximum(part, values[r0 - box[0] : r1 - box[0], c0 - box[2] : c1 - box[2]], out=part)


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def _count(box: Box) -> int:
    return (box[1] - box[0]) * (box[3] - box[2])


def _as_box(row: IntArray) -> Box:
    return int(row[0]), int(row[1]), int(row[2]), int(row[3])


def _select(maxima: Maxima, start: int, box: Box) -> Maxima:
    return maxima[start : start + _count(box)].reshape(box[1] - box[0], box[3] - box[2])


_BUFFERS_NBYTES = 16_000_000


class TransformedPart:
    """Transforms this rank's share of the tensors at each step.

    Args:
        transforms: the transforms of the whole model.
        own: those of this rank.
        outputs: name -> tensor that receives the output, and is lent.
    """

    def __init__(self, transforms: Transforms, own: list[TransformedTensor], outputs: dict[str, torch.Tensor]) -> None:
        self._transforms, self._own, self._outputs = transforms, own, outputs

    def fill(self, source: PeerSource) -> None:
        """Fill the outputs from all ranks' present values.

        Args:
            source: reads the tensors of all ranks in place.

        Raises:
            XrankError: as `apply_transform`, or a rank has failed.
        """
        budget = Budget.from_memory(_BUFFERS_NBYTES, default_workers())
        whole = WholeTensors(self._transforms.sources, source, budget)
        for tensor in self._own:
            (made,) = whole.make([tensor.number])
            results = apply_transform(self._transforms.function, tensor.name, made, tensor.outputs)
            for output, result in zip(tensor.outputs, results, strict=True):
                self._outputs[output.name].copy_(result.detach())


def list_own(transforms: Transforms, position: int, size: int) -> list[TransformedTensor]:
    """Return the tensors that the rank at a position transforms: about equal bytes for each rank."""
    loads = [0] * size
    own = []
    for tensor in sorted(transforms.tensors, key=lambda one: -transforms.sources.files[one.number].output.nbytes):
        least = loads.index(min(loads))
        loads[least] += transforms.sources.files[tensor.number].output.nbytes
        if least == position:
            own.append(tensor)
    return own


def find_dropped(transforms: Transforms, names: list[str], ties: dict[str, str]) -> Iterator[str]:
    """Yield the names of tensors that a transform replaces or leaves out.

    Args:
        transforms: the transforms.
        names: all tensors of the model.
        ties: tied name -> name.
    """
    replaced = {tensor.name for tensor in transforms.tensors}
    copied = set(transforms.order) - replaced
    for name in names:
        if name not in copied and ties.get(name) not in copied:
            yield name


_SILENT_SECONDS = 1.5
_GRACE_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class PreparedPart:
    """A rank's tensors as they are lent; see `prepare_part`. All ranks `measure`, and then all ranks `fill`."""

    description: str
    """As `LocalModel.describe`, of the tensors that are lent."""
    views: list[LocalBytes]
    """Bytes of the tensors; the last ones are those of the rank's maxima."""
    dropped: tuple[str, ...]
    """Names, as Hugging Face's, of tensors that engines do not get. They are the same on all ranks."""
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Own tensor, and the copy or cast that is lent."""
    quantized: QuantizedPart | None
    transformed: TransformedPart | None
    own_source: PeerSource
    """Reads all ranks' own tensors in place."""
    maxima_source: PeerSource | None = None
    """Reads all ranks' maxima: record i is of the rank at position i."""

    @property
    def is_shared(self) -> bool:
        """Whether ranks read each other's memory for it."""
        return self.quantized is not None or self.transformed is not None

    def connect(
        self, own: MemoryOffer, team: Team, offers: Sequence[Mapping[str, Any]], check: Callable[[], object]
    ) -> None:
        """Make the source of the ranks' maxima, once all ranks have described their offers.

        Args:
            own: this rank's offer.
            team: the trainer's ranks.
            offers: by position, the ranks' offers, whose last views are the maxima, the outcome and the status.
            check: raises if a rank has failed.
        """
        self.maxima_source = PeerSource(
            own,
            team.rank,
            {rank: dict(offer) for rank, offer in zip(team.ranks, offers, strict=True)},
            list(team.ranks),
            [len(offer["views"]) - 3 for offer in offers],
            check=check,
            timeout_seconds=_SILENT_SECONDS,
            grace_seconds=_GRACE_SECONDS,
        )

    def measure(self) -> None:
        """Measure the maxima of the present values, for the other ranks."""
        if self.quantized is not None:
            self.quantized.measure()

    def fill(self) -> None:
        """Fill everything that is lent from the present values.

        Raises:
            ContradictionError: a value that is to be quantised is not finite.
            XrankError: of the caller's function, or a rank has failed.
        """
        for tensor, copy in self.copies:
            copy.copy_(tensor)
        if self.quantized is not None:
            self.quantized.encode(self._read_maxima)
        if self.transformed is not None:
            self.transformed.fill(self.own_source)

    def close(self) -> None:
        """Close all connections to other ranks."""
        self.own_source.close()
        if self.maxima_source is not None:
            self.maxima_source.close()

    def _read_maxima(self, position: int, start: int, count: int) -> Maxima:
        assert self.maxima_source is not None
        numbers = np.empty(count, np.float32)
        self.maxima_source.read_into(position, 4 * start, numbers.view(np.uint8).data)
        return numbers


def prepare_part(
    lent: LentModel,
    tensors: Sequence[torch.Tensor],
    quantization: Quantization | None,
    team: Team,
    *,
    is_snapshot: bool,
) -> PreparedPart:
    """Return a rank's tensors in the form in which they are lent; nothing is filled yet.

    Args:
        lent: the model, with the plan of its tensors after casts and transforms.
        tensors: this rank's tensors in place, by view.
        quantization: of matrices, part by part.
        team: the trainer's ranks.
        is_snapshot: whether tensors that keep their form are copied, too.

    Raises:
        UsageError: a tensor cannot be quantised part by part, or a made tensor has the name of another one.
    """
    import torch

    gather, position = lent.gather, team.position
    transforms = gather.transforms
    apart = set() if transforms is None else transforms.files
    plans = [one for i, file in enumerate(gather.plan.files) if i not in apart for one in file.tensors]
    own_tensors = json.loads(lent.parts[position]["model"])["tensors"]
    forms = _choose_forms(lent, plans, quantization, {name: view for name, (_, _, view) in own_tensors.items()})

    lent_views: list[torch.Tensor] = []
    copies, codes = [], {}
    for view, tensor in enumerate(tensors):
        form = forms.get(view, "")
        if form is None or (form == "" and not is_snapshot):
            lent_views.append(tensor)
            continue
        kind = tensor.dtype if form == "" else getattr(torch, dtypes.dtype(form).torch_name)
        lent_views.append(torch.zeros(tensor.shape, dtype=kind, device="cpu"))
        if quantization is not None and form == quantization.code_dtype:
            codes[view] = lent_views[-1]
        else:
            copies.append((tensor, lent_views[-1]))

    made: dict[str, torch.Tensor] = {}
    quantized, transformed, num_maxima = None, None, 0
    maxima = torch.zeros(0, dtype=torch.float32)
    if quantization is not None:
        parts, num_maxima = plan_quantized(plans, quantization, lent.holder, position)
        maxima = torch.zeros(num_maxima, dtype=torch.float32)
        shapes = {one.output.name: one.output.shape for one in plans}
        scales = {
            part.name: torch.zeros(quantization.find_scale_shape(shapes[part.name]), dtype=torch.float32)
            for part in parts
            if part.owns_scales
        }
        made |= {quantization.name_scales(name): scale for name, scale in scales.items()}
        quantized = QuantizedPart(quantization, parts, maxima.numpy(), tensors, codes, scales)
    names = [shard.name for shard in gather.source.shards]
    dropped: list[str] = []
    if transforms is not None:
        own = list_own(transforms, position, team.size)
        made |= {
            output.name: torch.zeros(output.shape, dtype=getattr(torch, dtypes.dtype(output.dtype).torch_name))
            for one in own
            for output in one.outputs
        }
        ties = {other: name for name, others in gather.selection.tied.items() for other in others}
        dropped = list(find_dropped(transforms, names, ties))
        transformed = TransformedPart(transforms, own, made)
    _check_names(made, set(names) - set(dropped))
    lent_views += made.values()
    return PreparedPart(
        _describe(str(lent.parts[position]["model"]), lent_views, list(made)),
        [local_bytes(view) for view in (*lent_views, maxima)],
        tuple(dropped),
        copies,
        quantized,
        transformed,
        lent.source,
    )


def _choose_forms(
    lent: LentModel, plans: Sequence[TensorPlan], quantization: Quantization | None, views: Mapping[str, int]
) -> dict[int, str | None]:
    """Return the element type in which each view is lent: "" as it is, None if engines do not get it.

    It is the same for all parts of one tensor of the trainer. A tensor that becomes several ones of different types
    stays as it is; engines cast their parts.

    Args:
        lent: the model.
        plans: of the tensors that engines get as the ranks have them.
        quantization: of matrices.
        views: name of this rank's tensor -> its view.

    Raises:
        UsageError: a quantised tensor shares its memory with one that is not.
    """
    wanted: list[set[tuple[str | None, str]]] = [set() for _ in lent.holder]
    if lent.gather.transforms is not None:
        for one in lent.gather.transforms.sources.tensors:
            _want(wanted, one, None)
    for one in plans:
        form = ""
        if quantization is not None and quantization.applies_to(one.output.name, one.source_dtype, one.output.shape):
            form = quantization.code_dtype
        elif one.source_dtype != one.output.dtype and not one.changed and one.update is None:
            form = one.output.dtype
        _want(wanted, one, form)
    records = {shard.name: np.unique(shard.record).tolist() for shard in lent.stored.shards}
    by_view: dict[int, set[tuple[str | None, str]]] = {}
    for name, view in views.items():
        by_view.setdefault(view, set()).update(*(wanted[record] for record in records.get(name, ())))
    return {view: _choose_form(names, quantization) for view, names in by_view.items()}


def _want(wanted: list[set[tuple[str | None, str]]], one: TensorPlan, form: str | None) -> None:
    for part in one.read:
        for record in np.unique(part.record).tolist():
            wanted[record].add((form, one.output.name))


def _choose_form(wanted: set[tuple[str | None, str]], quantization: Quantization | None) -> str | None:
    forms = {form for form, _ in wanted if form is not None}
    code = None if quantization is None else quantization.code_dtype
    if code in forms and len(forms) > 1:
        ours, other = (min(name for form, name in wanted if (form == code) == is_code) for is_code in (True, False))
        raise UsageError(
            f"{ours} cannot be quantised part by part",
            tensor=ours,
            got=f"one tensor of the trainer for it and {other}, which stays as it is",
            want="tensors of the trainer that are quantised as a whole, or not at all",
            next_step="name both in keep of the Quantization, or give a function as transform=: it gets whole tensors",
        )
    if not forms:
        return None if wanted else ""
    return forms.pop() if len(forms) == 1 else ""


def _check_names(made: Mapping[str, object], names: set[str]) -> None:
    for name in made:
        if name in names:
            raise UsageError(
                f"{name}: two tensors would have this name",
                tensor=name,
                got="a tensor of the model, and one that transform makes",
                want="one tensor of a name",
                next_step="let transform give other names, or give another scale_suffix",
            )


def _describe(own: str, views: Sequence[torch.Tensor], made: Sequence[str]) -> str:
    """Return the description of a rank's own tensors, changed for those that are lent."""
    described = json.loads(own)
    described["views"] = [view.numel() * view.element_size() for view in views]
    num_own = len(views) - len(made)
    tensors = {name: [_torch_name(views[view]), shape, view] for name, (_, shape, view) in described["tensors"].items()}
    for number, name in enumerate(made, num_own):
        tensors[MADE + name] = [_torch_name(views[number]), list(views[number].shape), number]
    return json.dumps({**described, "tensors": tensors}, separators=(",", ":"))


def _torch_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
