"""Reads torch's distributed checkpoints (DCP) of FSDP, tensor parallelism or both; accelerate's among them.

On disk: ``.metadata``, a pickle that describes the tensors and their cuts, and ``__<rank>_<n>.distcp`` files, in which
every piece is an archive of ``torch.save`` (``torch/distributed/checkpoint/filesystem.py``).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from xrank.errors import IncompleteError, LayoutError, UsageError
from xrank.formats.dcp_metadata import DcpMetadata, DcpTensor, read_metadata
from xrank.formats.regular_file import quote
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints
from xrank.readers.dcp.files import file_notes, find_other_files, has_lightning_module, read_backend
from xrank.readers.dcp.pieces import DcpPieces, locate, rank_of_file
from xrank.readers.dcp.values import check_values
from xrank.readers.model_parts import ModelPart, SavedTree, part_details, part_notes, select_model
from xrank.readers.records import note_bare_files
from xrank.stores import places
from xrank.words import list_text

_METADATA = ".metadata"
_SUFFIX = ".distcp"
_OPTIMIZER_FOLDER = re.compile(r"optimizer(_\d+)?")  # accelerate/utils/fsdp_utils.py: save_fsdp_optimizer
_STEP = re.compile(r"(?:.*[^a-z])?(?:checkpoint|ckpt|step|iter|iteration|global_step)[-_]?0*(\d{1,18})", re.IGNORECASE)
_FLAT = "_flat_param"  # torch/distributed/fsdp/_flat_param.py: FLAT_PARAM


class DcpReader:
    """The reader of torch DCP checkpoints (`xrank.readers.base.Reader`)."""

    name = "dcp"

    def recognise(self, path: str) -> str | None:
        """Return None if the folder contains DCP's metadata or shards, and they are those of a torch model."""
        if not places.is_folder(path):
            return "not a folder"
        entries = places.list_names(path)
        if not places.is_file(os.path.join(path, _METADATA)) and not any(e.endswith(_SUFFIX) for e in entries):
            return "no .metadata and no *.distcp in it"
        if _OPTIMIZER_FOLDER.fullmatch(os.path.basename(places.absolute(path))):
            return "an optimizer's state, as accelerate names its folder" + _model_beside(path)
        if read_backend(path) == "torch_dist":
            return "a Megatron checkpoint (torch_dist)"
        return None

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of the model lies; errors as in `Reader.read`."""
        _check_presence(path)
        metadata = read_metadata(os.path.join(path, _METADATA))
        part = select_model(_describe_tree(metadata), hints.part)
        tensors = {name: metadata.tensors[flat] for name, flat in part.tensors.items()}
        _check_flat(metadata, tensors)
        pieces = locate(path, metadata, tensors)
        left_out = check_values(path, metadata, part.values, hints.is_left_out or (lambda name: False))
        kept_nbytes = sum(int(tensor.nbytes.sum()) for tensor in tensors.values())
        unused, idle = find_other_files(path, metadata)
        # Idle ranks belong to the world, too, though the metadata name none of their files.
        ranks = sorted({rank for name in (*metadata.files, *idle) if (rank := rank_of_file(name)) is not None})
        return StoredModel(
            format=self.name,
            path=path,
            files=pieces.files,
            records=pieces.records,
            shards=pieces.shards,
            world_size=ranks[-1] + 1 if ranks else None,
            step=_step(path),
            nbytes=int(pieces.records.nbytes.sum()),
            skipped_nbytes=metadata.nbytes - kept_nbytes,
            notes=_notes(path, metadata, part, pieces, unused),
            details={**part_details(part), **_details(metadata, tensors, ranks, unused)},
            absent=left_out,
            part=hints.part,
            is_attribute=has_lightning_module(path),
        )


def _describe_tree(metadata: DcpMetadata) -> SavedTree:
    return SavedTree(
        metadata.path,
        {name: tensor.shape for name, tensor in metadata.tensors.items()},
        metadata.byte_items,
        metadata.paths or {},
        lambda name: int(metadata.tensors[name].nbytes.sum()),
        metadata.byte_items,
    )


def _check_flat(metadata: DcpMetadata, tensors: Mapping[str, DcpTensor]) -> None:
    """Refuse FSDP1's flat parameters, of which every rank saved its own range under one name."""
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] == _FLAT:
            raise LayoutError(
                f"{quote(name)[1:-1]}: a flat parameter of FSDP1, which does not record its members' shapes",
                tensor=name,
                file=metadata.path,
                got=f"{tensor.shape[0] if tensor.shape else 1:,} elements of a LOCAL_STATE_DICT",
                want="parameters by name",
                next_step="load it into the same model, and save with SHARDED_STATE_DICT or FULL_STATE_DICT",
            )


