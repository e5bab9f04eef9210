"""xrank's own readers, each imported where names in the source's folder hint at its format: imports take time."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import import_module

from xrank.readers.base import Reader

__all__ = ["OWN_READERS", "WORKSPACE", "ListedReader"]


@dataclass(frozen=True, slots=True)
class ListedReader:
    """Where a reader is, and the sign without which its format is not there."""

    name: str
    """The format."""
    sign: str
    """A regular expression: the reader recognises no folder without an entry of such a name, and no other file."""
    module: str
    class_name: str

    def is_hinted_at(self, path: str) -> bool:
        """Say whether the reader may recognise a path."""
        try:
            names = os.listdir(path)
        except (NotADirectoryError, FileNotFoundError):  # a file; or a trainer has just removed the folder
            names = [os.path.basename(path)]
        return any(map(re.compile(self.sign).fullmatch, names))

    def load(self) -> Reader:
        """Import the reader."""
        reader: Reader = getattr(import_module(self.module), self.class_name)()
        return reader


WORKSPACE = ListedReader("workspace", r"rank_.*_state\.pth", "xrank.readers.workspace", "WorkspaceReader")
OWN_READERS = (
    WORKSPACE,
    ListedReader("safetensors", r".*\.safetensors", "xrank.readers.hugging_face.folder", "HfFolderReader"),
    ListedReader("hf-shards", r"shard-.*\.safetensors|sharded", "xrank.readers.hugging_face.shards", "HfShardsReader"),
    ListedReader("bin", r"pytorch_model.*\.bin", "xrank.readers.hugging_face.bin_folder", "BinFolderReader"),
    ListedReader("dcp", r"\.metadata|.*\.distcp", "xrank.readers.dcp.reader", "DcpReader"),
    ListedReader(
        "megatron-dist",
        r"metadata\.json|common\.pt|latest_checkpointed_iteration\.txt",
        "xrank.readers.megatron.dist",
        "MegatronDistReader",
    ),
    ListedReader(
        "megatron-legacy",
        r"mp_rank_.*|latest_checkpointed_iteration\.txt",
        "xrank.readers.megatron.legacy",
        "MegatronLegacyReader",
    ),
    ListedReader("deepspeed", r".*_states\.pt|latest|latest_universal", "xrank.readers.deepspeed", "DeepSpeedReader"),
    ListedReader("verl", r"model_world_size_.*\.pt", "xrank.readers.fsdp", "VerlReader"),
    ListedReader("accelerate-ranks", r"pytorch_model_fsdp.*rank.*\.bin", "xrank.readers.fsdp", "AccelerateRanksReader"),
)
"""In the order in which they are asked; where none of them fits, other packages' are."""
