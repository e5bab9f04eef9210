"""Versions of a model that are applied to a model on disk, so that it follows a trainer; and a look at all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import msgspec
import xxhash
from msgspec.structs import replace

from xrank.commands.checks import plan_manifest_check, run_check
from xrank.commands.folder_filling import make_output
from xrank.commands.report import EARLIER_NOTE, counts_requests, folder_report
from xrank.engine.changed_records import ChangedSource
from xrank.engine.companions import find_companions
from xrank.engine.report import AppliedDetails, ChainDetails, Report, timed_report
from xrank.engine.sources import open_source
from xrank.errors import CorruptError, XrankError, names_own_arguments
from xrank.formats.deltas import state_digest
from xrank.layout.stored_model import StoredModel
from xrank.ranks.team import Team
from xrank.readers.deltas import (
    Chain,
    choose_target,
    find_chain,
    find_versions,
    identify_version,
    number_of,
    read_chain,
    read_held_version,
    read_whole,
)
from xrank.readers.hugging_face.folder import read_delta, read_facts, read_headers, read_step
from xrank.recipes.decision import FolderPlan, Purpose, Request, decide, plan_output, small_files_of
from xrank.recipes.found_source import FoundSource, read_config
from xrank.recipes.options import GatherOptions, default_workers
from xrank.storage import places
from xrank.storage.manifest import MANIFEST_NAME, ManifestVersion
from xrank.storage.staging import (
    check_apart,
    check_output,
    clear_remains,
    output_file_nbytes,
    read_output_manifest,
    recover_output,
)
from xrank.storage.url import clean_path, is_url

_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@names_own_arguments
@counts_requests
def apply_deltas(
    base: str | os.PathLike[str],
    deltas: _Paths,
    out: str | os.PathLike[str],
    *,
    version: int | None = None,
    max_shard_size: str | int = "5GB",
    max_memory: str | int = "64MB",
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = True,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Write the model of a version, from the base model of its chain and all changes, in one pass.

    Every recorded checksum and state digest is compared before `out` appears by one rename. Call it again with the same
    arguments to follow the trainer: the newest version atomically replaces the model that an earlier call wrote to
    `out`. It is made from the files in `out` if all later versions are available.

    Args:
        base: the folder of the model on which the first version is based.
        deltas: folders of versions, or one folder that contains them; or their URLs.
        out: the folder to make, or its URL.
        version: the version to make; None: the newest.
        max_shard_size: bytes of tensors in a file.
        max_memory: bytes of the executor's buffers; decoding of records takes up to 32 MB more.
        workers: number of threads; None: ``min(4, cores)``.
        overwrite: whether to replace even a model that no call of this function has written.
        resume: whether to keep the finished parts of an interrupted run.
        verify: whether to read the files back before the rename.
        progress: called with (bytes written so far, bytes in all).

    Raises:
        IncompleteError: a version, or the base of one, is missing.
        ContradictionError, CorruptError: versions, or a version and its base, contradict each other, or a file is
            damaged.
        OutputExistsError: `out` is a different model.
        NoSpaceError, XrankError: the output could not be written; finished parts are kept for the next run.

    Example:
        >>> import torch, xrank
        >>> for number, value in enumerate([0.0, 1.0]):
        ...     _ = xrank.save_model({"norm.weight": torch.full((4,), value)}, f"step-{number}")
        >>> _ = xrank.make_delta("step-0", "step-1", "deltas/weight_v000001")
        >>> xrank.apply_deltas("step-0", "deltas", "engine").details.version
        1
    """
    started = time.monotonic()
    path, start, versions = clean_path(out), places.enter(base), _enter(deltas)
    goal = choose_target(versions, version)
    recover_output(path)
    held = _find_held(path, versions)
    facts = read_facts(goal)
    number = number_of(goal) if facts is None else facts.version
    earlier = None if held is None or held.number < 0 else held.number
    details = AppliedDetails(version=number, earlier_version=earlier)
    if held is not None and held.number == number:
        clear_remains(path)
        return timed_report("delta apply", started, path=path, notes=(EARLIER_NOTE,), details=details)
    chain = (
        None if facts is None else _choose_chain(goal, start, path, held, versions, is_folder=_is_one_folder(deltas))
    )
    source = read_whole(goal) if chain is None else read_chain(chain)
    options = GatherOptions(
        max_shard_size=max_shard_size,
        max_memory=max_memory,
        workers=workers,
        overwrite=overwrite or held is not None,
        resume=resume,
        verify=verify,
    )
    for one in (*versions.values(), *(() if held is not None else (start,))):
        check_apart(one, path)
    check_output(path, overwrite=options.overwrite)
    planned = _plan(source, goal if chain is None else chain.base, options)
    beside = None if is_url(path) else os.path.dirname(os.path.abspath(path))
    made = ManifestVersion(number or 0, None if facts is None else facts.state, identify_version(goal))
    with closing(open_source(planned.plan.source, beside)) as files:
        written = make_output(planned, files, path, progress, Team(), version=made)
    applied = (goal, 0) if chain is None else (chain.base, len(chain.versions))
    details = details.extended(base=applied[0], num_applied=applied[1])
    report = folder_report("delta apply", planned, written, path, started)
    return replace(report, details=details)


