"""Encodings: how a matrix of floating-point values becomes quantized tensors, band by band, and back.

A band is some whole rows of one matrix, with all rows of their blocks, so its codes and scales follow from its values
alone; only an encoding with `Encoding.is_shared` needs the largest magnitude of whole tensors first. The arithmetic is
that of the tool which an encoding is named after, to the last bit: the same operations in the same order and element
types, on a CPU. What the tool makes of infinities, not-a-numbers and scales of zero, however odd, is made here. Of a
not-a-number only the bits besides its exponent may differ, which there depend on the place in the tensor.

The tools use torch, whose operations on bf16 and fp16 are those on fp32 with the result rounded once. numpy makes them
here: importing torch takes longer than encoding a gigabyte. Its loops over ml_dtypes' types are slow, so bf16 is moved
as integers, and a table with the code of each bf16 number rounds to fp8 and fp4. The work is done in tiles of at most
`_TILE` elements, in memory that a thread keeps: they stay in a core's own cache. numpy's operations release the
interpreter's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import inf, nan, prod
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from xrank import dtypes
from xrank.errors import ContradictionError
from xrank.layout.output_files import OutputTensor

Array: TypeAlias = npt.NDArray[Any]
Rule: TypeAlias = Literal["own", "e8m0", "nvfp4", "fp32", "modelopt", "modelopt-nvfp4", "gpt-oss"]
"""How scales and codes follow from values, and values from them.

