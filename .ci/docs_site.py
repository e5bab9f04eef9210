"""Adds to the site what is not a file of docs/: README as its start, each command's help, the public Python names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from xrank.cli.main import cli

_PACKAGES = ("xrank", "xrank.layout", "xrank.errors", "xrank.gradients", "xrank.distribution", "xrank.virtual")
_WIDTH = 96


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    readme = (Path(config.config_file_path).parent / "README.md").read_text()
    made = {"index.md": readme.replace("](docs/", "]("), "commands.md": _commands(), "reference.md": _reference()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **arguments: object) -> str:
    """Show links to files of the repository as their paths: the site has no such files."""
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)]*)\)", r"\1 (`\2`)", markdown)


def _commands() -> str:
    pages = ["# Commands", "What `xrank help COMMAND` prints."]
    for path, context in _walk(cli.context_class(cli, info_name="xrank", terminal_width=_WIDTH)):
        pages.append(f"## {path}\n\n```text\n{click.unstyle(context.get_help())}\n```")
    return "\n\n".join(pages)


def _walk(context: click.Context) -> Iterator[tuple[str, click.Context]]:
    yield context.command_path, context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            yield from _walk(type(context)(command, parent=context, info_name=name, terminal_width=_WIDTH))


def _reference() -> str:
    pages = ["# Python reference", "The public names, from their docstrings. Names are imported on first use."]
    for package in _PACKAGES:
        pages.append(f"## {package}")
        for name in import_module(package).__all__:
            home = getattr(getattr(import_module(package), name), "__module__", None)
            if home is not None and home.startswith("xrank"):
                pages.append(f"::: {home}.{name}\n    options:\n      heading_level: 3")
    return "\n\n".join(pages)
