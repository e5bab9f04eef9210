"""The type of path arguments. The code that opens a path reports whether it can be read."""

from __future__ import annotations

import os
from typing import Any

import click


class _Path(click.Path):
    """A path that is not empty: an empty one would mean the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(readable=False)
