"""Write the ``.metadata`` of a torch DCP checkpoint, as torch's ``FileSystemReader`` takes it.

The classes are those of ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py: _StorageInfo``; torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from xrank.dtypes import dtype as dtype_of
from xrank.formats.pickle_writing import Call, Global, Instance, Pairs, size_value, write_pickle

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py: CURRENT_DCP_VERSION
_CHUNK, _TENSOR, _BYTES, _INDEX = (
    Global(_METADATA, name)
    for name in ("ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex")
)
_PLACE, _PROPERTIES = Global(_FILES, "_StorageInfo"), Global(_METADATA, "TensorProperties")
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))


class SavedPiece(Struct, frozen=True):
    """A box of a tensor, or a whole value, and its item."""

    file: str
    start: int
    nbytes: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class SavedValue(Struct, frozen=True):
    """A value of the state dict."""

    path: tuple[str | int, ...]
    """Keys of the nested dicts and lists that lead to it; torch joins them with dots."""
    pieces: tuple[SavedPiece, ...]
    dtype: str | None = None
    """Safetensors name of a tensor's element type; None: not a tensor."""
    shape: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Flat name."""
        return ".".join(map(str, self.path))


def metadata_pickle(values: Sequence[SavedValue]) -> bytes:
    """Return the content of a ``.metadata`` with these values."""
    described, places = {}, []
    for value in values:
        name, is_tensor = value.name, value.dtype is not None
        described[name] = _describe(value) if is_tensor else Instance(_BYTES, {})
        for number, piece in enumerate(value.pieces):
            offset = size_value(piece.offsets) if is_tensor else None
            index = {"fqn": name, "index": number if is_tensor else None, "offset": offset}
            place = {"relative_path": piece.file, "offset": piece.start, "length": piece.nbytes}
            places.append((Instance(_INDEX, index), Instance(_PLACE, place | {"transform_descriptors": None})))
    state = {
        "state_dict_metadata": described,
        "planner_data": {value.name: value.path for value in values},
        "storage_data": Pairs(places),
        "storage_meta": None,
        "version": _VERSION,
    }
    return write_pickle(Instance(Global(_METADATA, "Metadata"), state))


def _describe(value: SavedValue) -> Instance:
    assert value.dtype is not None
    element = Global("torch", dtype_of(value.dtype).torch_name)
    chunks = [
        Instance(_CHUNK, {"offsets": size_value(piece.offsets), "sizes": size_value(piece.sizes)})
        for piece in value.pieces
    ]
    properties = Instance(_PROPERTIES, (element, _STRIDED, False, _CONTIGUOUS, False))
    return Instance(_TENSOR, {"properties": properties, "size": size_value(value.shape), "chunks": chunks})
