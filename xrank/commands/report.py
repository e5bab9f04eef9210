"""Reports of the commands, and the facts that several of them share."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ParamSpec

from msgspec import Struct, to_builtins
from msgspec.structs import asdict, replace

from xrank.dtypes import DTYPES, dtype
from xrank.engine.executor import factors_nbytes
from xrank.engine.object_records import count_requests, holds_objects
from xrank.engine.planner import Plan
from xrank.engine.report import (
    DeltaDetails,
    FileFacts,
    OutputFacts,
    ProofFacts,
    Report,
    SourceFacts,
    TrafficFacts,
    source_facts,
    timed_report,
)
from xrank.engine.windows import WINDOW_NBYTES, digest_text
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import StoredModel
from xrank.storage.client import StoreTraffic, take_traffic, traffic
from xrank.storage.url import is_url
from xrank.words import plural, size_text

if TYPE_CHECKING:
    from xrank.engine.file_writing import WrittenFiles
    from xrank.recipes.decision import FolderPlan
    from xrank.recipes.reshard_plan import Reshard


_REQUESTS_OF_FILE = 5
"""Requests for an uploaded file beside its parts: its beginning, the journal, its record, its end, and a last look."""


EARLIER_NOTE = (
    "made-before",
    "an earlier run of this command had made the output: nothing was written; `xrank verify` reads its bytes again",
)


class WrittenOutput(Struct, frozen=True):
    """An output that is in place, with the facts that one rank of its team knows."""

    files: tuple[FileFacts, ...]
    written: WrittenFiles | None = None
    """Counts of the whole output, on the first rank."""
    notes: tuple[tuple[str, str], ...] = ()


def output_facts(planned: FolderPlan, path: str) -> OutputFacts:
    """Return the facts of a model folder before it is written."""
    from xrank.recipes.adapters import describe_merges  # reports of other commands need no recipes

    selection, merged, transforms = planned.selection, describe_merges(planned.plan), planned.transforms
    merges: dict[str, Any] = {"merged": list(merged)} if merged else {}
    if planned.options.salvage:
        merges["missing"] = [to_builtins(one) for one in planned.missing]
    if planned.options.filled:
        merges["filled"] = list(planned.options.filled)
    transformed: dict[str, Any] = {} if transforms is None else {"transformed": transforms.made_of}
    counts = count_outputs(selection.outputs)
    if planned.quantizing is not None:
        transformed = {
            "quantized": {
                "scheme": planned.quantizing.scheme.name,
                "num_tensors": sum(map(len, planned.quantizing.groups)),
                "num_sources": len(planned.decision.selection.outputs),
                "ignored": planned.quantizing.ignored,
            }
        }
        counts["num_parameters"] = count_outputs(planned.decision.selection.outputs)["num_parameters"]
    return OutputFacts(
        path=path,
        **counts,
        tied=[[target, *names] for target, names in selection.tied.items()],
        padding_dropped=planned.padding_dropped,
        excluded=[name for name in selection.excluded if name not in planned.options.missing],
        cast=dict(selection.cast),
        **merges,
        companions=[*(companion.name for companion in planned.companions), *planned.texts],
        **transformed,
    )


def count_outputs(outputs: Sequence[OutputTensor]) -> dict[str, Any]:
    """Return the numbers of tensors, elements and bytes, as `OutputFacts` names them."""
    return {
        "num_tensors": len(outputs),
        "num_parameters": sum(output.num_elements * dtype(output.dtype).num_packed for output in outputs),
        "nbytes": sum(output.nbytes for output in outputs),
    }


def file_facts(plan: Plan) -> list[FileFacts]:
    """Return the facts of a plan's files before they are written."""
    return [
        FileFacts(name=file.output.name, nbytes=file.output.nbytes, num_tensors=len(file.tensors))
        for file in plan.files
    ]


_FACTS = {
    "source": SourceFacts,
    "proof": ProofFacts,
    "output": OutputFacts,
    "traffic": TrafficFacts,
    "details": DeltaDetails,
}


