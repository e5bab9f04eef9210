"""Public calls: the errors of each name its own arguments, and their paths are of this machine."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from xrank.errors import RankFailedError, UsageError, XrankError
from xrank.faces import Face

# pathlib makes one slash of two. A single letter is a drive of other systems, and no scheme.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@contextmanager
def errors_of(function: Callable[..., Any]) -> Iterator[None]:
    """Let errors that leave the body name the arguments of a public function."""
    try:
        yield
    except XrankError as error:
        face = Face.of_function(function)
        for one in (error, *(error.failures if isinstance(error, RankFailedError) else ())):
            one.face = face
        raise


def names_own_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let errors that leave a public function name its arguments; see `errors_of`."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with errors_of(function):
            return function(*args, **kwargs)

    return call


def check_no_url(path: str | os.PathLike[str]) -> None:
    """Refuse a URL where a path is wanted; as a path, it would mean a folder with the scheme's name.

    Raises:
        UsageError: it is a URL.
    """
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
