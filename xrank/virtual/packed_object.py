"""Serialization of objects between the cluster's own processes: a pickle, with the arrays as out-of-band buffers.

Unpickling is safe here: the parts come from memory that only this cluster's processes can write.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrank.errors import UsageError
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import Array, bytes_of, from_bytes, kind_of, spec_of


def pack_object(value: Any) -> list[memoryview]:
    """Return an object as parts: its pickle, then the elements of the arrays in it.

    Tensors without a gradient of their own travel as their elements, each for itself, even where two share memory.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, buffers).dump(value)
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def unpack_object(parts: Sequence[memoryview]) -> Any:
    """Return the object of `pack_object`; its arrays lie where the parts lie."""
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 - from our own processes


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)

    def reducer_override(self, value: Any) -> Any:
        """Give a plain tensor as its elements; torch itself would write a file of its own into the pickle."""
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        try:
            kind_of(value)
            spec = spec_of(value)
        except UsageError:
            return NotImplemented
        return _tensor, (spec.dtype, spec.shape, pickle.PickleBuffer(bytes_of(value).data))


def _tensor(dtype: str, shape: tuple[int, ...], content: Any) -> Array:
    return from_bytes(np.frombuffer(content, np.uint8), ArraySpec(shape, dtype), "torch")
