"""Quantization: weights as numbers of 8 bits, with a scale for each tensor, channel or block.

A scale follows from the largest magnitude in its block alone, and an element from its own value and that scale. So
ranks that hold parts of a tensor need only their maxima of common blocks to quantise as one that holds it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Literal

from xrank import dtypes
from xrank.errors import ContradictionError, UsageError

if TYPE_CHECKING:
    import torch

_KEPT = ("*embed*", "*lm_head*", "*norm*", "*.gate.weight", "*router*")
"""Embeddings, heads, norms and routers, which engines keep in 16 or 32 bits."""


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """The blocks of a tensor whose last two dims are matrices. Rows are those of all matrices, one after another."""

    rows: int
    """Rows of one matrix."""
    columns: int
    block_rows: int
    block_columns: int
    num_matrices: int

    @property
    def block_rows_of_matrix(self) -> int:
        """Rows of blocks in one matrix."""
        return -(-self.rows // self.block_rows)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of blocks, over all matrices."""
        return self.num_matrices * self.block_rows_of_matrix, -(-self.columns // self.block_columns)


@dataclass(frozen=True, slots=True)
class Quantization:
    """A transform that quantises weights to fp8 or int8, for `xrank.offer_weights` and any other ``transform=``.

    A matrix ``name`` becomes ``name`` in the new type and a tensor of scales in fp32; ``name * scale`` is about the old
    value. `xrank.offer_weights` lets each rank quantise its own part, with the same bits as of the whole tensor.

    Attributes:
        dtype: ``"fp8"`` (e4m3, largest magnitude 448) or ``"int8"`` (127, rounded half to even).
        blocks: one scale for a ``"tensor"``, a ``"channel"`` (row), or each block of (rows, columns). Tensors of more
            than two dims are matrices of their last two, each with scales of its own.
        keep: patterns of names that stay as they are, beside tensors of one dim and integers; None: embeddings, heads,
            norms and routers.
        scale_suffix: appended to the name for the scales; None: ``"_scale_inv"`` for blocks, as in checkpoints of
            DeepSeek and transformers' ``fp8``, else ``"_scale"``, as in those of ModelOpt and compressed-tensors.

    Raises:
        UsageError: an attribute has another value.

    Example:
        >>> import torch, xrank
        >>> quantize = xrank.Quantization("int8", "channel")
        >>> made = quantize("up_proj.weight", torch.tensor([[1.0, -2.0], [0.0, 4.0]]))
        >>> {name: tensor.tolist() for name, tensor in made.items()}["up_proj.weight"]
        [[64, -127], [0, 127]]
    """

    dtype: Literal["fp8", "int8"] = "fp8"
    blocks: Literal["tensor", "channel"] | tuple[int, int] = "tensor"
    keep: Sequence[str] | None = None
    scale_suffix: str | None = None

    def __post_init__(self) -> None:
        is_pair = isinstance(self.blocks, tuple) and len(self.blocks) == 2
        if self.dtype not in ("fp8", "int8") or not (
            self.blocks in ("tensor", "channel") or (is_pair and all(isinstance(n, int) and n > 0 for n in self.blocks))
        ):
            raise UsageError(
                f"there is no quantization to {self.dtype!r} by {self.blocks!r}",
                got=f"dtype {self.dtype!r}, blocks {self.blocks!r}",
                want="'fp8' or 'int8', and 'tensor', 'channel' or (rows, columns)",
                next_step="give one of these",
            )

    @property
    def code_dtype(self) -> str:
        """Safetensors name of the quantised type."""
        return "F8_E4M3" if self.dtype == "fp8" else "I8"

    def applies_to(self, name: str, dtype: str, shape: Sequence[int]) -> bool:
        """Return whether a tensor is quantised; `dtype` is a safetensors name."""
        kept = _KEPT if self.keep is None else self.keep
        kind = dtypes.dtype(dtype)
        is_matrix = len(shape) >= 2 and prod(shape) > 0 and kind.is_float and kind.nbytes > 1
        return is_matrix and not any(fnmatchcase(name, pattern) for pattern in kept)

    def name_scales(self, name: str) -> str:
        """Return the name of a tensor's scales."""
        suffix = "_scale_inv" if isinstance(self.blocks, tuple) else "_scale"
        return name + (suffix if self.scale_suffix is None else self.scale_suffix)

    def find_grid(self, shape: Sequence[int]) -> BlockGrid:
        """Return the blocks of a tensor of a shape."""
        rows, columns = shape[-2:]
        sizes = {"tensor": (rows, columns), "channel": (1, columns)}
        block_rows, block_columns = self.blocks if isinstance(self.blocks, tuple) else sizes[self.blocks]
        return BlockGrid(rows, columns, block_rows, block_columns, prod(shape[:-2]))

    def find_scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor's scales."""
        if self.blocks == "tensor":
            return tuple(shape[:-2])
        grid = self.find_grid(shape)
        return (*shape[:-2], grid.block_rows_of_matrix, grid.shape[1])

    def find_scales(self, name: str, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of blocks, and the factors by which their values are multiplied.

        Args:
            name: the tensor's.
            maxima: largest magnitude of each block, in fp32.

        Raises:
            ContradictionError: a block contains a value that is not finite.
        """
        if not maxima.is_meta and not maxima.isfinite().all():
            raise ContradictionError(
                f"{name} has values that are not finite, which have no scale",
                tensor=name,
                got="inf or nan",
                want="finite weights",
                next_step="look for the training step that made them",
            )
        if self.dtype == "fp8":  # vllm/utils/deep_gemm.py: per_block_cast_to_fp8
            scales = maxima.clamp(min=1e-4) / 448.0
            return scales, 1.0 / scales
        # vllm/model_executor/layers/quantization/utils/int8_utils.py: per_token_quant_int8
        maxima = maxima.clamp(min=1e-10)
        return maxima / 127, 127 / maxima

    def encode(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return values in the quantised type; `factors` has one for each of them."""
        import torch

        scaled = values.float() * factors
        if self.dtype == "fp8":
            return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
        return scaled.round_().clamp_(-127, 127).to(torch.int8)

    def __call__(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a whole tensor quantised, with its scales; or as it is, if it is kept."""
        import torch

        dtype = dtypes.by_torch_name(str(tensor.dtype).removeprefix("torch.")).name
        if not self.applies_to(name, dtype, tensor.shape):
            return {name: tensor}
        grid = self.find_grid(tensor.shape)
        down, right = grid.block_rows_of_matrix * grid.block_rows, grid.shape[1] * grid.block_columns
        padded = torch.zeros((grid.num_matrices, down, right), dtype=tensor.dtype, device=tensor.device)
        padded[:, : grid.rows, : grid.columns] = tensor.reshape(-1, grid.rows, grid.columns)
        blocks = padded.view(-1, grid.block_rows, grid.shape[1], grid.block_columns)
        maxima = blocks.abs().amax(dim=(1, 3), keepdim=True).float()
        scales, factors = self.find_scales(name, maxima)
        codes = self.encode(blocks, factors).view(padded.shape)[:, : grid.rows, : grid.columns]
        return {
            name: codes.reshape(tensor.shape).contiguous(),
            self.name_scales(name): scales.reshape(self.find_scale_shape(tensor.shape)),
        }
