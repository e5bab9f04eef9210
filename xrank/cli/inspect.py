"""``xrank inspect``: describes a checkpoint or model from metadata alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from xrank.cli import options
from xrank.cli.command import Output, render_all, reporting, wording_of
from xrank.cli.gather import gather_command
from xrank.cli.help import Command
from xrank.cli.options import PATH
from xrank.errors import Wording
from xrank.words import list_text, plural, size_text

if TYPE_CHECKING:
    from xrank.engine.report import Report

_MAX_MISSING = 8
"""Missing tensors that have a row."""
_MAX_FACTS = 4
"""Entries of a table in a format's facts that a row shows."""


@click.command(
    cls=Command,
    short_help="Describe a checkpoint, model or workspace.",
    examples=["inspect checkpoint-2000 --ranks"],
)
@click.argument("path", type=PATH)
@options.layout("a source")
@options.base_model("the names and shapes that PATH must have; fills in unrecorded shapes.")
@options.format_name("format_name")
@options.part("PATH")
@options.world_size("PATH")
@options.allow_http
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--ranks", is_flag=True, help="List every rank.")
@click.option("--deep", is_flag=True, help="Read all tensors, and compare checksums and replicas.")
@click.option(
    "--html", type=PATH, metavar="FILE", help="Write an HTML page with faults, and the parts of each tensor by rank."
)
@reporting
def inspect_command(
    output: Output,
    path: str,
    layout: str | None,
    base_model: str | None,
    format_name: str | None,
    part: str | None,
    world_size: int | None,
    tensors: bool,
    ranks: bool,
    deep: bool,
    html: str | None,
) -> None:
    """Describe PATH: format, run, ranks, tensors, and the problems that a gather would meet.

    The exit code is 0 even with problems. Each problem has the exit code of the gather; with --json they are
    listed under "problems".
    """
    from xrank.commands.inspect import inspect_source

    choices = {"layouts": layout, "base_model": base_model, "format": format_name, "part": part, "html": html}
    report = inspect_source(path, world_size=world_size, deep=deep, **choices)
    output.wording = wording_of(gather_command)  # the problems are those of a gather
    output.report(report, _rows(report, output.wording, tensors=tensors, ranks=ranks, deep=deep))


