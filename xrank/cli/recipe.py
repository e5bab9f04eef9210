"""``xrank recipe``: lists, prints and checks recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from xrank.cli import options
from xrank.cli.command import Output, reporting
from xrank.cli.help import CommandGroup
from xrank.cli.options import PATH
from xrank.words import list_text, plural

if TYPE_CHECKING:
    from xrank.engine.report import Report


@click.group(cls=CommandGroup, short_help="List, print and check recipes.", examples=["recipe list"])
def recipe_command() -> None:
    """List, print and check recipes, which rename and split tensors for Hugging Face."""


@recipe_command.command("list", short_help="List the recipes that come with xrank.", examples=["recipe list --json"])
@reporting
def list_(output: Output) -> None:
    """List the recipes that come with xrank."""
    from xrank.commands.recipe import list_recipes

    report = list_recipes()
    rows = [
        (row["name"], f"{row['framework']}, {', '.join(row['model_types'])}, {plural(row['num_rules'], 'rule')}")
        for row in report.details["recipes"]
    ]
    output.report(report, rows)


@recipe_command.command(
    short_help="Print a recipe that comes with xrank.", examples=["recipe show megatron-llama --merged"]
)
@click.argument("name", metavar="NAME", shell_complete=options.completing(options.shipped_recipes))
@click.option("--merged", is_flag=True, help="Merge it with the recipes that it extends, without comments.")
@reporting
def show(output: Output, name: str, merged: bool) -> None:
    """Print the recipe NAME, as a start for your own. `xrank recipe list` shows the names."""
    from xrank.commands.recipe import show_recipe

    report = show_recipe(name, is_merged=merged)
    output.report(report, picture=report.details["toml"])


@recipe_command.command(
    short_help="Check a recipe against a checkpoint.", examples=["recipe check own.toml checkpoint-2000"]
)
@click.argument("file", metavar="FILE|NAME", shell_complete=options.completing(options.shipped_recipes, files=True))
@click.argument("path", metavar="SRC", type=PATH)
@options.base_model("the names that the recipe FILE must produce.")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@reporting
def check(output: Output, file: str, path: str, base_model: str | None, tensors: bool) -> None:
    """Check the recipe FILE, or the shipped one called NAME, against the tensors of SRC, from metadata alone.

    Lists rules that do not fit, names without a rule (with the nearest rule), and targets without a source. The
    exit code is 2 if there are any.
    """
    from xrank.commands.recipe import check_recipe

    report = check_recipe(file, path, base_model=base_model)
    if report.fault is None or not output.as_json:
        output.report(report, _check_rows(report, tensors=tensors))
    if report.fault is not None:
        output.fail(report.fault, report)


def _check_rows(report: Report, *, tensors: bool) -> list[tuple[str, str]]:
    details = report.details
    num_fitting = sum(row["fits"] for row in details["tensors"])
    names = "Hugging Face's" if details["is_reversed"] else "training"
    rows = [
        ("source", f"{report.source['path']}: {report.source['format']}, {names} names"),
        ("fits", f"{num_fitting:,} of {plural(report.source['num_tensors'], 'tensor')}"),
        ("sizes", ", ".join(f"{name} = {number}" for name, number in details["sizes"].items()) or "none"),
    ]
    if details["ignored"]:
        rows.append(("ignored", list_text(details["ignored"])))
    if tensors:
        for row in details["tensors"]:
            targets = ", ".join(row["targets"]) if row["fits"] else "does not fit"
            rows.append(("tensor", f"{row['name']} {row['shape']}  {row['rule']} -> {targets}"))
    for row in details["wrong_rules"]:
        rows.append(("wrong", f"{row['place']}: {row['message']}"))
        rows += [("", f"{part:<4} {row[part]}") for part in ("got", "want") if row[part]]
    for row in details["unknown"]:
        more = f" and {row['count'] - 1:,} more alike" if row["count"] > 1 else ""
        near = f"; the nearest rule is {row['nearest']}" if row["nearest"] else ""
        rows.append(("unknown", f"{row['name']}{more}{near}"))
    return [*rows, *(("missing", target) for target in details["missing"])]
