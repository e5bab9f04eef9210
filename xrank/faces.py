"""Faces: texts mark the options that they name, and whoever shows a text renders it as the command or as Python.

    f"cast with {option('dtype', 'bf16')}, then {AGAIN}"

is ``cast with --dtype bf16, then run the same command`` on the command line, and ``cast with dtype="bf16", then make
the same call`` in Python. The marks are characters that Unicode assigns to nothing, so f-strings, JSON, pickles and
other ranks carry them like any text.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

_OPTION, _VALUE, _OPTION_END, _CHOICE, _OR, _CHOICE_END, _AGAIN = map(chr, range(0xFDD0, 0xFDD7))
_MARKED_OPTION = re.compile(f"{_OPTION}([a-z][a-z0-9_]*)(?:{_VALUE}([^{_OPTION}-{_AGAIN}]*))?{_OPTION_END}")
_MARKED_AGAIN = re.compile(f"{_AGAIN} with ({_MARKED_OPTION.pattern})")
_MARKED_CHOICE = re.compile(f"{_CHOICE}([^{_CHOICE}{_CHOICE_END}]*){_CHOICE_END}")
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
    """Return remedies for a text, joined by "or"; a face shows those whose options it has, or all if it has none."""
    return f"{_CHOICE}{_OR.join(remedies)}{_CHOICE_END}"


def needs(name: str, remedy: str) -> str:
    """Return a remedy for `either` that only faces with a certain parameter show, although it does not name it."""
    return f"{_OPTION}{name}{_VALUE}{_UNNAMED}{_OPTION_END}{remedy}"


@dataclass(frozen=True, slots=True)
class Face:
    """How texts are shown: as the command line's, or as Python's."""

    is_command: bool
    options: frozenset[str] | None = None
    """Names of the parameters that the command or function has; None: it is not known which."""
    typed: str | None = None
    """The command as the user typed it, for the shell; None: it is not known, or this is not a command's face."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the environment variable that gave its value, which texts name in place of the option."""

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> Face:
        """Return the face of a public function, whose parameters are its options."""
        parameters = inspect.signature(function).parameters
        takes_others = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return cls(is_command=False, options=None if takes_others else frozenset(parameters))

    @classmethod
    def of_command(
        cls, options: Iterable[str], typed: str | None = None, variables: Mapping[str, str] | None = None
    ) -> Face:
        """Return the face of a command with these options, such as ``--max-memory``, that the user typed so."""
        parameters = {other: name for name, other in _OF_COMMAND.items()}
        names = (one.lstrip("-").replace("-", "_") for one in options)
        known = {parameters.get(name, name): variable for name, variable in (variables or {}).items()}
        has = frozenset(parameters.get(name, name) for name in names)
        return cls(is_command=True, options=has, typed=typed, variables=known)

    def render(self, text: str) -> str:
        """Return a text as this face shows it."""
        text = marked(text)
        if _MARK.search(text):
            text = _MARKED_CHOICE.sub(self._choose, text)
            text = _MARKED_AGAIN.sub(self._repeat, text)
            text = text.replace(AGAIN, "run the same command" if self.is_command else "make the same call")
            text = _MARKED_OPTION.sub(self._spell, text)
        return text

    def _choose(self, match: re.Match[str]) -> str:
        remedies = match[1].split(_OR)
        return ", or ".join([one for one in remedies if self._has_options_of(one)] or remedies)

    def _repeat(self, match: re.Match[str]) -> str:
        """Return the whole command with one more option, where it is known."""
        if self.typed is None:
            return match[0]
        more = _MARKED_OPTION.sub(replace(self, variables={})._spell, match[1])
        return f"run: {self.typed}" if f" {more}" in self.typed else f"run: {self.typed} {more}"

    def _has_options_of(self, remedy: str) -> bool:
        return self.options is None or self.options.issuperset(name for name, _ in _MARKED_OPTION.findall(remedy))

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


COMMAND = Face(is_command=True)
PYTHON = Face(is_command=False)


class Text(str):
    """A text as one face shows it, Python's by default, which other faces can still render."""

    __slots__ = ("marked",)
    marked: str

    def __new__(cls, source: str, face: Face = PYTHON) -> Self:
        """Render a text, of which the marks are kept."""
        text = super().__new__(cls, face.render(source))
        text.marked = marked(source)
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return (Text, (self.marked,))


def marked(text: str) -> str:
    """Return a text with its marks, for another text or for another rank."""
    return text.marked if isinstance(text, Text) else text
