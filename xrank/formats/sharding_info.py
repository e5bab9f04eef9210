"""Where a safetensors file's tensors lie in larger ones, as torch DCP writes it into the header."""

from __future__ import annotations

import json
from typing import Any

from xrank.formats.regular_file import Origin, shown
from xrank.formats.safetensors_header import SafetensorsHeader

__all__ = ["saved_offsets"]

_KEY = "DCP_SHARDING_INFO"


def saved_offsets(header: SafetensorsHeader) -> dict[str, tuple[int, ...]]:
    """Return name -> the place in the whole tensor at which the file's part of it begins.

    Raises:
        CorruptError: the header does not say it for each of its tensors, or for others.
    """
    origin = Origin(header.path)
    text = header.metadata.get(_KEY)
    if text is None:
        raise origin.corrupt(f"its header has no {_KEY}: torch did not write it as a shard")
    try:
        told: Any = json.loads(text, parse_float=_refuse, parse_constant=_refuse)
        found = {name: entry["saved_offsets"] for name, entry in told.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise origin.corrupt(f"its {_KEY} is damaged", got=f"{type(error).__name__}: {shown(str(error))}") from None
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if found.keys() != shapes.keys():
        name = sorted(found.keys() ^ shapes.keys())[0]
        raise origin.corrupt(
            f"its {_KEY} and its tensors disagree about {shown(name)}",
            got=f"{len(found)} names there",
            want=f"the {len(shapes)} names of the tensors",
        )
    for name, offsets in found.items():
        if (
            not isinstance(offsets, list)
            or len(offsets) != len(shapes[name])
            or not all(type(at) is int and 0 <= at < 1 << 62 for at in offsets)
        ):
            raise origin.corrupt(f"{shown(name)} begins at no place of a tensor", got=shown(str(offsets)[:200]))
    return {name: tuple(offsets) for name, offsets in found.items()}


def _refuse(text: str) -> int:
    raise ValueError(f"{text} is no offset")
