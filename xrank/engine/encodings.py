"""Encodings: how a matrix of floating-point values becomes quantized tensors, band by band, and back.

A band is some whole rows of one matrix, with all rows of its blocks, so its codes and scales follow from its values
alone; only an encoding with `Encoding.is_shared` needs the largest magnitude of whole tensors first. The arithmetic is
that of the tool which each encoding is named after, to the last bit: the order of its operations and the element type
of each of them, on a CPU. Values that the tool quantizes to something odd (infinities, not-a-numbers, scales of zero)
come out as odd as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct

from xrank import dtypes
from xrank.errors import ContradictionError
from xrank.layout.output_files import OutputTensor

if TYPE_CHECKING:
    import torch

Rule: TypeAlias = Literal["own", "fp32"]
"""How scales and codes follow from values: in the type of the values, or in fp32."""

_LARGEST = {"fp8": 448.0, "int8": 127.5, "int4": 7.5}
"""Half the range of codes, which compressed-tensors divides the largest magnitude by."""


class Encoding(Struct, frozen=True, kw_only=True):
    """How one matrix [rows, columns] of floating-point values becomes codes, scales and constants, and back.

    The methods' names and signatures are settled; fields may be added. Tensors of more than two dims are stacks of
    matrices, whose rows count one after another; no block crosses from one to the next.
    """

    elements: Literal["fp8", "int8", "int4", "fp4"]
    """Type of the codes."""
    block: tuple[int, int]
    """Rows and columns with one scale; 0: all of them."""
    rule: Rule
    suffixes: tuple[str, ...] = ("", "_scale")
    """Appended to the matrix's name for each output: codes, scales, constants."""

    @property
    def block_rows(self) -> int:
        """Rows that are encoded together; bands begin at multiples of it within a matrix."""
        return self.block[0] or 1

    @property
    def is_shared(self) -> bool:
        """Whether `encode` needs the largest magnitude of the whole tensor, and of those fused with it."""
        return self.block == (0, 0)

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Return what keeps a tensor of a shape from being encoded, as ``"100 columns, not a multiple of 16"``."""
        if len(shape) < 2 or not prod(shape):
            return f"shape {list(shape)}, not a matrix"
        return None

    def outputs(self, name: str, dtype: str, shape: Sequence[int]) -> tuple[OutputTensor, ...]:
        """Return the tensors that a matrix becomes: codes first, then scales, then constants.

        Args:
            name: the matrix's, such as ``"model.layers.0.mlp.up_proj.weight"``.
            dtype: safetensors name of its type: ``"BF16"``, ``"F16"`` or ``"F32"``.
            shape: its shape; `misfit` has accepted it.
        """
        codes = OutputTensor(name + self.suffixes[0], "F8_E4M3" if self.elements == "fp8" else "I8", tuple(shape))
        scale_dtype = "F32" if self.rule == "fp32" else dtype
        return codes, OutputTensor(name + self.suffixes[1], scale_dtype, self._scale_shape(shape))

    def measure(self, values: torch.Tensor) -> float:
        """Return the largest magnitude of a band; nan if one of its values is not a number."""
        return float(values.abs().amax())

    def encode(
        self,
        values: torch.Tensor,
        first_row: int,
        shape: Sequence[int],
        maximum: float | None = None,
        *,
        name: str = "a matrix",
    ) -> list[tuple[int, int, torch.Tensor]]:
        """Encode a band.

        Args:
            values: [rows of the band, columns], on the CPU, in the type that `outputs` was told.
            first_row: the band's first row among those of all matrices: a multiple of `block_rows` in its matrix. The
                band ends at another one or with the matrix.
            shape: of the whole tensor.
            maximum: if `is_shared`: `largest` of what `measure` returns of all bands, and of all tensors that share the
                scale. Of a stack of matrices, each has a maximum of its own.
            name: for errors.

        Returns:
            For each output that the band has a part of: its index in `outputs`, the first element in it, and the
            elements from there on in row-major order. Constants come with the first row of a matrix.

        Raises:
            ContradictionError: values are not finite, and the encoding has no codes for such.
        """
        rows, columns = shape[-2:]
        matrix, row = divmod(first_row, rows)
        blocks = self._cut(values)
        if self.is_shared:
            assert maximum is not None
            maxima = values.new_full((1, 1), maximum)
        else:
            maxima = blocks.abs().amax(dim=(1, 3))
        scales, factors = self._find_scales(maxima, name)
        codes = self._round(blocks, factors[:, None, :, None])
        codes = codes.reshape(-1, codes.shape[2] * codes.shape[3])[: values.shape[0], :columns]
        made = [(0, first_row * columns, codes.contiguous())]
        down = prod(self._scale_shape((rows, 1))) if not self.is_shared else 1
        first = matrix * down + (0 if self.is_shared else row // self.block_rows)
        if not self.is_shared or row == 0:
            made.append((1, first * scales.shape[1], scales))
        return made

    def decode(self, parts: Sequence[torch.Tensor], dtype: str) -> torch.Tensor:
        """Return the values of a band, in the type that the tool gives.

        Args:
            parts: as of `outputs`: codes of the band's rows, scales of their blocks, whole constants.
            dtype: of the model, for tools that are told.
        """
        import torch

        codes, scales = parts[:2]
        target = scales.dtype if self.rule == "own" else getattr(torch, dtypes.dtype(dtype).torch_name)
        blocks = self._cut(codes)
        values = blocks.to(scales.dtype) * scales.view(scales.numel() // max(1, blocks.shape[2]), -1)[:, None, :, None]
        return values.reshape(-1, blocks.shape[2] * blocks.shape[3])[: codes.shape[0], : codes.shape[1]].to(target)

    def _scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        if self.is_shared:
            return tuple(shape[:-2])
        down, across = (-(-n // (size or n)) for n, size in zip(shape[-2:], self.block, strict=True))
        return (*shape[:-2], down, across)

    def _cut(self, values: torch.Tensor) -> torch.Tensor:
        """Return a band's blocks, [down, rows, across, columns], the last ones padded with zeros."""
        import torch

        (rows, columns), (block_rows, block_columns) = values.shape, self.block
        block_rows, block_columns = block_rows or rows, block_columns or columns
        short, narrow = -rows % block_rows, -columns % block_columns
        if short or narrow:
            values = torch.nn.functional.pad(
                values.view(torch.uint8) if values.itemsize == 1 else values, (0, narrow, 0, short)
            ).view(values.dtype)
        return values.view((rows + short) // block_rows, block_rows, (columns + narrow) // block_columns, block_columns)

    def _find_scales(self, maxima: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of blocks, and what their values are divided (or, in fp32, multiplied) by."""
        import torch

        if self.rule == "own":
            scales = maxima / _LARGEST[self.elements]
            scales[scales == 0] = torch.finfo(scales.dtype).eps
            return scales, scales
        maxima = maxima.float()
        if not maxima.isfinite().all():
            problem = f"{name} has values that are not finite, which have no scale"
            step = "look for the step that made them"
            raise ContradictionError(problem, tensor=name, got="inf or nan", want="finite weights", next_step=step)
        if self.elements == "fp8":  # vllm/utils/deep_gemm.py: per_block_cast_to_fp8
            scales = maxima.clamp(min=1e-4) / 448.0
            return scales, 1.0 / scales
        # vllm/model_executor/layers/quantization/utils/int8_utils.py: per_token_quant_int8
        maxima = maxima.clamp(min=1e-10)
        return maxima / 127, 127 / maxima

    def _round(self, blocks: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        import torch

        scaled = blocks / factors if self.rule == "own" else blocks.float() * factors
        if self.elements == "fp8":
            return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
        lowest = -128 if self.rule == "own" else -127
        return scaled.clamp_(lowest, 127).round_().to(torch.int8)


def largest(maxima: Iterable[float]) -> float:
    """Return the largest of what `Encoding.measure` returned; nan if any is.

    Example:
        >>> largest([1.0, 3.0]), largest([1.0, float("nan"), 3.0])
        (3.0, nan)
    """
    found = 0.0
    for each in maxima:
        if each != each or each > found:
            found = each
        if found != found:
            break
    return found


FP8_DYNAMIC = Encoding(elements="fp8", block=(1, 0), rule="own")
FP8_BLOCK = Encoding(elements="fp8", block=(128, 128), rule="own")
W8A8 = Encoding(elements="int8", block=(1, 0), rule="own")
DEEPSEEK_FP8 = Encoding(elements="fp8", block=(128, 128), rule="fp32", suffixes=("", "_scale_inv"))


def fp32_encoding(
    dtype: Literal["fp8", "int8"], blocks: Literal["tensor", "channel"] | tuple[int, int], scale_suffix: str
) -> Encoding:
    """Return the encoding of an `xrank.Quantization`: scales in fp32, arithmetic in fp32."""
    block = {"tensor": (0, 0), "channel": (1, 0)}[blocks] if isinstance(blocks, str) else blocks
    return Encoding(elements=dtype, block=block, rule="fp32", suffixes=("", scale_suffix))
