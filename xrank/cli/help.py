"""Help pages: options in sections by their subject, examples, and headings in bold on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

_SECTIONS = {
    "Source": ("workspace", "layout", "format", "format_name", "part", "world_size", "strict_pickles", "allow_http"),
    "Output": (
        *("to", "out", "layouts", "dp", "tp", "tag", "max_shard_size", "overwrite", "resume", "verify", "dry_run"),
        *("page", "sign", "attest"),
        "push_to_hub",
    ),
    "Names and values": (
        *("base_model", "recipe", "dtype", "dequantize", "keep_fp32", "include", "exclude", "adapter"),
        *("salvage", "fill_from_base"),
        *("adapter_config", "replicas", "quantize", "quantize_ignore", "quantization_error", "dialect"),
    ),
    "Memory, threads and ranks": ("max_memory", "workers", "timeout", "distributed"),
    "Options": (),
    "Messages": ("as_json", "log_json", "quiet", "verbose"),
}
"""Section -> parameters; all others are in "Options". A parameter has the same section in every command."""
_NARROW = 72
"""Columns of a terminal below which options leave more room to their texts."""


class _Formatter(click.HelpFormatter):
    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{click.style(f'{heading}:', bold=True)}\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, self.term_width, col_spacing)

    @property
    def term_width(self) -> int:
        """Columns of an option; a longer one has a line of its own."""
        return 20 if self.width < _NARROW else 24


class _Context(click.Context):
    formatter_class = _Formatter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"help_option_names": ["-h", "--help"], "max_content_width": 120, **kwargs})


class _WithExamples(click.Command):
    context_class = _Context

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        """Command lines without the leading ``xrank``."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the text and the examples."""
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
                for example in self.examples:
                    formatter.write(f"  xrank {example}\n")


class Command(_WithExamples):
    """A command whose help shows examples, and its options in sections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = {option.name: option for option in self.params if isinstance(option, click.Option)}
        if "out" in options and "verbose" in options:  # only what writes has a plan and rates
            options["verbose"].help = "Print the plan and each file's rate, and a traceback with an error."

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in _SECTIONS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and not isinstance(parameter, click.Argument):
                own = [title for title, names in _SECTIONS.items() if parameter.name in names] or ["Options"]
                sections["Messages" if "--help" in parameter.opts else own[0]].append(record)
        assert isinstance(formatter, _Formatter)
        terms = [len(term) for records in sections.values() for term, _ in records]
        width = max((length for length in terms if length <= formatter.term_width), default=0)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl([(term.ljust(width), text) for term, text in records])


class CommandGroup(_WithExamples, click.Group):
    """A group whose commands, and their groups, have such help pages; `sections` are title -> names of commands."""

    command_class = Command
    group_class = type

    def __init__(self, *args: Any, sections: dict[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name; the error for another word suggests names like it."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches  # only a wrong word needs it

            error.possibilities = get_close_matches(args[0], self.list_commands(ctx))  # type: ignore[attr-defined]
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, section by section."""
        width = max(map(len, self.list_commands(ctx)))
        for title, names in (self._sections or {"Commands": self.list_commands(ctx)}).items():
            commands = [(name.ljust(width), self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in commands if command])
