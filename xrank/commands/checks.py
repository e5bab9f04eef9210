"""Checks by one process or a team: a model with its manifest, or a checkpoint as a gather would prove it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from xrank.engine.executor import Budget, Outcome
from xrank.engine.file_writing import FileDigests, digests_of, hash_beside
from xrank.engine.planner import Plan, make_plan
from xrank.engine.report import ProofFacts, SourceFacts
from xrank.engine.rounds import Outputs, Work, make_files
from xrank.engine.sources import open_source
from xrank.engine.windows import digest_text
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError, XrankError, option
from xrank.formats.safetensors_header import SafetensorsHeader, read_header
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import RecordedHash
from xrank.ranks.team import Team
from xrank.readers.hugging_face.folder import read_headers
from xrank.storage import places
from xrank.storage.manifest import COPY_AGAIN, MANIFEST_NAME, make_damage_error, read_manifest
from xrank.storage.places import digest_plain_file

if TYPE_CHECKING:
    from xrank.engine.transforms import Transforms
    from xrank.layout import LayoutMap
    from xrank.recipes.decision import FolderPlan
    from xrank.recipes.found_source import BaseModel


class Verdict(Struct, frozen=True, eq=False):
    """Facts of a check that passed."""

    source: SourceFacts
    proof: ProofFacts
    outputs: Sequence[OutputTensor]
    notes: tuple[tuple[str, str], ...] = ()


class Check(Struct, frozen=True, eq=False):
    """A check that was planned from metadata and has not read the data yet."""

    plan: Plan
    judge: Callable[..., Verdict]
    """Returns the facts of a sound outcome, or raises an error about it; it gets that of `made`, too, if there is one.
    """
    explain: Callable[[XrankError], XrankError] = lambda error: error
    """Returns an error of the reading in the words of this check."""
    made: FolderPlan | None = None
    """A folder that is made and not written, to compare what was read with it."""
    moments: Plan | None = None
    """A plan that reads the optimizer's moments; `judge` gets its outcome last."""


class Moments(Struct, frozen=True, eq=False):
    """The moments of a checkpoint's optimizer, which no gather reads."""

    optimizer: str
    count: int
    plan: Plan


def plan_moments(path: str, part: str | None) -> Moments | XrankError | None:
    """Return the moments of a checkpoint; an error if they cannot be read; None if there is no optimizer."""
    from xrank.engine.hf_folder import lay_out
    from xrank.readers.training_states import find_training_state

    try:
        state = find_training_state(path, part=part)
        names = {name for kinds in state.states.values() for name in kinds.values()} if state is not None else set()
        if state is None or not names:
            return None
        shards = tuple(shard for shard in state.stored.shards if shard.name in names)
        outputs = [OutputTensor(shard.name, shard.dtype, shard.shape) for shard in shards]
        plan = make_plan(replace(state.stored, shards=shards, hashes=()), lay_out(outputs, 1 << 62))
    except XrankError as error:
        return error
    return Moments(state.optimizer or "Adam", len(outputs), plan)


def run_check(check: Check, budget: Budget, progress: Callable[[int, int], None] | None, team: Team) -> Verdict | None:
    """Run a check, the same on all ranks; return the verdict of the first rank, which judges, and None on others."""
    try:
        outcomes = [_make(check.plan, check.plan.source.hashes, budget, team, progress)]
        if (made := check.made) is not None:
            outcomes.append(_make(made.plan, made.source.hashes, budget, team, transforms=made.transforms))
        if check.moments is not None:
            outcomes.append(_make(check.moments, (), budget, team))
    except XrankError as error:
        raise check.explain(error) from error
    return check.judge(*outcomes) if team.is_first else None


