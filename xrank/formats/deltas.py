"""Deltas: versions of a model as what has changed since the version before, as slime writes and SGLang applies them.

Facts from slime 624b824a (``slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py``,
``slime/utils/disk_delta.py``) and its patch of SGLang (``docker/patch/latest/sglang-pull_weights.patch``):

A folder ``weight_v000002`` contains safetensors files and an index, whose metadata name the version, its base, and the
encoding; an index without an encoding is a whole model's. Each tensor that has changed is a row of bytes: one frame of
zstd around a body. The metadata of its file have the checksum of the tensor's new bytes, by its name. The body is

``xor``        the old bytes xor the new ones;
``overwrite``  a count, so many positions of bytes by rising order, each a little-endian u4, and the bytes there.

SGLang reads the first frame of a body only, and asks its header for the size of an ``overwrite`` body.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from xrank.errors import CorruptError, UsageError, option
from xrank.formats.zarr_array import Readable, import_zstandard, open_frame

ENCODINGS = ("xor", "overwrite")
CHECKSUMS = ("xxh3-128", "blake3", "adler32")
INDEX_NAME = "model.safetensors.index.json"
MAX_OVERWRITTEN_NBYTES = (1 << 32) - 1
"""Bytes of a tensor at most, in the encoding with positions of 4 bytes."""

_VERSION = re.compile(r"weight_v(\d{6,})")
_CHUNK_NBYTES = 1 << 18
_STEP_NBYTES = 1 << 20
"""Bytes that are compressed at once: their xor stays in cache."""
FRAME_HEADER_NBYTES = 18
"""Bytes of the longest header of a valid zstd frame (RFC 8878, section 3.1.1.1)."""
_OWN = "xrank"

Bytes = npt.NDArray[np.uint8]


def version_name(version: int) -> str:
    """Return the name of a version's folder.

    Example:
        >>> version_name(12)
        'weight_v000012'
    """
    return f"weight_v{version:06d}"


def version_of(name: str) -> int | None:
    """Return the version of a folder by its name; None for another folder."""
    match = _VERSION.fullmatch(name)
    return None if match is None else int(match[1])


class DeltaFacts(Struct, frozen=True):
    """What the index of a version says of its bodies."""

    version: int
    base_version: int
    encoding: str
    checksum: str
    """Kind of the checksums."""
    state: str | None = None
    """Digest of all tensors of the version; None: xrank has not written it. See `state_digest`."""
    base_state: str | None = None
    step: int | None = None
    """The training step."""

    def to_metadata(self) -> dict[str, Any]:
        """Return the index's metadata. Programs other than xrank ignore its own part."""
        own = {name: getattr(self, name) for name in ("state", "base_state", "step")}
        return {
            "version": f"{self.version:06d}",
            "base_version": f"{self.base_version:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksum,
            _OWN: {name: value for name, value in own.items() if value is not None},
        }


def parse_facts(metadata: Mapping[str, Any], file: str) -> DeltaFacts | None:
    """Return the facts of a version by its index's metadata; None: it is a whole model. `file` is the index."""
    if "delta_encoding" not in metadata:
        return None
    numbers = {}
    for key in ("version", "base_version"):
        text = metadata.get(key)
        if not isinstance(text, str) or re.fullmatch(r"\d{1,18}", text) is None:
            raise _refuse(file, key, text, "the digits of a version")
        numbers[key] = int(text)
    if numbers["version"] <= numbers["base_version"]:
        raise _refuse(file, "base_version", metadata["base_version"], f"a version before {metadata['version']}")
    wanted = {"delta_encoding": ENCODINGS, "compression_format": ("zstd",), "checksum_format": CHECKSUMS}
    for key, allowed in wanted.items():
        if metadata.get(key) not in allowed:
            raise _refuse(file, key, metadata.get(key), " or ".join(allowed))
    own = metadata.get(_OWN, {})
    kinds = {"state": str, "base_state": str, "step": int}
    if (
        not isinstance(own, dict)
        or any(name in own and type(own[name]) is not kinds[name] for name in kinds)
        or any(re.fullmatch("[0-9a-f]{32}", own[name]) is None for name in ("state", "base_state") if name in own)
    ):
        raise _refuse(file, _OWN, own, "a table of state, base_state and step")
    return DeltaFacts(
        numbers["version"],
        numbers["base_version"],
        metadata["delta_encoding"],
        metadata["checksum_format"],
        **{name: own[name] for name in kinds if name in own},
    )