def report_text(report: Report) -> str:
    """Return an export's report as text for other ranks."""
    parts = {name: getattr(report, name) for name in ("command", "path", "seconds", "peak_rss_nbytes", "notes")}
    facts = {name: one.to_dict() for name in _FACTS if (one := getattr(report, name))}
    return json.dumps({**parts, **facts})


def read_report(text: str) -> Report:
    """Return the report in a text of `report_text`."""
    parts = json.loads(text)
    parts["output"]["files"] = [FileFacts(**file) for file in parts["output"]["files"]]
    parts["notes"] = tuple(map(tuple, parts["notes"]))
    return Report(**parts | {name: kind(**parts[name]) for name, kind in _FACTS.items() if name in parts})


def folder_report(command: str, planned: FolderPlan, written: WrittenOutput, path: str, started: float) -> Report:
    """Return the report of a model folder that was written; `started` is on the monotonic clock."""
    proof = ProofFacts(coverage="proven", base_model=planned.checked_against_base)
    output, found = output_facts(planned, path), written.written
    if found is None:
        output = output.extended(resumed_nbytes=0, shared_nbytes=0)
    else:
        proof = proof.extended(
            num_replicas_compared=found.num_replicas_compared, num_checksums=found.outcome.num_checksums
        )
        output = output.extended(resumed_nbytes=found.resumed_nbytes, shared_nbytes=found.outcome.shared_nbytes)
        if errors := found.outcome.errors:
            from xrank.engine.encodings import EncodingError  # reports of other commands need no arithmetic

            known = {kind: EncodingError(*fields) for kind, fields in sorted(errors.items())}
            told = {kind: {"mean": one.mean, "largest": one.largest} for kind, one in known.items()}
            output = output.extended(quantized={**output.quantized, "errors": told})
    return timed_report(
        command,
        started,
        path=path,
        source=source_facts(planned.source),
        proof=proof,
        output=output.extended(files=list(written.files)),
        notes=(*planned.notes, *written.notes),
    )


def plan_report(planned: FolderPlan, path: str, started: float) -> Report:
    """Return the report of a gather's dry run."""
    budget = planned.options.budget
    replicas = sum(len(replicas) for tensor in planned.plan.tensors for replicas in tensor.compared)
    return timed_report(
        "gather",
        started,
        path=path,
        source=source_facts(planned.source),
        proof=ProofFacts(coverage="proven", base_model=planned.checked_against_base, num_replicas_to_compare=replicas),
        plan=output_facts(planned, path).extended(
            files=file_facts(planned.plan),
            # Each worker holds the factors of a merge, and one window of the stored factors.
            peak_buffer_nbytes=budget.nbytes
            + (budget.workers * (factors + WINDOW_NBYTES) if (factors := factors_nbytes(planned.plan)) else 0),
        ),
        traffic=_plan_traffic(planned.plan, path),
        notes=planned.notes,
    )


def _plan_traffic(plan: Plan, out: str) -> TrafficFacts | None:
    facts = TrafficFacts()
    if holds_objects(plan.source):
        requests, nbytes = count_requests(plan.source)
        facts = facts.extended(planned_requests=requests, planned_nbytes=nbytes)
    if is_url(out):
        from xrank.storage.uploads import count_parts  # folders do not need this module

        sizes = [file.output.nbytes for file in plan.files]
        requests = sum(count_parts(nbytes) + _REQUESTS_OF_FILE for nbytes in sizes)
        facts = facts.extended(planned_written_requests=requests, planned_written_nbytes=sum(sizes))
    return facts if holds_objects(plan.source) or is_url(out) else None