def _enter(paths: _Paths) -> dict[int, str]:
    return find_versions([places.enter(one) for one in _list_paths(paths)])


def _list_paths(paths: _Paths) -> Sequence[str | os.PathLike[str]]:
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)


def _is_one_folder(paths: _Paths) -> bool:
    first, *others = _list_paths(paths)
    return not others and number_of(clean_path(first)) is None


def _find_held(out: str, versions: Mapping[int, str]) -> ManifestVersion | None:
    """Return the version that an earlier call has made there; None without one, or if it is of another chain."""
    try:
        manifest = read_output_manifest(out)
        listed = (*manifest["files"], *manifest["companions"])
        is_whole = all(output_file_nbytes(out, one["name"]) == one["nbytes"] for one in listed)
    except (OSError, XrankError):
        return None
    if not is_whole or "version" not in manifest:
        return None
    held = msgspec.convert(manifest["version"], ManifestVersion)
    there = versions.get(held.number)
    # A training run that starts again numbers its versions from 0 again.
    is_other = there is not None and held.lineage != identify_version(there)
    return replace(held, number=-1) if is_other else held


def _choose_chain(
    goal: str, base: str, out: str, held: ManifestVersion | None, versions: Mapping[int, str], *, is_folder: bool
) -> Chain:
    """Return the chain of a version: from what `out` holds if that is on a disk and belongs to it, or from the base."""
    if held is not None and not is_url(out):
        with suppress(XrankError):  # a hole, or another run's state: the base is there
            return find_chain(goal, out, known=versions, base_number=held.number)
    number = read_held_version(base)
    known = number_of(base) if number is None else number.number
    return find_chain(goal, base, known=versions, base_number=0 if known is None and is_folder else known)


def _plan(source: StoredModel, base: str, options: GatherOptions) -> FolderPlan:
    """Plan the folder of a version: the tensors and names of the base, and its small files."""
    companions, others = find_companions([base])
    config_path = next((one.path for one in companions if one.name == "config.json"), None)
    config = None if config_path is None else read_config(config_path)
    notes = tuple(("companion", text) for text in others)
    found = FoundSource(source, config, config_path, companions, notes, source.path)
    # As for states: all tensors that the base has, also one that the config ties to another.
    decision = decide(found, Request(Purpose.STATES, options))
    return plan_output(replace(decision, small=small_files_of(companions, found, options, is_model=True)), ())


def _records_of(model: StoredModel) -> dict[str, int | None]:
    """Return the record of each tensor; None for one without an element."""
    return {shard.name: int(shard.record[0]) if len(shard.record) else None for shard in model.shards}


def _compare_state(model: StoredModel, digests: Mapping[str, str], state: str, folder: str) -> None:
    found = state_digest({shard.name: (shard.dtype, shard.shape, digests[shard.name]) for shard in model.shards})
    if found != state:
        problem = f"{folder}: tensors that it does not change differ from those of its writer"
        step = "give the model that the first version was made of, or copy its files again"
        raise CorruptError(problem, file=folder, got=f"state {found}", want=state, next_step=step)


