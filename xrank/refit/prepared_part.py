"""A trainer rank's tensors in another form: cast, quantized, or made by a caller's function.

The rank lends these copies in place of its own tensors. They have the same names, shapes and layouts, so that recipes
and plans stay the same; tensors that are made anew, such as scales, have Hugging Face's names.

A rank quantizes its own elements with the scales of whole tensors. Ranks that hold parts of one block read each other's
maxima of it; a block on one rank takes no exchange. A function gets whole tensors: each rank makes its share of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.encoded_tensors import encode_into
from xrank.engine.executor import Budget
from xrank.engine.planner import Copies, TensorPlan
from xrank.engine.tensor_target import make_whole_tensors
from xrank.engine.transforms import TransformedTensor, Transforms, apply_transform
from xrank.errors import UsageError
from xrank.layout.nest_table import IntArray, NestTable
from xrank.ranks.loans import MemoryOffer, PeerSource
from xrank.ranks.memory import LocalBytes, local_bytes
from xrank.ranks.team import Team
from xrank.recipes.lent_model import LentModel
from xrank.recipes.options import default_workers
from xrank.recipes.quantization import BlockGrid, Quantization
from xrank.refit.directory import MADE
from xrank.refit.peers import open_source

if TYPE_CHECKING:
    import torch


_CHUNK_ELEMENTS = 1 << 19
"""Elements that are measured or encoded at once."""
_BUFFERS_NBYTES = 16_000_000

Maxima: TypeAlias = npt.NDArray[np.float32]
Box: TypeAlias = tuple[int, int, int, int]
"""First and end row, first and end column of blocks."""
_Loop: TypeAlias = tuple[int, int, int]
"""Count, stride in the record, and stride in the matrix, as of a nest."""


class PreparedPart(Struct, eq=False):
    """A rank's tensors as they are lent; see `prepare_part`. All measure `quantized`, then all `fill`."""

    description: str
    """As `LocalModel.describe`, of the tensors that are lent."""
    views: list[LocalBytes]
    """Bytes of the tensors; the last ones are those of the rank's maxima."""
    dropped: tuple[str, ...]
    """Names, as Hugging Face's, of tensors that engines do not get. They are the same on all ranks."""
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Own tensor, and the copy or cast that is lent."""
    quantized: _QuantizedPart | None
    transforms: Transforms | None
    transformed: list[TransformedTensor]
    """The tensors that this rank transforms."""
    made: dict[str, torch.Tensor]
    """Tensors that this rank makes anew."""
    own_source: PeerSource
    """Reads all ranks' own tensors in place."""
    maxima_source: PeerSource | None = None
    """Reads all ranks' maxima: record i is of the rank at position i."""

    @property
    def is_shared(self) -> bool:
        """Whether ranks read each other's memory for it."""
        return self.quantized is not None or self.transforms is not None

    def connect(
        self, own: MemoryOffer, team: Team, offers: Sequence[Mapping[str, Any]], check: Callable[[], object]
    ) -> None:
        """Make the source of the ranks' maxima, once all ranks have described their offers."""
        self.maxima_source = open_source(
            own,
            team.rank,
            {rank: dict(offer) for rank, offer in zip(team.ranks, offers, strict=True)},
            list(team.ranks),
            [len(offer["views"]) - 3 for offer in offers],  # before the outcome and the status
            check=check,
        )

    def fill(self) -> None:
        """Fill everything that is lent from the present values."""
        for tensor, copy in self.copies:
            copy.copy_(tensor)
        if self.quantized is not None and self.maxima_source is not None:
            self.quantized.encode(self.maxima_source)
        if self.transforms is not None:
            budget = Budget.from_memory(_BUFFERS_NBYTES, default_workers())
            encoded = [one.number for one in self.transformed if one.encoding is not None]
            if encoded:
                encode_into(self.transforms, encoded, self.own_source, budget, self.made)
            for one in self.transformed:
                if self.transforms.function is None:
                    break
                (made,) = make_whole_tensors(self.transforms.sources, self.own_source, budget, [one.number])
                results = apply_transform(self.transforms.function, one.name, made, one.outputs)
                for output, result in zip(one.outputs, results, strict=True):
                    self.made[output.name].copy_(result.detach())

    def close(self) -> None:
        """Close all connections to other ranks."""
        self.own_source.close()
        if self.maxima_source is not None:
            self.maxima_source.close()


