"""The reader of torch_checkpointing: one file per item and rank, as ``torch.save`` or as safetensors.

``model_<rank>.pt`` holds DTensors, which record their cuts. ``model_<rank>.safetensors`` holds the rank's elements
alone, so that only ``metadata.pkl`` records how they were cut (torch_checkpointing 0.1.1: checkpoint_writer.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xrank.errors import ContradictionError, LayoutError, either, option
from xrank.formats.safetensors_header import read_header
from xrank.formats.torch_archive import ArchivedTensor
from xrank.layout.nests import row_major
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints
from xrank.readers.fsdp.dtensors import DTensorPart
from xrank.readers.fsdp.rank_files import FsdpRankFile, read_rank_file
from xrank.readers.fsdp.reader import describe_rank_files
from xrank.readers.torch_checkpointing.item_files import ModelFiles, explain_mismatch, find_model_files
from xrank.readers.torch_checkpointing.metadata import METADATA
from xrank.words import list_text, plural

if TYPE_CHECKING:
    from xrank.readers.torch_checkpointing.metadata import SavedCut

_AGAIN = "all files must come from one save of one run; copy them again"


class TorchCheckpointingReader:
    """The reader of torch_checkpointing's folders (`xrank.readers.base.Reader`)."""

    name = "torch-checkpointing"

    def recognise(self, path: str) -> str | None:
        """Return None for a folder with ``metadata.pkl`` or ``model_0.pt``, or for a file of another item."""
        return explain_mismatch(path)

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        found = find_model_files(path)
        files = []
        for rank, file in found.listed.by_rank.items():
            read = (
                _read_safetensors(file, rank) if found.are_safetensors else read_rank_file(file, rank, is_nested=True)
            )
            files.append(read if found.metadata is None else _apply_cuts(read, found.metadata.cuts_of(rank)))
        if found.are_safetensors and found.metadata is None:
            hints = _limit_hints(found, hints)
        model = describe_rank_files(self.name, path, found.listed, files, hints)
        notes = list(model.notes)
        if found.others:
            notes.append(("left-out", f"items beside {found.item} were left out: {list_text(found.others)}"))
        return replace(model, notes=tuple(notes), details={**model.details, "item": found.item})


def _read_safetensors(path: str, rank: int) -> FsdpRankFile:
    header = read_header(path)
    plain = {
        tensor.name: ArchivedTensor(tensor.name, tensor.dtype, tensor.shape, row_major(tensor.shape), 0)
        for tensor in header.tensors
    }
    return FsdpRankFile(rank, header, {}, {}, plain, ())


def _apply_cuts(file: FsdpRankFile, cuts: dict[str, SavedCut]) -> FsdpRankFile:
    """Return a rank's file whose plain tensors have the cuts that the metadata records.

    Raises:
        ContradictionError: the file and the metadata are from two saves.
    """
    held = {**file.dtensors, **file.sharded, **file.plain}
    odd = sorted(cuts.keys() ^ held.keys())
    if odd:
        raise ContradictionError(
            f"{odd[0]}: {METADATA} and {file.archive.path} disagree about it",
            tensor=odd[0],
            rank=file.rank,
            file=file.archive.path,
            got="the tensor in the file" if odd[0] in held else "no such tensor in the file",
            want=f"it {'is' if odd[0] in cuts else 'is not'} in {METADATA}",
            next_step=_AGAIN,
        )
    for name, part in file.dtensors.items():
        _check_kind(name, file, (part.local.dtype, part.shape), cuts[name])
    for name, sharded in file.sharded.items():
        _check_kind(name, file, (sharded.dtype, sharded.shape), cuts[name])
    dtensors = dict(file.dtensors)
    for name, tensor in file.plain.items():
        cut = cuts[name]
        _check_kind(name, file, (tensor.dtype, cut.shape), cut)
        dtensors[name] = DTensorPart(tensor, cut.layout, cut.mesh, cut.shape)
    # No plain tensor is left, which beside DTensors would count as a replica.
    return replace(file, dtensors=dtensors, plain={})


def _check_kind(name: str, file: FsdpRankFile, kind: tuple[str, tuple[int, ...]], cut: SavedCut) -> None:
    if kind != (cut.dtype, cut.shape):
        raise ContradictionError(
            f"{name}: {METADATA} and {file.archive.path} record another type or shape",
            tensor=name,
            rank=file.rank,
            file=file.archive.path,
            got=f"{kind[0]} {list(kind[1])}",
            want=f"{cut.dtype} {list(cut.shape)}, as in {METADATA}",
            next_step=_AGAIN,
        )


def _limit_hints(found: ModelFiles, hints: Hints) -> Hints:
    """Return the hints that can place ranks' elements whose cuts are recorded nowhere.

    A base model's shapes show whether the file of a single rank is a whole model. They do not show the order of the
    parts of several ranks: FSDP2 over tensor parallelism cuts rows in another order than that of the ranks.

    Raises:
        LayoutError: there are none.
    """
    num_ranks = len(found.listed.by_rank)
    if hints.layouts is not None:
        return replace(hints, shapes={})
    if num_ranks == 1 and hints.shapes:
        return hints
    file = next(iter(found.listed.by_rank.values()))
    raise LayoutError(
        f"{file} holds a rank's elements of tensors, and no {METADATA} records how they were cut",
        file=file,
        got=f"safetensors files of {plural(num_ranks, 'rank')}",
        want=f"{METADATA}, or a layout file{', or a base model' if num_ranks == 1 else ''}",
        next_step=either(
            f"give {option('layouts', metavar='FILE')}",
            *([f"give {option('base_model', metavar='DIR')}"] if num_ranks == 1 else []),
            "save with a resharder (ItemSpec(resharder=DefaultResharder()))",
        ),
    )
