"""Files in a DCP checkpoint's folder that contain nothing of it, or that are damaged outside the model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from xrank.errors import XrankError
from xrank.formats.dcp_metadata import DcpMetadata
from xrank.formats.regular_file import open_regular
from xrank.formats.torch_archive import read_archive
from xrank.readers.records import note_foreign_names
from xrank.readers.wrapper_names import is_of_lightning
from xrank.stores import places
from xrank.words import list_text

_SUFFIX = ".distcp"
_MAX_CONFIG_NBYTES = 1 << 16


def read_backend(folder: str) -> str | None:
    """Return the format that Megatron's ``metadata.json`` in a folder names; None without a readable one."""
    try:
        with open_regular(os.path.join(folder, "metadata.json")) as file:
            content = json.loads(file.read(0, min(file.nbytes, _MAX_CONFIG_NBYTES)))
    except (XrankError, OSError, ValueError, RecursionError):
        return None
    backend = content.get("sharded_backend") if isinstance(content, dict) else None
    return backend if isinstance(backend, str) else None


def has_lightning_module(folder: str) -> bool:
    """Return whether the model is an attribute of a LightningModule, by the rest of its checkpoint beside the shards.

    Source: lightning/pytorch/strategies/fsdp.py: FSDPStrategy.save_checkpoint.
    """
    try:
        return is_of_lightning(read_archive(os.path.join(folder, "meta.pt")).value)
    except XrankError:
        return False


def find_other_files(folder: str, metadata: DcpMetadata) -> tuple[list[str], list[str]]:
    """Return the shards that the metadata does not name: those with content, and the empty ones of idle ranks."""
    named = set(metadata.files)
    others = sorted(entry for entry in places.list_names(folder) if entry.endswith(_SUFFIX) and entry not in named)
    # torch/distributed/checkpoint/filesystem.py: write_data opens a file even for an empty plan.
    idle = [entry for entry in others if _nbytes(os.path.join(folder, entry)) == 0]
    return [entry for entry in others if entry not in idle], idle


def file_notes(folder: str, metadata: DcpMetadata, unused: Sequence[str]) -> list[tuple[str, str]]:
    """Return notes about the files of a checkpoint whose model was located, so that no byte of the model is missing."""
    notes = []
    lost = []
    for name, end in zip(metadata.files, metadata.ends.tolist(), strict=True):
        nbytes = _nbytes(os.path.join(folder, name))
        if nbytes is None:
            lost.append(f"{name} is not there")
        elif nbytes < end:
            lost.append(f"{name} ends at byte {nbytes:,} of {end:,}")
    if lost:
        text = f"the checkpoint is damaged, though no byte of the model is lost: {list_text(lost, 3)}"
        notes.append(("damage", text))
    notes += note_foreign_names({metadata.path: metadata.foreign})
    if unused:
        text = f".metadata names nothing in {list_text(unused, 3)}: of another save, and not read"
        notes.append(("unused-files", text))
    return notes


def _nbytes(path: str) -> int | None:
    try:
        return places.nbytes_of(path)
    except OSError:
        return None
