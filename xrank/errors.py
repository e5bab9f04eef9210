"""All errors of xrank, in one tree.

    XrankError
    ├ UsageError (ValueError) 2         ├ IncompleteError (FileNotFoundError) 3   ├ RankFailedError (RuntimeError) 1
    │ ├ UnknownFormatError              ├ ContradictionError (ValueError) 4       ├ RankTimeoutError (TimeoutError) 1
    │ └ OutputExistsError (FileExists…) ├ CorruptError (ValueError) 4             ├ NoSpaceError (OSError) 1
    ├ LayoutError (ValueError) 2        ├ UnsafeError (UnpicklingError) 4         └ GradientError (RuntimeError) 1

The number is the exit status of a command that fails with the error. Each class also derives from the built-in that
plain callers would catch. All of them can be pickled, so a failure reaches other processes with all its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any, ClassVar

from xrank.faces import PYTHON, Text, marked

__all__ = [
    "ContradictionError",
    "CorruptError",
    "GradientError",
    "IncompleteError",
    "LayoutError",
    "NoSpaceError",
    "OutputExistsError",
    "RankFailedError",
    "RankTimeoutError",
    "UnknownFormatError",
    "UnsafeError",
    "UsageError",
    "XrankError",
]


class XrankError(Exception):
    """Base class of xrank's errors; each part that does not apply is None.

    Texts may mark options (`xrank.faces`). They are shown in Python's words, unless a face is asked for another's.

    Args:
        message: the failure, in one line that names the thing.
        tensor: the tensor's name in the source or the output.
        rank: the rank concerned.
        host: the host concerned.
        file: the file concerned.
        index_range: the part of the tensor, in words (``"rows 1024-1535"``).
        got: the value or state that was found.
        want: the value or state that is needed.
        next_step: the next step of the user.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str = "",
        *,
        tensor: str | None = None,
        rank: int | None = None,
        host: str | None = None,
        file: str | None = None,
        index_range: str | None = None,
        got: str | None = None,
        want: str | None = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(Text(message))
        self.face = PYTHON
        self.tensor = tensor
        self.rank = rank
        self.host = host
        self.file = file
        self.index_range = index_range
        self._message = message
        self._got = got
        self._want = want
        self._next_step = next_step
        self._added: list[str] = []

    @property
    def message(self) -> str:
        """What failed, in one line that names the thing."""
        return Text(self._message, self.face)

    @property
    def got(self) -> str | None:
        """What was found."""
        return self._shown(self._got)

    @property
    def want(self) -> str | None:
        """What had to be found."""
        return self._shown(self._want)

    @property
    def next_step(self) -> str | None:
        """What the user does next."""
        return self._shown(self._next_step or self._derive_next_step())

    def _derive_next_step(self) -> str | None:
        """Return the next step after an error of this class that was given none."""
        return None

    def _shown(self, marked: str | None) -> str | None:
        return None if marked is None else Text(marked, self.face)

    def about(
        self,
        subject: str = "",
        *,
        tensor: str | None = None,
        rank: int | None = None,
        file: str | None = None,
        got: str | None = None,
        next_step: str | None = None,
    ) -> None:
        """Fill parts that are absent with what the caller knows of them.

        Args:
            subject: the message then begins with it, unless it does so already.
            tensor: as for a new error.
            rank: as for a new error.
            file: as for a new error.
            got: what was found besides.
            next_step: what the user does next, unless the error has a step of its own.
        """
        if subject and not self._message.startswith(subject):
            self._message = f"{subject}: {self._message}"
            self.args = (Text(self._message),)
        self.tensor = tensor if self.tensor is None else self.tensor
        self.rank = rank if self.rank is None else self.rank
        self.file = file if self.file is None else self.file
        self._got = "; ".join(filter(None, (self._got, got))) or None
        self._next_step = self._next_step or next_step

    def rename(self, old: str, new: str) -> None:
        """Replace a name or path that is internal: of a tensor while it is compared, of a file while it is open."""
        self._message = self._message.replace(old, new)
        self.args = (Text(self._message),)
        self._got = self._got and self._got.replace(old, new)
        self.tensor = self.tensor and self.tensor.replace(old, new)
        self.file = self.file and self.file.replace(old, new)

    def advise(self, next_step: str) -> None:
        """Replace the next step: the caller knows better what the user can change."""
        self._next_step = next_step

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """Lines that Python prints below the message of an uncaught error: got, want, try, and added notes."""
        parts = (("got", self.got), ("want", self.want), ("try", self.next_step))
        return [*(f"  {label:<5} {part}" for label, part in parts if part), *self._added]

    def add_note(self, note: str) -> None:
        """Add a line to those printed below the message."""
        self._added.append(note)

    def __str__(self) -> str:
        # Some built-in bases (OSError) format their arguments in ways of their own.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self._message, {**self.__dict__, "_added": [*self._added]}))

    def to_dict(self) -> dict[str, Any]:
        """Return the error as a JSON object; absent parts are None."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "tensor": self.tensor,
            "rank": self.rank,
            "host": self.host,
            "file": self.file,
            "index_range": self.index_range,
            "got": self.got,
            "want": self.want,
            "try": self.next_step,
        }

    def to_record(self) -> dict[str, Any]:
        """Return the error as plain JSON, its texts with their marks; see `from_record`."""
        return {part: marked(value) if isinstance(value, str) else value for part, value in self.to_dict().items()}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> XrankError:
        """Return the error that `to_record` described."""
        parts = {part: value for part, value in record.items() if part not in ("type", "message", "try")}
        error: XrankError = globals()[record["type"]](record["message"], **parts, next_step=record["try"])
        return error


def _rebuild(kind: type[XrankError], message: str, state: dict[str, Any]) -> XrankError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class UsageError(XrankError, ValueError):
    """The command or call must change: an option, an ambiguous source, a choice to make."""

    exit_code = 2

    def _derive_next_step(self) -> str | None:
        return None if self._want is None else f"give {self._want}"


class UnknownFormatError(UsageError):
    """No reader recognises the source; ``got`` lists each reader's reason."""


