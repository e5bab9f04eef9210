"""The fp32 weights of a universal checkpoint: ``zero/<parameter>/fp32.pt``, each whole.

``deepspeed/checkpoint/ds_to_universal.py`` writes them: from stages 1 and 2 a dict with ``param``, from stage 3 the
bare row of elements. The script also writes buffers, ties and frozen parameters there, rounded to fp32; this reader
takes those from the model states.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod

from xrank.errors import ContradictionError, IncompleteError, UnsafeError
from xrank.formats.pickles import InertRecord, inert_error
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor, read_archive
from xrank.layout.nests import Nest
from xrank.plan.source import StoredShard
from xrank.readers.deepspeed.states import Shape, Shapes
from xrank.readers.held_tensor import HeldTensor, pieces_of, whole
from xrank.readers.records import Records
from xrank.stores import places


def locate_universal(folder: str, shapes: Shapes, records: Records, *, is_sliced: bool) -> dict[str, StoredShard]:
    """Return every trained tensor.

    Args:
        folder: the checkpoint's folder.
        shapes: shapes of the parameters, from the model states.
        records: collects the files.
        is_sliced: whether the shapes are those of tensor-parallel slices, which do not determine the whole.

    Raises:
        IncompleteError: a parameter's file is missing.
        ContradictionError: it has another shape.
        CorruptError, UnsafeError: it is damaged, or a name leads out of the folder.
    """
    return {name: _shard(folder, name, shape, records, is_sliced) for name, shape in shapes.items()}


def _shard(folder: str, name: str, shape: Shape, records: Records, is_sliced: bool) -> StoredShard:
    if os.path.basename(name) != name or name in ("", ".", "..") or not name.isprintable():
        raise UnsafeError(
            f"{folder}: a parameter's name is not the name of a folder: {quote(name)}",
            tensor=quote(name),
            file=folder,
            got=quote(name),
            want="a name without / in it",
            next_step="do not use this checkpoint: it was tampered with",
        )
    path = os.path.join(folder, "zero", name, "fp32.pt")
    if not places.is_present(path):
        raise IncompleteError(
            f"{name}: {path} is missing",
            tensor=name,
            file=path,
            want="the parameter's fp32 weights",
            next_step="run ds_to_universal.py again, or copy the folder again from where it was made",
        )
    archive, origin = read_archive(path), Origin(path)
    value = archive.value
    entry: Mapping[object, object] = value if isinstance(value, dict) else {"param": value}
    tensor = entry.get("param")
    if isinstance(tensor, InertRecord):
        raise inert_error(tensor, origin)
    # torch calls an archive by its file's name, or "archive" if it was saved into a stream.
    if archive.name not in ("fp32", "archive"):
        raise ContradictionError(
            origin.locate("is another file, renamed or copied"),
            tensor=name,
            file=path,
            got=f"a file saved as {quote(archive.name)}",
            want="a file saved as fp32.pt",
            next_step="run ds_to_universal.py again",
        )
    if not isinstance(tensor, ArchivedTensor):
        raise origin.corrupt("contains no tensor", got=type(tensor).__name__, want="a tensor, or a dict with param")
    # ds_to_universal.py cuts the padding off a `vocab_tensor`, so its rows may be fewer than the model states'.
    is_row = tensor.shape == (prod(shape),) and (tensor.strides == (1,) or prod(shape) <= 1)
    if is_row:
        # Stage 3's elements lost their shape; the model states have it.
        final = shape
    elif tensor.shape == shape or is_sliced or (entry.get("vocab_tensor") is True and tensor.shape[1:] == shape[1:]):
        final = tensor.shape
    else:
        raise ContradictionError(
            f"{name}: {path} has another shape than the model states record",
            tensor=name,
            file=path,
            got=str(list(tensor.shape)),
            want=str(list(shape)),
            next_step="run ds_to_universal.py again",
        )
    held = HeldTensor.from_archive(tensor, rank=0, file=path, record=records.add_archive(archive)(tensor.key))
    count = prod(final)
    row = (Nest(0, 0, ((count, 1, 1),) if count > 1 else ()),) if count else ()
    return pieces_of(name, [held], final, [row if is_row else whole(tensor.shape)])
