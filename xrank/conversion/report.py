"""Facts that the reports of several commands share."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from typing import Any

from xrank.decisions.adapters import describe_merges
from xrank.decisions.folder_plan import FolderPlan
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan
from xrank.plan.report import FileFacts, OutputFacts, ProofFacts, Report, SourceFacts
from xrank.plan.source import StoredModel

__all__ = [
    "count_outputs",
    "file_facts",
    "output_facts",
    "peak_rss_nbytes",
    "proof_facts",
    "read_report",
    "report_text",
    "source_facts",
]


def source_facts(source: StoredModel) -> SourceFacts:
    """Return the facts of a source."""
    return SourceFacts(
        path=source.path,
        format=source.format,
        recipe=source.recipe,
        step=source.step,
        world_size=source.world_size,
        run_id=source.run_id,
        nbytes=source.nbytes,
        skipped_nbytes=source.skipped_nbytes,
    )


def proof_facts(planned: FolderPlan) -> ProofFacts:
    """Return the facts of a proof that is made from metadata alone."""
    return ProofFacts(coverage="proven", base_model=planned.checked_against_base)


def output_facts(planned: FolderPlan, path: str) -> OutputFacts:
    """Return the facts of a model folder before it is written."""
    selection, small = planned.selection, planned.decision.small
    merged = describe_merges(planned.plan)
    merges: dict[str, Any] = {"merged": list(merged)} if merged else {}
    return OutputFacts(
        path=path,
        **count_outputs(selection.outputs),
        tied=[[target, *names] for target, names in selection.tied.items()],
        padding_dropped=planned.padding_dropped,
        excluded=list(selection.excluded),
        cast=dict(selection.cast),
        **merges,
        companions=[
            *(companion.name for companion in small.companions),
            *(["config.json"] if small.config_text else []),
            *planned.texts,
        ],
    )


def count_outputs(outputs: Sequence[OutputTensor]) -> dict[str, Any]:
    """Return the numbers of tensors, elements and bytes, as `OutputFacts` names them."""
    return {
        "num_tensors": len(outputs),
        "num_parameters": sum(output.num_elements for output in outputs),
        "nbytes": sum(output.nbytes for output in outputs),
    }


def file_facts(plan: Plan) -> list[FileFacts]:
    """Return the files of a plan that nothing is written of."""
    return [
        FileFacts(name=file.output.name, nbytes=file.output.nbytes, num_tensors=len(file.tensors))
        for file in plan.files
    ]


def peak_rss_nbytes() -> int:
    """Return the most memory this process has held, in bytes.

    From /proc where it is: getrusage's figure also counts the program that started this one.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report_text(report: Report) -> str:
    """Return an export's report as text for other ranks."""
    parts = {name: getattr(report, name) for name in ("command", "path", "seconds", "peak_rss_nbytes", "notes")}
    facts = {name: getattr(report, name).to_dict() for name in ("source", "proof", "output")}
    return json.dumps({**parts, **facts})


def read_report(text: str) -> Report:
    """Return the report that `report_text` wrote; the same on every rank."""
    parts = json.loads(text)
    output = parts.pop("output")
    output["files"] = [FileFacts(**file) for file in output["files"]]
    notes = tuple((code, message) for code, message in parts.pop("notes"))
    source, proof = SourceFacts(**parts.pop("source")), ProofFacts(**parts.pop("proof"))
    return Report(**parts, source=source, proof=proof, output=OutputFacts(**output), notes=notes)
