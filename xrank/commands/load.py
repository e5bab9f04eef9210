"""Load: fill the tensors of a live module from any source, each rank its own part."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from xrank.commands.report import count_outputs
from xrank.dtypes import by_torch_name
from xrank.engine.executor import Budget, Outcome, execute
from xrank.engine.file_writing import hash_beside
from xrank.engine.planner import Plan
from xrank.engine.report import OutputFacts, ProofFacts, Report, source_facts, timed_report
from xrank.engine.sources import open_source
from xrank.engine.tensor_target import TensorTarget, check_fillable
from xrank.engine.windows import FilePart, TensorDigest, digest_text, share_all
from xrank.errors import CorruptError, names_own_arguments, require
from xrank.layout import LayoutMap
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import StoredModel
from xrank.ranks.store import group_place
from xrank.ranks.team import Team, find_group_team, path_text
from xrank.readers.live.models import LocalModel, local_model
from xrank.readers.live.modules import (
    FilledModule,
    check_materialized,
    count_changes,
    list_tensors,
    names_left_out,
)
from xrank.recipes.decision import Purpose, Request, decide, layout_notes
from xrank.recipes.dequantization import decode_source
from xrank.recipes.live_arguments import check_meeting, check_types, live_layouts
from xrank.recipes.load_plan import Load, check_loads, describe_load, plan_load
from xrank.recipes.options import default_workers, parse_size
from xrank.recipes.quantization import holds_codes
from xrank.recipes.sources import read_source
from xrank.recipes.ties import list_unsaved
from xrank.storage import places
from xrank.storage.manifest import MANIFEST_NAME, read_manifest
from xrank.words import list_text


class ManifestDigests:
    """Compares each tensor that is read whole and unchanged; a manifest has no digests of other tensors.

    The plan has one tensor in each file. Without a manifest, nothing is compared.
    """

    def __init__(self, source: StoredModel, plan: Plan) -> None:
        self.num_compared = 0
        self._plan = plan
        self._path = os.path.join(source.path, MANIFEST_NAME)
        is_model = source.format == "safetensors" and source.recipe is None and os.path.exists(self._path)
        tensors = read_manifest(self._path)["tensors"] if is_model else {}
        self._digests = {name: str(tensor["digest"]) for name, tensor in tensors.items()}
        self._quantized = {*source.records.quantized}
        self._lock = threading.Lock()

    def compare(self, part: FilePart) -> None:
        """Compare the digest of one file's tensor, after all its windows are read; any thread may call this."""
        tensor = self._plan.files[part.index].tensors[0]
        want = self._digests.get(tensor.output.name)
        output = tensor.output
        is_decoded = not self._quantized.isdisjoint(tensor.copies.record.tolist())
        is_cast = is_decoded or tensor.changed or tensor.source_dtype != output.dtype
        if want is None or is_cast or output.shape != output.global_shape or output.is_padded:
            return
        digest = TensorDigest(tensor.output.nbytes)
        for _, known in part.digests:
            digest.join(known)
        got = digest_text(digest.digest())
        if got != want:
            raise CorruptError(
                f"{tensor.output.name}: its bytes differ from those that were gathered",
                tensor=tensor.output.name,
                file=self._path,
                got=got,
                want=f"{want}, as in {MANIFEST_NAME}",
                next_step="gather the model again, or copy the file again from a good copy",
            )
        with self._lock:
            self.num_compared += 1


class PreparedLoad(Struct, frozen=True, eq=False):
    """One rank's proven load, before any tensor changes."""

    local: LocalModel
    source: StoredModel
    """The source under the module's names."""
    load: Load
    digests: ManifestDigests
    notes: tuple[tuple[str, str], ...]


def fill_module(
    module: FilledModule,
    prepared: PreparedLoad,
    budget: Budget,
    team: Team,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Read every byte of a rank's load into the module; `progress` counts the bytes of this rank."""
    views = [prepared.local.views[view] for view in prepared.load.views]
    plan = prepared.load.plan
    target, source = TensorTarget(dict(enumerate(views))), open_source(plan.source)
    show = progress or (lambda done, total: None)
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
                progress=lambda done: show(done, plan.nbytes),
            )
            source.check_unchanged()
            finish_hashes()
    finally:
        # After a failure, too: queued copies still read buffers, and some tensors have changed.
        source.close()
        target.finish()
        count_changes(module, views)
    return outcome


