"""A gather whose folder goes to the Hub: as ``push_to_hub`` beside a folder, or as the output ``hf://org/name``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xrank.environment import environ
from xrank.errors import UsageError, option
from xrank.plan.report import Report
from xrank.stores.url import is_url, split_url


@dataclass(frozen=True, slots=True)
class Push:
    """A repository, and the folder that is uploaded to it."""

    repository: str
    """``org/name``."""
    folder: str
    is_stage: bool
    """Whether the folder is removed after the upload; after a failure it stays for the next run."""

    def check(self, *, overwrite: bool) -> None:
        """Refuse a repository that cannot take a model, before the model is made; errors as `check_repository`."""
        from xrank.writers.hub import check_repository  # other gathers do not need this module

        check_repository(self.repository, overwrite=overwrite)

    def upload(self, report: Report, *, overwrite: bool) -> Report:
        """Upload the folder that a gather made, and return the gather's report with that; errors as `push_folder`."""
        from xrank.writers.hub import push_folder  # other gathers do not need this module

        commit_url = push_folder(self.folder, self.repository, overwrite=overwrite)
        if self.is_stage:
            shutil.rmtree(self.folder)
        return self.name(replace(report, notes=(*report.notes, ("pushed", f"uploaded: {commit_url}"))))

    def name(self, report: Report) -> Report:
        """Return a report that names the repository as the output, if the user did."""
        if not self.is_stage:
            return report
        url = f"hf://{self.repository}"
        made = {
            name: facts.extended(path=url)
            for name in ("output", "plan")
            if (facts := getattr(report, name)) is not None
        }
        return replace(report, path=url, **made)


def find_push(out: str, push_to_hub: str | None) -> Push | None:
    """Return the upload that a gather's options ask for; None if they ask for none.

    Args:
        out: the output, a cleaned path or URL.
        push_to_hub: the option's value.

    Raises:
        UsageError: both name a repository, or one is not a repository's name, or a store's model is to be uploaded.
    """
    is_hub = is_url(out) and split_url(out).scheme == "hf"
    if push_to_hub is None and not is_hub:
        return None
    from xrank.writers.hub import repository_name  # other gathers do not need this module

    if push_to_hub is None:
        repository = repository_name(out)
        return Push(repository, _stage_folder(environ(), repository), is_stage=True)
    if is_url(out):
        raise UsageError(
            f"{out}: a model in a store is not uploaded to the Hub",
            file=out,
            next_step=f"give {option('out')} a folder, or leave {option('push_to_hub')} out",
        )
    return Push(repository_name(push_to_hub), out, is_stage=False)


def _stage_folder(variables: Mapping[str, str], repository: str) -> str:
    """Return the folder in which a model for a repository is made: in huggingface_hub's own, which has room for models.

    Source: huggingface_hub/constants.py, HF_HOME.
    """
    cache = variables.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = variables.get("HF_HOME") or os.path.join(cache, "huggingface")
    return os.path.join(os.path.expanduser(home), "xrank", repository.replace("/", "--"))
