"""All errors of xrank, in one tree; their texts name options as the command line or as Python does.

    XrankError
    ├ UsageError (ValueError) 2         ├ IncompleteError (FileNotFoundError) 3   ├ RankFailedError (RuntimeError) 1
    │ ├ UnknownFormatError              ├ ContradictionError (ValueError) 4       ├ RankTimeoutError (TimeoutError) 1
    │ └ OutputExistsError (FileExists…) ├ CorruptError (ValueError) 4             ├ NoSpaceError (OSError) 1
    ├ LayoutError (ValueError) 2        ├ UnsafeError (UnpicklingError) 4         └ GradientError (RuntimeError) 1

The number is the exit code of a command that fails with the error. Each class also derives from the built-in that
plain callers would catch. All of them can be pickled, so a failure reaches other processes with all its parts.

Texts mark the options that they name, and the place that shows a text renders it:

    f"cast with {option('dtype', 'bf16')}, then {AGAIN}"

is ``cast with --dtype bf16, then run the same command`` on the command line, and ``cast with dtype="bf16", then make
the same call`` in Python. The marks are characters that Unicode assigns to nothing, so f-strings, JSON, pickles and
other ranks carry them like any text.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pickle import UnpicklingError
from typing import Any, ClassVar, Self, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

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

_OPTION, _VALUE, _OPTION_END, _CHOICE, _OR, _CHOICE_END, _AGAIN = map(chr, range(0xFDD0, 0xFDD7))
_MARKED_OPTION = f"{_OPTION}([a-z][a-z0-9_]*)(?:{_VALUE}([^{_OPTION}-{_AGAIN}]*))?{_OPTION_END}"
_MARKED_AGAIN = f"{_AGAIN} with ({_MARKED_OPTION})"
_MARKED_CHOICE = f"{_CHOICE}([^{_CHOICE}{_CHOICE_END}]*){_CHOICE_END}"
_UNNAMED = "!"
_MARK = re.compile(f"[{_OPTION}-{_AGAIN}]")

AGAIN = _AGAIN
"""``run the same command``, or ``make the same call``; followed by " with " and one option, the whole command."""

_OF_COMMAND = {"layouts": "layout", "timeout_seconds": "timeout", "num_ranks": "ranks"}
"""Parameters whose option has another name."""


def option(name: str, value: str | int | None = None, *, metavar: str = "") -> str:
    """Return an option for a text.

    Args:
        name: the parameter's name in Python.
        value: its value; True and False for a flag.
        metavar: what stands for the value on the command line, where it is the user's: ``FILE``.

    Example:
        >>> COMMAND.render(option("max_memory", "1GB")), PYTHON.render(option("max_memory", "1GB"))
        ('--max-memory 1GB', 'max_memory="1GB"')
    """
    text = metavar if value is None else json.dumps(value)
    return f"{_OPTION}{name}{_VALUE}{text}{_OPTION_END}" if text else f"{_OPTION}{name}{_OPTION_END}"


def either(*remedies: str) -> str:
    """Return remedies for a text, joined by "or"; a wording shows those whose options it has, or all if it has none."""
    return f"{_CHOICE}{_OR.join(remedies)}{_CHOICE_END}"


def needs(name: str, remedy: str) -> str:
    """Return a remedy for `either` that only wordings with a certain parameter show, although it does not name it."""
    return f"{_OPTION}{name}{_VALUE}{_UNNAMED}{_OPTION_END}{remedy}"


class Wording(Struct, frozen=True):
    """How texts are shown: as the command line's, or as Python's."""

    is_command: bool
    options: frozenset[str] | None = None
    """Names of the parameters that the command or function has; None: it is not known which."""
    typed: str | None = None
    """The command as the user typed it, for the shell; None: it is not known, or this is not a command's wording."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the environment variable that gave its value, which texts name in place of the option."""

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> Wording:
        """Return the wording of a public function, whose parameters are its options."""
        parameters = inspect.signature(function).parameters
        takes_others = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return cls(is_command=False, options=None if takes_others else frozenset(parameters))

    @classmethod
    def of_command(
        cls, options: Iterable[str], typed: str | None = None, variables: Mapping[str, str] | None = None
    ) -> Wording:
        """Return the wording of a command with these options, such as ``--max-memory``, that the user typed so."""
        parameters = {other: name for name, other in _OF_COMMAND.items()}
        names = (one.lstrip("-").replace("-", "_") for one in options)
        known = {parameters.get(name, name): variable for name, variable in (variables or {}).items()}
        has = frozenset(parameters.get(name, name) for name in names)
        return cls(is_command=True, options=has, typed=typed, variables=known)

    def render(self, text: str) -> str:
        """Return a text as this wording shows it."""
        text = marked(text)
        if _MARK.search(text):
            text = re.sub(_MARKED_CHOICE, self._choose, text)
            text = re.sub(_MARKED_AGAIN, self._repeat, text)
            text = text.replace(AGAIN, "run the same command" if self.is_command else "make the same call")
            text = re.sub(_MARKED_OPTION, self._spell, text)
        return text

    def _choose(self, match: re.Match[str]) -> str:
        remedies = match[1].split(_OR)
        names = ({name for name, _ in re.findall(_MARKED_OPTION, remedy)} for remedy in remedies)
        known = [one for one, of in zip(remedies, names, strict=True) if self.options is None or of <= self.options]
        return ", or ".join(known or remedies)

    def _repeat(self, match: re.Match[str]) -> str:
        """Return the whole command with one more option, where it is known."""
        if self.typed is None:
            return match[0]
        more = re.sub(_MARKED_OPTION, replace(self, variables={})._spell, match[1])
        return f"run: {self.typed}" if f" {more}" in self.typed else f"run: {self.typed} {more}"

    def _spell(self, match: re.Match[str]) -> str:
        name, text = match[1], match[2]
        if text == _UNNAMED:
            return ""
        try:
            value = json.loads(text) if text else None
            metavar = ""
        except ValueError:
            value, metavar = None, text
        if not self.is_command:
            return f"{name}=" + ("" if value is None else f'"{value}"' if isinstance(value, str) else str(value))
        if name in self.variables:
            return f"{self.variables[name]}={metavar if value is None else value}".rstrip("=")
        spelt = _OF_COMMAND.get(name, name).replace("_", "-")
        if value is None or isinstance(value, bool):
            return f"--no-{spelt}" if value is False else f"--{spelt} {metavar}".rstrip()
        return f"--{spelt} {value}"


