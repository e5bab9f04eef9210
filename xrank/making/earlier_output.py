"""Finds the output of an earlier run of the same command: complete, but the run did not end well.

A signal or a failing disk after the rename leaves a whole output behind a command that has failed. Its manifest records
the plan that made it, so that the same command finds its work done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import xxhash

from xrank.errors import XrankError
from xrank.plan.file_hashes import digest_plain_file
from xrank.plan.report_facts import FileFacts
from xrank.teams.team import Team
from xrank.writers.companions import CompanionFile
from xrank.writers.staging import output_file_nbytes, read_output_manifest


def identify_output(plan_digest: str, small_files: Mapping[str, str]) -> str:
    """Return the digest of an output's plan and of its small files, which are name -> XXH3-128."""
    state = xxhash.xxh3_128(plan_digest.encode())
    for one in sorted(small_files.items()):
        state.update(repr(one).encode())
    return state.hexdigest()


def find_together(
    team: Team, out: str, plan_digest: str, companions: Iterable[CompanionFile], texts: Mapping[str, str]
) -> tuple[FileFacts, ...] | None:
    """Return the result of `find_earlier_output` on the first rank, and on the others whether there is one."""
    found = find_earlier_output(out, plan_digest, companions, texts) if team.is_first else None
    answer = ("to be made" if found is None else "made") if team.is_first else None
    return (found or ()) if team.broadcast("whether the output is made", answer) == "made" else None


def find_earlier_output(
    out: str, plan_digest: str, companions: Iterable[CompanionFile], texts: Mapping[str, str]
) -> tuple[FileFacts, ...] | None:
    """Return the weights' files of an output that this plan has made; None if there is no such output.

    Sizes are compared with the manifest, contents are not read: `xrank verify` does.

    Args:
        out: the output.
        plan_digest: digest of the plan.
        companions: files to copy.
        texts: name -> content of the small files that are written from the plan; they replace companions of that name.
    """
    try:
        manifest = read_output_manifest(out)
        small = {one.name: digest_plain_file(one.path) for one in companions if one.name not in texts}
        small |= {name: xxhash.xxh3_128_hexdigest(text.encode()) for name, text in texts.items()}
        if manifest.get("plan") != identify_output(plan_digest, small):
            return None
        listed = (*manifest["files"], *manifest["companions"])
        if any(output_file_nbytes(out, one["name"]) != one["nbytes"] for one in listed):
            return None
    except (OSError, XrankError):
        return None
    weights = {tensor["file"] for tensor in manifest["tensors"].values()}
    return tuple(FileFacts(**one) for one in manifest["files"] if not weights or one["name"] in weights)
