"""Checks a rank's config and tensors, and converts them to the plain values that a state can hold.

A slice of a large buffer is saved as its own few bytes. Contiguous CPU tensors are not copied; strided, expanded and
device tensors are.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xrank.errors import UsageError
from xrank.formats.pickles import MAX_INTEGER_NBYTES
from xrank.formats.rank_state import MeshRecord, TensorRecord
from xrank.words import repr_text
from xrank.workspace.tensor_places import locate_tensors, view_key

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap


@dataclass(frozen=True, slots=True)
class StateContent:
    """Tensors ready for torch.save, and the records of their places."""

    weights: dict[str, torch.Tensor]
    """Plain, detached, contiguous CPU tensors, each with a storage of its own size; tied names share one object."""
    meshes: tuple[MeshRecord, ...]
    tensors: dict[str, TensorRecord]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; tied tensors count once."""
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in self.weights.values()}.values())


def plain_config(config: object, what: str = "config") -> dict[str, Any]:
    """Return a config as JSON would give it back: a copy of plain dicts, lists, texts and numbers.

    Args:
        config: a mapping.
        what: its name in errors.

    Raises:
        UsageError: JSON cannot represent a part of it; the message names its place.
    """
    if not isinstance(config, Mapping):
        raise UsageError(
            f"the {what} is a {type(config).__name__}",
            got=type(config).__name__,
            want="a dict",
            next_step="pass a dict, such as config.to_dict()",
        )
    try:
        plain: dict[str, Any] = _plain_value(dict(config), what)
    except RecursionError:
        raise UsageError(
            f"the {what} contains itself, or is nested too deep for JSON",
            want="a tree",
            next_step=f"give a {what} that does not contain itself, or nest it less deep",
        ) from None
    return plain


def _plain_value(value: object, where: str) -> Any:
    # Subclasses (a text Enum, numpy's float64) would be pickled as classes that strict readers refuse.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        _check_integer(value, where)
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list | tuple):
        return [_plain_value(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for key, item in value.items():
            text = _key_text(key, where)
            if text in plain:
                raise UsageError(
                    f"{where} has two keys that JSON writes as {repr_text(text)}",
                    got=repr_text(key),
                    want="each key once",
                    next_step=f"rename one of the two keys {repr_text(text)}",
                )
            plain[text] = _plain_value(item, f"{where}[{repr_text(key)}]")
        return plain
    raise UsageError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold",
        got=type(value).__name__,
        want="dict, list, str, int, float, bool or None",
        next_step="put a text or a number in its place, or the tensor among the weights",
    )


def _key_text(key: object, where: str) -> str:
    """Return a key as `json.dumps` writes it: transformers' ``config.to_dict()`` has numbers for keys (id2label)."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, bool | int | float):
        if isinstance(key, int):
            _check_integer(key, f"a key of {where}")
        return json.dumps(key)
    raise UsageError(
        f"{where} has the key {repr_text(key)}, a {type(key).__name__}",
        got=type(key).__name__,
        want="texts, numbers, booleans or None for keys, as JSON takes them",
        next_step="give the keys as texts",
    )


def _check_integer(value: int, where: str) -> None:
    if value.bit_length() >= 8 * MAX_INTEGER_NBYTES:
        raise UsageError(
            f"{where} is an integer of {value.bit_length():,} bits",
            got=f"{value.bit_length():,} bits",
            want=f"fewer than {8 * MAX_INTEGER_NBYTES:,} bits, which all readers of JSON and pickles take",
            next_step="put its digits in its place as a text",
        )


def state_content(weights: object, layouts: LayoutMap | None, rank: int) -> StateContent:
    """Return what a state holds of these tensors. Everything is checked before anything is copied.

    Arguments and errors as in `locate_tensors`.
    """
    located = locate_tensors(weights, layouts, rank)
    return StateContent(dict(_plain_tensors(located.local)), located.meshes, located.records)


def _plain_tensors(held: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors as torch.save gets them; names of the same view share one object."""
    made: dict[Hashable, torch.Tensor] = {}
    storages: set[int] = set()
    dtypes: dict[int, torch.dtype] = {}
    for name, tensor in held.items():
        view = view_key(tensor)
        if view not in made:
            plain = _plain_tensor(tensor)
            # torch.save writes one record of one dtype per storage (torch/serialization.py: _save refuses two dtypes at
            # one address), so names that share bytes without being the same tensor get separate storages.
            if plain.untyped_storage()._cdata in storages:
                plain = _shrink_storage(plain)
            if plain.data_ptr() != 0 and dtypes.setdefault(plain.data_ptr(), plain.dtype) != plain.dtype:
                plain = plain.clone()
            storages.add(plain.untyped_storage()._cdata)
            made[view] = plain
        yield name, made[view]


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if plain.numel() == 0:
        return torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    # Flatten and reshape: a dim of size 1 may have any stride and still count as contiguous.
    plain = plain.contiguous().as_strided((plain.numel(),), (1,)).view(plain.shape)
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else _shrink_storage(plain)


def _shrink_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor whose storage has exactly these bytes; it keeps the larger storage alive."""
    import torch

    # DLPack exports an address and a shape, so the imported tensor does not know the surrounding storage. As bytes,
    # because DLPack lacks some dtypes (torch/csrc/.../DLConvertor: float8, unsigned 16 to 64).
    nbytes = torch.utils.dlpack.from_dlpack(tensor.reshape(-1).view(torch.uint8))
    return nbytes.view(tensor.dtype).view(tensor.shape)