@names_own_arguments
@counts_requests
def verify_deltas(base: str | os.PathLike[str] | None, deltas: _Paths, *, workers: int | None = None) -> Report:
    """Read every byte of versions and compare all recorded checksums and digests; write nothing.

    Args:
        base: the folder of the model on which the first version is based; None: a version among them is whole.
        deltas: folders of versions, or one folder that contains them; or their URLs.
        workers: number of threads; None: ``min(4, cores)``.

    Raises:
        IncompleteError, ContradictionError, CorruptError: as in `apply_deltas`.

    Example:
        >>> import torch, xrank
        >>> for number, value in enumerate([0.0, 1.0]):
        ...     _ = xrank.save_model({"norm.weight": torch.full((4,), value)}, f"checked-{number}")
        >>> _ = xrank.make_delta("checked-0", "checked-1", "checked/weight_v000001")
        >>> xrank.verify_deltas("checked-0", "checked").details.num_checksums
        1
    """
    started = time.monotonic()
    start, versions = None if base is None else places.enter(base), _enter(deltas)
    count = workers or default_workers()
    num_checksums = num_digests = 0
    budget = GatherOptions(workers=count).budget
    for folder in versions.values():
        if places.is_file(os.path.join(folder, MANIFEST_NAME)):
            verdict = run_check(plan_manifest_check(folder, None), budget, None, Team())
            num_digests += 0 if verdict is None else verdict.proof.num_digests or 0
    left = dict(versions)
    while left:
        goal = max(left)
        if read_facts(left[goal]) is None:
            read_headers(left.pop(goal))
            continue
        number = None if start is None else number_of(start)
        if number is None and _is_one_folder(deltas):
            number = 0
        chain = find_chain(left[goal], start, known=versions, base_number=number)
        num_checksums += _trace_chain(chain, count)
        for one in chain.versions:
            del left[one.facts.version]
    rows = [describe_version(number, path) for number, path in versions.items()]
    goal_path = places.absolute(versions[max(versions)])
    details = ChainDetails(versions=rows, num_checksums=num_checksums, num_digests=num_digests)
    return timed_report("delta verify", started, path=os.path.dirname(goal_path), details=details)


def _trace_chain(chain: Chain, workers: int) -> int:
    """Compare every checksum and state of a chain's versions; return the number of checksums."""
    model = read_chain(chain)
    states = [chain.versions[0].facts.base_state, *(version.facts.state for version in chain.versions)]
    kinds = ["xxh3-128"] if any(states) else []
    level = {version.path: number for number, version in enumerate(chain.versions, 1)}
    records = _records_of(model)
    with closing(open_source(model)) as files, ThreadPoolExecutor(workers) as threads:
        reader = files if isinstance(files, ChangedSource) else ChangedSource(model, files)

        def trace(record: int | None) -> list[str]:
            """Return the XXH3-128 of a record in the base and each version, if some state is recorded."""
            found = [] if record is None else reader.trace(record, kinds)
            digests = [own.get("xxh3-128", "") for own in found] or [xxhash.xxh3_128_hexdigest(b"")]
            changes = () if record is None else model.records.changed.get(record, ())
            at = [level[os.path.dirname(model.files[int(model.records.file[one.body])].path)] for one in changes]
            return [digests[sum(own <= number for own in at)] for number in range(len(states))]

        traced = dict(zip(records, threads.map(trace, records.values()), strict=True))
        files.check_unchanged()
    for number, state in enumerate(states):
        if state is not None:
            folder = chain.versions[max(0, number - 1)].path
            _compare_state(model, {name: own[number] for name, own in traced.items()}, state, folder)
    return sum(len(changes) for changes in model.records.changed.values())


@names_own_arguments
@counts_requests
def inspect_deltas(deltas: _Paths) -> Report:
    """Return a report on versions, from their indexes and headers only; errors as in `find_versions`.

    Example:
        >>> import torch, xrank
        >>> for number, value in enumerate([0.0, 1.0]):
        ...     _ = xrank.save_model({"norm.weight": torch.full((4,), value)}, f"listed-{number}")
        >>> _ = xrank.make_delta("listed-0", "listed-1", "listed/weight_v000001", step=30)
        >>> [(row["version"], row["step"]) for row in xrank.inspect_deltas("listed").details.versions]
        [(1, 30)]
    """
    started = time.monotonic()
    versions = _enter(deltas)
    rows = [describe_version(number, path) for number, path in versions.items()]
    return timed_report("delta inspect", started, details=ChainDetails(versions=rows))


def describe_version(number: int, path: str) -> dict[str, object]:
    """Return the facts of a version, as JSON has them; the tensors are those that it changes, or all."""
    found = read_delta(path)
    headers = read_headers(path) if found is None else found[1]
    facts = None if found is None else found[0]
    return {
        "version": number,
        "path": path,
        "is_whole": facts is None,
        "base_version": None if facts is None else facts.base_version,
        "step": read_step(path),
        "encoding": None if facts is None else facts.encoding,
        "checksum": None if facts is None else facts.checksum,
        "state": None if facts is None else facts.state,
        "num_tensors": sum(len(header.tensors) for header in headers),
        "nbytes": sum(tensor.end - tensor.start for header in headers for tensor in header.tensors),
    }
