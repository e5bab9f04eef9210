"""Write the pickle of a rank's state, ``data.pkl``, like ``torch.save``, but without torch and the tensors' bytes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from math import prod
from typing import Any

from xrank.dtypes import dtype
from xrank.formats.archived_tensor import STORAGE_DTYPES, ArchivedTensor
from xrank.formats.rank_state import CONFIG, RECORD, WEIGHT

_STORAGES = {dtype_name: storage for storage, dtype_name in STORAGE_DTYPES.items()}
_PROTOCOL = 2  # torch/serialization.py: DEFAULT_PROTOCOL


def state_pickle(config: Mapping[str, Any], weights: Mapping[str, ArchivedTensor], record: str) -> bytes:
    """Return the pickle of ``{"config": config, "weight": weights, "xrank": record}``.

    Args:
        config: plain values, as in JSON.
        weights: name -> tensor, each the whole of its record; equal values become one tensor with several names.
        record: the state's record as a text.
    """
    parts = [pickle.PROTO + bytes([_PROTOCOL]), pickle.EMPTY_DICT, pickle.MARK]
    parts += [_plain(CONFIG), _plain(dict(config)), _plain(WEIGHT), pickle.EMPTY_DICT, pickle.MARK]
    memo: dict[ArchivedTensor, int] = {}
    for name, tensor in weights.items():
        parts.append(_plain(name))
        if tensor in memo:
            parts.append(pickle.LONG_BINGET + memo[tensor].to_bytes(4, "little"))
            continue
        # Plain values below reuse number 0. The config may have used any number, but does not need it anymore.
        memo[tensor] = len(memo) + 1
        parts += [_tensor(tensor), pickle.LONG_BINPUT + memo[tensor].to_bytes(4, "little")]
    parts += [pickle.SETITEMS, _plain(RECORD), _plain(record), pickle.SETITEMS, pickle.STOP]
    return b"".join(parts)


def _plain(value: object) -> bytes:
    """Return the opcodes that push a plain value."""
    return pickle.dumps(value, _PROTOCOL)[2:-1]  # without the protocol and the stop


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _tensor(tensor: ArchivedTensor) -> bytes:
    """Return the call of torch/_utils.py: _rebuild_tensor_v2, or _v3 if the element type has no storage class."""
    element = dtype(tensor.dtype)
    storage = _STORAGES.get(element.torch_name)
    count = prod(tensor.shape) * (1 if storage else element.nbytes)
    kind = _global("torch", storage) if storage else _global("torch.storage", "UntypedStorage")
    parts = [_global("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3"), pickle.MARK]
    # ("storage", type, key, location, count): torch/serialization.py: _save.persistent_id.
    parts += [pickle.MARK, _plain("storage"), kind, _plain(tensor.key), _plain("cpu"), _plain(count)]
    parts += [pickle.TUPLE, pickle.BINPERSID]
    parts += [_plain(tensor.storage_offset), _plain(tensor.shape), _plain(tensor.strides), _plain(False)]
    parts += [_global("collections", "OrderedDict"), pickle.EMPTY_TUPLE, pickle.REDUCE]  # no backward hooks
    if storage is None:
        parts.append(_global("torch", element.torch_name))
    return b"".join([*parts, pickle.TUPLE, pickle.REDUCE])
