"""Adds to the site what is not a file of docs/: README as its start, each command's help, the public Python names."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from xrank.cli.main import cli
from xrank.pictures.picture import ACCENT
from xrank.version import __version__

_PACKAGES = ("xrank", "xrank.layout", "xrank.errors", "xrank.gradients", "xrank.distribution", "xrank.virtual")
_WIDTH = 80
_LOOK = f"""
[data-md-color-scheme="default"] {{ --md-accent-fg-color: {ACCENT}; --md-typeset-a-color: {ACCENT} }}
[data-md-color-scheme="slate"] {{ --md-accent-fg-color: #56b4e9; --md-typeset-a-color: #56b4e9 }}
.md-grid {{ max-width: 76rem }}
.md-typeset h1, .md-typeset h2 {{ font-weight: 500 }}
.md-typeset .xrank figure {{ margin: 0; text-align: left }}
.md-typeset .xrank figcaption {{ font-style: normal; margin: 0 0 .2em; max-width: none }}
.md-typeset .xrank {{ margin: 1em 0 2em }}
.md-typeset .highlight:not(.language-text) pre > code {{ white-space: pre-wrap; overflow-wrap: anywhere }}
.md-typeset pre > code, .md-typeset__scrollwrap {{ scrollbar-width: thin; scrollbar-color: #8c959f transparent }}
.md-typeset .doors {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1em }}
.md-typeset .doors > a {{ border: 1px solid #8c959f80; border-radius: .4em; padding: .8em 1em; color: inherit }}
.md-typeset .doors b {{ display: block; color: var(--md-typeset-a-color) }}
"""
"""Colors of xrank's own pages, room for blocks of 100 columns, code that wraps, and the three doors of the home."""
_DOORS = """
<div class="doors">
<a href="from-accelerate.html"><b>A checkpoint on disk</b>Merge it, quantize it, cut it for other ranks, or see what a
crash has left.</a>
<a href="live-models.html"><b>A model in ranks' memory</b>Export, load or iterate over it; no rank ever holds all of
it.</a>
<a href="refit.html"><b>A trainer and an engine</b>Each step's weights straight into vLLM, SGLang or your own
engine.</a>
</div>
"""
_HOME = "\n![Four ranks become one folder](pictures/gather.svg)\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version below each page."""
    config.copyright = f"xrank {__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    readme = (Path(config.config_file_path).parent / "README.md").read_text()
    home = readme.replace("](docs/", "](").replace(_HOME, _HOME + _DOORS)
    assert _DOORS in home
    made = {"index.md": home, "commands.md": _commands(), "reference.md": _reference()}
    made["assets/xrank.css"] = _LOOK
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **arguments: object) -> str:
    """Draw pictures, and show links to files of the repository as their paths: the site has no such files."""
    # Within code, Python-Markdown shows the backslash that GitHub takes away.
    markdown = re.sub(r"`([^`\n]*\\\|[^`\n]*)`", lambda code: _code(code[1]), markdown)
    markdown = re.sub(r"^```python\n((?:(?!```).*\n)*)```\n\n<!-- picture -->$", _draw, markdown, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)]*)\)", r"\1 (`\2`)", markdown)


def _code(text: str) -> str:
    """Return code of a table's cell as HTML."""
    return f"<code>{escape(text.replace(chr(92) + '|', '|')).replace('|', '&#124;')}</code>"


def _draw(match: re.Match[str]) -> str:
    """Return a block of Python, and after it what its name `picture` looks like in a notebook."""
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(match[1], names)  # noqa: S102  the repository's own docs, which tests run as well
    # Without empty lines, which would end the block of HTML.
    drawn = re.sub(r"\n+", "\n", names["picture"]._repr_html_())
    return f"{match[0]}\n\n{drawn}"


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


def _home_of(package: str, name: str) -> str | None:
    """Return the module that defines a public name; None for what is no function or class of xrank."""
    if name.startswith("_"):
        return None
    homes = getattr(import_module(package), "_HOMES", {})
    if name in homes:  # not imported: some need torch
        return f"{package}.{homes[name]}"
    home: str | None = getattr(getattr(import_module(package), name), "__module__", None)
    return home if home is not None and home.startswith("xrank") else None


def _reference() -> str:
    pages = ["# Python reference", "The public names, from their docstrings. Names are imported on first use."]
    for package in _PACKAGES:
        pages.append(f"## {package}")
        homes = ((name, _home_of(package, name)) for name in import_module(package).__all__)
        pages += [f"::: {home}.{name}\n    options:\n      heading_level: 3" for name, home in homes if home]
    return "\n\n".join(pages)