def _rows(report: Report, wording: Wording, *, tensors: bool, ranks: bool, deep: bool) -> list[tuple[str, str]]:
    source, details = report.source, report.details
    rows = [("path", str(report.path)), ("format", source["format"])]
    if "stage" in details:
        stage = details["stage"]
        finished, begun = stage["finished_nbytes"], stage["begun_nbytes"]
        next_step = {
            "alive": "its gather is still running",
            "gone": "the same gather resumes from it",
            "unknown": "if its gather is no longer running there, the same gather resumes from it",
        }[stage["owner"]]
        size = f"{size_text(finished)} of {size_text(begun)} begun"
        rows.append(("finished", f"{plural(len(stage['files']), 'file')}, {size}"))
        return [*rows, ("owner", f"host {stage['host']}, pid {stage['pid']}: {stage['owner']}; {next_step}")]
    if "num_tensors" in source:
        if source["world_size"]:
            run = f", run {source['run_id']}" if source["run_id"] else ""
            step = f", step {source['step']}" if source["step"] is not None else ""
            rows.append(("written", f"by {plural(source['world_size'], 'rank')}{run}{step}"))
        kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in source["dtypes"].items())
        counts = f"{plural(source['num_tensors'], 'tensor')} ({kinds}), {source['num_parameters']:,} parameters"
        rows.append(("model", f"{counts}, {size_text(source['nbytes'])} in the source"))
        config = details["config_path"]
        if config is None and "adapter_config.json" in details["companions"]:
            config = "the adapter's own, adapter_config.json"
        absent = "none; gather with --base-model, or put a config.json into its folder"
        rows.append(("config", str(config or ("in the states" if source["has_config"] else absent))))
        if details["quantization"]:
            rows.append(("quantized", _quantization_text(details["quantization"])))
        if (optimizer := details["optimizer"]) is not None:
            text = f"cannot be read: {optimizer['problem']}"
            if optimizer["problem"] is None:
                text = f"{optimizer['class']}: {plural(optimizer['num_tensors'], 'tensor')}, "
                text += f"{size_text(optimizer['nbytes'])}{', undamaged' if deep else ''}; "
                text += "xrank reshard converts it, a gather leaves it out"
            rows.append(("optimizer", text))
        if source["recipe"]:
            rows.append(("recipe", f"{source['recipe']}: a gather gives Hugging Face's names"))
    facts = [(key, _fact_text(value)) for key, value in details["format"].items() if value is not None]
    rows += [(key, text) for key, text in facts if text]
    if details["companions"]:
        rows.append(("companions", ", ".join(details["companions"])))
    if ranks:
        rows += [(f"rank {row['rank']}", _rank_text(row)) for row in details["ranks"]]
        if not details["ranks"] and "num_tensors" in source:
            rows.append(("ranks", "the format does not record which rank wrote which tensor"))
    if tensors:
        for row in details["tensors"]:
            what = row.get("problem")
            what = what or f"{plural(row['num_pieces'], 'piece')}, {plural(row['num_replicas'], 'replica')}"
            rows.append(("tensor", f"{row['name']}  {row['dtype']} {row['shape']}  {what}"))
    for problem in render_all(details["problems"], wording):
        exits = f"(a gather would exit {problem['exit_code']})"
        rows.append(("problem", f"{problem['type']}: {problem['message']} {exits}"))
        rows += [("", f"{part:<4} {problem[part]}") for part in ("got", "want", "try") if problem[part]]
    missing = details["missing"]
    for one in missing[:_MAX_MISSING]:
        lost = "".join(f"; rank {part['rank']} in {part['file']}" for part in one["lost"])
        rows.append(("missing", f"{one['problem']}{lost}"))
    if len(missing) > _MAX_MISSING:
        rows.append(("", f"and {len(missing) - _MAX_MISSING:,} more; --json lists all"))
    if details["problems"]:
        rows += [("to get", f"{one['what']}: {one['command']}") for one in details["commands"]]
    rows += [("wrote", report.output.path)] if report.output is not None and report.output.path else []
    if not details["problems"]:
        rows.append(("problems", "none" if deep else "none in the metadata; --deep reads every byte"))
    return rows


def _quantization_text(facts: dict[str, Any]) -> str:
    scheme = list_text(facts["schemes"], 3, "no declared scheme") + (f" in {facts['place']}" if facts["place"] else "")
    counts = f"{plural(facts['num_quantized'], 'weight')}, {facts['num_ignored']:,} not quantized"
    sizes = f"{size_text(facts['weight_nbytes'])} and {size_text(facts['scale_nbytes'])} of scales"
    return f"{scheme}: {counts}; {sizes}"


def _fact_text(value: Any) -> str:
    if isinstance(value, dict):
        parts = [f"{key}: {_fact_text(part)}" for key, part in value.items()]
        left_out = len(parts) - _MAX_FACTS
        return "; ".join(parts[:_MAX_FACTS] + ([f"and {left_out} more (--json has all)"] if left_out > 0 else []))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        parts = [*map(_fact_text, value)]
        return ("; " if any("," in part for part in parts) else ", ").join(parts)
    return f"{value:,}" if type(value) is int else str(value)


def _rank_text(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"{row['state']}: {row['problem']}"
    if "state" not in row:
        return f"{plural(row['num_tensors'], 'tensor')}, {size_text(row['nbytes'])} of the model"
    counts = f"{plural(row['num_tensors'], 'tensor')}, {plural(row['num_layouts'], 'layout')}"
    return f"{row['state']}: {row['run']}, {size_text(row['nbytes'])}, {counts}, host {row['host'] or 'unknown'}"