def _make(
    plan: Plan,
    hashes: Sequence[RecordedHash],
    budget: Budget,
    team: Team,
    progress: Callable[[int, int], None] | None = None,
    *,
    transforms: Transforms | None = None,
) -> Outcome:
    """Make the files of a plan, and write nothing."""
    show = progress or (lambda done, total: None)
    with hash_beside(hashes, team) as finish_hashes, closing(open_source(plan.source)) as source:
        work = Work(plan, source, budget, transforms=transforms)
        if transforms is not None:
            from xrank.engine.transformed_files import make_transformed  # few checks need this module

            work = replace(work, make_transformed=make_transformed)
        outcome = make_files(
            team,
            work,
            range(len(plan.files)),
            Outputs(),
            what="the verification",
            progress=lambda done: show(done, plan.nbytes),
        )
        source.check_unchanged()
        finish_hashes()
    return outcome


def plan_manifest_check(path: str, base: BaseModel | None) -> Check:
    """Return the check of a folder against its manifest: files, tensors, digests. Companions are read immediately."""
    manifest = read_manifest(os.path.join(path, MANIFEST_NAME))
    listed = {file["name"]: file for file in manifest["files"]}
    surplus = sorted(name for name in places.list_names(path) if name.endswith(".safetensors") and name not in listed)
    if surplus:
        raise ContradictionError(
            f"{surplus[0]} is in {path} but not in its manifest",
            file=os.path.join(path, surplus[0]),
            got=surplus[0],
            want=f"only {', '.join(sorted(listed))}",
            next_step="move the file to another folder, or gather the model again",
        )
    # The manifest alone lists files in a folder within, such as an adapter's.
    apart = [name for name in listed if name.endswith(".safetensors") and "/" in name]
    headers = [
        *read_headers(path, of_delta=True),
        *(read_header(os.path.join(path, *name.split("/"))) for name in apart),
    ]
    found = [os.path.relpath(header.path, path).replace(os.sep, "/") for header in headers]
    _check_plain_files(path, [*manifest["companions"], *(f for f in listed.values() if f["name"] not in found)])
    plan = plan_of_headers(headers)

    def judge(outcome: Outcome) -> Verdict:
        for index, name in enumerate(found):
            read = digests_of(plan.files[index].output, outcome.files[index])
            _check_digests(path, manifest, listed, replace(read, name=name))
        checked = [OutputTensor(t.name, t.dtype, t.shape) for h in headers for t in h.tensors]
        proof = ProofFacts(manifest=os.path.join(path, MANIFEST_NAME), num_digests=len(manifest["tensors"]))
        notes = []
        if base is not None:
            from xrank.recipes.config_proof import check_against, describe_skipped_check  # others need no recipes

            # The base model's names and shapes precede a transform.
            made = manifest.get("transformed", {})
            own = [o for o in checked if o.name not in made and manifest["tensors"][o.name]["file"] not in apart]
            absent = {*manifest["excluded"], *made.values()}
            proof = proof.extended(base_model=check_against(base, own, absent, set(manifest["tied"])))
            if proof.base_model is None:
                notes.append(describe_skipped_check(base, path))
            elif made:
                notes.append(("base-model", f"of {len(made)} tensors that a transform made, no shape was compared"))
        return Verdict(SourceFacts(path=path, format="safetensors"), proof, checked, tuple(notes))

    return Check(plan, judge)


def _check_digests(
    path: str, manifest: Mapping[str, Any], listed: Mapping[str, Mapping[str, Any]], digests: FileDigests
) -> None:
    names = {name for name, tensor in manifest["tensors"].items() if tensor["file"] == digests.name}
    if names != set(digests.tensors):
        name = sorted(names ^ set(digests.tensors))[0]
        raise ContradictionError(
            f"{name}: {digests.name} and the manifest disagree about where it is",
            tensor=name,
            file=os.path.join(path, digests.name),
            got="only in the file" if name in digests.tensors else "only in the manifest",
            want="in both",
            next_step=COPY_AGAIN,
        )
    for name, digest in digests.tensors.items():
        if digest_text(digest) != manifest["tensors"][name]["digest"]:
            raise make_damage_error(path, digests.name, name, digest_text(digest), manifest["tensors"][name]["digest"])
    if digest_text(digests.digest) != listed[digests.name]["digest"]:
        raise make_damage_error(path, digests.name, None, digest_text(digests.digest), listed[digests.name]["digest"])


