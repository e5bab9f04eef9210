"""Files in a DCP checkpoint's folder: those that hold nothing of it, and those that lost what no gather needs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from xrank.formats.dcp_metadata import DcpMetadata
from xrank.words import list_text

__all__ = ["file_notes", "other_files"]

_SUFFIX = ".distcp"


def other_files(folder: str, metadata: DcpMetadata) -> tuple[list[str], list[str]]:
    """Return the names of shards that no entry names, and of those that a rank without anything to save left empty."""
    named = set(metadata.files)
    others = sorted(entry for entry in os.listdir(folder) if entry.endswith(_SUFFIX) and entry not in named)
    # torch/distributed/checkpoint/filesystem.py: write_data opens a file for an empty plan, too.
    idle = [entry for entry in others if _nbytes(os.path.join(folder, entry)) == 0]
    return [entry for entry in others if entry not in idle], idle


def file_notes(folder: str, metadata: DcpMetadata, unused: Sequence[str]) -> list[tuple[str, str]]:
    """Return what a report says of the files of a checkpoint whose model was located: no byte of that is missing."""
    notes = []
    lost = []
    for name, end in zip(metadata.files, metadata.ends.tolist(), strict=True):
        nbytes = _nbytes(os.path.join(folder, name))
        if nbytes is None:
            lost.append(f"{name} is not there")
        elif nbytes < end:
            lost.append(f"{name} ends at byte {nbytes:,} of {end:,}")
    if lost:
        notes.append(
            ("damage", f"the checkpoint is damaged, though no byte of the model is lost: {list_text(lost, 3)}")
        )
    if unused:
        notes.append(
            ("unused-files", f".metadata names nothing in {list_text(unused, 3)}: of another save, and not read")
        )
    return notes


def _nbytes(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None
