"""Adds a manual page for each command to the wheel: ``man xrank-gather`` after an installation."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click_man.core import generate_man_page
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook that pyproject.toml names ``custom``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the pages into a folder that lives as long as the build."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from xrank.cli.main import cli

        self._folder = tempfile.TemporaryDirectory()
        for context in _walk(cli.context_class(cli, info_name="xrank")):
            name = f"{context.command_path.replace(' ', '-')}.1"
            text = generate_man_page(context, version=self.metadata.version, date=" ")
            examples = [f".B xrank {line}\n.br" for line in getattr(context.command, "examples", ())]
            page = Path(self._folder.name, name)
            page.write_text("\n".join([text, *([".SH EXAMPLES", *examples] if examples else [])]))
            build_data["shared_data"][str(page)] = f"share/man/man1/{name}"


def _walk(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            yield from _walk(type(context)(command, parent=context, info_name=name))