def prepare_part(
    lent: LentModel,
    tensors: Sequence[torch.Tensor],
    quantization: Quantization | None,
    team: Team,
    *,
    is_snapshot: bool,
) -> PreparedPart:
    """Return a rank's tensors in the form in which they are lent; nothing is filled yet."""
    import torch

    gather, position = lent.gather, team.position
    transforms = gather.transforms
    apart = set() if transforms is None else transforms.files
    plans = [one for i, file in enumerate(gather.plan.files) if i not in apart for one in file.tensors]
    described = json.loads(str(lent.parts[position]["model"]))
    views = {name: view for name, (_, _, view) in described["tensors"].items()}
    forms = _choose_forms(lent, plans, quantization, views)

    def make(shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtypes.dtype(dtype).torch_name), device="cpu")

    lent_views: list[torch.Tensor] = []
    copies, codes = [], {}
    for view, tensor in enumerate(tensors):
        form = forms.get(view, "")
        if form is None or (form == "" and not is_snapshot):
            lent_views.append(tensor)
            continue
        copy = make(tensor.shape, form) if form else torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        lent_views.append(copy)
        if quantization is not None and form == quantization.code_dtype:
            codes[view] = copy
        else:
            copies.append((tensor, copy))

    made: dict[str, torch.Tensor] = {}
    quantized, maxima = None, make((0,), "F32")
    if quantization is not None:
        parts, num_maxima = _plan_quantized(plans, quantization, lent.holder, position)
        maxima = make((num_maxima,), "F32")
        shapes = {one.output.name: one.output.shape for one in plans}
        scales = {
            part.name: make(quantization.find_scale_shape(shapes[part.name]), "F32")
            for part in parts
            if part.owns_scales
        }
        made |= {quantization.name_scales(name): scale for name, scale in scales.items()}
        quantized = _QuantizedPart(quantization, parts, maxima.numpy(), tensors, codes, scales)
    names = [shard.name for shard in gather.source.shards]
    dropped: list[str] = []
    transformed: list[TransformedTensor] = []
    if transforms is not None:
        sizes, loads = [file.output.nbytes for file in transforms.sources.files], [0] * team.size
        groups: dict[int, list[TransformedTensor]] = {}
        for one in transforms.tensors:
            groups.setdefault(one.group, []).append(one)
        nbytes = {group: sum(sizes[one.number] for one in ones) for group, ones in groups.items()}
        for group in sorted(groups, key=lambda group: -nbytes[group]):  # about equal bytes for each rank
            least = loads.index(min(loads))
            loads[least] += nbytes[group]
            if least == position:
                transformed += groups[group]
        made |= {output.name: make(output.shape, output.dtype) for one in transformed for output in one.outputs}
        ties = {other: name for name, others in gather.selection.tied.items() for other in others}
        copied = set(transforms.order) - {one.name for one in transforms.tensors}
        dropped = [name for name in names if name not in copied and ties.get(name) not in copied]
    kept = set(names) - set(dropped)
    for name in made:
        if name in kept:
            raise UsageError(
                f"{name}: two tensors would have this name",
                tensor=name,
                got="a tensor of the model, and one that transform makes",
                next_step="let transform give other names, or give another scale_suffix",
            )

    def kind_of(view: int) -> str:
        return str(lent_views[view].dtype).removeprefix("torch.")

    kinds = {name: [kind_of(view), shape, view] for name, (_, shape, view) in described["tensors"].items()}
    for name, tensor in made.items():
        lent_views.append(tensor)
        kinds[MADE + name] = [kind_of(-1), list(tensor.shape), len(lent_views) - 1]
    sizes_of_views = [view.numel() * view.element_size() for view in lent_views]
    return PreparedPart(
        json.dumps({**described, "views": sizes_of_views, "tensors": kinds}, separators=(",", ":")),
        [local_bytes(view) for view in (*lent_views, maxima)],
        tuple(dropped),
        copies,
        quantized,
        transforms,
        transformed,
        made,
        lent.source,
    )