def _refuse(file: str, key: str, got: object, want: str) -> CorruptError:
    text = json.dumps(got, default=str)[:80]
    next_step = "copy the version again from where it was written, or write it with a value that xrank supports"
    return CorruptError(f"{file}: {key} is not known", file=file, got=text, want=want, next_step=next_step)


def state_digest(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """Return the digest of a whole model: of name -> (element type, shape, XXH3-128 of the bytes), in any order."""
    import xxhash

    lines = (json.dumps([name, dtype, list(shape), digest]) for name, (dtype, shape, digest) in sorted(tensors.items()))
    return xxhash.xxh3_128("\n".join(lines).encode()).hexdigest()


class Checksum(Protocol):
    """A checksum that is computed piece by piece."""

    def update(self, data: Any, /) -> object:
        """Add the next bytes."""

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_checksum(kind: str) -> Checksum:
    """Return a checksum of no bytes yet.

    Raises:
        UsageError: the kind is unknown, or its package is not installed.
    """
    if kind == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128()
    if kind == "adler32":
        return _Adler32()
    if kind == "blake3":
        try:
            from blake3 import blake3
        except ImportError:
            next_step = "run pip install blake3"
            raise UsageError("checksums of blake3 need a package", got="no blake3", next_step=next_step) from None
        made: Checksum = blake3()
        return made
    next_step = "give one of these"
    raise UsageError(f"{option('checksum')} is unknown", got=kind, want=", ".join(CHECKSUMS), next_step=next_step)


class BodyWriter:
    """Makes the body of one tensor, whose bytes come in order; it keeps the compressed body alone.

    `put` takes the frame of an ``xor`` body piece by piece, which is then not kept. ``overwrite`` also keeps five bytes
    for each byte that has changed, up to `finish`.
    """

    def __init__(self, encoding: str, nbytes: int, put: Callable[[bytes], object] | None = None) -> None:
        self._encoding, self._nbytes, self._done = encoding, nbytes, 0
        self._parts: list[bytes] = []
        self._put = self._parts.append if put is None else put
        self._positions: list[npt.NDArray[np.uint32]] = []
        self._values: list[Bytes] = []
        self.changed_nbytes = 0
        """Bytes that differ, or at least one if any does where the encoding needs no count."""
        self._frame: Any = None

    def add(self, old: Bytes, new: Bytes) -> None:
        """Add the next bytes of both versions."""
        if self._encoding != "xor":
            at = np.flatnonzero(old != new)
            self.changed_nbytes += len(at)
            self._positions.append((at + self._done).astype("<u4"))
            self._values.append(new[at])
        elif self.changed_nbytes or old.data != new.data:  # most tensors of a frozen part need no compressor
            if not self.changed_nbytes:
                self.changed_nbytes = 1
                self._frame = _open_compressor(self._nbytes)
                for start in range(0, self._done, _STEP_NBYTES):
                    self._put(self._frame.compress(bytes(min(_STEP_NBYTES, self._done - start))))
            for start in range(0, len(new), _STEP_NBYTES):
                part = slice(start, start + _STEP_NBYTES)
                self._put(self._frame.compress(xor_bytes(old[part], new[part])))
        self._done += len(new)

    def finish(self) -> bytes | None:
        """Return the frame, without what `put` has taken; None if no byte has changed."""
        assert self._done == self._nbytes, "put() has not received all bytes of the tensor"
        if not self.changed_nbytes:
            return None
        if self._encoding != "xor":
            count = np.array([self.changed_nbytes], "<u4")
            self._frame = _open_compressor(4 + 5 * self.changed_nbytes)
            for array in (count, *self._positions, *self._values):
                self._put(self._frame.compress(array.tobytes()))
        self._put(self._frame.flush())
        return b"".join(self._parts)


def frame_content_nbytes(frame: Readable) -> int:
    """Return the bytes of a body as its frame's header records them, or -1; it raises DamagedBodyError."""
    zstandard = import_zstandard()
    try:
        return int(zstandard.frame_content_size(frame.read(FRAME_HEADER_NBYTES)))
    except zstandard.ZstdError as error:
        raise DamagedBodyError(str(error)) from error


def fold_bodies(encoding: str, bodies: Sequence[Callable[[], Readable]], put: Callable[[bytes], object]) -> bool:
    """Compose the bodies of one tensor, by rising version, without its base; return False if nothing has changed.

    Each function opens a frame from its first byte on, and `put` takes the composed frame piece by piece. It raises
    DamagedBodyError. ``overwrite`` takes the memory of all positions and bytes.
    """
    sizes = [frame_content_nbytes(open_body()) for open_body in bodies]
    contents = [_Content(open_body()) for open_body in bodies]
    if encoding == "xor":
        if len(set(sizes)) > 1 or sizes[0] < 0:
            raise DamagedBodyError(f"bodies of {', '.join(f'{size:,}' for size in sizes)} bytes")
        writer = BodyWriter("xor", sizes[0], put)
        for start in range(0, sizes[0], _STEP_NBYTES):
            first, *others = (content.take(min(_STEP_NBYTES, sizes[0] - start)) for content in contents)
            writer.add(first, reduce(xor_bytes, others))
        for content in contents:
            content.check_end()
        return writer.finish() is not None
    positions, values = list[Bytes](), list[Bytes]()
    for content, size in zip(reversed(contents), reversed(sizes), strict=True):
        count = int(content.take(4).view("<u4")[0])
        if size != 4 + 5 * count:
            raise DamagedBodyError(f"{count:,} positions in a body of {size:,} bytes")
        positions.append(content.take(4 * count).view("<u4"))
        values.append(content.take(count))
        content.check_end()
    places, first_rows = np.unique(np.concatenate(positions), return_index=True)  # the last version's value counts
    frame = _open_compressor(4 + 5 * len(places))
    for array in (np.array([len(places)], "<u4"), places.astype("<u4"), np.concatenate(values)[first_rows]):
        put(frame.compress(array.tobytes()))
    put(frame.flush())
    return True


def most_frame_nbytes(encoding: str, nbytes: int) -> int:
    """Return a bound of the bytes of a body's frame, for a tensor of that many bytes."""
    content = nbytes if encoding == "xor" else 4 + 5 * nbytes
    return content + (content >> 8) + (64 << 10)  # a little more than zstd's own bound (ZSTD_COMPRESSBOUND)


def _open_compressor(nbytes: int) -> Any:
    # SGLang needs the size in the frame's header. The frame's own checksum finds damage in it before anything is used.
    # About level 1, with tables that fit a core's first cache: a body is mostly zeros.
    zstandard = import_zstandard()
    parameters = zstandard.ZstdCompressionParameters(
        window_log=17,
        hash_log=12,
        chain_log=12,
        search_log=1,
        min_match=6,
        strategy=zstandard.STRATEGY_FAST,
        write_content_size=1,
        write_checksum=1,
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=nbytes)


def xor_bytes(a: Bytes, b: Bytes, out: Bytes | None = None) -> Bytes:
    """Return the bytes of one array xor those of the other, which has as many; in `out` if it is given."""
    out, whole = np.empty(len(a), np.uint8) if out is None else out, len(a) // 8 * 8
    words = [array[:whole].view(np.uint64) for array in (a, b, out)]
    np.bitwise_xor(words[0], words[1], out=words[2])
    np.bitwise_xor(a[whole:], b[whole:], out=out[whole:])
    return out


class DamagedBodyError(Exception):
    """A body does not have the form that its encoding gives it; the text says in what."""


class BodyReader:
    """Applies the body of one tensor to bytes that come in order. It raises DamagedBodyError.

    `open_body` returns a stream of the frame from its first byte on; ``overwrite`` reads two at once.
    """

    def __init__(self, encoding: str, nbytes: int, open_body: Callable[[], Readable]) -> None:
        self._encoding, self._nbytes, self._done = encoding, nbytes, 0
        self._content = _Content(open_body())
        if encoding == "xor":
            self._buffer = np.empty(min(nbytes, _CHUNK_NBYTES), np.uint8)
            return
        self._left = int(self._content.take(4).view("<u4")[0])
        if self._left > nbytes:
            raise DamagedBodyError(f"{self._left:,} positions, and the tensor has {nbytes:,} bytes")
        self._ahead: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        """Positions that are read and not used yet."""
        self._last = -1
        self._values = _Content(open_body())
        self._values.skip(4 + 4 * self._left)

    def apply(self, data: Bytes) -> None:
        """Change the next bytes from the old version's to the new one's, in place."""
        start, self._done = self._done, self._done + len(data)
        if self._encoding == "xor":
            for at in range(0, len(data), _CHUNK_NBYTES):
                part = data[at : at + _CHUNK_NBYTES]
                xor_bytes(part, self._content.fill(self._buffer[: len(part)]), part)
            return
        for positions in self._positions_before(self._done):
            data[positions - start] = self._values.take(len(positions))

    def finish(self) -> None:
        """Check that the body has ended with the tensor."""
        assert self._done == self._nbytes, "all bytes of a tensor are changed by a body"
        if self._encoding == "xor":
            self._content.check_end()
            return
        if self._left or len(self._ahead):
            raise DamagedBodyError(f"a position beyond the {self._nbytes:,} bytes of the tensor")
        self._values.check_end()

    def _positions_before(self, end: int) -> Iterator[npt.NDArray[np.int64]]:
        while True:
            if not len(self._ahead):
                if not self._left:
                    return
                count = min(self._left, _CHUNK_NBYTES // 4)
                self._ahead, self._left = self._content.take(4 * count).view("<u4"), self._left - count
                steps = np.diff(self._ahead.astype(np.int64), prepend=self._last)
                if (steps <= 0).any():
                    raise DamagedBodyError("positions that do not rise")
                self._last = int(self._ahead[-1])
            count = int(np.searchsorted(self._ahead, end))
            if not count:
                return
            yield self._ahead[:count].astype(np.int64)
            self._ahead = self._ahead[count:]


class _Content:
    """The decompressed bytes of a frame, in order."""

    def __init__(self, encoded: Readable) -> None:
        self._stream, self._error = open_frame(encoded), import_zstandard().ZstdError

    def take(self, nbytes: int) -> Bytes:
        """Return the next bytes, which the caller may change."""
        return self.fill(np.empty(nbytes, np.uint8))

    def fill(self, data: Bytes) -> Bytes:
        """Return an array, filled with the next bytes."""
        done = 0
        while done < len(data):
            count = self._read_into(data[done:])
            if not count:
                raise DamagedBodyError(f"it ends {len(data) - done:,} bytes too early")
            done += count
        return data

    def skip(self, nbytes: int) -> None:
        """Pass over the next bytes."""
        for start in range(0, nbytes, _CHUNK_NBYTES):
            self.take(min(_CHUNK_NBYTES, nbytes - start))

    def check_end(self) -> None:
        """Read the end of the frame, with its checksum."""
        if self._read_into(np.empty(1, np.uint8)):
            raise DamagedBodyError("it has more bytes than the tensor")

    def _read_into(self, data: Bytes) -> int:
        try:
            return int(self._stream.readinto(data))
        except self._error as error:
            raise DamagedBodyError(str(error)) from error
