"""Writes the states of a reshard with a team: each rank its share, the first also the small files, then the commit."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

from xrank.decisions.reshard_plan import Reshard
from xrank.making.earlier_output import identify_output
from xrank.making.file_writing import WrittenFiles, write_files
from xrank.making.rereading import hash_beside, keep_if_hashed
from xrank.making.work import Work
from xrank.plan.decoding import open_source
from xrank.plan.digests import digest_text
from xrank.stores.url import is_url
from xrank.teams.team import Team
from xrank.writers.manifest import MANIFEST_NAME, ManifestFile, ManifestSource, manifest_text
from xrank.writers.output_stage import OutputStage
from xrank.writers.staging import open_stage


def make_states(
    reshard: Reshard, out: str, progress: Callable[[int, int], None] | None, team: Team
) -> tuple[WrittenFiles | None, tuple[str, ...]]:
    """Make the states with all ranks of a team; return, on the first rank, the written files and notes on the stage.

    Raises:
        CorruptError, ContradictionError: the source does not match its metadata.
        NoSpaceError, XrankError: the output could not be written.
        RankFailedError: another rank failed.
    """
    beside = None if is_url(out) else os.path.dirname(os.path.abspath(out))
    with (
        closing(open_source(reshard.plan.source, beside)) as source,
        hash_beside(reshard.source.hashes, team) as finish,
    ):
        work = Work(reshard.plan, source, reshard.options.budget)
        if not team.is_first:
            from xrank.making.shared_writing import help_to_write_files  # one process does not need this module

            help_to_write_files(team, work, out, reshard.digest)
            finish()
            return None, ()
        overwrite = reshard.options.overwrite
        with open_stage(out, plan_digest=reshard.digest, overwrite=overwrite, replaces_states=True) as stage:
            written = write_files(work, stage, progress or (lambda done, total: None), team, verify=overwrite)
            _write_small_files(reshard, stage, written)
            keep_if_hashed(stage, finish)
            team.check_failures()
            stage.commit()
            team.mark_committed()
    return written, stage.notes


def own_texts(reshard: Reshard) -> dict[str, str]:
    """Return name -> content of the companions that a plan changes."""
    changed = reshard.config_text
    return {one.name: changed for one in reshard.companions if one.name == "config.json" and changed is not None}


def _write_small_files(reshard: Reshard, stage: OutputStage, written: WrittenFiles) -> None:
    """Write the companions, then the manifest."""
    texts = own_texts(reshard)
    lines = [stage.copy_file(one.name, one.path) for one in reshard.companions if one.name not in texts]
    lines += [stage.write_file(name, text.encode()) for name, text in texts.items()]
    source = reshard.source
    text = manifest_text(
        ManifestSource(source.format, source.world_size, source.run_id, source.step),
        [ManifestFile(d.name, d.nbytes, digest_text(d.digest)) for _, d in sorted(written.digests.items())],
        {},
        companions=[ManifestFile(line.file, line.nbytes, f"xxh128:{line.digest}") for line in lines],
        cast=reshard.selection.cast,
        notes=[list(note) for note in (*reshard.notes, *written.notes)],
        plan=identify_output(reshard.digest, {line.file: line.digest for line in lines}),
    )
    # Last: after a kill, `roll_forward` takes a stage with a manifest for a whole one.
    stage.write_file(MANIFEST_NAME, text.encode())
