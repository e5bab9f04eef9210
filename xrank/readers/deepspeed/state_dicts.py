"""Checks of every file of a DeepSpeed checkpoint: a dict of names with plain tensors, under the file's own name."""

from __future__ import annotations

import os
from collections.abc import Mapping

from xrank.errors import ContradictionError
from xrank.formats.pickles import InertRecord, inert_error, is_extra_state
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive
from xrank.readers.deepspeed.folder import parse_owner


def check_name(archive: TorchArchive, origin: Origin) -> None:
    """Check that a file is not another rank's: torch writes the file's original name into the archive."""
    own, saved = parse_owner(os.path.basename(origin.path)), parse_owner(f"{archive.name}.pt")
    if own is not None and saved is not None and own != saved:
        raise ContradictionError(
            origin.locate("is another file, renamed or copied"),
            rank=origin.rank,
            file=origin.path,
            got=f"a file saved as {archive.name}.pt",
            want=f"a file saved as {os.path.basename(origin.path)}",
            next_step="copy both files again from where they were saved",
        )


def check_table(value: object, what: str, origin: Origin) -> dict[str, object]:
    """Return a value that must be a dict of names.

    Raises:
        UnsafeError: it is an object that only running code can make.
        CorruptError: it is something else.
    """
    if isinstance(value, InertRecord):
        raise inert_error(value, origin, what)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise origin.corrupt(f"{what} is not a dict of names", got=type(value).__name__)
    return value


def check_tensors(module: Mapping[str, object], origin: Origin) -> dict[str, ArchivedTensor]:
    """Return the tensors of a state dict.

    Raises:
        UnsafeError: an entry can only be made by running code.
    """
    for name, value in module.items():
        # A parameter of its own class (quantised, sparse) is pickled as code; without it the model would have a gap.
        if isinstance(value, InertRecord) and not is_extra_state(name):
            error = inert_error(value, origin, quote(name)[1:-1])
            error.about(tensor=name)
            raise error
    return {name: value for name, value in module.items() if isinstance(value, ArchivedTensor)}
