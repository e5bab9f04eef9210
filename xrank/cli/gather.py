"""``xrank gather`` and ``xrank reshard``: write any sharded checkpoint as one folder, or in another layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from xrank.cli import options
from xrank.cli.command import Output, report_shared, reporting, sharing
from xrank.cli.help import Command
from xrank.cli.options import PATH
from xrank.errors import UsageError
from xrank.words import list_text, plural, size_text

if TYPE_CHECKING:
    from xrank.engine.report import OutputFacts, Report


def _list_schemes() -> list[str]:
    from xrank.recipes.schemes import list_schemes  # slow to import for a command's help

    return list_schemes()


@click.command(
    cls=Command,
    short_help="Merge a sharded checkpoint into one Hugging Face folder.",
    examples=["gather checkpoint-2000 -o model --dtype bf16", "gather --workspace nfs/run42 -o model --dry-run"],
)
@click.argument("source", metavar="[SRC]", required=False, type=PATH)
@click.option(
    "--workspace",
    type=PATH,
    metavar="DIR",
    envvar="XRANK_WORKSPACE",
    show_envvar=True,
    help="Workspace to read, instead of SRC.",
)
@click.option(
    "-o", "--out", required=True, type=PATH, metavar="DIR", help="Output folder; it appears when it is complete."
)
@options.base_model("config, tokenizer, names and shapes.")
@options.layout("a source")
@options.recipe("Recipe that renames and splits tensors for Hugging Face.  [default: the one that fits]", "none")
@options.format_name("format")
@options.part("SRC")
@options.world_size("SRC")
@options.dtype("keep", "base", "bf16", "fp16", "fp32", default="keep")
@options.dequantize
@click.option("--keep-fp32", multiple=True, metavar="REGEX", help="Names of tensors that a cast leaves in fp32.")
@click.option("--include", multiple=True, metavar="REGEX", help="Write only tensors whose whole output name matches.")
@click.option("--exclude", multiple=True, metavar="REGEX", help="Leave out tensors whose whole output name matches.")
@click.option("--salvage", is_flag=True, help="Write the undamaged tensors of SRC, and a list of the others.")
@click.option("--fill-from-base", multiple=True, metavar="REGEX", help="Missing tensors to copy from --base-model.")
@click.option(
    "--max-shard-size", default="5GB", metavar="SIZE", show_default=True, help="Maximum bytes of tensors in one file."
)
@options.max_memory
@options.workers
@click.option(
    "--replicas",
    default="verify",
    metavar="verify|pick",
    shell_complete=options.completing(lambda: ("verify", "pick")),
    show_default=True,
    help="Fail if replicas differ, or take the lowest rank's.",
)
@click.option(
    "--adapter",
    metavar="separate|merge|both",
    shell_complete=options.completing(lambda: ("separate", "merge", "both")),
    help="Write LoRA adapters as a PEFT folder, merge them into the model, or both.  [default: separate]",
)
@click.option("--adapter-config", type=PATH, metavar="FILE", help="PEFT's adapter_config.json, if SRC lacks one.")
@click.option(
    "--quantize",
    metavar="SCHEME",
    shell_complete=options.completing(_list_schemes),
    help="Write matrices quantized: FP8_DYNAMIC, FP8_BLOCK, W8A8, W8A16, W4A16, NVFP4A16, MXFP4A16, MXFP8 or "
    "DEEPSEEK_FP8.",
)
@click.option("--quantize-ignore", multiple=True, metavar="REGEX", help="Modules that are not quantized.")
@click.option("--quantization-error", is_flag=True, help="With --quantize: measure errors, by kind of module.")
@click.option("--dialect", metavar="modelopt", help="Format of ModelOpt, for --quantize FP8 or NVFP4.")
@click.option(
    "--overwrite", is_flag=True, help="Replace an existing model; readers see the old or the new one, never a mixture."
)
@click.option(
    "--resume/--no-resume", default=True, show_default=True, help="Reuse the finished parts of an interrupted run."
)
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Read the output back before it gets its final name.  [default: with --overwrite]",
)
@click.option(
    "--sign", type=PATH, metavar="KEY", help="Sign the output with a private key (PEM), for model-signing and verify."
)
@click.option("--attest", is_flag=True, help="With --sign: add a signed statement about source, ranks, step and casts.")
@click.option(
    "--strict-pickles",
    is_flag=True,
    help="Refuse pickles that name code of unknown packages, also in parts that are not read.",
)
@click.option(
    "--push-to-hub", metavar="ORG/NAME", help="Upload the folder to the Hub in one commit, with a model card."
)
@click.option(
    "--report", "page", type=PATH, metavar="FILE", help="Write an HTML page with source, proof, notes and rates."
)
@options.allow_http
@options.dry_run
@sharing
@reporting
def gather_command(
    output: Output,
    source: str | None,
    workspace: str | None,
    timeout: float,
    distributed: bool,
    page: str | None,
    **arguments: Any,
) -> None:
    """Merge SRC, a workspace or a sharded checkpoint, into one Hugging Face folder.

    Ranks that torchrun, srun or mpirun started share the work; rank 0 reports.
    """
    from xrank.commands.gather import gather_checkpoint

    context = click.get_current_context()
    by_option = context.get_parameter_source("workspace") == click.core.ParameterSource.COMMANDLINE
    if source is not None and workspace is not None and by_option:
        raise UsageError(
            "SRC and --workspace were both given",
            got=f"{source} and {workspace}",
            want="one of the two",
            next_step="omit one of them",
        )
    path = source if source is not None else workspace
    if path is None:
        raise UsageError(
            "no source was given",
            want="SRC, --workspace DIR or XRANK_WORKSPACE",
            next_step="give the folder that the ranks wrote to",
        )
    arguments["layouts"] = arguments.pop("layout")
    convert = partial(gather_checkpoint, path, arguments.pop("out"), workspace=source is None, **arguments)
    rows = partial(_rows, is_verbose=output.verbose > 0, is_signed=arguments["sign"] is not None)
    report_shared(output, convert, rows, timeout=timeout, distributed=distributed, page=page)


def source_row(report: Report) -> tuple[str, str]:
    """Return the row about the source."""
    source = report.source
    step = f", step {source.step}" if source.step is not None else ""
    ranks = f", written by {plural(source.world_size, 'rank')}" if source.world_size else ""
    left_out = f", {size_text(source.skipped_nbytes)} left out" if source.skipped_nbytes else ""
    recipe = f", named by the recipe {source.recipe}" if source.recipe else ""
    return "source", f"{source.format}{step}{ranks}; {size_text(source.nbytes)} in the source{left_out}{recipe}"


def proof_row(report: Report) -> tuple[str, str]:
    """Return the row about the proof."""
    proof = report.proof
    quantized = report.made.quantized
    num_tensors = quantized["num_sources"] if quantized else report.num_tensors
    facts = [f"{plural(num_tensors, 'tensor')}, every element exactly once"]
    if "num_checksums" in proof:
        good = f"{plural(proof.num_checksums, 'checksum')} good"
        facts.append(good if proof.num_checksums else "no checksums to compare")
    if proof.num_replicas_compared:
        facts.append(f"{plural(proof.num_replicas_compared, 'replica')} equal")
    if proof.base_model:
        facts.append(f"{proof.base_model} as in the base model")
    return "proof", "; ".join(facts)


def output_rows(made: OutputFacts, tied_note: str) -> list[tuple[str, str]]:
    """Return the rows about tied and cast tensors; `tied_note` explains how a tied tensor is written."""
    rows = [
        ("tied", f"{', '.join(names)} {'equals' if len(names) == 1 else 'equal'} {target}, {tied_note}")
        for target, *names in made.tied
    ]
    casts = Counter(made.cast.values()).items()
    return [*rows, *(("cast", f"{plural(count, 'tensor')} {cast}") for cast, count in casts)]


def _rows(report: Report, *, is_verbose: bool, is_signed: bool) -> list[tuple[str, str]]:
    made = report.made
    rows = [source_row(report), proof_row(report), *output_rows(made, "which is written once")]
    if made.merged:
        rows.append(("adapter", f"merged into {plural(len(made.merged), 'tensor')}"))
    if made.quantized:
        rows += _quantized_rows(made.quantized)
    if "missing" in made:
        names = list_text([one["name"] for one in made.missing], 3, empty="none that is known")
        rows.append(("missing", f"{plural(len(made.missing), 'tensor')}: {names}; salvage.json lists them"))
    if made.filled:
        rows.append(("filled", f"{plural(len(made.filled), 'tensor')} of the base model: {list_text(made.filled, 3)}"))
    if made.excluded:
        rows.append(("left out", f"{plural(len(made.excluded), 'tensor')}: {list_text(made.excluded)}"))
    if is_verbose:
        rows.append(("recipe", report.source.recipe or "none: the names are those of the source"))
    outcome = _outcome_row(report, f"{plural(len(made.files), 'file')}, {size_text(report.nbytes)}")
    if outcome[0] == "plan":
        return [*rows, outcome, *_file_rows(made)]
    if is_verbose:
        rows += _file_rows(made)
    if is_signed and outcome[0] == "wrote":
        from xrank.storage.output_place import SIGNATURE_NAME  # slow to import for a command's help

        rows.append(("signed", f"{report.path}/{SIGNATURE_NAME}, every file"))
    return [*rows, outcome]


def _quantized_rows(quantized: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kept = f"; {len(quantized['ignored'])} are not quantized" if quantized["ignored"] else ""
    yield "quantized", f"{plural(quantized['num_tensors'], 'tensor')} by {quantized['scheme']}{kept}"
    for kind, error in quantized.get("errors", {}).items():
        yield (
            "error",
            f"{kind}: {error['mean']:.2%} of the mean magnitude, at most {error['largest']:.2%} of the largest",
        )


def _outcome_row(report: Report, what: str) -> tuple[str, str]:
    """Return the row about an output, such as "2 files, 5.0 GB", that was planned, found or written."""
    made, notes = report.made, dict(report.notes)
    if report.output is None:
        return "plan", f"{report.path}: {what}, {size_text(made.peak_buffer_nbytes)} of buffers; nothing was written"
    if "made-before" in notes:
        return "found", f"{report.path}: {what}; see the note"
    speed, memory = size_text(report.nbytes / max(report.seconds, 1e-9)), size_text(report.peak_rss_nbytes)
    resumed = f", {size_text(made.resumed_nbytes)} of it by an earlier run" if made.resumed_nbytes else ""
    resumed += f", {size_text(made.shared_nbytes)} shared with the source" if made.shared_nbytes else ""
    companions = f"; with {', '.join(made.companions)}" if made.companions else ""
    companions += "; no config.json: see the note" if "no-config" in notes else ""
    companions += "; a tensor may be missing: see the note" if "missing-tensor" in notes else ""
    return "wrote", f"{report.path}: {what}{resumed}, {speed}/s, peak memory {memory}{companions}"


def _file_rows(made: OutputFacts) -> list[tuple[str, str]]:
    rows = []
    for file in made.files:
        text = f"{file.name}: {size_text(file.nbytes)}"
        text += f", {plural(file.num_tensors, 'tensor')}" if file.num_tensors else ""
        rows.append(("file", f"{text}, {file.digest}" if file.digest else text))
    return rows


@click.command(
    cls=Command,
    short_help="Write a checkpoint in a different layout, or for a different framework.",
    examples=[
        "reshard demo/workspace --layout new.toml -o resharded",
        "reshard checkpoint-2000 --to deepspeed-universal -o resumed",
    ],
)
@click.argument("source", metavar="SRC", type=PATH)
@click.option(
    "--to",
    type=click.Choice(["workspace", "dcp", "torchtitan", "accelerate", "deepspeed-universal"]),
    default="workspace",
    show_default=True,
    metavar="FORM",
    help="dcp, torchtitan, accelerate or deepspeed-universal: model and optimizer, to resume; or workspace.",
)
@click.option(
    "--layout", "layouts", type=PATH, metavar="FILE", help="File of the new layout; required for a workspace."
)
@click.option("--dp", type=int, metavar="N", help="Split the first dim of each tensor into N parts, in separate files.")
@click.option("--tp", type=int, metavar="N", help="Split the second dim in the same way.")
@click.option("-o", "--out", required=True, type=PATH, metavar="DIR", help="Output; it appears when it is complete.")
@click.option("--tag", metavar="NAME", help="Folder of DeepSpeed's files.  [default: global_step<N>]")
@click.option("--optimizer", type=click.Choice(["Adam", "AdamW"]), help="Optimizer of SRC, if it does not record it.")
@options.recipe("Recipe that renames and splits tensors, in either direction.  [default: the names stay]")
@options.base_model("the companions and config.json to copy.")
@options.part("SRC")
@options.world_size("SRC")
@options.dtype("keep", "bf16", "fp16", "fp32", default="keep")
@options.dequantize
@options.max_memory
@options.workers
@click.option(
    "--overwrite", is_flag=True, help="Replace an output of xrank; readers see the old or the new one, never a mixture."
)
@options.allow_http
@options.dry_run
@sharing
@reporting
def reshard_command(
    output: Output, source: str, layouts: str | None, timeout: float, distributed: bool, **arguments: Any
) -> None:
    """Write SRC, a workspace or any other checkpoint, as the states of ranks in another layout.

    With --to, model and optimizer are written as another framework loads them, on any ranks.
    After an interruption the same command resumes. Ranks that torchrun, srun or mpirun started share
    the work; rank 0 reports.
    """
    from xrank.commands.reshard import reshard_checkpoint

    convert = partial(reshard_checkpoint, source, layouts, arguments.pop("out"), **arguments)
    report_shared(output, convert, _reshard_rows, timeout=timeout, distributed=distributed)


def _reshard_rows(report: Report) -> list[tuple[str, str]]:
    made = report.made
    rows = [source_row(report), proof_row(report), ("layout", f"{made.mesh}; run {made.run_id}")]
    files = made.files
    if not made.run_id:
        rows[-1] = ("form", str(made.mesh))
        rows += output_rows(made, "")
        return [*rows, _outcome_row(report, f"{plural(len(files), 'file')}, {size_text(sum(f.nbytes for f in files))}")]
    rows += output_rows(made, "whose bytes they share")
    sizes = sorted(file.nbytes for file in files)
    share = size_text(sizes[0]) if sizes[0] == sizes[-1] else f"{size_text(sizes[0])} to {size_text(sizes[-1])}"
    rows.append(_outcome_row(report, f"{plural(len(files), 'state')} of {share}"))
    if report.output is None:
        for file in files:
            rows.append(("file", f"{file.name}: {size_text(file.nbytes)}, {plural(file.num_tensors, 'tensor')}"))
    return rows
