"""Verify: compare a model with its manifest, prove a checkpoint, or compare two of either value by value."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xrank.commands.checks import Check, is_state, plan_manifest_check, plan_proof, plan_state_proof, run_check
from xrank.commands.report import count_outputs, counts_requests
from xrank.engine.executor import Budget
from xrank.engine.report import OutputFacts, ProofFacts, Report, SourceFacts, timed_report
from xrank.errors import (
    ContradictionError,
    CorruptError,
    IncompleteError,
    UsageError,
    Wording,
    XrankError,
    names_own_arguments,
    option,
)
from xrank.ranks.team import find_launched_team
from xrank.readers.hugging_face.folder import refuse_salvaged
from xrank.recipes.options import default_workers, parse_size
from xrank.storage import places
from xrank.storage.manifest import MANIFEST_NAME
from xrank.storage.places import rank_of
from xrank.storage.url import is_url
from xrank.words import list_text

if TYPE_CHECKING:
    from xrank.layout import LayoutMap


@names_own_arguments
@counts_requests
def verify_model(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    signature: str | os.PathLike[str] | None = None,
    public_key: str | os.PathLike[str] | None = None,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    base_model: str | os.PathLike[str] | None = None,
    recipe: str | os.PathLike[str] | None = None,
    part: str | None = None,
    world_size: int | None = None,
    adapter_config: str | os.PathLike[str] | None = None,
    max_memory: str | int = "64MB",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    distributed: bool = False,
    timeout_seconds: float = 1800.0,
) -> Report:
    """Read every byte of a model or checkpoint, and compare it.

    A model with a manifest is compared with it. A checkpoint is proven as in a gather, with all checksums and replicas.
    With `against`, the tensors of both are compared value by value, also those of adapters. If only one of the two has
    an adapter, the other must be the result of `gather_checkpoint` with ``adapter="merge"``.

    Args:
        path: a model or a checkpoint.
        against: a model or checkpoint to compare with.
        signature: a bundle of ``gather_checkpoint(sign=...)`` or of model-signing, to compare all files with, instead
            of the manifest; None with `public_key`: ``model.sig`` in the folder. Needs ``cryptography``.
        public_key: file of the public key (PEM) that belongs to the signature.
        layouts: a layout file, or its content, for a checkpoint without recorded layouts, in `path` or `against`.
        base_model: a model with the names and shapes that `path` must have; fills in unrecorded shapes. With `against`
            it only does the latter.
        recipe: the recipe that the gather used, if names and config.json allow several, or a file.
        part: keys of the part of `path` to read, as `xrank.gather_checkpoint`; so is `world_size`.
        world_size: number of ranks that wrote `path`.
        adapter_config: configuration of an adapter among a checkpoint's tensors, as in the gather.
        max_memory: as `xrank.gather_checkpoint`; so are `workers`, `distributed` and `timeout_seconds`.
        workers: number of threads.
        progress: called with (bytes compared so far, bytes in all), only on rank 0; an exception in it ends the call on
            all ranks.
        distributed: share the reading among a launcher's ranks. Only rank 0 compares and reports.
        timeout_seconds: how long to wait for a live rank.

    Returns:
        A report that is `ok`, or has the first fault as its `error`. A fault on another rank is a `RankFailedError`.

    Raises:
        UsageError: the path cannot be verified: an unknown format, a model without a manifest, or an adapter that
            cannot be merged.

    Example:
        >>> import torch, xrank
        >>> report = xrank.export_model({"norm.weight": torch.ones(4)}, "model")
        >>> xrank.verify_model("model").ok
        True
    """
    started = time.monotonic()
    budget = Budget.from_memory(parse_size(max_memory, "max_memory"), workers or default_workers())
    for name, value in (("adapter_config", adapter_config), ("recipe", recipe)):
        if value is not None and against is None:
            raise UsageError(
                f"{option(name)} was given without {option('against')}",
                got=option(name, os.fspath(value)),
                want=f"{option('against')}, and a checkpoint that was gathered with it",
                next_step="give both, or neither",
            )
    if signature is not None or public_key is not None:
        others: dict[str, Any] = {"against": against, "layouts": layouts, "base_model": base_model}
        others |= {"part": part, "world_size": world_size}
        surplus = next((name for name, value in others.items() if value is not None), None)
        if public_key is None or surplus is not None:
            raise UsageError(
                f"{option('signature')} was given "
                + ("without a key" if public_key is None else f"with {option(surplus or '')}"),
                got="no public key" if public_key is None else option(surplus or ""),
                want=f"{option('public_key')}, and no other comparison",
                next_step=f"give {option('public_key', metavar='KEY')} and nothing else with it",
            )
    given = base = None
    if layouts is not None:
        from xrank.layout import LayoutMap  # most calls need neither these modules nor recipes
        from xrank.recipes.decision import read_layouts

        given = layouts if isinstance(layouts, LayoutMap) else read_layouts(layouts)
    if base_model is not None:
        from xrank.recipes.sources import open_base_model

        base = open_base_model(base_model)
    text = places.enter(path)

    choices: dict[str, Any] = {"layouts": given, "part": part, "world_size": world_size}

    def plan() -> Check:
        if against is None:
            # A workspace of `xrank reshard` has a manifest too, but ranks may have changed it since: prove it.
            is_model = places.exists(os.path.join(text, MANIFEST_NAME))
            if not is_model or any(rank_of(name) is not None for name in places.list_names(text)):
                return plan_proof(text, base, **choices)
            surplus = next((name for name, value in choices.items() if value is not None), None)
            if surplus is not None:
                raise UsageError(
                    f"{option(surplus)} was given, but {text} is a model with a manifest, whose tensors are whole",
                    got=option(surplus),
                    want=f"a checkpoint that needs it, or {option('against')} one",
                    next_step=f"leave {option(surplus)} out",
                )
            return plan_state_proof(text) if is_state(text) else plan_manifest_check(text, base)
        from xrank.commands.comparison import plan_comparison  # not needed for a single path

        return plan_comparison(text, places.enter(against), budget, adapter_config, base=base, recipe=recipe, **choices)

    def find_facts() -> dict[str, Any]:
        if public_key is not None:
            return _verify_signature(text, signature, public_key, budget.workers, progress)
        paths = [places.absolute(os.fspath(one)) for one in (text, against or "")]
        team = find_launched_team(text, distributed=distributed, timeout_seconds=timeout_seconds)
        with team.together():
            if team.size == 1:
                check = plan()
            else:
                from xrank.recipes.decision import digest_of_plan

                check, _ = team.agree(
                    "the plan", plan, lambda check: digest_of_plan(check.plan, *paths), team.check_plans
                )
            verdict = run_check(check, budget, progress, team)
        if verdict is None:
            return {}
        counts = OutputFacts(**count_outputs(verdict.outputs))
        found: dict[str, Any] = {
            "source": verdict.source,
            "proof": verdict.proof,
            "plan": counts,
            "notes": verdict.notes,
        }
        if verdict.proof.manifest is not None:
            try:
                refuse_salvaged(text)
            except IncompleteError as partial:  # every byte is right, and tensors are missing
                found["fault"] = partial
        return found

    facts: dict[str, Any] = {"source": SourceFacts(path=text)}
    fault: XrankError | None = None
    try:
        facts |= find_facts()
    except UsageError:
        raise
    except XrankError as found:
        fault = (_find_replacement(text, found) if public_key is None else None) or found
        fault.wording = Wording.of_function(verify_model)
    return timed_report("verify", started, path=text, **{"fault": fault, **facts})


def _find_replacement(path: str, fault: XrankError) -> IncompleteError | None:
    """Return the error of a model in a store that a gather is replacing, so that its files do not fit together yet."""
    if not is_url(path) or not isinstance(fault, ContradictionError | CorruptError | IncompleteError):
        return None
    from xrank.storage.bucket_stage import is_replaced_now  # folders do not need this module

    try:
        if not is_replaced_now(path):
            return None
    except XrankError:  # the fault that was found counts
        return None
    return IncompleteError(
        f"{path}: a gather is replacing the model, or was stopped while it did",
        file=path,
        got=fault.message,
        want="a model whose files fit together",
        next_step="verify it again after that gather has ended; if it was stopped, run it again, which ends it",
    )


def _verify_signature(
    path: str,
    signature: str | os.PathLike[str] | None,
    public_key: str | os.PathLike[str],
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    """Compare a model with its signature, in this process alone; return the report's facts."""
    from xrank.commands.signing import check_signature  # its packages are not needed otherwise

    given = None if signature is None else os.fspath(signature)
    used, num_files, nbytes, left_out = check_signature(path, given, os.fspath(public_key), workers, progress)
    text = f"the signature leaves out {list_text(left_out)}, which may have any content"
    return {
        "proof": ProofFacts(signature=used),
        "plan": OutputFacts(path=path, num_files=num_files, files_nbytes=nbytes),
        "notes": (("unsigned-files", text),) if left_out else (),
    }
