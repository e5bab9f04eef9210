"""Gather: from any source to a Hugging Face folder, proven before the first byte is written.

The folder may go to the Hub: as ``push_to_hub`` beside a folder, or as the output ``hf://org/name``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from xrank.commands.earlier_output import check_dry_run
from xrank.commands.report import counts_requests, folder_report, plan_report
from xrank.engine.replicas import ReplicaChoice
from xrank.engine.report import Report
from xrank.environment import environ, hub_cache
from xrank.errors import UsageError, names_own_arguments, option
from xrank.layout import LayoutMap
from xrank.ranks.team import find_launched_team, path_text, value_text
from xrank.recipes.decision import FolderPlan, plan_gather
from xrank.recipes.options import AdapterChoice, GatherOptions
from xrank.storage import places
from xrank.storage.staging import plan_apart
from xrank.storage.url import clean_path, is_url, split_url

if TYPE_CHECKING:
    import torch

    from xrank.commands.shared_plan import ReceivedPlan


class Push(Struct, frozen=True):
    """A repository, and the folder that is uploaded to it."""

    repository: str
    """``org/name``."""
    folder: str
    is_stage: bool
    """Whether the folder is removed after the upload; after a failure it stays for the next run."""

    def check(self, *, overwrite: bool) -> None:
        """Refuse a repository that cannot take a model, before the model is made; errors as `check_repository`."""
        from xrank.storage.hub import check_repository  # other gathers do not need this module

        check_repository(self.repository, overwrite=overwrite)

    def upload(self, report: Report, *, overwrite: bool) -> Report:
        """Upload the folder that a gather made, and return the gather's report with that; errors as `push_folder`."""
        import shutil  # other gathers do not need these modules

        from xrank.storage.hub import push_folder

        commit_url = push_folder(self.folder, self.repository, overwrite=overwrite)
        if self.is_stage:
            shutil.rmtree(self.folder)
        return self.name(replace(report, notes=(*report.notes, ("pushed", f"uploaded: {commit_url}"))))

    def name(self, report: Report) -> Report:
        """Return a report that names the repository as the output, if the user did."""
        if not self.is_stage:
            return report
        url = f"hf://{self.repository}"
        output, plan = (one and one.extended(path=url) for one in (report.output, report.plan))
        return replace(report, path=url, output=output, plan=plan)


def find_push(out: str, push_to_hub: str | None) -> Push | None:
    """Return the upload that a gather's options ask for; None if they ask for none. `out` is a cleaned path or URL."""
    is_hub = is_url(out) and split_url(out).scheme == "hf"
    if push_to_hub is None and not is_hub:
        return None
    from xrank.storage.hub import repository_name  # other gathers do not need this module

    if push_to_hub is None:
        repository = repository_name(out)
        # huggingface_hub's own folder has room for models.
        home = os.path.dirname(hub_cache({k: v for k, v in environ().items() if k != "HF_HUB_CACHE"}))
        return Push(repository, os.path.join(home, "xrank", repository.replace("/", "--")), is_stage=True)
    if is_url(out):
        raise UsageError(
            f"{out}: a model in a store cannot be uploaded to the Hub",
            file=out,
            next_step=f"give {option('out')} a folder, or omit {option('push_to_hub')}",
        )
    return Push(repository_name(push_to_hub), out, is_stage=False)


