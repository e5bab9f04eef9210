"""Fill the stage of an output, a model folder or the states of ranks: weights by the executor, the manifest last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from xrank.commands.earlier_output import find_earlier, identify_output
from xrank.commands.report import EARLIER_NOTE, WrittenOutput
from xrank.engine.buffers import OpenSource
from xrank.engine.file_writing import (
    FileDigests,
    WrittenFiles,
    hash_beside,
    write_files,
)
from xrank.engine.hf_folder import index_name, index_text
from xrank.engine.planner import Plan, TensorPlan
from xrank.engine.report import FileFacts
from xrank.engine.rounds import Work
from xrank.engine.sources import open_source
from xrank.engine.windows import FileHashes, digest_text
from xrank.formats.deltas import INDEX_NAME
from xrank.layout.nest_table import IntArray, int_array
from xrank.ranks.team import Team
from xrank.recipes.adapters import describe_merges
from xrank.recipes.decision import FolderPlan
from xrank.storage import places
from xrank.storage.commit import JournalLine, Stage
from xrank.storage.manifest import (
    MANIFEST_NAME,
    ManifestFile,
    ManifestQuantization,
    ManifestSource,
    ManifestTensor,
    ManifestVersion,
    make_damage_error,
    manifest_blocks,
    read_manifest,
    tensor_line,
)
from xrank.storage.staging import check_store_writer, open_stage, settle_output
from xrank.storage.url import is_url

if TYPE_CHECKING:
    from xrank.commands.shared_plan import ReceivedPlan
    from xrank.recipes.reshard_plan import Reshard


def make_output(
    planned: FolderPlan | Reshard | ReceivedPlan,
    source: OpenSource,
    out: str,
    progress: Callable[[int, int], None] | None,
    team: Team,
    holder: IntArray | None = None,
    *,
    version: ManifestVersion | None = None,
) -> WrittenOutput:
    """Make the output with all ranks of a team: the first fills a stage and commits it, the others write their shares.

    `holder` has the ranks that hold a live model's records, as in `Work`; `version` is one that the manifest records.
    Ranks other than the first return the facts from the plan.
    """
    options = planned.options
    check_store_writer(out, ranks=1 if options.sign is None else team.size)
    windows = None if options.sign is None else FileHashes()
    transforms = planned.transforms
    work = Work(planned.plan, source, options.budget, options.replicas, holder, transforms, windows)
    if transforms is not None:
        from xrank.engine.transformed_files import make_transformed  # copied files do not need this module

        work = replace(work, make_transformed=make_transformed, measures_errors=options.quantization_error)
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
            overwrite=options.overwrite,
            replaces_states=not isinstance(planned, FolderPlan),
            resume=options.resume,
        ) as stage:
            # First: a companion that cannot be copied ends the gather before the weights are written.
            texts = planned.texts
            lines = [stage.copy_file(one.name, one.path) for one in planned.companions if one.name not in texts]
            lines += [stage.write_file(name, text.encode()) for name, text in texts.items()]
            verify = options.overwrite if options.verify is None else options.verify
            written = write_files(work, stage, progress or (lambda done, total: None), team, verify=verify)
            whole = cast("FolderPlan | Reshard", planned)  # the first rank's
            made = _write_lists(whole, work, stage, out, written, lines, version)
            finish_hashes(stage)
            # The last moment to stop: after the commit the output is there, whichever rank has failed.
            team.check_failures()
            stage.commit()
            team.mark_committed()
        notes = (*written.notes, *(("stage", note) for note in stage.notes))
        return WrittenOutput(tuple(made), written, notes)


def _write_lists(
    planned: FolderPlan | Reshard,
    work: Work,
    stage: Stage,
    out: str,
    written: WrittenFiles,
    lines: Sequence[JournalLine],
    version: ManifestVersion | None,
) -> list[FileFacts]:
    """Write a model's index, and the manifest last; return the weights' files for the report."""
    digests = {index: replace(d, name=stage.final_name(d.name)) for index, d in written.digests.items()}
    weights = [ManifestFile(d.name, d.nbytes, digest_text(d.digest)) for _, d in sorted(digests.items())]
    files, facts = list(weights), dict[str, Any]()
    if isinstance(planned, FolderPlan):
        adapted, transforms = planned.decision.adapted, planned.transforms
        own = adapted.weights_file if adapted is not None else None
        model = [file.output for file in planned.plan.files if file.output.name != own]
        written_model = [replace(file, name=stage.final_name(file.name)) for file in model]
        is_model = bool(model or planned.index is not None) and not planned.options.salvage
        index = index_text(written_model, planned.index) if is_model else None
        if index is not None:
            name = index_name(model) if model else INDEX_NAME  # a delta without changes has no file
            files.append(_small_file(stage.write_file(name, index.encode())))
        facts = {
            "tied": {name: target for target, names in planned.selection.tied.items() for name in names},
            "excluded": planned.selection.excluded,
            "merged": describe_merges(planned.plan),
            "transformed": transforms.made_of if transforms is not None else None,
            "quantized": _quantization(planned),
            "padding_dropped": planned.padding_dropped,
            "filled": planned.options.filled,
        }
    source, plan = planned.source, planned.plan
    sources = [os.path.basename(file.path) for file in plan.source.files]
    tensors = [(tensor, digests[i]) for i, file in enumerate(plan.files if facts else ()) for tensor in file.tensors]
    tensors.sort(key=lambda one: one[0].output.name)
    if planned.transforms is None:
        _compare_source(plan, tensors)
    blocks: Iterable[bytes] = manifest_blocks(
        ManifestSource(source.format, source.world_size, source.run_id, source.step),
        files,
        ((tensor.output.name, _tensor_line(plan, sources, tensor, own)) for tensor, own in tensors),
        companions=[_small_file(line) for line in lines],
        cast=planned.selection.cast,
        notes=[list(note) for note in (*planned.notes, *written.notes)],
        version=version,
        # The plan of a live model does not decide the output's bytes.
        plan=identify_output(planned.digest, {one.file: one.digest for one in lines}) if work.holder is None else None,
        **facts,
    )
    if isinstance(planned, FolderPlan) and planned.options.sign is not None:
        from xrank.commands.signing import sign_folder  # its packages are not needed otherwise

        names = [file.name for file in files] + [line.file for line in lines]
        blocks = [b"".join(blocks)]
        sign_folder(planned, out, stage, names, blocks[0], work.file_hashes)
    # Last: after a kill, `roll_forward` takes a stage with a manifest for a whole one.
    stage.write_file(MANIFEST_NAME, blocks)
    return [FileFacts(name=file.name, nbytes=file.nbytes, digest=file.digest) for file in weights]


def _compare_source(plan: Plan, tensors: Sequence[tuple[TensorPlan, FileDigests]]) -> None:
    """Compare unchanged tensors of a model that xrank wrote with its manifest: safetensors files have no checksums."""
    source = plan.source
    path = os.path.join(source.path, MANIFEST_NAME)
    if source.format != "safetensors" or source.recipe is not None or not places.exists(path):
        return
    listed, records, quantized = read_manifest(path)["tensors"], source.records, {*source.records.quantized}
    # A base model may have filled some in, and quantized ones are decoded.
    own = [os.path.dirname(file.path) == source.path for file in source.files]
    for tensor, digests in tensors:
        output, got = tensor.output, digest_text(digests.tensors[tensor.output.name])
        want, used = listed.get(output.name), tensor.copies.record
        is_changed = tensor.changed or tensor.update is not None or tensor.source_dtype != output.dtype
        is_changed = is_changed or output.is_padded or not quantized.isdisjoint(used.tolist())
        if want is None or is_changed or not all(own[file] for file in records.file[used].tolist()):
            continue
        if (want["dtype"], tuple(want["shape"])) == (output.dtype, output.shape) and want["digest"] != got:
            raise make_damage_error(source.path, want["file"], output.name, got, want["digest"])


def _quantization(planned: FolderPlan) -> ManifestQuantization | None:
    options, quantizing = planned.options, planned.quantizing
    if quantizing is None:
        return None
    return ManifestQuantization(quantizing.scheme.name, options.dialect, tuple(options.quantize_ignore), options.dtype)


def make_once(
    planned: FolderPlan | Reshard | ReceivedPlan,
    out: str,
    progress: Callable[[int, int], None] | None,
    team: Team,
    source: OpenSource | None = None,
) -> WrittenOutput:
    """Return the output that the same command has made, after the rest of that run's work; else make it.

    `source` reads the plan's records, and the caller closes it; None: they are in files.
    """
    found = None if planned.options.overwrite else find_earlier(planned, out, team)
    if found is not None:
        if team.is_first:
            settle_output(out)
        return WrittenOutput(found, notes=(EARLIER_NOTE,))
    if source is not None:
        return make_output(planned, source, out, progress, team)
    beside = None if is_url(out) else os.path.dirname(os.path.abspath(out))
    with closing(open_source(planned.plan.source, beside)) as files:
        return make_output(planned, files, out, progress, team)


def _small_file(line: JournalLine) -> ManifestFile:
    """Return the manifest's entry of a small file, with the digest of its plain bytes."""
    return ManifestFile(line.file, line.nbytes, f"xxh128:{line.digest}")


def _tensor_line(plan: Plan, names: Sequence[str], tensor: TensorPlan, digests: FileDigests) -> str:
    """Return a tensor's line of the manifest; `names` are those of the source's files."""
    made_of = [tensor, *((tensor.update.a, tensor.update.b) if tensor.update is not None else ())]
    ranks, table = dict[int, int](), plan.source.records
    for part in made_of:
        for record, rank in zip(part.copies.record.tolist(), part.copies.rank.tolist(), strict=True):
            ranks.setdefault(record, rank)
    if table.quantized or table.changed:
        ranks = {stored: rank for record, rank in ranks.items() for stored in table.find_stored([record])}
    once = int_array(ranks)
    files, offsets, sizes = (column[once].tolist() for column in (table.file, table.offset, table.nbytes))
    output, replicas = tensor.output, sum(map(len, tensor.compared))
    digest = digest_text(digests.tensors[output.name])
    line = ManifestTensor(output.dtype, output.shape, digests.name, digest, (), replicas)
    return tensor_line(line, zip([names[file] for file in files], ranks.values(), offsets, sizes, strict=True))
