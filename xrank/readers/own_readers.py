"""xrank's own readers. Each is imported only if file names hint at its format, because imports take time."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import import_module

from xrank.readers.base import Reader
from xrank.stores import places


@dataclass(frozen=True, slots=True)
class ListedReader:
    """A reader's place, and the file names that hint at its format."""

    name: str
    """The format."""
    sign: str
    """A regular expression. A folder of this format has an entry with a matching name; a single file matches itself."""
    module: str
    class_name: str

    def is_hinted_at(self, path: str) -> bool:
        """Return whether the reader may recognise a path."""
        try:
            names = places.list_names(path)
        except (NotADirectoryError, FileNotFoundError):  # a file, or a folder that a trainer has just removed
            names = [os.path.basename(path)]
        return any(map(re.compile(self.sign).fullmatch, names))

    def load(self) -> Reader:
        """Import the reader."""
        reader: Reader = getattr(import_module(self.module), self.class_name)()
        return reader


WORKSPACE = ListedReader("workspace", r"rank_.*_state\.pth", "xrank.readers.workspace", "WorkspaceReader")
TORCH_SAVE = ListedReader(
    "torch-save", r".*\.(pt|pth|ckpt|th|bin|tar)", "xrank.readers.torch_save.reader", "TorchSaveReader"
)
OWN_READERS = (
    WORKSPACE,
    ListedReader("safetensors", r".*\.safetensors", "xrank.readers.hugging_face.folder", "HfFolderReader"),
    ListedReader("hf-shards", r"shard-.*\.safetensors|sharded", "xrank.readers.hugging_face.shards", "HfShardsReader"),
    ListedReader("vllm", r"model-(rank|pp)-.*\.safetensors", "xrank.readers.vllm", "VllmReader"),
    ListedReader(
        "bin",
        r"(diffusion_)?pytorch_model.*\.bin|(ft-)?model-\d{5}-of-\d{5}\.bin",
        "xrank.readers.hugging_face.bin_folder",
        "BinFolderReader",
    ),
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
    ListedReader(
        "torch-checkpointing",
        r"metadata\.pkl|(?!model_world_size_).+_\d+\.(pt|safetensors)",
        "xrank.readers.torch_checkpointing",
        "TorchCheckpointingReader",
    ),
    ListedReader(
        "orbax",
        r"_METADATA|_CHECKPOINT_METADATA|_sharding|array_metadatas|manifest\.ocdbt|ocdbt\.process_\d+",
        "xrank.readers.orbax",
        "OrbaxReader",
    ),
    ListedReader("accelerate-ranks", r"pytorch_model_fsdp.*rank.*\.bin", "xrank.readers.fsdp", "AccelerateRanksReader"),
    TORCH_SAVE,
)
"""In the order in which they are tried, before the readers of other packages."""
