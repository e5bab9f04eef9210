"""``xrank gather``: the Hugging Face folder of a workspace or any sharded checkpoint."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from xrank.cli.command import Output, reporting
from xrank.cli.paths import PATH
from xrank.cli.sharing import report_shared, sharing
from xrank.errors import UsageError
from xrank.words import list_text, plural, size_text

if TYPE_CHECKING:
    from xrank.plan.report import OutputFacts, Report

__all__ = ["gather", "output_rows", "proof_row", "source_row"]


@click.command(short_help="Make the Hugging Face folder.")
@click.argument("source", metavar="[SRC]", required=False, type=PATH)
@click.option(
    "--workspace",
    type=PATH,
    metavar="DIR",
    envvar="XRANK_WORKSPACE",
    help="The source; insists that it is a workspace.",
)
@click.option("--out", required=True, type=PATH, metavar="DIR", help="The folder to make; it appears by one rename.")
@click.option(
    "--base-model", metavar="DIR|ID", help="A model folder or cached ID: config, tokenizer, names and shapes."
)
@click.option("--layout", type=PATH, metavar="FILE", help="Layouts for a source that records none.")
@click.option(
    "--recipe", metavar="NAME|FILE|none", help="Training names to Hugging Face's.  [default: the one that fits]"
)
@click.option("--format", metavar="NAME", help="The source's format, where two readers accept it.")
@click.option(
    "--dtype",
    default="keep",
    metavar="keep|base|bf16|fp16|fp32",
    show_default=True,
    help="Element type of floating-point tensors.",
)
@click.option("--keep-fp32", multiple=True, metavar="REGEX", help="Names that are not cast below fp32.")
@click.option("--include", multiple=True, metavar="REGEX", help="Only these names.")
@click.option("--exclude", multiple=True, metavar="REGEX", help="All but these names.")
@click.option("--max-shard-size", default="5GB", metavar="SIZE", show_default=True, help="Bytes of tensors in a file.")
@click.option(
    "--max-memory",
    default="64MB",
    metavar="SIZE",
    envvar="XRANK_MAX_MEMORY",
    show_default=True,
    help="Bytes of all buffers.",
)
@click.option("--workers", type=int, metavar="N", envvar="XRANK_WORKERS", help="Threads.  [default: min(4, cores)]")
@click.option(
    "--replicas",
    default="verify",
    metavar="verify|pick",
    show_default=True,
    help="Refuse replicas that differ, or take the lowest rank's.",
)
@click.option(
    "--adapter", metavar="separate|merge", help="LoRA adapters: a PEFT folder beside the model, or merged into it."
)
@click.option("--adapter-config", type=PATH, metavar="FILE", help="PEFT's adapter_config.json, if SRC holds none.")
@click.option(
    "--overwrite", is_flag=True, help="Replace a model that is there; old or new is visible, never a mixture."
)
@click.option(
    "--resume/--no-resume", default=True, show_default=True, help="Go on with what an interrupted run finished."
)
@click.option(
    "--verify/--no-verify", default=None, help="Read the stage back before the rename.  [default: with --overwrite]"
)
@click.option("--dry-run", is_flag=True, help="Prove and plan; write nothing.")
@sharing
@reporting
def gather(
    output: Output, source: str | None, workspace: str | None, timeout: float, distributed: bool, **options: Any
) -> None:
    """Make the Hugging Face folder of a workspace or a sharded checkpoint SRC.

    Ranks that torchrun, srun or mpirun started share the work; rank 0 reports.
    """
    from xrank.conversion.gather import gather_checkpoint

    context = click.get_current_context()
    by_option = context.get_parameter_source("workspace") == click.core.ParameterSource.COMMANDLINE
    if source is not None and workspace is not None and by_option:
        raise UsageError(
            "SRC and --workspace were both given",
            got=f"{source} and {workspace}",
            want="one of the two",
            next_step="leave one of them out",
        )
    path = source if source is not None else workspace
    if path is None:
        raise UsageError(
            "no source was given",
            want="SRC, --workspace DIR or XRANK_WORKSPACE",
            next_step="name the folder that the ranks wrote to",
        )
    options["layouts"] = options.pop("layout")
    convert = partial(gather_checkpoint, path, options.pop("out"), workspace=source is None, **options)
    report_shared(output, convert, _rows, timeout=timeout, distributed=distributed)


def source_row(report: Report) -> tuple[str, str]:
    """Return what was read."""
    source = report.source
    step = f", step {source.step}" if source.step is not None else ""
    ranks = f", written by {plural(source.world_size, 'rank')}" if source.world_size else ""
    left_out = f", {size_text(source.skipped_nbytes)} left out" if source.skipped_nbytes else ""
    recipe = f", named by the recipe {source.recipe}" if source.recipe else ""
    return "source", f"{source.format}{step}{ranks}; {size_text(source.nbytes)} in the source{left_out}{recipe}"


def proof_row(report: Report) -> tuple[str, str]:
    """Return what was proven."""
    proof = report.proof
    facts = [f"{plural(report.num_tensors, 'tensor')}, every element exactly once"]
    if "num_checksums" in proof:
        facts.append(
            f"{plural(proof.num_checksums, 'checksum')} good" if proof.num_checksums else "no checksums to compare"
        )
    if proof.num_replicas_compared:
        facts.append(f"{plural(proof.num_replicas_compared, 'replica')} equal")
    if proof.base_model:
        facts.append(f"{proof.base_model} as in the base model")
    return "proof", "; ".join(facts)


def output_rows(made: OutputFacts, tied_are: str) -> list[tuple[str, str]]:
    """Return what became of tied and of cast tensors; `tied_are` says how tied ones are written."""
    rows = [("tied", f"{', '.join(names)} equal {target}, {tied_are}") for target, *names in made.tied]
    casts = Counter(made.cast.values()).items()
    return [*rows, *(("cast", f"{plural(count, 'tensor')} {cast}") for cast, count in casts)]


def _rows(report: Report) -> list[tuple[str, str]]:
    made = report.made
    rows = [source_row(report), proof_row(report), *output_rows(made, "which is written once")]
    if made.merged:
        rows.append(("adapter", f"merged into {plural(len(made.merged), 'tensor')}"))
    if made.excluded:
        names = made.excluded
        rows.append(("left out", f"{plural(len(names), 'tensor')}: {list_text(names)}"))
    files = plural(len(made.files), "file")
    if report.output is None:
        buffers = size_text(made.peak_buffer_nbytes)
        rows.append(
            ("plan", f"{report.path}: {files}, {size_text(report.nbytes)}, {buffers} of buffers; nothing was written")
        )
        rows.extend(
            ("file", f"{file.name}: {size_text(file.nbytes)}, {plural(file.num_tensors, 'tensor')}")
            for file in made.files
        )
        return rows
    speed = size_text(report.nbytes / max(report.seconds, 1e-9))
    resumed = f", {size_text(made.resumed_nbytes)} of it by an earlier run" if made.resumed_nbytes else ""
    companions = f"; with {', '.join(made.companions)}" if made.companions else ""
    memory = size_text(report.peak_rss_nbytes)
    rows.append(
        (
            "wrote",
            f"{report.path}: {files}, {size_text(report.nbytes)}{resumed}, {speed}/s, peak memory {memory}{companions}",
        )
    )
    return rows