@names_own_arguments
def load_model(
    module: FilledModule,
    path: str | os.PathLike[str],
    *,
    layouts: LayoutMap | str | os.PathLike[str] | None = None,
    mesh: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    part: str | None = None,
    max_memory: str | int = "64MB",
    progress: Callable[[int, int], None] | None = None,
    group: Any = None,
    timeout_seconds: float = 1800.0,
) -> Report:
    """Fill a module's tensors from a model folder or any sharded checkpoint; every rank reads its own part.

    Every rank of the group makes this call. All ranks prove the load from metadata before they touch a tensor: the
    module and the source have the same names, shapes and layouts fit, and every rank sees the same source. Then each
    rank reads its part straight into the module: on any device and with any strides, no parameter is reallocated, and
    autograd's version counters increase. After an error beyond that point the tensors' values are undefined; another
    call fills them.

    Quantized weights of the source are decoded for a module of floating-point parameters, as by
    ``gather_checkpoint(..., dequantize=True)``; a quantized module gets the quantized values and scales of the source.

    A rank reads only its own part of the source. If inner dims are sharded, it also reads the gaps if it needs at least
    a quarter of the bytes. A checksum is compared if a rank reads all of its bytes, replicas by one rank, and digests
    of ``xrank_manifest.json`` for tensors that a rank holds whole in the source's type. Buffers that are not persistent
    are not changed, with a note: `torch.nn.Module.to_empty` leaves rotary frequencies without values.

    Args:
        module: a module with DTensors of any mesh (FSDP2, tensor parallelism, both), plain tensors, or both; its state
            dict; or Megatron's chunks of one. For tied names, the source may have only some of them.
        path: any source of `xrank.open_checkpoint` with recorded layouts.
        layouts: layouts of plain tensors that are cut, or a layout file; other plain tensors are whole.
        mesh: xrank's mesh or torch's, for layouts without one and for Megatron's modules
            (`xrank.readers.megatron.live`).
        recipe: name of a shipped recipe, or a file, from training names to Hugging Face's or back, with zeros for the
            padding of a vocabulary. ``"none"`` keeps the names. None keeps them too, but fuses experts that
            transformers fuses in memory.
        part: as `xrank.gather_checkpoint`.
        max_memory: bytes of all buffers of a rank, such as ``"64MB"``; the same on all.
        progress: called with (bytes read so far, bytes in all) of this rank; an exception that it raises ends the call
            on all ranks.
        group: the process group of the ranks; None: the world, or this process alone.
        timeout_seconds: how long ranks may take to arrive. After that a death is noticed in seconds.

    Returns:
        The report of this rank.

    Raises:
        UsageError: a name, shape or element type differs from the source's, or the module is on the meta device.
        LayoutError: a layout does not fit its tensor.
        XrankError: as `xrank.gather_checkpoint`.

    Example:
        >>> import torch, xrank
        >>> report = xrank.export_model({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, "model")
        >>> module = torch.nn.Linear(3, 2)
        >>> xrank.load_model(module, "model").num_tensors, module.bias.tolist()
        (2, [1.0, 1.0])
    """
    require("torch", "load_model")
    started = time.monotonic()
    place = places.enter(path)

    def read_arguments() -> int:
        check_types(None if isinstance(layouts, str | os.PathLike) else layouts, mesh)
        nbytes = parse_size(max_memory, "max_memory")
        Budget.from_memory(nbytes, default_workers())
        return nbytes

    def describe(max_memory_nbytes: int) -> dict[str, str | None]:
        size = f"{max_memory_nbytes:,} bytes"
        return {"call": "load_model", "recipe": path_text(recipe), "part": part, "max_memory": size}

    def read_module() -> bool:
        check_materialized(module)
        return holds_codes(
            OutputTensor(name, by_torch_name(str(tensor.dtype).removeprefix("torch.")).name, tuple(tensor.shape))
            for name, tensor in list_tensors(module)
        )

    def prove() -> PreparedLoad:
        on_mesh = live_layouts(layouts, mesh)
        rank, world_size = group_place() or (0, 1)
        local = local_model(module, layouts=on_mesh, mesh=mesh, rank=rank, world_size=world_size)
        shapes = local.find_global_shapes(has_layouts=on_mesh is not None)
        request = Request(Purpose.MODULE, recipe=recipe, module_shapes=shapes)
        found = read_source(place, part=part, share=(team.position, team.size), module_names=shapes)
        if not has_codes:
            found = decode_source(found)
        decision = decide(found, request)
        source = decision.source
        load = plan_load(local, source, on_mesh, decision.padded_names)
        computed = [name for name in load.missing if name in list_unsaved(decision.found.config)]
        load = replace(load, missing=tuple(name for name in load.missing if name not in computed))
        for view, tensor in zip(load.views, load.plan.tensors, strict=True):
            check_fillable(tensor.output.name, local.views[view])
        notes = [*source.notes, *layout_notes(on_mesh, source), *load.notes]
        if names := [*names_left_out(module), *computed]:
            notes.append(("not-loaded", f"tensors that no checkpoint contains were not changed: {list_text(names, 3)}"))
        return PreparedLoad(local, source, load, ManifestDigests(source, load.plan), tuple(notes))

    check_meeting(group, timeout_seconds)
    team = find_group_team(group, place, timeout_seconds=timeout_seconds, call="load_model", joins_launch=False)
    with team.together():
        max_memory_nbytes, _ = team.agree("the arguments", read_arguments, describe, team.check_alike)
        budget = Budget.from_memory(max_memory_nbytes, default_workers())
        # A stage of a quantized module may hold no codes itself.
        _, has_codes = team.agree("the module", read_module, lambda held: held, lambda _, ranks: any(ranks))
        planned, _ = team.agree(
            "the plan",
            prove,
            lambda planned: describe_load(planned.source, planned.load),
            lambda planned, loads: check_loads(planned.source, team.ranks, loads),
        )
        outcome = fill_module(module, planned, budget, team, progress)
    source, outputs = planned.source, list(planned.load.plan.tensors)
    return timed_report(
        "load",
        started,
        path=source.path,
        source=source_facts(source),
        proof=ProofFacts(
            coverage="proven",
            num_replicas_compared=sum(len(tensor.replicas) for tensor in outputs),
            num_checksums=outcome.num_checksums,
            num_digests=planned.digests.num_compared,
        ),
        output=OutputFacts(**count_outputs([tensor.output for tensor in outputs]), cast=dict(planned.load.cast)),
        notes=planned.notes,
    )