@names_own_arguments
@counts_requests
def gather_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workspace: bool = False,
    base_model: str | os.PathLike[str] | None = None,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    recipe: str | os.PathLike[str] | None = None,
    format: str | None = None,  # noqa: A002  the option's name
    part: str | None = None,
    world_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    dequantize: bool = False,
    keep_fp32: str | Sequence[str] = (),
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    salvage: bool = False,
    fill_from_base: str | Sequence[str] = (),
    max_shard_size: str | int = "5GB",
    max_memory: str | int = "64MB",
    workers: int | None = None,
    replicas: ReplicaChoice = "verify",
    adapter: AdapterChoice | None = None,
    adapter_config: str | os.PathLike[str] | None = None,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    quantization_error: bool = False,
    dialect: str | None = None,
    overwrite: bool = False,
    resume: bool = True,
    verify: bool | None = None,
    dry_run: bool = False,
    sign: str | os.PathLike[str] | None = None,
    attest: bool = False,
    strict_pickles: bool = False,
    push_to_hub: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    distributed: bool = False,
    timeout_seconds: float = 1800.0,
) -> Report:
    """Merge a workspace or a sharded checkpoint into one Hugging Face folder.

    The whole plan is proven from metadata before anything is written: every element of every tensor exactly once.
    While bytes move, all recorded checksums and all replicas are compared. The folder appears by one rename.

    Args:
        source: the folder, or file, to gather.
        out: the folder to make; or its URL in a store, ``s3://bucket/model``, whose objects appear with the index last;
            or ``hf://org/name``, as with `push_to_hub`, from a folder in ``HF_HOME`` that is removed afterwards.
        workspace: whether the source must be a workspace.
        base_model: a model folder, or the ID of one in the local Hugging Face cache: companions, names and shapes.
        layouts: a layout file, or its content, for a source without recorded layouts.
        recipe: a recipe from training names to Hugging Face's: a shipped recipe's name, a file, or ``"none"``. None:
            the shipped recipe that knows all of the source's names, if there is one.
        format: name of the source's format, if two readers accept it.
        part: keys of the part to read where the source has several, joined by dots, such as ``"ema"``; None: the only
            one that may be the model.
        world_size: number of ranks that wrote the source, where it records none, as torch's Hugging Face shards; it
            must be right: fewer ranks than wrote them give a smaller model.
        dtype: ``"keep"``, ``"base"`` (the base model's types), ``"bf16"``, ``"fp16"``, ``"fp32"``, or torch's, for
            floating-point tensors; None keeps, too.
        dequantize: whether quantized weights are decoded, with the bits that the tool which made them gives: those of
            compressed-tensors, of DeepSeek and transformers (``weight_scale_inv``), of ModelOpt (FP8, NVFP4) and of
            GPT-OSS (MXFP4). Without `dtype` they get the type that config.json has. False: they are copied.
        keep_fp32: regular expressions of names that are not cast below fp32.
        include: regular expressions of the output names to write; empty: all. With this or `exclude`, faults of the
            source that no written tensor needs become notes.
        exclude: regular expressions of the output names to leave out.
        salvage: write the tensors of a damaged source that are whole, to files that no program takes for a model, with
            ``salvage.json``, which lists the missing ones by name, shape, rank and file. Reads all tensors twice.
        fill_from_base: regular expressions of names that the base model fills in where the source's tensors are not
            whole. Report and manifest list them. Without `salvage`, all missing tensors must be filled in.
        max_shard_size: bytes of tensors in a file.
        max_memory: bytes of all buffers, such as ``"64MB"``.
        workers: number of threads; None: ``min(4, cores)``.
        replicas: ``"verify"`` refuses replicas that differ, ``"pick"`` takes the lowest rank's.
        adapter: ``"separate"`` writes LoRA adapters as a PEFT folder, ``"merge"`` adds them to the model, which
            for an adapter alone is the base model; ``"both"`` does both; None: ``"separate"``.
        adapter_config: PEFT's ``adapter_config.json``, if the source lacks one.
        quantize: write the model's matrices quantized, by a scheme that needs no calibration: ``"FP8_DYNAMIC"``,
            ``"FP8_BLOCK"``, ``"W8A8"``, ``"W8A16"``, ``"W4A16"``, ``"NVFP4A16"``, ``"MXFP4A16"``, ``"MXFP8"``, bit for
            bit as llm-compressor's ``model_free_ptq`` makes them of the plain folder, or ``"DEEPSEEK_FP8"``.
        quantize_ignore: regular expressions of modules that stay as they are, beside embeddings, norms, heads, routers
            and the towers of other inputs.
        quantization_error: measure how far the quantized values are from the others, for the report.
        dialect: ``"modelopt"`` for the schemes ``"FP8"`` and ``"NVFP4"`` in ModelOpt's form; None: compressed-tensors.
        overwrite: whether an existing model may be replaced.
        resume: whether to keep the finished parts of an interrupted run.
        verify: whether to read the stage back before the rename; None: if an output is replaced.
        dry_run: prove and plan without writing.
        sign: file of a private key of an elliptic curve (PEM): the folder gets ``model.sig``, which ``model_signing
            verify key`` and ``verify_model(signature=...)`` accept. Needs ``cryptography``.
        attest: whether to add ``model.attestation.json``, a signed in-toto statement with the source's files, ranks
            and step, the recipe and the casts.
        strict_pickles: whether to refuse a source whose pickles name classes or functions that no known framework
            writes, also in parts that the gather leaves out. xrank runs none of them; ``torch.load`` would.
        push_to_hub: ``org/name`` of a repository of the Hub, to which rank 0 uploads the folder in one commit, with a
            model card. One that is not there is made, private. A model that is there is replaced with `overwrite`.
        progress: called with (bytes written so far, bytes in all), on rank 0 alone; an exception that it
            raises ends the call on all ranks.
        distributed: share the work with all ranks that torchrun, srun or mpirun started, or that RANK and WORLD_SIZE
            name; each makes this call. Reports of ranks other than 0 lack digests and counts.
        timeout_seconds: how long to wait for a live rank; a death is noticed in seconds.

    Raises:
        UsageError, LayoutError: the call must change.
        IncompleteError: something is missing and may still come.
        ContradictionError, CorruptError, UnsafeError: the source is not to be trusted.
        NoSpaceError, XrankError: the output could not be written; finished parts are kept for the next run.
        RankFailedError, RankTimeoutError: another rank failed, died or did not arrive; finished parts are kept.

    Example:
        >>> import torch, xrank
        >>> workspace = xrank.NFSWorkspace("states", rank=0, world_size=1)
        >>> workspace.write_configs_and_weights({"model_type": "llama"}, {"norm.weight": torch.ones(4)})
        >>> xrank.gather_checkpoint("states", "model").num_tensors
        1
    """
    options = GatherOptions.from_arguments(locals())
    if distributed and (salvage or options.fill_from_base):
        one = option("salvage", True) if salvage else option("fill_from_base")
        problem = f"{one} and {option('distributed', True)} were both given"
        raise UsageError(problem, got="several processes", want="one process", next_step="start one")
    asked = _describe_call(locals())
    path = places.enter(source)
    plan = partial(
        plan_gather,
        path,
        options,
        format_name=format,
        part=part,
        world_size=world_size,
        workspace=workspace,
        base_model=base_model,
        layouts=layouts,
        recipe=recipe,
    )
    target = clean_path(out)
    push = find_push(target, push_to_hub)
    if push is not None:
        if salvage:
            step = f"give {option('out')} a folder on a disk, and leave {option('push_to_hub')} out"
            raise UsageError("a salvage is no model for the Hub", got=push.repository, want="a folder", next_step=step)
        target = push.folder
    if dry_run:
        started = time.monotonic()
        planned = plan_apart(path, target, plan, overwrite=overwrite)
        check_dry_run(planned, target)
        report = plan_report(planned, target, started)
        return report if push is None else push.name(report)

    from xrank.commands.folder_filling import make_once  # a dry run moves no byte

    team = find_launched_team(target, distributed=distributed, timeout_seconds=timeout_seconds)

    def prove(share: tuple[int, int]) -> FolderPlan:
        if push is not None and team.is_first:
            push.check(overwrite=overwrite)
        return plan_apart(path, target, partial(plan, share=share), overwrite=overwrite, checks_output=team.is_first)

    started = time.monotonic()
    with team.together():
        agreed: FolderPlan | ReceivedPlan
        if team.size == 1:
            agreed = prove((0, 1))
        else:
            from xrank.commands.shared_plan import plan_together  # one process does not need this module

            agreed = plan_together(team, asked, target, options, prove)
        written = make_once(agreed, target, progress, team)
    if not isinstance(agreed, FolderPlan):
        return agreed.report(written, started)
    report = folder_report("gather", agreed, written, target, started)
    return report if push is None or not team.is_first else push.upload(report, overwrite=overwrite)


def _describe_call(arguments: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the arguments of a gather that decide its plan, as text."""
    own = {"max_memory", "workers", "resume", "verify", "dry_run", "push_to_hub", "progress", "distributed"}
    asked = {name: value for name, value in arguments.items() if name not in {*own, "timeout_seconds", "options"}}
    paths = {"source", "out", "base_model", "recipe", "layouts", "adapter_config", "sign"}
    return {name: path_text(value) if name in paths else value_text(value) for name, value in asked.items()}
