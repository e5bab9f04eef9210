"""Fill the stage of an output, a model folder or the states of ranks: weights by the executor, the manifest last."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from msgspec.structs import replace

from xrank.commands.report import EARLIER_NOTE, WrittenOutput
from xrank.engine.buffers import OpenSource
from xrank.engine.file_writing import (
    FileDigests,
    WrittenFiles,
    find_together,
    hash_beside,
    identify_output,
    write_files,
)
from xrank.engine.hf_folder import index_name, index_text
from xrank.engine.planner import Plan, TensorPlan
from xrank.engine.report import FileFacts
from xrank.engine.rounds import Work
from xrank.engine.sources import open_source
from xrank.engine.windows import FileHashes, digest_text
from xrank.layout.nest_table import IntArray
from xrank.ranks.team import Team
from xrank.recipes.adapters import describe_merges
from xrank.recipes.decision import FolderPlan
from xrank.storage.commit import JournalLine, Stage
from xrank.storage.manifest import (
    MANIFEST_NAME,
    ManifestFile,
    ManifestSource,
    ManifestTensor,
    TensorSource,
    manifest_text,
)
from xrank.storage.output_place import check_room
from xrank.storage.staging import check_output, check_store_writer, open_stage, settle_output
from xrank.storage.url import is_url

if TYPE_CHECKING:
    from xrank.recipes.reshard_plan import Reshard


def make_output(
    gather: FolderPlan,
    source: OpenSource,
    out: str,
    progress: Callable[[int, int], None] | None,
    team: Team,
    holder: IntArray | None = None,
    *,
    is_repeatable: bool = False,
) -> WrittenOutput:
    """Make the output with all ranks of a team: the first fills a stage and commits it, the others write their shares.

    `holder` has the ranks that hold a live model's records, as in `Work`; `is_repeatable` is whether the plan alone
    decides the output's bytes, so that the manifest records its digest.
    """
    options = gather.options
    check_store_writer(out, ranks=1 if options.sign is None else team.size)
    windows = None if options.sign is None else FileHashes()
    work = Work(gather.plan, source, options.budget, options.replicas, holder, gather.transforms, windows)

    def fill(stage: Stage) -> WrittenOutput:
        verify = options.overwrite if options.verify is None else options.verify
        # First: a companion that cannot be copied ends the gather before the weights are written.
        lines = _write_small_files(stage, gather)
        written = write_files(work, stage, progress or (lambda done, total: None), team, verify=verify)
        files = _write_lists(gather, work, stage, out, written, lines, is_repeatable)
        return WrittenOutput(tuple(files), written, written.notes)

    return _fill_stage(team, work, out, gather, fill, resume=options.resume)


def _fill_stage(
    team: Team,
    work: Work,
    out: str,
    planned: FolderPlan | Reshard,
    fill: Callable[[Stage], WrittenOutput],
    *,
    resume: bool = True,
    replaces_states: bool = False,
) -> WrittenOutput:
    """Make an output with all ranks of a team; the first fills a stage by `fill` and commits it.

    Return the result of `fill`, with notes on the stage; on other ranks the facts from the plan.
    """
    with hash_beside(planned.source.hashes, team) as finish_hashes:
        if not team.is_first:
            from xrank.engine.shared_writing import help_to_write_files  # one process does not need this module

            help_to_write_files(team, work, out, planned.digest)
            finish_hashes()
            files = (file.output for file in planned.plan.files)
            return WrittenOutput(tuple(FileFacts(name=one.name, nbytes=one.nbytes) for one in files))
        with open_stage(
            out,
            plan_digest=planned.digest,
            overwrite=planned.options.overwrite,
            replaces_states=replaces_states,
            resume=resume,
        ) as stage:
            made = fill(stage)
            finish_hashes(stage)
            # The last moment to stop: after the commit the output is there, whichever rank has failed.
            team.check_failures()
            stage.commit()
            team.mark_committed()
        return replace(made, notes=(*made.notes, *(("stage", note) for note in stage.notes)))


def _write_lists(
    gather: FolderPlan,
    work: Work,
    stage: Stage,
    out: str,
    written: WrittenFiles,
    lines: Sequence[JournalLine],
    is_repeatable: bool,
) -> list[FileFacts]:
    """Write the index, and the manifest last; return the weights' files for the report."""
    plan = gather.plan
    digests = {index: replace(d, name=stage.final_name(d.name)) for index, d in written.digests.items()}
    weights = [ManifestFile(d.name, d.nbytes, digest_text(d.digest)) for _, d in sorted(digests.items())]
    files = list(weights)
    own = gather.decision.adapted.weights_file if gather.decision.adapted is not None else None
    model = [file.output for file in plan.files if file.output.name != own]
    index = index_text([replace(file, name=stage.final_name(file.name)) for file in model]) if model else None
    if index is not None:
        line = stage.write_file(index_name(model), index.encode())
        files.append(_small_file(line))
    source = gather.source
    text = manifest_text(
        ManifestSource(source.format, source.world_size, source.run_id, source.step),
        files,
        {
            tensor.output.name: _manifest_tensor(plan, tensor, digests[index])
            for index, file in enumerate(plan.files)
            for tensor in file.tensors
        },
        companions=[_small_file(line) for line in lines],
        tied={name: target for target, names in gather.selection.tied.items() for name in names},
        excluded=gather.selection.excluded,
        cast=gather.selection.cast,
        merged=describe_merges(plan),
        transformed=gather.transforms.made_of if gather.transforms is not None else None,
        padding_dropped=gather.padding_dropped,
        notes=[list(note) for note in (*gather.notes, *written.notes)],
        plan=identify_output(gather.digest, {line.file: line.digest for line in lines}) if is_repeatable else None,
    )
    if gather.options.sign is not None:
        from xrank.commands.signing import sign_folder  # its packages are not needed otherwise

        names = [file.name for file in files] + [line.file for line in lines]
        sign_folder(gather, out, stage, names, text.encode(), work.file_hashes)
    # Last: after a kill, `roll_forward` takes a stage with a manifest for a whole one.
    stage.write_file(MANIFEST_NAME, text.encode())
    return [FileFacts(name=file.name, nbytes=file.nbytes, digest=file.digest) for file in weights]


