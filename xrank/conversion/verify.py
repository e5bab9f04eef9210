"""Verify: a model against its manifest, a checkpoint against its own proof, or two of either, value by value."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import xxhash

from xrank.conversion.report import peak_rss_nbytes
from xrank.decisions.base_check import check_source, not_compared
from xrank.decisions.base_model import BaseModel, check_against, open_base_model
from xrank.decisions.decision import Purpose, Request, decide
from xrank.decisions.found_source import read_source
from xrank.decisions.options import default_workers, parse_size
from xrank.decisions.output_plan import read_layouts
from xrank.decisions.plan_digest import digest_of_plan
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError, XrankError
from xrank.formats.safetensors_header import read_header
from xrank.layout import LayoutMap
from xrank.making.check import Check, carried_out
from xrank.making.rereading import FileDigests, digests_of, plan_of_headers
from xrank.plan.digests import digest_text
from xrank.plan.executor import Budget, Outcome
from xrank.plan.output import OutputTensor
from xrank.plan.planner import make_plan
from xrank.plan.report import Report
from xrank.readers.hugging_face.folder import read_headers
from xrank.readers.workspace import WorkspaceReader
from xrank.teams.agreement import check_plans
from xrank.teams.launches import find_launched_team
from xrank.writers.hf_folder import lay_out
from xrank.writers.manifest import MANIFEST_NAME, read_manifest

__all__ = ["verify", "verify_model"]


def verify_model(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    base_model: str | os.PathLike[str] | None = None,
    adapter_config: str | os.PathLike[str] | None = None,
    max_memory: str | int = "64MB",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    distributed: bool = False,
    timeout_seconds: float = 1800.0,
) -> Report:
    """Read every byte and say whether all is as it must be.

    A model with a manifest is compared with it; a checkpoint is proven as a gather would prove it, all checksums and
    replicas included; with `against`, the tensors of both are compared value by value, an adapter's, too. Where one has
    an adapter and the other has not, the other must be what `gather_checkpoint` with ``adapter="merge"`` makes of it.

    Args:
        path: a model or a checkpoint.
        against: what to compare it with.
        layouts: layouts for a checkpoint that records none, either of the two: a layout file, or its content.
        base_model: names and shapes that it must have, and what a checkpoint does not record; with `against`, the
            latter alone.
        adapter_config: of an adapter among a checkpoint's tensors, where the gather was given it.
        max_memory: bytes of all buffers.
        workers: threads; None: as many as a gather's.
        progress: called with (bytes compared so far, bytes in all), on rank 0 alone.
        distributed: share the reading with all other ranks that torchrun, srun or mpirun started, or that RANK and
            WORLD_SIZE name; each makes this call. Rank 0 alone judges and reports all.
        timeout_seconds: how long ranks that live may take to come; a death is noticed in seconds.

    Returns:
        A report that is `ok`, or has the first fault as its `error`: of a fault that another rank read, that this one
        failed, and why.

    Raises:
        UsageError: the path can't be verified: it is of no known format, a model without a manifest, or what an adapter
            makes of it cannot be computed.
    """
    return verify(
        path,
        against=against,
        layouts=layouts,
        base_model=base_model,
        adapter_config=adapter_config,
        max_memory=max_memory,
        workers=workers,
        progress=progress,
        distributed=distributed,
        timeout_seconds=timeout_seconds,
    )[0]


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None,
    layouts: str | os.PathLike[str] | LayoutMap | None,
    base_model: str | os.PathLike[str] | None,
    adapter_config: str | os.PathLike[str] | None,
    max_memory: str | int,
    workers: int | None,
    progress: Callable[[int, int], None] | None = None,
    distributed: bool = False,
    timeout_seconds: float = 1800.0,
) -> tuple[Report, XrankError | None]:
    """Do as `verify_model` and return the first fault as it was raised, too."""
    started = time.monotonic()
    budget = Budget.within(parse_size(max_memory, "--max-memory"), workers or default_workers())
    if adapter_config is not None and against is None:
        raise UsageError(
            "--adapter-config was given and --against was not",
            got=f"--adapter-config {os.fspath(adapter_config)}",
            want="--against, and an adapter in one of the two",
            next_step="give both, or neither",
        )
    given = layouts if layouts is None or isinstance(layouts, LayoutMap) else read_layouts(layouts)
    base = open_base_model(base_model) if base_model is not None else None
    text = os.fspath(path)

    def plan() -> Check:
        if against is not None:
            from xrank.comparing.comparison import plan_comparison  # one path alone is done without

            return plan_comparison(text, os.fspath(against), budget, adapter_config, base=base, layouts=given)
        if os.path.exists(os.path.join(text, MANIFEST_NAME)) and WorkspaceReader().recognise(text) is not None:
            # A workspace that xrank made has a manifest too, but ranks may have written to it since: it proves itself.
            if given is not None:
                raise UsageError(
                    f"--layout was given, and {text} is a model with a manifest, whose tensors are whole",
                    got="--layout",
                    want="a checkpoint whose layouts are not recorded, or --against one",
                    next_step="leave --layout out",
                )
            return _plan_manifest_check(text, base)
        return _plan_proof(text, base, given)

    facts: dict[str, Any] = {}
    error: XrankError | None = None
    paths = [os.path.abspath(one) for one in (text, against or "")]
    try:
        team = find_launched_team(text, distributed=distributed, timeout_seconds=timeout_seconds)
        with team.together():
            check, _ = team.agree(
                "the plan", plan, lambda check: digest_of_plan(check.plan, *paths), check_plans(team.ranks)
            )
            facts = carried_out(check, budget, progress, team)
    except UsageError:
        raise
    except XrankError as found:
        error = found
    report = Report(
        command="verify",
        path=text,
        status="ok" if error is None else "failed",
        exit_code=0 if error is None else error.exit_code,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=facts.get("source", {"path": text}),
        proof=facts.get("proof", {}),
        plan=_counts(facts["checked"]) if "checked" in facts else None,
        notes=tuple(facts.get("notes", ())),
        error=None if error is None else error.to_dict(),
    )
    return report, error


def _plan_manifest_check(path: str, base: BaseModel | None) -> Check:
    """Return what compares a model folder with its manifest: files, tensors, digests; companions are read here."""
    manifest = read_manifest(os.path.join(path, MANIFEST_NAME))
    listed = {file["name"]: file for file in manifest["files"]}
    surplus = sorted(name for name in os.listdir(path) if name.endswith(".safetensors") and name not in listed)
    if surplus:
        raise ContradictionError(
            f"{surplus[0]} is in {path} and not in its manifest",
            file=os.path.join(path, surplus[0]),
            got=surplus[0],
            want=f"only {', '.join(sorted(listed))}",
            next_step="remove the file, or gather the model again",
        )
    # What lies in a folder within, as an adapter does, is in the manifest alone.
    apart = [name for name in listed if name.endswith(".safetensors") and "/" in name]
    headers = [*read_headers(path), *(read_header(os.path.join(path, *name.split("/"))) for name in apart)]
    found = [os.path.relpath(header.path, path).replace(os.sep, "/") for header in headers]
    _check_plain_files(path, [*manifest["companions"], *(f for f in listed.values() if f["name"] not in found)])
    plan = plan_of_headers(headers)

    def judge(outcome: Outcome) -> dict[str, Any]:
        for name, read in zip(found, digests_of(plan, outcome), strict=True):
            _check_digests(path, manifest, listed, replace(read, name=name))
        checked = [OutputTensor(t.name, t.dtype, t.shape) for h in headers for t in h.tensors]
        told = {"manifest": os.path.join(path, MANIFEST_NAME), "num_digests": len(manifest["tensors"])}
        notes = []
        if base is not None:
            # The base model's names and shapes are those before a transform.
            made = manifest.get("transformed", {})
            own = [o for o in checked if o.name not in made and manifest["tensors"][o.name]["file"] not in apart]
            absent = {*manifest["excluded"], *made.values()}
            told["base_model"] = check_against(base, own, absent, set(manifest["tied"]))
            if told["base_model"] is None:
                notes.append(not_compared(base, path))
            elif made:
                notes.append(("base-model", f"of {len(made)} tensors that a transform made, no shape was compared"))
        return {"source": {"path": path, "format": "safetensors"}, "proof": told, "notes": notes, "checked": checked}

    return Check(plan, judge)


def _check_digests(
    path: str, manifest: Mapping[str, Any], listed: Mapping[str, Mapping[str, Any]], digests: FileDigests
) -> None:
    """Compare a file that was read with the manifest."""
    names = {name for name, tensor in manifest["tensors"].items() if tensor["file"] == digests.name}
    if names != set(digests.tensors):
        name = sorted(names ^ set(digests.tensors))[0]
        raise ContradictionError(
            f"{name}: {digests.name} and the manifest disagree about where it is",
            tensor=name,
            file=os.path.join(path, digests.name),
            got="in the file alone" if name in digests.tensors else "in the manifest alone",
            want="in both",
            next_step="gather the model again, or copy the file again from a good copy",
        )
    for name, digest in digests.tensors.items():
        if digest_text(digest) != manifest["tensors"][name]["digest"]:
            raise _damaged(path, digests.name, name, digest_text(digest), manifest["tensors"][name]["digest"])
    if digest_text(digests.digest) != listed[digests.name]["digest"]:
        raise _damaged(path, digests.name, None, digest_text(digests.digest), listed[digests.name]["digest"])


def _damaged(path: str, file: str, tensor: str | None, got: str, want: str) -> CorruptError:
    return CorruptError(
        f"{tensor or file}: its bytes are not those that were gathered" + (f" ({file})" if tensor else ""),
        tensor=tensor,
        file=os.path.join(path, file),
        got=got,
        want=f"{want}, as in {MANIFEST_NAME}",
        next_step="gather the model again, or copy the file again from a good copy",
    )


def _check_plain_files(path: str, files: Sequence[dict[str, Any]]) -> None:
    for file in files:
        name = os.path.join(path, file["name"])
        try:
            with open(name, "rb") as stream:
                digest = xxhash.xxh3_128()
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        except FileNotFoundError:
            raise IncompleteError(
                f"{file['name']} is in the manifest and not in {path}",
                file=name,
                next_step="gather the model again, or copy the file again from a good copy",
            ) from None
        if digest.hexdigest() != file["digest"].rpartition(":")[2]:
            raise _damaged(path, file["name"], None, digest.hexdigest(), file["digest"])


def _plan_proof(path: str, base: BaseModel | None, layouts: LayoutMap | None) -> Check:
    """Return what proves a checkpoint as a gather would, and lets go of the bytes."""
    found = read_source(path, base=base, layouts=layouts)
    try:
        model = decide(found, Request(Purpose.PROOF)).source
    except UsageError:  # a user who gathers it has to choose first; the proof needs no names of Hugging Face's
        model = found.model
    if model.format == "safetensors":
        raise UsageError(
            f"{path} has no {MANIFEST_NAME} to verify it by",
            file=path,
            next_step="give --against a copy to compare with; a gather writes a manifest",
        )
    outputs = [OutputTensor(shard.name, shard.dtype, shard.shape) for shard in model.shards]
    checked = check_source(base, model, found.config) if base is not None else None
    notes = [*model.notes] if base is not None or layouts is not None else []
    if base is not None and checked is None:
        notes.append(not_compared(base, path))
    plan = make_plan(model, lay_out(outputs, 1 << 62) if outputs else ())

    def judge(outcome: Outcome) -> dict[str, Any]:
        return {
            "source": {
                "path": path,
                "format": model.format,
                "recipe": model.recipe,
                "world_size": model.world_size,
                "step": model.step,
            },
            "proof": {
                "coverage": "proven",
                "num_checksums": outcome.num_checksums,
                "num_replicas_compared": sum(len(tensor.replicas) for tensor in plan.tensors),
                **({"base_model": checked} if base is not None else {}),
            },
            "notes": notes,
            "checked": outputs,
        }

    return Check(plan, judge)


def _counts(outputs: Sequence[OutputTensor]) -> dict[str, Any]:
    return {
        "num_tensors": len(outputs),
        "num_parameters": sum(output.num_elements for output in outputs),
        "nbytes": sum(output.nbytes for output in outputs),
    }