def make_absence_error(path: str, file: str) -> IncompleteError:
    """Return the error for a file of a manifest that the folder lacks."""
    problem = f"{file} is in the manifest but not in {path}"
    return IncompleteError(problem, file=os.path.join(path, file), next_step=COPY_AGAIN)


def _check_plain_files(path: str, files: Sequence[dict[str, Any]]) -> None:
    for file in files:
        name = os.path.join(path, file["name"])
        try:
            digest = digest_plain_file(name)
        except FileNotFoundError:
            raise make_absence_error(path, file["name"]) from None
        except OSError as error:
            raise CorruptError(
                f"{name} cannot be read: {error.strerror}",
                file=name,
                got=error.strerror,
                want="the file that was gathered",
                next_step=COPY_AGAIN,
            ) from None
        if digest != file["digest"].rpartition(":")[2]:
            raise make_damage_error(path, file["name"], None, digest, file["digest"])


def plan_proof(
    path: str, base: BaseModel | None, layouts: LayoutMap | None, part: str | None = None, world_size: int | None = None
) -> Check:
    """Return the check that proves a checkpoint as a gather would, and discards the bytes."""
    from xrank.engine.hf_folder import lay_out  # a model with a manifest needs none of these
    from xrank.recipes.config_proof import check_source, describe_skipped_check, prove_config
    from xrank.recipes.decision import Purpose, Request, decide
    from xrank.recipes.sources import read_source

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
    moments = plan_moments(path, part)
    if isinstance(moments, XrankError):  # a gather does not need them
        notes.append(("optimizer", f"the optimizer was not read: {moments.message}"))
        moments = None

    def judge(outcome: Outcome, *others: Outcome) -> Verdict:
        proof = ProofFacts(
            coverage="proven",
            num_checksums=outcome.num_checksums + sum(other.num_checksums for other in others),
            num_replicas_compared=sum(len(tensor.replicas) for tensor in plan.tensors),
        )
        proof = proof if moments is None else proof.extended(num_optimizer_tensors=moments.count)
        return Verdict(
            SourceFacts(
                path=path, format=model.format, recipe=model.recipe, world_size=model.world_size, step=model.step
            ),
            proof if base is None else proof.extended(base_model=checked),
            outputs,
            tuple(notes),
        )

    return Check(plan, judge, moments=None if moments is None else moments.plan)


def plan_state_proof(path: str) -> Check:
    """Return the check that proves a training state, its moments too, as a reshard would, and discards the bytes."""
    from xrank.engine.hf_folder import lay_out
    from xrank.readers.training_states import read_training_state

    stored = read_training_state(path).stored
    outputs = [OutputTensor(shard.name, shard.dtype, shard.shape) for shard in stored.shards]

    def judge(outcome: Outcome) -> Verdict:
        proof = ProofFacts(coverage="proven", num_checksums=outcome.num_checksums)
        return Verdict(SourceFacts(path=path, format=stored.format, step=stored.step), proof, outputs, ())

    return Check(make_plan(stored, lay_out(outputs, 1 << 62)), judge)


def is_state(path: str) -> bool:
    """Return whether the manifest in a folder is that of a training state, whose tensors are not listed there."""
    names = (file["name"].rpartition("/")[2] for file in read_manifest(os.path.join(path, MANIFEST_NAME))["files"])
    return not {".metadata", "latest_universal"}.isdisjoint(names)


def plan_of_headers(headers: Sequence[SafetensorsHeader]) -> Plan:
    """Return a plan that reads files as they are, from their headers; each is one file of the plan."""
    from xrank.readers.hugging_face.folder import describe_files, output_file_of

    model = describe_files(os.path.dirname(headers[0].path) if headers else "", headers, as_bytes=True)
    return make_plan(model, [output_file_of(header) for header in headers])