def _choose_forms(
    lent: LentModel, plans: Sequence[TensorPlan], quantization: Quantization | None, views: Mapping[str, int]
) -> dict[int, str | None]:
    """Return the element type in which each view is lent: "" as it is, None if engines do not get it.

    It is the same for all parts of one tensor of the trainer. A tensor that becomes several ones of different types
    stays as it is; engines cast their parts.
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
        raise _part_error(ours, f"one tensor of the trainer for it and {other}, which stays as it is", "both")
    if not forms:
        return None if wanted else ""
    return forms.pop() if len(forms) == 1 else ""


# ---- quantization part by part


class _QuantizedTensor(Struct, frozen=True, eq=False):
    """A tensor of which this rank quantizes a part."""

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

    def cut(self) -> Iterator[tuple[int, MatrixTile, IntArray, IntArray]]:
        """Yield each piece in tiles of bounded size: a view, a tile in it, and the tile's blocks.

        The blocks are two arrays: the row of blocks of each row, and the column of blocks of each column.
        """
        for view, tile in self.pieces:
            step = max(1, _CHUNK_ELEMENTS // tile.num_columns)
            columns = tile.column + np.arange(tile.num_columns, dtype=np.int64) * tile.column_step
            for low in range(0, tile.num_rows, step):
                x, row = tile.x + low * tile.x_row, tile.row + low * tile.row_step
                part = replace(tile, x=x, row=row, num_rows=min(step, tile.num_rows - low))
                rows = row + np.arange(part.num_rows, dtype=np.int64) * tile.row_step
                yield view, part, _row_blocks(rows, self.grid), columns // self.grid.block_columns


def _plan_quantized(
    tensors: Sequence[TensorPlan], quantization: Quantization, holder: IntArray, position: int
) -> tuple[list[_QuantizedTensor], int]:
    """Return the quantized tensors of which a rank has a part, and the number of its maxima."""
    filled = np.zeros(max(int(holder.max(initial=0)), position) + 1, np.int64)
    first = int(np.searchsorted(holder, position))
    found = []
    for one in tensors:
        name, shape = one.output.name, one.output.shape
        if not quantization.applies_to(name, one.source_dtype, shape):
            continue
        if one.changed or one.update is not None or one.tied:
            cause = "a tensor that is tied to another one" if one.tied else "a recipe that changes its values"
            raise _part_error(name, cause, "it")
        grid = quantization.find_grid(shape)
        holders, boxes = _find_boxes([one.copies, one.replicas], holder, grid)
        sizes = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
        starts = filled[holders]
        filled[holders] += sizes
        its: dict[int, tuple[int, Box]] = {
            rank: (start, (r0, r1, c0, c1))
            for rank, start, (r0, r1, c0, c1) in zip(holders.tolist(), starts.tolist(), boxes.tolist(), strict=True)
        }
        if position not in its:
            continue
        start, box = its[position]
        owns_scales = int(holders[crc32(name.encode()) % len(holders)]) == position
        needed = (0, grid.shape[0], 0, grid.shape[1]) if owns_scales else box
        others = set(np.unique(holder[one.copies.record]).tolist()) - {position}
        r0, r1, c0, c1 = needed
        shared = [
            (other, begin, (top, bottom, left, right))
            for other, (begin, (top, bottom, left, right)) in its.items()
            if other in others and top < r1 and r0 < bottom and left < c1 and c0 < right
        ]
        pieces = []
        for part in (one.copies, one.replicas):
            for row in np.flatnonzero(holder[part.record] == position).tolist():
                nest, view = part.nests[row], int(part.record[row]) - first
                pieces += [(view, tile) for tile in cut_matrix_tiles(nest.x, nest.y, nest.loops, grid.columns)]
        found.append(_QuantizedTensor(name, grid, box, start, needed, tuple(shared), tuple(pieces), owns_scales))
    return found, int(filled[position])


def _part_error(name: str, got: str, kept: str) -> UsageError:
    return UsageError(
        f"{name} cannot be quantized part by part",
        tensor=name,
        got=got,
        next_step=f"name {kept} in keep of the Quantization, or give a function as transform=: it gets whole tensors",
    )


class _QuantizedPart(Struct, frozen=True, eq=False):
    """Measures and encodes this rank's elements at each step."""

    quantization: Quantization
    tensors: Sequence[_QuantizedTensor]
    maxima: Maxima
    """This rank's maxima, which the other ranks read."""
    views: Sequence[torch.Tensor]
    codes: Mapping[int, torch.Tensor]
    """View -> its quantized elements, which are lent."""
    scales: Mapping[str, torch.Tensor]
    """Name -> the scales of a whole tensor that this rank lends."""

    def measure(self) -> None:
        """Fill the maxima from the present values."""
        self.maxima[:] = 0
        for tensor in self.tensors:
            into = _select(self.maxima, tensor.start, tensor.box)
            for view, part, rows, columns in tensor.cut():
                _raise_maxima(into, tensor.box, rows, columns, _take(self.views[view], part))

    def encode(self, source: PeerSource) -> None:
        """Fill the codes and scales from the present values and all ranks' maxima."""
        import torch

        for tensor in self.tensors:
            maxima = torch.from_numpy(self._join_maxima(tensor, source))
            scales, factors = self.quantization.find_scales(tensor.name, maxima)
            if tensor.owns_scales:
                lent = self.scales[tensor.name]
                lent.copy_(scales.view(lent.shape))
            r0, _, c0, _ = tensor.needed
            for view, part, rows, columns in tensor.cut():
                at = torch.from_numpy(rows - r0)[:, None], torch.from_numpy(columns - c0)
                values = _take(self.views[view], part)
                codes = self.quantization.encode(values, factors[at].to(values.device))
                _take(self.codes[view], part).copy_(codes)

    def _join_maxima(self, tensor: _QuantizedTensor, source: PeerSource) -> Maxima:
        """Return the maxima of the blocks that the tensor needs, over all ranks."""
        joined = np.zeros(_shape(tensor.needed), np.float32)
        _raise_box(joined, tensor.needed, _select(self.maxima, tensor.start, tensor.box), tensor.box)
        for position, start, box in tensor.shared:
            theirs = np.empty(_shape(box), np.float32)
            source.read_into(position, 4 * start, theirs.reshape(-1).view(np.uint8).data)
            _raise_box(joined, tensor.needed, theirs, box)
        return joined


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

    # The first index of each run of equal numbers.
    row_starts, column_starts = ([0, *(np.flatnonzero(np.diff(one)) + 1).tolist()] for one in (rows, columns))
    ends = [*column_starts[1:], len(columns)]
    # The largest values of each row; rows of a block are joined below.
    by_block = [values[:, low:high].abs().amax(dim=1) for low, high in zip(column_starts, ends, strict=True)]
    largest = torch.stack(by_block, dim=1).float().cpu().numpy()
    largest = np.maximum.reduceat(largest, row_starts, axis=0)
    at = np.ix_(rows[row_starts] - box[0], columns[column_starts] - box[2])
    into[at] = np.maximum(into[at], largest)


