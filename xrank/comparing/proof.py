"""Proves a checkpoint as a gather would, and writes nothing."""

from __future__ import annotations

from xrank.decisions.base_check import check_source, describe_skipped_check
from xrank.decisions.base_model import BaseModel
from xrank.decisions.config_proof import prove_config
from xrank.decisions.decision import Purpose, Request, decide
from xrank.decisions.found_source import read_source
from xrank.errors import UsageError, option
from xrank.layout import LayoutMap
from xrank.making.check import Check, Verdict
from xrank.plan.executor import Outcome
from xrank.plan.output import OutputTensor
from xrank.plan.planner import make_plan
from xrank.plan.report_facts import ProofFacts, SourceFacts
from xrank.writers.hf_folder import lay_out
from xrank.writers.manifest import MANIFEST_NAME


def plan_proof(
    path: str, base: BaseModel | None, layouts: LayoutMap | None, part: str | None = None, world_size: int | None = None
) -> Check:
    """Return the check that proves a checkpoint as a gather would, and discards the bytes."""
    found = read_source(path, base=base, layouts=layouts, part=part, world_size=world_size)
    try:
        model = decide(found, Request(Purpose.PROOF), base).source
    except UsageError:  # a user who gathers it has to choose first; the proof does not need Hugging Face names
        model = found.model
    if model.format == "safetensors":
        raise UsageError(
            f"{path} has no {MANIFEST_NAME} to verify it by",
            file=path,
            next_step=f"give {option('against')} a copy to compare with; a gather writes a manifest",
        )
    outputs = [OutputTensor(shard.name, shard.dtype, shard.shape) for shard in model.shards]
    checked = check_source(base, model, found.config) if base is not None else None
    holes = prove_config(found, model, base=base)
    notes = [*(model.notes if base is not None or layouts is not None else ()), *holes]
    if base is not None and checked is None:
        notes.append(describe_skipped_check(base, path))
    plan = make_plan(model, lay_out(outputs, 1 << 62) if outputs else ())

    def judge(outcome: Outcome) -> Verdict:
        proof = ProofFacts(
            coverage="proven",
            num_checksums=outcome.num_checksums,
            num_replicas_compared=sum(len(tensor.replicas) for tensor in plan.tensors),
        )
        return Verdict(
            SourceFacts(
                path=path, format=model.format, recipe=model.recipe, world_size=model.world_size, step=model.step
            ),
            proof if base is None else proof.extended(base_model=checked),
            outputs,
            tuple(notes),
        )

    return Check(plan, judge)
