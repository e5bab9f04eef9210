"""A workspace's states as output files: a pickle, the tensors and the zip directory at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xrank.formats.rank_state import RankRecord, state_file_name, state_pickle
from xrank.formats.torch_archive import ArchivedTensor
from xrank.formats.zip_archive import lay_out_archive
from xrank.layout.nests import row_major
from xrank.plan.output import OutputFile, OutputTensor


def lay_out_state(
    record: RankRecord, config: Mapping[str, Any], tensors: Sequence[OutputTensor], names: Mapping[str, str]
) -> OutputFile:
    """Return one rank's state as a file to be written: ``rank_<r>_state.pth``, as `NFSWorkspace` writes it.

    Args:
        record: rank, world size and run of the state.
        config: plain values.
        tensors: the rank's parts, with their local shapes; their offsets do not matter.
        names: name in the state, in its order -> tensor; tied names have the same tensor.
    """
    keys = {tensor.name: str(key) for key, tensor in enumerate(tensors)}
    views = {
        tensor.name: ArchivedTensor(keys[tensor.name], tensor.dtype, tensor.shape, row_major(tensor.shape), 0)
        for tensor in tensors
    }
    pickled = state_pickle(config, {name: views[tensor] for name, tensor in names.items()}, record.to_json())
    layout = lay_out_archive(pickled, [tensor.nbytes for tensor in tensors])
    placed = tuple(replace(tensor, offset=at) for tensor, at in zip(tensors, layout.offsets, strict=True))
    name = state_file_name(record.rank)
    return OutputFile(name, layout.front, placed, layout.nbytes, layout.headers, layout.ending, layout.trailer)
