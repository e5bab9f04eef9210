"""Frames of zstd, as Orbax compresses chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from xrank.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType


_CHUNK_NBYTES = 256 << 10
_MAX_WINDOW_NBYTES = 8 << 20
"""Memory that a frame may ask for. zstd's levels 1 to 19 ask for 8 MiB at most; Orbax's 1 and 3 for 2 MiB."""


def import_zstandard() -> ModuleType:
    """Return the module that decodes frames of zstd; its absence is a UsageError."""
    try:
        import zstandard
    except ImportError:
        raise UsageError(
            "the checkpoint is compressed with zstd, and zstandard is not installed",
            got="no module zstandard",
            want="the packages of the extra xrank[orbax]",
            next_step='install them: pip install "xrank[orbax]"',
        ) from None
    module: ModuleType = zstandard  # mypy knows no type of it where it is not installed
    return module


class Readable(Protocol):
    """Bytes in order."""

    def read(self, nbytes: int, /) -> bytes:
        """Return the next bytes, fewer only at the end."""


def open_frame(encoded: Readable) -> Any:
    """Return a stream (`read`, `readinto`) of the content of one frame of zstd; it raises ZstdError."""
    decoder = import_zstandard().ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES)
    return decoder.stream_reader(encoded, read_size=_CHUNK_NBYTES, read_across_frames=False)
