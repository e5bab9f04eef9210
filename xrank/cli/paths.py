"""Paths as the commands take them: whether one can be read is found out, and said, where it is read."""

from __future__ import annotations

import os
from typing import Any

import click

__all__ = ["PATH"]


class _Path(click.Path):
    """Any path but the empty one, which would be the folder that the command runs in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("an empty path names nothing.", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(readable=False)
