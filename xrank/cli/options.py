"""Options that several commands have, each with its completion for a shell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from xrank import environment

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class _Path(click.Path):
    """A path that is not empty: an empty one would mean the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(readable=False)


_Option = Callable[[Callable[..., Any]], Callable[..., Any]]
_Completion = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def completing(find: Callable[[], Iterable[str]], *, files: bool = False) -> _Completion:
    """Return a completion of words, which `find` returns when a shell asks, and of files where no word begins so."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        words = [CompletionItem(word) for word in find() if word.startswith(incomplete)]
        return words or ([CompletionItem(incomplete, type="file")] if files else [])

    return complete


def base_model(what: str) -> _Option:
    """Return ``--base-model``; `what` follows "Model folder or cached ID"."""
    text = f"Model folder or cached ID with {what}"
    complete = completing(_cached_models, files=True)
    return click.option("--base-model", metavar="DIR|ID", help=text, shell_complete=complete)


def recipe(text: str, *words: str) -> _Option:
    """Return ``--recipe`` with its help, and words that it takes besides names and files."""
    metavar = "|".join(["NAME", "FILE", *words])
    complete = completing(lambda: [*shipped_recipes(), *words], files=True)
    return click.option("--recipe", metavar=metavar, help=text, shell_complete=complete)


def dtype(*words: str, default: str | None = None, text: str = "Element type of floating-point tensors.") -> _Option:
    """Return ``--dtype`` with the words that it takes."""
    complete = completing(lambda: words)
    return click.option(
        "--dtype",
        default=default,
        metavar="|".join(words),
        show_default=default is not None,
        help=text,
        shell_complete=complete,
    )


def part(place: str) -> _Option:
    """Return ``--part`` of the source that the command calls so."""
    return click.option("--part", metavar="NAME", help=f"Part to read, if {place} has several, such as model and ema.")


def world_size(place: str) -> _Option:
    """Return ``--world-size`` of the source that the command calls so."""
    text = f"Number of ranks that wrote {place}, if it does not record this."
    return click.option("--world-size", type=click.IntRange(1), metavar="N", help=text)


def layout(what: str) -> _Option:
    """Return ``--layout`` for what records no layouts."""
    return click.option("--layout", type=PATH, metavar="FILE", help=f"Layout file for {what} without recorded layouts.")


def format_name(parameter: str) -> _Option:
    """Return ``--format``, as the parameter of that name."""
    text = "Format to read, if the source has several."
    return click.option("--format", parameter, metavar="NAME", help=text, shell_complete=completing(_own_formats))


def _permit_http(context: click.Context, parameter: click.Parameter, is_allowed: bool) -> None:
    if is_allowed and not context.resilient_parsing:
        environment.permit_http()


allow_http = click.option(
    "--allow-http",
    is_flag=True,
    expose_value=False,
    callback=_permit_http,
    help="Allow plain http for requests to stores; others can read and change them.",
)
dry_run = click.option("--dry-run", is_flag=True, help="Make and prove the plan, but write nothing.")

dequantize = click.option("--dequantize", is_flag=True, help="Decode quantized weights to floating-point ones.")
max_memory = click.option(
    "--max-memory",
    default="64MB",
    metavar="SIZE",
    envvar="XRANK_MAX_MEMORY",
    show_envvar=True,
    show_default=True,
    help="Maximum size of all buffers together, such as 512MB.",
)
workers = click.option(
    "--workers",
    type=int,
    metavar="N",
    envvar="XRANK_WORKERS",
    show_envvar=True,
    help="Number of worker threads.  [default: the number of cores, at most 4]",
)


def shipped_recipes() -> tuple[str, ...]:
    """Return the names of the recipes that come with xrank."""
    from xrank.recipes.recipe_file import list_shipped_recipes

    return list_shipped_recipes()


def _own_formats() -> list[str]:
    from xrank.readers.discovery import OWN_READERS

    return [reader.name for reader in OWN_READERS]


def _cached_models() -> list[str]:
    return environment.list_cached_models(environment.environ())