def _write_small_files(stage: Stage, planned: FolderPlan | Reshard) -> list[JournalLine]:
    texts = planned.texts
    lines = [stage.copy_file(one.name, one.path) for one in planned.companions if one.name not in texts]
    return lines + [stage.write_file(name, text.encode()) for name, text in texts.items()]


def find_earlier(planned: FolderPlan | Reshard, out: str, team: Team) -> WrittenOutput | None:
    """Return the output if the same command has made it, and finish that run's work; with `overwrite` make it anew."""
    found = None
    if not planned.options.overwrite:
        found = find_together(team, out, planned.digest, planned.companions, planned.texts)
    if found is not None and team.is_first:
        settle_output(out)
    return None if found is None else WrittenOutput(found, notes=(EARLIER_NOTE,))


def check_dry_run(planned: FolderPlan | Reshard, out: str, *, replaces_states: bool = False) -> None:
    """Refuse a place that cannot take the output, before anything is written."""
    overwrite = planned.options.overwrite
    if overwrite or find_together(Team(), out, planned.digest, planned.companions, planned.texts) is None:
        check_output(out, overwrite=overwrite, replaces_states=replaces_states)
    check_room(out, [file.output.nbytes for file in planned.plan.files], planned.source.path)


def _small_file(line: JournalLine) -> ManifestFile:
    """Return the manifest's entry of a small file, with the digest of its plain bytes."""
    return ManifestFile(line.file, line.nbytes, f"xxh128:{line.digest}")


def _manifest_tensor(plan: Plan, tensor: TensorPlan, digests: FileDigests) -> ManifestTensor:
    records, files = plan.source.records, plan.source.files
    seen: dict[int, TensorSource] = {}
    made_of = [tensor, *((tensor.update.a, tensor.update.b) if tensor.update is not None else ())]
    for part in made_of:
        for rank, record in zip(part.copies.rank.tolist(), part.copies.record.tolist(), strict=True):
            name = os.path.basename(files[int(records.file[record])].path)
            seen.setdefault(record, TensorSource(name, rank, int(records.offset[record]), int(records.nbytes[record])))
    output = tensor.output
    return ManifestTensor(
        output.dtype,
        output.shape,
        digests.name,
        digest_text(digests.tensors[output.name]),
        tuple(seen.values()),
        sum(map(len, tensor.compared)),
    )


def make_states(reshard: Reshard, out: str, progress: Callable[[int, int], None] | None, team: Team) -> WrittenOutput:
    """Make the states with all ranks of a team, as `make_output`."""
    beside = None if is_url(out) else os.path.dirname(os.path.abspath(out))
    with closing(open_source(reshard.plan.source, beside)) as source:
        work = Work(reshard.plan, source, reshard.options.budget)

        def fill(stage: Stage) -> WrittenOutput:
            verify = reshard.options.overwrite
            written = write_files(work, stage, progress or (lambda done, total: None), team, verify=verify)
            lines = _write_small_files(stage, reshard)
            origin = reshard.source
            text = manifest_text(
                ManifestSource(origin.format, origin.world_size, origin.run_id, origin.step),
                [ManifestFile(d.name, d.nbytes, digest_text(d.digest)) for _, d in sorted(written.digests.items())],
                {},
                companions=[_small_file(line) for line in lines],
                cast=reshard.selection.cast,
                notes=[list(note) for note in (*reshard.notes, *written.notes)],
                plan=identify_output(reshard.digest, {line.file: line.digest for line in lines}),
            )
            # Last: after a kill, `roll_forward` takes a stage with a manifest for a whole one.
            stage.write_file(MANIFEST_NAME, text.encode())
            return WrittenOutput((), written, written.notes)

        return _fill_stage(team, work, out, reshard, fill, replaces_states=True)
