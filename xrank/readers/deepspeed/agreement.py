"""Checks that files belong to one save of one run, by the facts that DeepSpeed records in several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from xrank.errors import ContradictionError
from xrank.formats.pickles import InertRecord
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive


class Agreement:
    """Compares each file's facts with those of the first file that has them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Origin]] = {}

    def add(self, facts: Mapping[str, object], origin: Origin) -> None:
        """Add a file's facts.

        Raises:
            ContradictionError: an earlier file has another value.
        """
        for path, value in facts.items():
            known, other = self._known.setdefault(path, (value, origin))
            # repr compares types, too, and makes NaN equal NaN.
            if repr(known) != repr(value):
                raise ContradictionError(
                    origin.locate(f"is not from the same save as {other.path}: {quote(path)[1:-1]} differs"),
                    rank=origin.rank,
                    file=origin.path,
                    got=ascii(value)[:200],
                    want=f"{ascii(known)[:200]}, as in {other.path}",
                    next_step="all files must come from one save of one run; copy them again",
                )


def flatten_facts(value: object, archive: TorchArchive, path: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of a tree's numbers and texts; single elements, such as steps, give their checksums."""
    if depth > 6:
        return
    if value is None or isinstance(value, (bool, int, float, str)):
        yield path, value
    elif isinstance(value, ArchivedTensor):
        record = archive.records[value.key]
        if value.shape == () and record.nbytes <= 16 and archive.has_checksums:
            yield path, f"{value.dtype} of CRC {record.crc32:08x}"
    elif isinstance(value, InertRecord):
        if isinstance(value.state, dict):
            yield from flatten_facts(value.state, archive, path, depth + 1)
        elif value.args:
            yield from flatten_facts(value.args, archive, path, depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flatten_facts(part, archive, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from flatten_facts(part, archive, f"{path}.{number}", depth + 1)
