"""Elements of tensors as bytes, and checks that a tensor has memory: reading one without crashes the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def kind_without_elements(tensor: torch.Tensor) -> str | None:
    """Return a description of a tensor that is not dense; None for a dense one, even if its memory was freed."""
    import torch

    if tensor.is_meta:
        return "a meta tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "quantised"
    return None if tensor.layout is torch.strided else f"of layout {tensor.layout}"


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor's storage is long enough for it; FSDP and offloaders free some storages."""
    count = tensor.numel()
    if not count:
        return True
    last = count - 1  # offset of the last element of a contiguous tensor
    if not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + last + 1) * tensor.element_size())


def row_major_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a dense tensor's elements, row-major: a view if the tensor is contiguous on the CPU."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1): a single element may have any stride and still count as contiguous.
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]]
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return flat
