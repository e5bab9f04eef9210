"""Which tensors have elements in memory that strides lead to; reading some of the others ends the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["has_memory", "kind_without_elements"]


def kind_without_elements(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is that is not dense; None: it is dense, though its memory may have been freed."""
    import torch

    if tensor.is_meta:
        return "a meta tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "quantised"
    return None if tensor.layout is torch.strided else f"of layout {tensor.layout}"


def has_memory(tensor: torch.Tensor) -> bool:
    """Say whether the storage of a dense tensor reaches as far as the tensor does: FSDP and offloaders free some."""
    count = tensor.numel()
    if not count:
        return True
    last = count - 1  # from the first element to the last, where they lie one after another
    if not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + last + 1) * tensor.element_size())
