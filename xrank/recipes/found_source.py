"""The base model a user names: its companions, its config, and the names and shapes the result must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from xrank.engine.companions import CompanionFile
from xrank.errors import CorruptError
from xrank.layout.stored_model import StoredModel
from xrank.recipes.own_config import OwnConfig
from xrank.storage.regular_file import open_regular

_MAX_CONFIG_NBYTES = 4 << 20
"""As Python's objects up to 160 MB. The largest known have some hundred KB, lists of modules left unquantized."""


class BaseModel(Struct, frozen=True):
    """A model folder that defines the names and shapes of the result."""

    path: str
    companions: tuple[CompanionFile, ...]
    config: Mapping[str, Any] | None
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Name -> (dtype, global shape); empty where the folder holds no safetensors weights."""


def read_config(path: str) -> Mapping[str, Any]:
    """Read the JSON object in a config.json."""
    with open_regular(path) as file:
        if file.nbytes > _MAX_CONFIG_NBYTES:
            raise file.origin.corrupt(
                "is too large for a config", got=f"{file.nbytes:,} bytes", want=f"at most {_MAX_CONFIG_NBYTES:,}"
            )
        content = file.read(0, file.nbytes)
    try:
        config = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is no JSON", file=path, got=str(error)[:200], next_step="repair the file") from None
    if not isinstance(config, dict):
        raise CorruptError(f"{path} holds no object", file=path, got=type(config).__name__, next_step="repair the file")
    return config


class FoundSource(Struct, frozen=True, eq=False):
    """A source under its own names: tensors that a reader found in files, or that ranks hold in memory."""

    model: StoredModel
    config: Mapping[str, Any] | None
    """The model's config.json: the one beside the source, the base model's, or the one in the source."""
    config_path: str | None = None
    """Path of the config, if it is a file."""
    companions: tuple[CompanionFile, ...] = ()
    """Small files beside the source."""
    notes: tuple[tuple[str, str], ...] = ()
    """Notes on companions that share a name, so that only one is used."""
    place: str | None = None
    """Path of the source; None: memory."""
    own: OwnConfig | None = None
    """The knowledge of a live module about itself; None: files."""
    plain_names: Mapping[str, str] = field(default_factory=dict)
    """Name from a wrapper -> the model's own name, for a live model."""
    unsaved: tuple[str, ...] = ()
    """Names of a live module's tensors that `save_pretrained` leaves out, and therefore the source, too."""