def reshard_report(reshard: Reshard, path: str, started: float, made: WrittenOutput | None = None) -> Report:
    """Return the report of a reshard, or of its plan on ranks that do not know what was made."""
    plan, proof = reshard.plan, ProofFacts(coverage="proven")
    written, notes = (None, ()) if made is None else (made.written, made.notes)
    is_made = written is not None or EARLIER_NOTE in notes
    facts = OutputFacts(
        path=path,
        **count_outputs(reshard.outputs) | {"nbytes": sum(tensor.output.nbytes for tensor in plan.tensors)},
        world_size=len(plan.files),
        mesh=reshard.grid,
        run_id=reshard.run_id,
        tied=[[target, *names] for target, names in reshard.tied.items()],
        cast=dict(reshard.selection.cast),
        companions=[companion.name for companion in reshard.companions],
        files=file_facts(plan),
    )
    if written is None:
        facts = facts.extended(peak_buffer_nbytes=reshard.options.budget.nbytes)
        proof = proof.extended(num_replicas_to_compare=sum(len(tensor.replicas) for tensor in plan.tensors))
    else:
        digests = [digest_text(written.digests[index].digest) for index in range(len(plan.files))]
        files = [file.extended(digest=digest) for file, digest in zip(facts.files, digests, strict=True)]
        facts = facts.extended(files=files, resumed_nbytes=written.resumed_nbytes)
        proof = proof.extended(
            num_replicas_compared=written.num_replicas_compared, num_checksums=written.outcome.num_checksums
        )
    return timed_report(
        "reshard",
        started,
        path=path,
        source=source_facts(reshard.source),
        proof=proof,
        output=facts if is_made else None,
        plan=None if is_made else facts,
        traffic=None if is_made else _plan_traffic(plan, path),
        notes=(*reshard.notes, *notes),
    )


def model_facts(model: StoredModel) -> dict[str, Any]:
    """Return the figures of a model that is not yet planned, as `SourceFacts` names them."""
    # A tie is one tensor under two names.
    shards = [shard for shard in model.shards if shard.name not in model.aliases]
    return {
        "step": model.step,
        "world_size": model.world_size,
        "run_id": model.run_id,
        "num_tensors": len(shards),
        "num_parameters": sum(prod(shard.shape) * dtype(shard.dtype).num_packed for shard in shards),
        "dtypes": dict(Counter(shard.dtype for shard in shards)),
        "nbytes": model.nbytes,
        "skipped_nbytes": model.skipped_nbytes,
        "has_config": model.config is not None,
    }


def count_rank_tensors(model: StoredModel) -> list[dict[str, Any]]:
    """Return the number and bytes of the model's tensors by rank, for formats whose ranks record no more."""
    if model.world_size is None:
        return []
    counts: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    for shard in model.shards:
        if shard.name not in model.aliases:
            counts.update(set(shard.rank.tolist()))
            width = DTYPES[shard.dtype].nbytes
            for rank, size in zip(shard.rank.tolist(), shard.nests.sizes.tolist(), strict=True):
                nbytes[rank] += size * width
    return [{"rank": rank, "num_tensors": counts[rank], "nbytes": nbytes[rank]} for rank in sorted(counts)]


Parameters = ParamSpec("Parameters")


def counts_requests(call: Callable[Parameters, Report]) -> Callable[Parameters, Report]:
    """Let a command's report have the requests that this process sent meanwhile; without any, it stays as it is."""

    @functools.wraps(call)
    def counted(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Report:
        before = begin_counting()
        return with_traffic(call(*args, **kwargs), before)

    return counted


def begin_counting() -> StoreTraffic:
    """Return the counts of this process before a command, for `with_traffic`."""
    take_traffic()  # what came before is not for another rank's report
    return traffic()


def with_traffic(report: Report, before: StoreTraffic) -> Report:
    """Return a report with the requests that this process, and other ranks of its team, have sent since then."""
    counts = traffic().since(before)
    if not counts.requests:
        return report
    facts = (report.traffic or TrafficFacts()).extended(**asdict(counts))
    return replace(report, traffic=facts, notes=(*report.notes, ("requests", _describe(facts))))


def _describe(facts: TrafficFacts) -> str:
    again = f", {facts.retries:,} of them again after a failure" if facts.retries else ""
    written = f", {size_text(facts.written_nbytes)} written" if facts.written_nbytes else ""
    text = f"{plural(facts.requests, 'request')} to the store{again}: {size_text(facts.read_nbytes)} read{written}"
    ways = (
        ("read", facts.planned_requests, facts.planned_nbytes),
        ("write", facts.planned_written_requests, facts.planned_written_nbytes),
    )
    planned = [f"{plural(count, 'request')} to {way} {size_text(nbytes)}" for way, count, nbytes in ways if count]
    return f"{text}; the tensors will take {', '.join(planned)}" if planned else text
