"""Tensors that every model of a type has once, as data: a final norm, an embedding.

``single_tensors.json`` beside this module is generated from an installed transformers by
``tests/oracle/make_single_tensors.py``. For each model type it has the classes that were made, the names that all of
them have, without outer modules, each with its number of dims, and the last words of the other names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parent / "single_tensors.json"
_NUMBERED = re.compile(r"\.\d+\.|^\d+\.")


def find_absent(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> str | None:
    """Return the first name that every model of config.json's type has and this one lacks; None: none, or unknown.

    Older versions of transformers gave some tensors other names. So a tensor is absent only if the model has no other
    one with as many dims whose name the type does not know.

    Args:
        shapes: shape of each tensor by name.
        config: the content of config.json.
    """
    entry = _read_types().get(str(config.get("model_type")))
    if entry is None or not set(config.get("architectures") or ()) <= set(entry["classes"]):
        return None
    singles = {name: shape for name, shape in shapes.items() if not _NUMBERED.search(name)}
    needed: Mapping[str, int] = entry["needed"]
    known = [*(end for ends in needed for end in ends.split("|")), *entry["others"]]
    dims = {len(shape) for name, shape in singles.items() if not _has_end(name, known)}
    lost = (ends for ends, num_dims in needed.items() if num_dims not in dims)
    return next(
        (ends.split("|")[0] for ends in lost if not any(_has_end(name, ends.split("|")) for name in singles)), None
    )


def _has_end(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


@lru_cache(maxsize=1)
def _read_types() -> Mapping[str, Mapping[str, Any]]:
    types: dict[str, dict[str, Any]] = json.loads(_PATH.read_text())["types"]
    return types