COMMAND = Wording(is_command=True)
PYTHON = Wording(is_command=False)


class Text(str):
    """A text as one wording shows it, Python's by default, which other wordings can still render."""

    __slots__ = ("marked",)
    marked: str

    def __new__(cls, source: str, wording: Wording = PYTHON) -> Self:
        """Render a text, of which the marks are kept."""
        text = super().__new__(cls, wording.render(source))
        text.marked = marked(source)
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return (Text, (self.marked,))


def marked(text: str) -> str:
    """Return a text with its marks, for another text or for another rank."""
    return text.marked if isinstance(text, Text) else text


class XrankError(Exception):
    """Base class of xrank's errors; each part that does not apply is None.

    Texts may mark options (`xrank.errors`). They are shown in Python's words, unless a different wording is requested.

    Args:
        message: what failed, in one line that names the file, tensor or rank.
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
        self.wording = PYTHON
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
        """What failed, in one line that names the file, tensor or rank."""
        return Text(self._message, self.wording)

    @property
    def got(self) -> str | None:
        """What was found."""
        return self._shown(self._got)

    @property
    def want(self) -> str | None:
        """What was expected."""
        return self._shown(self._want)

    @property
    def next_step(self) -> str | None:
        """What the user does next."""
        return self._shown(self._next_step or self._derive_next_step())

    def _derive_next_step(self) -> str | None:
        """Return the next step after an error of this class that was given none."""
        return None

    def _shown(self, marked: str | None) -> str | None:
        return None if marked is None else Text(marked, self.wording)

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
        """Add parts that are absent, which the caller knows; `got` is added to what was found.

        The message then begins with `subject`, unless it does so already.
        """
        if subject and not self._message.startswith((f"{subject} ", f"{subject}:", f"{subject},")):
            self._message = make_sentence(subject, self._message)
            self.args = (Text(self._message),)
        self.tensor = tensor if self.tensor is None else self.tensor
        self.rank = rank if self.rank is None else self.rank
        self.file = file if self.file is None else self.file
        self._got = "; ".join(filter(None, (self._got, got))) or None
        self._next_step = self._next_step or next_step

    def rename(self, old: str, new: str) -> None:
        """Replace an internal name or path by the user's: of a tensor during a comparison, or of an open file."""
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
        return (type(self), (self._message,), {**self.__dict__, "_added": [*self._added]})

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
        parts = {"waiting_for", "pid", "cause", "failures", "needed_nbytes", "free_nbytes"}
        own = {part: value for part in parts if (value := getattr(self, part, None))}
        if "failures" in own:  # of which it may be the first itself
            own["failures"] = [None if one is self else one.to_record() for one in own["failures"]]
        record = self.to_dict() | own
        return {part: marked(value) if isinstance(value, str) else value for part, value in record.items()}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> XrankError:
        """Return the error that `to_record` described."""
        parts = {part: value for part, value in record.items() if part not in ("type", "message", "try", "failures")}
        if "waiting_for" in parts:
            parts["waiting_for"] = tuple(parts["waiting_for"])
        kind: type[XrankError] = {name: globals()[name] for name in __all__}[record["type"]]
        error = kind(record["message"], **parts, next_step=record["try"])
        if isinstance(error, RankFailedError):
            failures = record.get("failures", ())
            error.failures = tuple(error if one is None else XrankError.from_record(one) for one in failures)
        return error


