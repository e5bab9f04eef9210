"""Regular expressions for names of tensors, as users write them in options and files."""

from __future__ import annotations

import re


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return a text as a regular expression.

    Raises:
        ValueError: it is none, nests too deeply, or repeats too often.
    """
    try:
        return re.compile(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from error
