"""Verify: a model against its manifest, a checkpoint against its own proof, or two of either, value by value."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import xxhash

from xrank.conversion.named_source import read_source
from xrank.conversion.options import default_workers, parse_size
from xrank.conversion.process import peak_rss_nbytes
from xrank.conversion.rereading import read_through, reread_headers
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError, XrankError
from xrank.formats.safetensors_header import read_header
from xrank.plan.digests import digest_text
from xrank.plan.executor import Budget, Outcome
from xrank.plan.output import OutputTensor
from xrank.plan.planner import make_plan
from xrank.plan.report import Report
from xrank.plan.source import StoredModel, merged
from xrank.readers.hf_folder import read_headers
from xrank.readers.workspace import WorkspaceReader
from xrank.writers.hf_folder import lay_out
from xrank.writers.manifest import MANIFEST_NAME, read_manifest

__all__ = ["verify", "verify_model"]

_OTHER = "\0other/"  # no tensor that a gather accepts has such a name
_NOT_COPIES = "find out which of the two is the right one"


def verify_model(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    max_memory: str | int = "64MB",
    workers: int | None = None,
) -> Report:
    """Read every byte and say whether all is as it must be.

    A model with a manifest is compared with it; a checkpoint is proven as a gather would prove it, all checksums and
    replicas included; with `against`, the tensors of both are compared value by value.

    Returns:
        A report that is `ok`, or has the first fault as its `error`.

    Raises:
        UsageError: the path can't be verified: it is of no known format, or a model without a manifest.
    """
    return verify(path, against=against, max_memory=max_memory, workers=workers)[0]


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None,
    max_memory: str | int,
    workers: int | None,
) -> tuple[Report, XrankError | None]:
    """Do as `verify_model` and return the first fault as it was raised, too."""
    started = time.monotonic()
    budget = Budget.within(parse_size(max_memory, "--max-memory"), workers or default_workers())
    text = os.fspath(path)
    facts: dict[str, Any] = {}
    error: XrankError | None = None
    try:
        if against is not None:
            facts = _compare(text, os.fspath(against), budget)
        elif os.path.exists(os.path.join(text, MANIFEST_NAME)) and WorkspaceReader().recognise(text) is not None:
            # A workspace that xrank made has a manifest too, but ranks may have written to it since: it proves itself.
            facts = _check_manifest(text, budget)
        else:
            facts = _prove(text, budget)
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
        plan=facts.get("checked"),
        error=None if error is None else error.to_dict(),
    )
    return report, error


def _check_manifest(path: str, budget: Budget) -> dict[str, Any]:
    """Compare a model folder with its manifest: files, tensors, digests, companions."""
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
    for name, read in zip(found, reread_headers(headers, budget), strict=True):
        digests = replace(read, name=name)
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
    return {
        "source": {"path": path, "format": "safetensors"},
        "proof": {"manifest": os.path.join(path, MANIFEST_NAME), "num_digests": len(manifest["tensors"])},
        "checked": _counts([OutputTensor(t.name, t.dtype, t.shape) for h in headers for t in h.tensors]),
    }


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


def _with_tied(model: StoredModel) -> StoredModel:
    """Return a gathered model with the names that its manifest says were tied and not written."""
    manifest = os.path.join(model.path, MANIFEST_NAME)
    if not os.path.exists(manifest):
        return model
    shards = {shard.name: shard for shard in model.shards}
    tied = read_manifest(manifest)["tied"]
    aliases = [replace(shards[target], name=name) for name, target in tied.items() if target in shards]
    return replace(model, shards=(*model.shards, *(alias for alias in aliases if alias.name not in shards)))


def _prove(path: str, budget: Budget) -> dict[str, Any]:
    """Prove a checkpoint as a gather would, and let go of the bytes."""
    model = read_source(path).renamed_if_clear()
    if model.format == "safetensors":
        raise UsageError(
            f"{path} has no {MANIFEST_NAME} to verify it by",
            file=path,
            next_step="give --against a copy to compare with; a gather writes a manifest",
        )
    outputs = [OutputTensor(shard.name, shard.dtype, shard.shape) for shard in model.shards]
    outcome, num_replicas = _run(model, outputs, {}, budget)
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
            "num_replicas_compared": num_replicas,
        },
        "checked": _counts(outputs),
    }


def _compare(path: str, other_path: str, budget: Budget) -> dict[str, Any]:
    """Compare the tensors of two models or checkpoints value by value: the other's pieces count as replicas."""
    found, other = read_source(path), read_source(other_path)
    if {shard.name for shard in found.model.shards} == {shard.name for shard in other.model.shards}:
        ours, theirs = found.model, other.model
    else:
        # Whichever is under training names gets Hugging Face's; a config that one has does for both.
        ours, theirs = found.renamed(other.config), other.renamed(found.config)
    ours, theirs = _with_tied(ours), _with_tied(theirs)
    mine, others = ({shard.name: shard for shard in model.shards} for model in (ours, theirs))
    for name in sorted(set(mine) ^ set(others)):
        raise ContradictionError(
            f"{name} is in {path if name in mine else other_path} alone",
            tensor=name,
            got=f"{len(mine)} tensors against {len(others)}",
            want="the same names",
            next_step=_NOT_COPIES,
        )
    for name, shard in mine.items():
        if (shard.dtype, shard.shape) != (others[name].dtype, others[name].shape):
            raise ContradictionError(
                f"{name} differs in kind",
                tensor=name,
                got=f"{shard.dtype} {list(shard.shape)} in {path}",
                want=f"{others[name].dtype} {list(others[name].shape)}, as in {other_path}",
                next_step=_NOT_COPIES,
            )
    outputs = [OutputTensor(shard.name, shard.dtype, shard.shape) for shard in ours.shards]
    tied = {name: (_OTHER + name,) for name in mine}
    try:
        outcome, _ = _run(merged(ours, theirs, _OTHER), outputs, tied, budget)
    except ContradictionError as error:
        if error.index_range is None or error.file not in {file.path for file in theirs.files}:
            raise  # within one of the two
        raise ContradictionError(
            f"{error.tensor} differs between {path} and {other_path}",
            tensor=error.tensor,
            file=error.file,
            index_range=error.index_range,
            got=error.got,
            want="equal values",
            next_step=_NOT_COPIES,
        ) from error
    return {
        "source": {"path": path, "format": ours.format},
        "proof": {"against": other_path, "num_checksums": outcome.num_checksums},
        "checked": _counts(outputs),
    }


def _run(
    model: StoredModel, outputs: Sequence[OutputTensor], tied: Mapping[str, Sequence[str]], budget: Budget
) -> tuple[Outcome, int]:
    plan = make_plan(model, lay_out(outputs, 1 << 62) if outputs else (), tied=tied)
    outcome = read_through(plan, budget)
    return outcome, sum(len(tensor.replicas) for tensor in plan.tensors)


def _counts(outputs: Sequence[OutputTensor]) -> dict[str, Any]:
    return {
        "num_tensors": len(outputs),
        "num_parameters": sum(output.num_elements for output in outputs),
        "nbytes": sum(output.nbytes for output in outputs),
    }
