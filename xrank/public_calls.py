"""Public calls: the errors of each name its own arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from xrank.errors import RankFailedError, XrankError
from xrank.faces import Face

__all__ = ["errors_of", "names_own_arguments"]

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
