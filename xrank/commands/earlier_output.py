"""An output that an earlier run of the same command has made, and whether a place can take one that none has.

A signal or a failing disk may leave a whole output after its rename: it is found by the plan's digest in its manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import xxhash

from xrank.engine.report import FileFacts
from xrank.errors import XrankError
from xrank.ranks.team import Team
from xrank.recipes.decision import FolderPlan
from xrank.storage.output_place import check_room
from xrank.storage.places import digest_plain_file
from xrank.storage.staging import check_output, output_file_nbytes, read_output_manifest

if TYPE_CHECKING:
    from xrank.commands.shared_plan import ReceivedPlan
    from xrank.recipes.reshard_plan import Reshard


def identify_output(plan_digest: str, small_files: Mapping[str, str]) -> str:
    """Return the digest of an output's plan and of its small files, which are name -> XXH3-128."""
    state = xxhash.xxh3_128(plan_digest.encode())
    for one in sorted(small_files.items()):
        state.update(repr(one).encode())
    return state.hexdigest()


def find_earlier(planned: FolderPlan | Reshard | ReceivedPlan, out: str, team: Team) -> tuple[FileFacts, ...] | None:
    """Return the weights' files of an output that this plan has made, none on other ranks than the first.

    None: there is no such output. Sizes are compared with the manifest, contents are not read: `xrank verify` does.
    """
    if not team.is_first:
        return () if team.broadcast("whether the output is made") == "made" else None
    found, texts = None, planned.texts
    with suppress(OSError, XrankError):
        manifest = read_output_manifest(out)
        # Texts are made by the plan, and replace companions of their name.
        small = {one.name: digest_plain_file(one.path) for one in planned.companions if one.name not in texts}
        small |= {name: xxhash.xxh3_128_hexdigest(text.encode()) for name, text in texts.items()}
        listed = (*manifest["files"], *manifest["companions"])
        is_same = manifest.get("plan") == identify_output(planned.digest, small)
        if is_same and all(output_file_nbytes(out, one["name"]) == one["nbytes"] for one in listed):
            weights = {tensor["file"] for tensor in manifest["tensors"].values()}
            found = tuple(FileFacts(**one) for one in manifest["files"] if not weights or one["name"] in weights)
    team.broadcast("whether the output is made", "to be made" if found is None else "made")
    return found


def check_dry_run(planned: FolderPlan | Reshard, out: str) -> None:
    """Refuse a place that cannot take the output, before anything is written."""
    overwrite = planned.options.overwrite
    if overwrite or find_earlier(planned, out, Team()) is None:
        check_output(out, overwrite=overwrite, replaces_states=not isinstance(planned, FolderPlan))
    check_room(out, [file.output.nbytes for file in planned.plan.files], planned.source.path)