class OutputExistsError(UsageError, FileExistsError):
    """The output exists, or another gather to it won."""


class LayoutError(XrankError, ValueError):
    """A mesh, a layout or its text is wrong, or does not fit a tensor."""

    exit_code = 2

    def _derive_next_step(self) -> str:
        return "correct the layout or the mesh"


class IncompleteError(XrankError, FileNotFoundError):
    """A rank, a file or a part of a tensor is missing; it may still come."""

    exit_code = 3


class ContradictionError(XrankError, ValueError):
    """Two parts of the source disagree: replicas, runs, shapes, dtypes, meshes."""

    exit_code = 4


class CorruptError(XrankError, ValueError):
    """Bytes differ from those that were written: a checksum, a size, a structure."""

    exit_code = 4


class UnsafeError(XrankError, UnpicklingError):
    """A file asks to run code, or names a path outside its folder."""

    exit_code = 4


class RankFailedError(XrankError, RuntimeError):
    """Another rank failed: ``rank``, ``host``, ``pid``, ``cause``; ``failures`` contains all failures."""

    def __init__(
        self,
        message: str = "",
        *,
        pid: int | None = None,
        cause: str | None = None,
        failures: tuple[XrankError, ...] = (),
        **parts: Any,
    ) -> None:
        super().__init__(message, **parts)
        self.pid = pid
        self._cause = cause
        self.failures = failures

    @property
    def cause(self) -> str | None:
        """Why it failed: the type and the message of its error, or how its process ended."""
        return self._shown(self._cause)


class RankTimeoutError(XrankError, TimeoutError):
    """A live rank did not arrive before the deadline; ``waiting_for`` lists such ranks."""

    def __init__(self, message: str = "", *, waiting_for: tuple[int, ...] = (), **parts: Any) -> None:
        super().__init__(message, **parts)
        self.waiting_for = waiting_for


class NoSpaceError(XrankError, OSError):
    """A disk or a memory file system is too full: ``needed_nbytes`` and ``free_nbytes``."""

    def __init__(
        self, message: str = "", *, needed_nbytes: int | None = None, free_nbytes: int | None = None, **parts: Any
    ) -> None:
        super().__init__(message, **parts)
        self.needed_nbytes = needed_nbytes
        self.free_nbytes = free_nbytes


class GradientError(XrankError, RuntimeError):
    """A gradient was synchronised never, twice, too late or by the wrong factor."""