def _raise_box(into: Maxima, region: Box, values: Maxima, box: Box) -> None:
    """Raise maxima of a region of blocks to those of a box, where they meet."""
    r0, r1 = max(region[0], box[0]), min(region[1], box[1])
    c0, c1 = max(region[2], box[2]), min(region[3], box[3])
    if r0 < r1 and c0 < c1:
        part = into[r0 - region[0] : r1 - region[0], c0 - region[2] : c1 - region[2]]
        np.maximum(part, values[r0 - box[0] : r1 - box[0], c0 - box[2] : c1 - box[2]], out=part)


def _shape(box: Box) -> tuple[int, int]:
    return box[1] - box[0], box[3] - box[2]


def _select(maxima: Maxima, start: int, box: Box) -> Maxima:
    return maxima[start : start + prod(_shape(box))].reshape(_shape(box))


class MatrixTile(Struct, frozen=True):
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
        (num_rows, x_row, y_row), (num_columns, x_column, y_column) = row_loop, column_loop
        row, column = divmod(there, columns)
        yield MatrixTile(here, row, num_rows, y_row // columns, x_row, column, num_columns, y_column, x_column)


def _take_longest(loops: Sequence[_Loop]) -> tuple[_Loop, list[_Loop]]:
    if not loops:
        return (1, 0, 0), []
    at = max(range(len(loops)), key=lambda i: loops[i][0])
    return loops[at], [loop for i, loop in enumerate(loops) if i != at]