class UsageError(XrankError, ValueError):
    """The command or call must change: an option, an ambiguous source, a choice to make."""

    exit_code = 2

    def _derive_next_step(self) -> str | None:
        return None if self._want is None else f"give {self._want}"


class UnknownFormatError(UsageError):
    """No reader recognizes the source; ``got`` lists each reader's reason."""


class OutputExistsError(UsageError, FileExistsError):
    """The output exists, or another gather wrote it first."""


class LayoutError(XrankError, ValueError):
    """A mesh, a layout or its text is wrong, or does not fit a tensor."""

    exit_code = 2

    def _derive_next_step(self) -> str:
        return "correct the layout, its sizes or the mesh"


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
    """A gradient was never synchronized, twice, too late or with the wrong factor."""


# pathlib makes one slash of two. A single letter is a drive of other systems, and no scheme.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")

Function = TypeVar("Function", bound=Callable[..., Any])


@contextmanager
def errors_of(function: Callable[..., Any]) -> Iterator[None]:
    """Let errors that leave the body name the arguments of a public function."""
    try:
        yield
    except XrankError as error:
        wording = Wording.of_function(function)
        for one in (error, *(error.failures if isinstance(error, RankFailedError) else ())):
            one.wording = wording
        raise


def names_own_arguments(function: Function) -> Function:
    """Let errors that leave a public function name its arguments; see `errors_of`."""
    return errors_of(function)(function)


def check_no_url(path: str | os.PathLike[str]) -> None:
    """Refuse a URL where a path is wanted; as a path, it would mean a folder with the scheme's name."""
    text = os.fspath(path)
    match = _URL.match(text)
    if match is not None:
        is_file = match[1].lower() == "file"
        raise UsageError(
            f"{text} is a URL",
            file=text,
            got=f"a URL of the scheme {match[1]}",
            want="a path of this machine",
            next_step="leave file:// out"
            if is_file
            else "copy the folder to a disk of this machine, or mount the bucket, and give that path",
        )


_VERB = re.compile(
    r"(is|was|has|does|may|must|cannot|belongs|contains|differs|exists|holds|lacks|lists|names|records|trains) "
)


def make_sentence(subject: str, problem: str) -> str:
    """Return a problem behind its subject, as a sentence if the problem begins with a verb.

    >>> make_sentence("a.pt", "is missing"), make_sentence("a.pt", "no tensor fits")
    ('a.pt is missing', 'a.pt: no tensor fits')
    """
    return subject + (" " if _VERB.match(problem) else ": ") + problem


_STORES = "'obstore>=0.12' 'botocore>=1.36'"
_PACKAGES = {
    "torch": "'torch>=2.10'",
    "cryptography": "'cryptography>=42'",
    "obstore": _STORES,
    "botocore": _STORES,
    "azure.storage.blob": "'azure-storage-blob>=12.24'",
    "google.auth": "'google-auth>=2.30' requests",
}
"""Module -> what pip installs for it, as in pyproject.toml's extras. No index has xrank itself yet."""


def require(module: str, what: str) -> None:
    """Raise UsageError, which names the packages, unless a module is installed; it is not imported.

    `what` is the call that needs it, for the error.
    """
    try:
        is_there = module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or sys.modules bars it
        is_there = False
    if not is_there:
        message, next_step = f"{what} needs {module}, which is not installed", f"run pip install {_PACKAGES[module]}"
        raise UsageError(message, next_step=next_step)


def require_linux(what: str) -> None:
    """Raise UsageError unless this is Linux, whose memory files and process descriptors ranks need.

    `what` is the call that needs them, for the error.
    """
    missing = [name for name in ("memfd_create", "pidfd_open", "eventfd") if not hasattr(os, name)]
    if missing:
        raise UsageError(
            f"{what} needs Linux",
            got=f"a system without {', '.join(missing)}",
            want="Linux 5.4 or newer",
            next_step="run it on Linux; here xrank can gather, verify and reshard checkpoints on disk",
        )