- ``own``: compressed-tensors; scales and quotients in the type of the values.
- ``e8m0``: compressed-tensors' MX formats; scales are powers of two, stored as exponents.
- ``nvfp4``: compressed-tensors; scales in fp8 after a global factor, quotients in fp32.
- ``fp32``: scales and products in fp32, as in DeepGEMM and vLLM.
- ``modelopt``, ``modelopt-nvfp4``: ModelOpt's FP8 and NVFP4.
- ``gpt-oss``: the MXFP4 of GPT-OSS, which is only decoded.
"""

_TILE = 65536
_CHANNEL, _TENSOR = (1, 0), (0, 0)
_BF16, _F16, _F32, _FP8 = (dtypes.numpy_dtype(name) for name in ("BF16", "F16", "F32", "F8_E4M3"))
_NAMES = {_BF16: "BF16", _F16: "F16", _F32: "F32"}
_MANTISSA_BITS = {_BF16: 7, _F16: 10, _F32: 23}

_HALF_RANGE = {"fp8": 448.0, "int8": 127.5, "int4": 7.5, "fp4": 6.0}
"""Half the range of codes, which compressed-tensors divides the largest magnitude by."""
_BITS = {"fp8": 8, "int8": 8, "int4": 4, "fp4": 4}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_MAX_FP8_MAX = 2688.0  # 6 * 448
_SCALE_DTYPES = {"own": None, "fp32": "F32", "modelopt": "F32", "e8m0": "U8", "gpt-oss": "U8"}
"""Types of scales, if they are not fp8; None: that of the values."""


class Encoding(Struct, frozen=True, kw_only=True):
    """How one matrix [rows, columns] of floating-point values becomes codes, scales and constants, and back.

    Tensors of more than two dims are stacks of matrices, whose rows count one after another; no block crosses from one
    to the next. Arrays have the types of `xrank.dtypes.numpy_dtype`. All methods may run in several threads.

    Example:
        >>> import numpy
        >>> values = numpy.array([[1.0, -2.0], [0.0, 4.0]], "float32")
        >>> [tensor.name for tensor in W8A8.outputs("up.weight", "F32", values.shape)]
        ['up.weight', 'up.weight_scale']
        >>> codes, scales = (elements for _, _, elements in W8A8.encode(values, 0, values.shape))
        >>> codes.tolist(), W8A8.decode([codes, scales], "F32").tolist()[1]
        ([[64, -127], [0, 127]], [0.0, 3.98431396484375])
    """

    elements: Literal["fp8", "int8", "int4", "fp4"]
    """Type of the codes."""
    block: tuple[int, int]
    """Rows and columns with one scale; 0: all of them."""
    rule: Rule
    suffixes: tuple[str, ...] = ("", "_scale")
    """Appended to the matrix's name for each output: codes, scales, constants."""
    packed: Literal["U8", "I32"] | None = None
    """Type of the elements that several codes share, the first in the lowest bits; None: each is an element."""

    @property
    def block_rows(self) -> int:
        """Rows that are encoded together; bands begin at multiples of it within a matrix."""
        return self.block[0] or 1

    @property
    def is_shared(self) -> bool:
        """Whether `encode` needs the largest magnitude of the whole tensor, and of those fused with it."""
        return self.block == (0, 0) or self.rule in ("nvfp4", "modelopt-nvfp4")

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Return what keeps a tensor of a shape from being encoded, or None.

        Where blocks are parts of rows, columns have to be whole blocks; other blocks may end early, at the last row or
        column.

        Example:
            >>> MXFP8.misfit((64, 100)), FP8_BLOCK.misfit((64, 100))
            ('100 columns, not a multiple of 32', None)
        """
        if len(shape) < 2 or not prod(shape):
            return f"shape {list(shape)}, not a matrix"
        if len(shape) > 2 and len(self.suffixes) > 2:
            return f"{len(shape)} dims, not 2"
        rows, columns = self.block
        if rows == 1 and columns and shape[-1] % columns:
            return f"{shape[-1]} columns, not a multiple of {columns}"
        return None

    def outputs(self, name: str, dtype: str, shape: Sequence[int]) -> tuple[OutputTensor, ...]:
        """Return the tensors that a matrix becomes: codes first, then scales, then constants.

        Args:
            name: the matrix's, such as ``"model.layers.0.mlp.up_proj.weight"``.
            dtype: safetensors name of its type: ``"BF16"``, ``"F16"`` or ``"F32"``.
            shape: its shape; `misfit` has accepted it.
        """
        *stack, columns = shape
        code_dtype = self.packed or ("F8_E4M3" if self.elements == "fp8" else "I8")
        per_row = columns * _BITS[self.elements] // (8 * dtypes.dtype(code_dtype).nbytes)
        kinds: list[tuple[str, tuple[int, ...]]] = [
            (code_dtype, (*stack, per_row)),
            (_SCALE_DTYPES.get(self.rule, "F8_E4M3") or dtype, self._scale_shape(shape)),
        ]
        if self.rule == "nvfp4":
            kinds.append(("F32", (1,)))
        elif self.rule == "modelopt-nvfp4":
            kinds.append(("F32", ()))
        elif self.packed == "I32":
            kinds.append(("I64", (2,)))
        return tuple(OutputTensor(name + end, *kind) for end, kind in zip(self.suffixes, kinds, strict=True))

    def measure(self, values: Array) -> float:
        """Return the largest magnitude of a band; nan if one of its values is not a number."""
        return float(_find_maxima(values, _TENSOR)[0, 0])

    def encode(
        self,
        values: Array,
        first_row: int,
        shape: Sequence[int],
        maximum: float | None = None,
        *,
        name: str = "a matrix",
    ) -> list[tuple[int, int, Array]]:
        """Encode a band.

        The values are only read, and no result shares memory with them.

        Args:
            values: [rows of the band, columns], in the type that `outputs` was told; rows may lie apart.
            first_row: the band's first row among those of all matrices: a multiple of `block_rows` in its matrix. The
                band ends at another one or with the matrix.
            shape: of the whole tensor.
            maximum: if `is_shared`: the `largest` of what `measure` returns of all bands, and of all tensors that share
                the scale, which have one type. Each matrix of a stack has a maximum of its own.
            name: for errors.

        Returns:
            For each output that the band has a part of: its index in `outputs`, the first element in it, and the
            elements from there on in row-major order. Constants come with the first row of a matrix.

        Raises:
            ContradictionError: values are not finite, and the encoding has no codes for such (rule ``fp32``).
        """
        matrix, row = divmod(first_row, shape[-2])
        with np.errstate(all="ignore"):
            maxima = _as_maxima(maximum, values.dtype) if self.block == _TENSOR else _find_maxima(values, self.block)
            scales = _FIND[self.rule](self, maxima, maximum, name)
            codes = self._encode(values, scales.divisors)
        made = [(0, first_row * codes.shape[1], codes)]
        if self.block != _TENSOR:
            above = matrix * -(-shape[-2] // self.block_rows) + row // self.block_rows
            made.append((1, above * scales.stored.shape[1], scales.stored))
        elif row == 0:
            made.append((1, matrix, scales.stored))
        if first_row == 0 and scales.factor is not None:
            made.append((2, 0, scales.factor))
        elif first_row == 0 and self.packed == "I32":
            made.append((2, 0, np.array(shape, np.int64)))
        return made

    def decode(self, parts: Sequence[Array], dtype: str, *, skipped_rows: int = 0) -> Array:
        """Return the values of a band, in the type that the tool gives: see `decoded_dtype`.

        A band is any rows here, with all columns or those of some blocks. The values of GPT-OSS are in the order of its
        blocks, [rows, columns]; transformers has them transposed.

        Args:
            parts: as of `outputs`: codes of the band [rows, elements], scales of all blocks that these are in [rows of
                blocks, blocks] (one of a whole tensor in any shape), whole constants.
            dtype: safetensors name of the model's type.
            skipped_rows: rows of the first block that are above the band.
        """
        raw, stored = parts[0].view(np.uint8), parts[1]
        target = dtypes.numpy_dtype(self.decoded_dtype(dtype, _NAMES.get(stored.dtype)))
        table = _numbers_table(self.elements, self.rule, is_packed=self.packed is not None)
        per_byte = 8 // _BITS[self.elements]
        values = np.empty((len(raw), raw.shape[1] * per_byte), target)
        with np.errstate(all="ignore"):
            factors = _find_factors(self.rule, stored, parts[2:], target)
            factors = factors.reshape(1, 1) if self.block == _TENSOR else factors
            for down, across in _cut_tiles(values.shape, self.block, skipped_rows):
                codes = raw[down, across.start // per_byte : across.stop // per_byte]
                near = _select(factors, self.block, down, across, skipped_rows)
                words, places = _SCRATCH.words[: codes.size * per_byte], _SCRATCH.places[: codes.size]
                np.copyto(places.reshape(codes.shape), codes)
                np.take(table, places, out=words.view(table.dtype), mode="clip")
                products = words.view(_F32).reshape(len(codes), near.shape[1], -1)
                np.multiply(products, near, out=products)
                into = values[down, across]
                if target == _BF16:
                    _round_to_bf16(words)
                    np.copyto(into.view(np.uint16), words.reshape(into.shape), casting="unsafe")
                else:
                    np.copyto(into, products.reshape(into.shape), casting="unsafe")
        return values

    def decoded_dtype(self, dtype: str, scale_dtype: str | None = None) -> str:
        """Return the type of decoded values in a model of a type; `scale_dtype` is that of the stored scales.

        compressed-tensors gives the type of the scales, and bf16 for MX formats and NVFP4; other tools that of the
        model. All are safetensors names.
        """
        if self.rule in ("e8m0", "nvfp4"):
            return "BF16"
        return (scale_dtype or dtype) if self.rule == "own" else dtype

    def _scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        if self.rule == "modelopt" and self.block == _CHANNEL:
            return tuple(shape[:-1])
        return tuple(shape[:-2]) if self.block == _TENSOR else (*shape[:-2], *_count_blocks(shape[-2:], self.block))

    def _encode(self, values: Array, divisors: Array) -> Array:
        """Return the codes of a band, as in the output: [rows, elements of a row]."""
        rows, columns = values.shape
        per_byte = 8 // _BITS[self.elements]
        codes = np.empty((rows, columns // per_byte), np.uint8)
        apply = np.multiply if self.rule == "fp32" else np.divide
        # The type of the tools' quotients: fp32 where that of the scales is, else that of the values.
        is_own = self.rule in ("own", "e8m0") or (self.rule == "modelopt" and self.block == _TENSOR)
        dtype = values.dtype if is_own else _F32
        for down, across in _cut_tiles(values.shape, self.block):
            tile = values[down, across]
            words = _widen(tile)
            near = _select(divisors, self.block, down, across)
            quotients = words.view(_F32).reshape(len(tile), near.shape[1], -1)
            apply(quotients, near, out=quotients)
            if dtype == _BF16:
                _round_to_bf16(words, has_ties=self.rule != "own")
            elif dtype == _F16:
                quotients[...] = quotients.astype(_F16)
            into = codes[down, across.start // per_byte : across.stop // per_byte]
            made = into if per_byte == 1 else _SCRATCH.codes[: tile.size].reshape(tile.shape)
            if self.elements in ("int8", "int4"):
                self._round_to_integers(words, dtype, made)
            else:
                table = _codes_table(self.elements, self.rule, is_bf16=values.dtype == _BF16)
                _look_up(table, words, dtype, made)
            if per_byte == 2:
                pairs = made.view(np.uint16)
                np.copyto(into, pairs | (pairs >> 4), casting="unsafe")
        if self.packed == "I32":
            return codes.view(np.int32)
        return codes if self.packed else codes.view(_FP8 if self.elements == "fp8" else np.int8)

    def _round_to_integers(self, words: Array, dtype: np.dtype[Any], into: Array) -> None:
        """Write the codes of quotients, which are overwritten; bf16 ones lie in the lower halves of words."""
        if dtype == _BF16:
            np.left_shift(words, 16, out=words)
        quotients = words.view(_F32).reshape(into.shape)
        lowest = -8 if self.elements == "int4" else -128
        np.rint(quotients, out=quotients)
        np.clip(quotients, lowest, -1 - lowest, out=quotients)
        np.copyto(into.view(np.int8), quotients, casting="unsafe")  # a not-a-number becomes 0
        if self.packed:
            np.add(into, -lowest, out=into)  # from 0 on; numbers of 8 bits wrap around


class _Scales(Struct, frozen=True, eq=False):
    """The scales of blocks, computed from the largest magnitude in each."""

    stored: Array
    """Scales as they are written."""
    divisors: Array
    """[down, across], in fp32; rule ``fp32`` multiplies by them."""
    factor: Array | None = None
    """The second scale, of whole tensors."""


def largest(maxima: Iterable[float]) -> float:
    """Return the largest of what `Encoding.measure` returned; nan if any is.

    Example:
        >>> largest([1.0, 3.0]), largest([1.0, float("nan"), 3.0])
        (3.0, nan)
    """
    found = 0.0
    for each in maxima:
        if each != each:
            return nan
        found = max(found, each)
    return found


class EncodingError(Struct, frozen=True):
    """How far decoded values are from those that were encoded; errors of bands add up.

    Example:
        >>> both = EncodingError(1.0, 10.0, 0.5, 4.0) + EncodingError(2.0, 20.0, 0.25, 8.0)
        >>> both.mean, both.largest
        (0.1, 0.0625)
    """

    sum_of_errors: float = 0.0
    sum_of_magnitudes: float = 0.0
    largest_error: float = 0.0
    largest_magnitude: float = 0.0

    @property
    def mean(self) -> float:
        """The mean error, relative to the mean magnitude."""
        return self.sum_of_errors / self.sum_of_magnitudes if self.sum_of_magnitudes else self.sum_of_errors

    @property
    def largest(self) -> float:
        """The largest error, relative to the largest magnitude."""
        return self.largest_error / self.largest_magnitude if self.largest_magnitude else self.largest_error

    def __add__(self, other: EncodingError) -> EncodingError:
        return EncodingError(
            self.sum_of_errors + other.sum_of_errors,
            self.sum_of_magnitudes + other.sum_of_magnitudes,
            largest((self.largest_error, other.largest_error)),
            largest((self.largest_magnitude, other.largest_magnitude)),
        )


def errors_of(
    encoding: Encoding, values: Array, made: Sequence[tuple[int, int, Array]], maximum: float | None = None
) -> EncodingError:
    """Return how far a band is from its decoded values; `made` is what `Encoding.encode` returned for `maximum`."""
    parts = [each for _, _, each in made[:2]]
    found = EncodingError()
    with np.errstate(all="ignore"):
        if encoding.is_shared:  # what belongs to the whole tensor comes with its first band only
            whole = _FIND[encoding.rule](encoding, _as_maxima(maximum, values.dtype), maximum, "a matrix")
            parts += [whole.stored] if len(parts) == 1 else []
            parts += [] if whole.factor is None else [whole.factor]
        decoded = encoding.decode(parts, _NAMES[values.dtype])
        for down, across in _cut_tiles(values.shape, _CHANNEL):
            plain, back = values[down, across].astype(_F32), decoded[down, across].astype(_F32)
            errors, magnitudes = np.abs(back - plain), np.abs(plain)
            sums = float(errors.sum()), float(magnitudes.sum())
            found += EncodingError(*sums, float(errors.max()), float(magnitudes.max()))
    return found


class _Scratch(threading.local):
    """Memory of a thread for the elements of one tile."""

    def __init__(self) -> None:
        self.words = np.empty(_TILE, np.uint32)
        self.places = np.empty(_TILE, np.int64)
        self.codes = np.empty(_TILE, np.uint8)


_SCRATCH = _Scratch()


def _count_blocks(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    down, across = (-(-n // (size or n)) for n, size in zip(shape, block, strict=True))
    return down, across


def _cut_tiles(shape: Sequence[int], block: tuple[int, int], skipped_rows: int = 0) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of tiles.

    Each is a part of one row of blocks if these are several rows high; and across some whole blocks, or a part of one:
    the last, which may be narrow, or one larger than a tile.
    """
    rows, columns = shape
    height, size = block[0], block[1] or columns
    spans = [(0, columns // size * size), (columns // size * size, columns)]
    if size > _TILE:
        spans = [(left, min(left + size, columns)) for left in range(0, columns, size)]
    for first, end in spans:
        step = max(_TILE // size * size, min(size, _TILE))
        for left in range(first, end, step):
            right, top = min(left + step, end), 0
            while top < rows:
                bottom = min(top + max(1, _TILE // (right - left)), rows)
                if height > 1:
                    bottom = min(bottom, ((top + skipped_rows) // height + 1) * height - skipped_rows)
                yield slice(top, bottom), slice(left, right)
                top = bottom


def _select(blocks: Array, block: tuple[int, int], down: slice, across: slice, skipped_rows: int = 0) -> Array:
    """Return what belongs to the blocks of a tile, of an array with one element a block: [rows or 1, across, 1]."""
    rows, columns = block
    if rows != 1:
        row = (down.start + skipped_rows) // rows if rows else 0
        down = slice(row, row + 1)
    return blocks[down, across.start // columns if columns else 0 : -(-across.stop // columns) if columns else 1, None]


def _as_maxima(maximum: float | None, dtype: np.dtype[Any]) -> Array:
    if maximum is None:
        raise TypeError("an encoding with is_shared needs the maximum")
    return np.full((1, 1), maximum, dtype)


def _find_maxima(values: Array, block: tuple[int, int]) -> Array:
    """Return the largest magnitude of each block, [down, across]; nan if one of its values is not a number."""
    # Magnitudes are in the order of their bits, and not-a-numbers above infinity.
    unsigned = np.uint16 if values.itemsize == 2 else np.uint32
    bits, scratch = values.view(unsigned), _SCRATCH.words.view(unsigned)
    maxima = np.zeros(_count_blocks(values.shape, block), unsigned)
    for down, across in _cut_tiles(values.shape, block):
        tile = bits[down, across]
        magnitudes = scratch[: tile.size].reshape(tile.shape)
        np.bitwise_and(tile, 0x7FFF if values.itemsize == 2 else 0x7FFFFFFF, out=magnitudes)
        if block[0] != 1:
            magnitudes = magnitudes.max(axis=0, keepdims=True)
        near = _select(maxima, block, down, across)[:, :, 0]
        np.maximum(near, _find_maxima_across(magnitudes, near.shape[1]), out=near)
    maxima[maxima > np.array(inf, values.dtype).view(unsigned)] = np.array(nan, values.dtype).view(unsigned)
    return maxima.view(values.dtype)


def _find_maxima_across(magnitudes: Array, num_blocks: int) -> Array:
    """Return the maximum of each of so many even parts of every row."""
    if num_blocks == 1:
        return magnitudes.max(axis=1, keepdims=True)  # type: ignore[no-any-return]
    # numpy is slow where it reduces a few elements at a time, so whole rows are halved instead.
    found, size = magnitudes.reshape(-1), magnitudes.shape[1] // num_blocks
    while size % 2 == 0 and size < 128:
        found, size = np.maximum(found[0::2], found[1::2]), size // 2
    return found.reshape(len(magnitudes), num_blocks, size).max(axis=2)  # type: ignore[no-any-return]


def _widen(tile: Array) -> Array:
    """Return a tile in fp32, as the bits of its elements in the thread's memory."""
    words = _SCRATCH.words[: tile.size]
    if tile.dtype == _BF16:
        np.copyto(words.reshape(tile.shape), tile.view(np.uint16))
        np.left_shift(words, 16, out=words)
    else:
        np.copyto(words.view(_F32).reshape(tile.shape), tile)
    return words


def _round_to_bf16(words: Array, *, has_ties: bool = True) -> None:
    """Turn the bits of fp32 numbers into those of the nearest bf16, of two the even one.

    No quotient of two bf16 numbers, which have 8 bits, is half way between two such: k with 9 bits, of which the last
    is set, would have to divide one of 8 bits. And fp32 is too fine to round one to there. (It is otherwise where bf16
    has fewer bits, below 2**-126.)
    """
    if has_ties:
        spare = _SCRATCH.places.view(np.uint32)[: words.size]
        np.right_shift(words, 16, out=spare)
        np.bitwise_and(spare, 1, out=spare)
        np.add(spare, 0x7FFF, out=spare)
        np.add(words, spare, out=words)
    else:
        np.add(words, 0x8000, out=words)
    np.right_shift(words, 16, out=words)


def _look_up(table: Array, words: Array, dtype: np.dtype[Any], into: Array) -> None:
    """Write the entries for the bits of numbers, which are overwritten, of a table with one for each bf16."""
    if dtype != _BF16:
        # All thresholds between codes are even bf16 numbers. A number between two bf16 takes the entry of the odd one.
        spare = _SCRATCH.places.view(np.uint32)[: words.size]
        np.bitwise_and(words, 0xFFFF, out=spare)
        np.add(spare, 0xFFFF, out=spare)
        np.bitwise_or(words, spare, out=words)
        np.right_shift(words, 16, out=words)
    places = _SCRATCH.places[: words.size]
    np.copyto(places, words)
    np.take(table, places.reshape(into.shape), out=into, mode="clip")


@cache
def _codes_table(elements: str, rule: Rule, *, is_bf16: bool) -> Array:
    """Return the code of each bf16 number, for quotients of bf16 or other values."""
    numbers = np.arange(65536, dtype=np.uint16).view(_BF16).astype(_F32)
    codes: Array
    if elements == "fp8":
        with np.errstate(all="ignore"):
            codes = (numbers if rule == "modelopt" else numbers.clip(-448.0, 448.0)).astype(_FP8).view(np.uint8)
        nan_code = 0x7F
    else:
        # The nearest number, and of two the one with an even code.
        magnitudes = np.abs(numbers)
        codes = np.searchsorted((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), magnitudes).astype(np.uint8)
        codes += np.isin(magnitudes, (0.75, 1.75, 3.5))
        codes |= (numbers < 0).astype(np.uint8) << 3  # -0.0 has no sign
        nan_code = 7 if rule == "modelopt-nvfp4" else 8 if is_bf16 else 0
    codes[np.isnan(numbers)] = nan_code
    return codes


@cache
def _numbers_table(elements: str, rule: Rule, *, is_packed: bool) -> Array:
    """Return the number of each byte in fp32, or the bits of two."""
    codes = np.arange(256, dtype=np.uint8)
    if elements == "fp8":
        return codes.view(_FP8).astype(_F32)
    if elements == "int8":
        return codes.astype(_F32) - 128 if is_packed else codes.view(np.int8).astype(_F32)
    pairs = np.stack((codes & 15, codes >> 4), axis=1)
    if elements == "int4":
        return (pairs.astype(_F32) - 8).view(np.uint64)[:, 0]
    numbers = np.array([*_FP4, *(-number for number in _FP4)], _F32)
    if rule == "modelopt-nvfp4":
        numbers[8] = 0.0
    elif rule == "gpt-oss":
        numbers *= 2
    return numbers[pairs].view(np.uint64)[:, 0]


def _find_own(encoding: Encoding, maxima: Array, maximum: float | None, name: str) -> _Scales:
    """compressed-tensors/quantization/utils/helpers.py: calculate_qparams."""
    scales = (maxima.astype(_F32) / _HALF_RANGE[encoding.elements]).astype(maxima.dtype)
    scales[scales == 0] = ml_dtypes.finfo(scales.dtype).eps  # type: ignore[no-untyped-call]
    return _Scales(scales, scales.astype(_F32))


def _find_e8m0(encoding: Encoding, maxima: Array, maximum: float | None, name: str) -> _Scales:
    """compressed-tensors/quantization/utils/mxfp_utils.py and compressors/mx_utils.py."""
    # Rounds to a power of two: up from 1.75, which would round to 2 with the single bit of fp4.
    mantissa = _MANTISSA_BITS[maxima.dtype]
    most = 31 if maxima.dtype == _F16 else 255
    bits = maxima.view(np.uint16 if maxima.itemsize == 2 else np.uint32).astype(np.int32)
    powers = (bits + (1 << (mantissa - 2))) >> mantissa
    exponents = np.clip(powers - most // 2 + 127 - (8 if encoding.elements == "fp8" else 2), 0, 255)
    exponents[powers == 0] = 0
    exponents[powers == most] = 255
    # torch's vectors set all bits of a not-a-number, and the rounding above carries them into the sign of a zero.
    exponents[np.isnan(maxima)] = 0
    scales = np.ldexp(np.float32(1), exponents - 127).astype(maxima.dtype).astype(_F32)
    # A scale that fp16 does not have becomes 1; the integer that infinity becomes has the lowest bits of 0.
    is_lost = scales == 0
    scales[is_lost] = 1.0
    exponents[is_lost | np.isinf(scales)] = 127
    return _Scales(exponents.astype(np.uint8), scales)


def _find_nvfp4(encoding: Encoding, maxima: Array, maximum: float | None, name: str) -> _Scales:
    """compressed-tensors/quantization/utils/helpers.py: generate_gparam, calculate_qparams."""
    dtype = maxima.dtype
    whole = np.maximum(_as_maxima(maximum, dtype).astype(_F32), np.float32(ml_dtypes.finfo(dtype).tiny))  # type: ignore[no-untyped-call]
    # torch divides a Python number by a tensor in two steps, each rounded.
    factor = (_FP4_MAX_FP8_MAX * (1.0 / whole).astype(dtype).astype(_F32)).astype(dtype).astype(_F32)
    factor[~np.isfinite(factor)] = 1.0
    sixths = (maxima.astype(_F32) / 6.0).astype(dtype).astype(_F32)
    stored = np.minimum(factor * sixths, 448.0).astype(_FP8)
    scales = stored.astype(_F32)
    is_lost = scales == 0
    stored[is_lost] = scales[is_lost] = 0.125
    return _Scales(stored, scales.astype(dtype).astype(_F32) / factor, factor.reshape(1))


def _as_finite(maxima: Array, name: str) -> Array:
    """Return maxima in fp32; raise an error if one of them is not finite."""
    maxima = maxima.astype(_F32)
    if not np.isfinite(maxima).all():
        problem = f"{name} has values that are not finite, so its scale cannot be computed"
        step = "find the training step that made them"
        raise ContradictionError(problem, tensor=name, got="inf or nan", want="finite weights", next_step=step)
    return maxima


def _find_fp32(encoding: Encoding, maxima: Array, maximum: float | None, name: str) -> _Scales:
    maxima = _as_finite(maxima, name)
    if encoding.elements == "fp8":  # deep_gemm/utils/math.py, vllm/utils/deep_gemm.py: per_block_cast_to_fp8
        scales = np.maximum(maxima, np.float32(1e-4)) / 448.0
        return _Scales(scales, 1.0 / scales)
    # vllm/model_executor/layers/quantization/utils/int8_utils.py: per_token_quant_int8
    maxima = np.maximum(maxima, np.float32(1e-10))
    return _Scales(maxima / 127, 1.0 / maxima * 127)


def _find_modelopt(encoding: Encoding, maxima: Array, maximum: float | None, name: str) -> _Scales:
    """modelopt/torch/export: unified_export_hf.py, quant_utils.py: to_quantized_weight."""
    if encoding.block == _TENSOR:
        scale = maxima.astype(_F32) / 448.0
        return _Scales(scale.reshape(()), scale)
    # modelopt/torch/quantization/nn/modules/tensor_quantizer.py: export_amax; calibration refuses what is not finite
    smallest = np.float32(ml_dtypes.finfo(maxima.dtype).tiny)  # type: ignore[no-untyped-call]
    maxima = _as_finite(maxima, name)
    scales = np.where(maxima == 0, np.float32(448), np.maximum(maxima, smallest)) / 448.0
    return _Scales(scales, scales)


def _find_modelopt_nvfp4(encoding: Encoding, maxima: Array, maximum: float | None, name: str) -> _Scales:
    """modelopt/torch/quantization/qtensor/nvfp4_tensor.py."""
    factor = _as_maxima(maximum, maxima.dtype).astype(_F32) / _FP4_MAX_FP8_MAX
    scales = maxima.astype(_F32) / (factor * 6.0)
    scales[scales == 0] = 1.0
    stored = np.clip(scales, 2**-9, 448.0).astype(_FP8)
    return _Scales(stored, stored.astype(_F32) * factor, factor.reshape(()))


def _find_none(encoding: Encoding, maxima: Array, maximum: float | None, name: str) -> _Scales:
    raise NotImplementedError(f"{encoding.rule} is only decoded")


_FIND: Mapping[str, Callable[[Encoding, Array, float | None, str], _Scales]] = MappingProxyType(
    {
        "own": _find_own,
        "e8m0": _find_e8m0,
        "nvfp4": _find_nvfp4,
        "fp32": _find_fp32,
        "modelopt": _find_modelopt,
        "modelopt-nvfp4": _find_modelopt_nvfp4,
        "gpt-oss": _find_none,
    }
)


def _find_factors(rule: Rule, stored: Array, constants: Sequence[Array], target: np.dtype[Any]) -> Array:
    """Return what codes are multiplied by, in fp32."""
    if rule in ("e8m0", "gpt-oss"):
        # transformers multiplies by 2**128 without an overflow, so the numbers have the first doubling.
        return np.ldexp(np.float32(1), stored.astype(np.int32) - (128 if rule == "gpt-oss" else 127))
    # The tool's product of a code and the scale of a whole tensor has the type of both, that of the values.
    factors = (stored.astype(target) if rule == "modelopt" else stored).astype(_F32)
    if rule == "nvfp4":
        factors /= constants[0].reshape(1, 1)
    elif rule == "modelopt-nvfp4":
        factors *= constants[0].reshape(1, 1)
    factors[np.isnan(factors)] = nan  # one whose bits do not overflow as it is rounded
    return factors


FP8_DYNAMIC = Encoding(elements="fp8", block=_CHANNEL, rule="own")
FP8_BLOCK = Encoding(elements="fp8", block=(128, 128), rule="own")
W8A8 = Encoding(elements="int8", block=_CHANNEL, rule="own")
W8A16 = Encoding(elements="int8", block=(1, 128), rule="own", suffixes=("_packed", "_scale", "_shape"), packed="I32")
W4A16 = Encoding(elements="int4", block=(1, 128), rule="own", suffixes=("_packed", "_scale", "_shape"), packed="I32")
NVFP4A16 = Encoding(
    elements="fp4", block=(1, 16), rule="nvfp4", suffixes=("_packed", "_scale", "_global_scale"), packed="U8"
)
MXFP4A16 = Encoding(elements="fp4", block=(1, 32), rule="e8m0", suffixes=("_packed", "_scale"), packed="U8")
MXFP8 = Encoding(elements="fp8", block=(1, 32), rule="e8m0")
DEEPSEEK_FP8 = Encoding(elements="fp8", block=(128, 128), rule="fp32", suffixes=("", "_scale_inv"))
"""DeepGEMM's ``per_block_cast_to_fp8``. The ``weight_quant`` of DeepSeek-V3's repository runs on GPUs only, and makes
not-a-numbers of a block of zeros."""
MODELOPT_FP8 = Encoding(elements="fp8", block=_TENSOR, rule="modelopt")
MODELOPT_FP8_CHANNEL = Encoding(elements="fp8", block=_CHANNEL, rule="modelopt")
MODELOPT_NVFP4 = Encoding(
    elements="fp4", block=(1, 16), rule="modelopt-nvfp4", suffixes=("", "_scale", "_scale_2"), packed="U8"
)
GPT_OSS = Encoding(elements="fp4", block=(1, 32), rule="gpt-oss", suffixes=("_blocks", "_scales"), packed="U8")
"""Decoded only; a row of the codes is that of ``_blocks`` as [rows, groups * 16]."""


def fp32_encoding(
    dtype: Literal["fp8", "int8"], blocks: Literal["tensor", "channel"] | tuple[int, int], scale_suffix: str
) -> Encoding:
    """Return the encoding of an `xrank.Quantization`: scales in fp32, arithmetic in fp32."""
    block = {"tensor": _TENSOR, "channel": _CHANNEL}[blocks] if isinstance(blocks, str) else blocks
    return Encoding(elements=dtype, block=block, rule="fp32", suffixes=("", scale_suffix))