def _model_beside(path: str) -> str:
    """Return a hint at accelerate's folder of the model, if it lies beside that of its optimizer."""
    name = os.path.basename(places.absolute(path)).replace("optimizer", "pytorch_model_fsdp")
    beside = os.path.join(os.path.dirname(places.absolute(path)), name)
    return f"; the model's is {os.path.join(path, os.pardir, name)}" if places.is_folder(beside) else ""


def _check_presence(path: str) -> None:
    """Raise if a folder has shards but no metadata, which is written last."""
    entries = places.list_names(path)
    if _METADATA in entries:
        return
    file = os.path.join(path, _METADATA)
    own = sorted(entry for entry in entries if re.fullmatch(r"__\d+\.metadata", entry))
    if own:
        raise UsageError(
            f"{path} was saved without coordination: each rank has metadata of its own, and none knows the whole",
            file=os.path.join(path, own[0]),
            got=f"{len(own)} files like {own[0]}",
            want=_METADATA,
            next_step="save with coordination (torch's default), or load it and save it again with torch",
        )
    shards = sum(entry.endswith(_SUFFIX) for entry in entries)
    raise IncompleteError(
        f"{file} is missing: the checkpoint was not finished, or not copied whole",
        file=file,
        got=f"{shards} *.distcp files" + (", .metadata.tmp" if ".metadata.tmp" in entries else ""),
        want="the .metadata that is written last",
        next_step="copy .metadata from where the checkpoint was written, or take an earlier checkpoint",
    )


def _step(path: str) -> int | None:
    """Return the step in the folder's name or its parent's."""
    folder = places.absolute(path)
    for name in (os.path.basename(folder), os.path.basename(os.path.dirname(folder))):
        # accelerate's folder has the number of the model, and the step is in its parent's name.
        if re.fullmatch(r"pytorch_model_fsdp(_\d+)?", name):
            continue
        found = _STEP.fullmatch(name)
        return None if found is None else int(found[1])
    return None


def _notes(
    path: str, metadata: DcpMetadata, part: ModelPart, pieces: DcpPieces, unused: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    notes = file_notes(path, metadata, unused)
    notes += part_notes(part)
    if metadata.byte_items:
        names = sorted(ascii(name)[1:-1][:100] for name in metadata.byte_items)
        notes.append(("byte-items", f"{len(names):,} values that are not tensors were left out: {list_text(names, 3)}"))
    return (*notes, *note_bare_files(pieces.unchecked))


def _details(
    metadata: DcpMetadata, tensors: Mapping[str, DcpTensor], ranks: Sequence[int], unused: Sequence[str]
) -> dict[str, Any]:
    grids: dict[str, Counter[str]] = {}
    for name, tensor in tensors.items():
        grids.setdefault(re.sub(r"\d+", "#", name), Counter())[_grid(tensor)] += 1
    return {
        "ranks that wrote": len(ranks),
        "values that are not tensors": len(metadata.byte_items),
        "chunks": {family: ", ".join(sorted(counts)) for family, counts in sorted(grids.items())},
        "unused files": list(unused),
    }


def _grid(tensor: DcpTensor) -> str:
    """Return the number of parts in each dimension: ``4 x 2``."""
    cuts = [len(set(tensor.offsets[:, k].tolist())) for k in range(len(tensor.shape))]
    return " x ".join(map(str, cuts)) if max(cuts, default=1) > 1 else "whole"
