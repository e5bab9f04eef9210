"""Fills the tensors of a live module from files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from xrank.decisions.decision import Purpose, Request, decide
from xrank.decisions.folder_plan import layout_notes
from xrank.decisions.found_source import read_source
from xrank.decisions.given_layouts import live_layouts
from xrank.decisions.load_plan import Load, plan_load
from xrank.layout import LayoutMap
from xrank.lending.tensor_target import TensorTarget, check_fillable
from xrank.making.manifest_digests import ManifestDigests
from xrank.making.rereading import hash_beside
from xrank.plan.budget import Budget
from xrank.plan.decoding import open_source
from xrank.plan.executor import Outcome, execute
from xrank.plan.source import StoredModel
from xrank.plan.windows import share_all
from xrank.readers.live.local_model import LocalModel, local_model
from xrank.readers.live.module_tensors import FilledModule, check_materialised, count_changes, names_left_out
from xrank.recipes.tied_weights import list_unsaved
from xrank.teams.launches import find_world
from xrank.teams.team import Team
from xrank.words import list_text


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLoad:
    """One rank's proven load, before any tensor changes."""

    local: LocalModel
    """Tensors of the module on this rank."""
    source: StoredModel
    """The source under the module's names."""
    load: Load
    digests: ManifestDigests
    """Digests of whole tensors in the source's manifest."""
    notes: tuple[tuple[str, str], ...]


def prepare_load(
    module: FilledModule,
    place: str,
    *,
    layouts: LayoutMap | str | os.PathLike[str] | None,
    mesh: Any,
    recipe: str | os.PathLike[str] | None,
    part: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> PreparedLoad:
    """Return the proven load of this rank from metadata alone; arguments and errors as `xrank.load_model`.

    `share` is this rank's share of a comparison with another form of the model, as in `read_best`.
    """
    check_materialised(module)
    on_mesh = live_layouts(layouts, mesh)
    rank, world_size = find_world()
    local = local_model(module, layouts=on_mesh, mesh=mesh, rank=rank, world_size=world_size)
    shapes = local.find_global_shapes(has_layouts=on_mesh is not None)
    request = Request(Purpose.MODULE, recipe=recipe, module_shapes=shapes)
    decision = decide(read_source(place, part=part, share=share, module_names=shapes), request)
    source = decision.source
    load = plan_load(local, source, on_mesh, decision.padded_names)
    computed = [name for name in load.missing if name in list_unsaved(decision.found.config)]
    load = replace(load, missing=tuple(name for name in load.missing if name not in computed))
    for view, tensor in zip(load.views, load.plan.tensors, strict=True):
        check_fillable(tensor.output.name, local.views[view])
    notes = [*source.notes, *layout_notes(on_mesh, source), *load.notes]
    if names := [*names_left_out(module), *computed]:
        notes.append(("not-loaded", f"tensors that no checkpoint has are left as they are: {list_text(names, 3)}"))
    return PreparedLoad(local, source, load, ManifestDigests(source, load.plan), tuple(notes))


def fill_module(
    module: FilledModule,
    prepared: PreparedLoad,
    budget: Budget,
    team: Team,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Read every byte of a rank's load into the module.

    Args:
        module: the live module.
        prepared: the proven load of this rank.
        budget: threads and buffers.
        team: the ranks that load together.
        progress: called with (bytes read so far, bytes in all) of this rank.

    Raises:
        CorruptError, ContradictionError: the source does not match its metadata.
        RankFailedError: another rank failed.
    """
    views = [prepared.local.views[view] for view in prepared.load.views]
    plan = prepared.load.plan
    target, source = TensorTarget(dict(enumerate(views))), open_source(plan.source)
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, plan.nbytes)

    try:
        with hash_beside(plan.source.hashes, team) as finish_hashes:
            outcome = execute(
                plan,
                source,
                target,
                budget=budget,
                shares=share_all(plan),
                finish_share=prepared.digests.compare,
                cancelled=team.make_failure_check(),
                progress=count,
            )
            source.check_unchanged()
            finish_hashes()
    finally:
        # After a failure, too: queued copies still read buffers, and some tensors have changed.
        source.close()
        target.finish()
        count_changes(module, views)
    return outcome
