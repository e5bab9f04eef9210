"""The facts that reports of several commands share."""

from __future__ import annotations

import resource
from typing import Any

from xrank.decisions.adapters import merged_texts
from xrank.decisions.output_plan import OutputPlan
from xrank.plan.source import StoredModel

__all__ = ["output_facts", "peak_rss_nbytes", "proof_facts", "source_facts"]


def source_facts(source: StoredModel) -> dict[str, Any]:
    """Return what a report says of its source."""
    return {
        "path": source.path,
        "format": source.format,
        "recipe": source.recipe,
        "step": source.step,
        "world_size": source.world_size,
        "run_id": source.run_id,
        "nbytes": source.nbytes,
        "skipped_nbytes": source.skipped_nbytes,
    }


def proof_facts(gather: OutputPlan) -> dict[str, Any]:
    """Return what a report says of the proof."""
    return {"coverage": "proven", "base_model": gather.checked_against_base}


def output_facts(gather: OutputPlan) -> dict[str, Any]:
    """Return what a report says of the output, before it is written."""
    outputs = gather.selection.outputs
    return {
        "num_tensors": len(outputs),
        "num_parameters": sum(output.num_elements for output in outputs),
        "nbytes": sum(output.nbytes for output in outputs),
        "tied": [[target, *names] for target, names in gather.selection.tied.items()],
        "padding_dropped": gather.padding_dropped,
        "excluded": list(gather.selection.excluded),
        "cast": dict(gather.selection.cast),
        **({"merged": list(merged)} if (merged := merged_texts(gather.plan)) else {}),
        "companions": [
            *(c.name for c in gather.decision.small.companions),
            *(["config.json"] if gather.decision.small.config_text else []),
            *gather.texts,
        ],
    }


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
