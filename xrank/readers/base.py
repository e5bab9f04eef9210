"""The protocol of readers: they recognize a source format and describe it as a stored model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field

from xrank.errors import XrankError
from xrank.layout import LayoutMap
from xrank.layout.stored_model import StoredModel
from xrank.storage.regular_file import Origin, quote


class Faults:
    """Collects the faults of a source, so that a reader continues with the rest; `RAISING` raises the first fault.

    The pieces of a lost file stay in the model, in records that are `xrank.layout.stored_model.LOST`.
    """

    def __init__(self, *, raises: bool = False) -> None:
        self.raises = raises
        self.errors: list[XrankError] = []
        """All faults, in the order in which they were found."""
        self.files: dict[str, XrankError] = {}
        """Path of a lost file -> its first fault."""
        self.ranks: dict[int, tuple[str, int]] = {}
        """Rank of a lost file -> the file's path and its lost record, for readers that place ranks' parts."""

    def add(self, error: XrankError) -> None:
        """Add a fault, once."""
        if self.raises:
            raise error
        if all(error.message != known.message for known in self.errors):
            self.errors.append(error)

    def lose(self, error: XrankError, *paths: str) -> None:
        """Add a fault because of which these files are not used."""
        self.add(error)
        for path in paths:
            self.files.setdefault(path, error)

    @contextmanager
    def losing(self, *paths: str) -> Iterator[None]:
        """Lose these files if the body raises an `XrankError`."""
        try:
            yield
        except XrankError as error:
            self.lose(error, *paths)


MAX_LISTED = 1 << 16
"""Missing ranks that may each have a fault; a damaged record may claim any number of ranks."""
RAISING = Faults(raises=True)
"""Raises each fault. It has no state, so all calls share it."""


class _HasOrigin(Protocol):
    @property
    def origin(self) -> Origin: ...


_Key = TypeVar("_Key", bound=Hashable)
_File = TypeVar("_File", bound=_HasOrigin)


def drop_outvoted(
    files: dict[_Key, _File], facts: Callable[[_File], Mapping[str, object]], faults: Faults
) -> dict[_Key, _File]:
    """Return the files that agree with most others in the facts that are equal in all files of one save that have them.

    The others are lost, and those of two equal groups. Without a collector of faults, the caller compares them.
    """
    values: dict[str, dict[_Key, str]] = {}
    for key, file in [] if faults.raises else files.items():
        for name, value in facts(file).items():
            values.setdefault(name, {})[key] = repr(value)
    kept = dict(files)
    for name, found in values.items():
        (most, count), *others = Counter(found.values()).most_common(2)
        for key, value in found.items() if others else ():
            if key in kept and (value != most or count == others[0][1]):
                origin, problem = kept.pop(key).origin, f"is not from the same save as other files: {quote(name)[1:-1]}"
                faults.lose(origin.contradiction(f"{problem} differs", quote(value), quote(most)), origin.path)
    return kept


class Hints(Struct, frozen=True):
    """Facts that the caller knows and a source may not record."""

    layouts: LayoutMap | None = None
    """Layouts for tensors that record none."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Global shapes of the base model, by name; they may determine how a tensor without a layout was cut."""
    module_names: Collection[str] = ()
    """Names of a live module that the source will fill."""
    keeps_names: bool = False
    """Whether names stay as they are with respect to config.json's class; marks of well-known wrappers go."""
    tied_to: Callable[[str], str | None] | None = None
    """Returns the name in `shapes` of the tensor that a name is tied to; the base model may have only one of them."""
    is_left_out: Callable[[str], bool] | None = None
    """Returns whether the caller leaves a tensor out; such a tensor need not be placed."""
    needs_config: bool = True
    """Whether the source's own config will be used; if not, ranks may disagree about it."""
    needs_layouts: bool = False
    """Whether the model must record the layouts that its ranks declare (`StoredModel.layouts`)."""
    part: str | None = None
    """Keys, joined by dots, of the part that the caller chose among those in the source; the reader records it in
    `StoredModel.part`. None: the only part that may be the model."""
    world_size: int | None = None
    """Number of ranks that wrote the source, as the caller states it; None: not stated."""
    config: Mapping[str, Any] | None = None
    """Content of the model's config.json beside the source or in the base model; None if neither has one."""
    base_path: str | None = None
    """Folder of the base model's weights: the model that deltas begin with whose chain contains no whole one."""
    prove_shapes: Callable[[Mapping[str, tuple[int, ...]]], str | None] | None = None
    """Proves inferred global shapes. Returns the recipe that they fit, or None if no recipe knows the names. Raises if
    they contradict each other or the config (`xrank.recipes.proofs.prove_shapes`)."""
    faults: Faults = RAISING
    """Collects the faults of the source; by default the first one is raised."""


class Reader(Protocol):
    """Describes one source format from metadata alone.

    Call order: `recognize` for any path, then `read` only if it returned None. Neither writes, imports the framework
    that wrote the source, or runs code found in it. Readers are stateless; any thread may call them.
    """

    name: str
    """The format's name in options and reports."""

    def recognize(self, path: str) -> str | None:
        """Return None if the path holds this format, otherwise the reason why not, in a few words."""

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where the bytes of every tensor lie.

        Raises:
            IncompleteError: a rank or a file is missing.
            ContradictionError: parts disagree.
            CorruptError, UnsafeError: a file is damaged or hostile.
            LayoutError: it is unknown how a tensor was cut.
        """
