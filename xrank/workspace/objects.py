"""A workspace in a bucket: one object per rank, for ranks without a common directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from xrank.errors import UsageError, XrankError
from xrank.storage.places import open_store, state_file_name
from xrank.storage.uploads import WRITABLE, Uploads, upload_object
from xrank.storage.url import clean_path, is_url, split_url
from xrank.workspace.base import IdentifiedWorkspace, check_rank, find_identity, make_place_error
from xrank.workspace.states import make_state_archive, read_run_id, read_state

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap


class ObjectWorkspace(IdentifiedWorkspace):
    """Keeps each rank's state in ``<workspace_path>/rank_<r>_state.pth`` of a bucket, as `NFSWorkspace` in a directory.

    It is a `Workspace`. Construction removes this rank's objects of earlier runs: a state with another run id or none,
    and uploads that were not completed. It does not touch other ranks' objects. ``xrank gather --workspace URL`` reads
    the states. Credentials and the endpoint come from the environment (docs/stores.md).

    Args:
        workspace_path: ``s3://bucket/prefix``; None leaves the workspace uninitialized.
        rank: as `NFSWorkspace`; so are `world_size` and `run_id`.
        world_size: number of ranks.
        run_id: distinguishes the states of this run from those of earlier runs.

    Raises:
        UsageError: the rank is outside the world, the path is not such a URL, or there are no credentials.
        XrankError: the store does not answer.

    Example:
        >>> workspace = ObjectWorkspace("s3://bucket/run-42/states")  # doctest: +SKIP
        >>> workspace.write_configs_and_weights(config.to_dict(), model.state_dict())  # doctest: +SKIP
    """

    def __init__(
        self,
        workspace_path: str | os.PathLike[str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        run_id: str | None = None,
    ) -> None:
        # No store is kept, so that a forked process may use the workspace: `open_store` opens one for each process.
        self._url = None if workspace_path is None else _check_url(workspace_path)
        self._identity = find_identity(rank, world_size, run_id)
        if self._url is not None:
            with self._naming():
                self._settle(self._url)

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a URL."""
        return self._url is not None

    @property
    def url(self) -> str | None:
        """The URL of the prefix; None if the workspace is uninitialized."""
        return self._url

    def write_configs_and_weights(
        self,
        config_json: dict[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        layouts: LayoutMap | None = None,
        step: int | None = None,
    ) -> None:
        """Write this rank's state, completely or not at all; see `Workspace`.

        Tensors are copied as by `NFSWorkspace`, and 20 MiB are used for parts in transit. A kill may leave an upload
        that no reader sees; the next construction for this rank removes it, and so does ``xrank clean``.
        """
        url = self._place()
        archive = make_state_archive(self._identity, config_json, weights, layouts, step)
        with self._naming():
            store, folder = open_store(url)  # of the URL that the user gave: errors name it
            key = f"{folder}/{state_file_name(self.rank)}"
            upload_object(Uploads(store, url), key, archive.pass_to, nbytes=archive.nbytes, mark=os.urandom(8).hex())

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return that rank's last state of this run, or ``(None, None)``; see `Workspace`.

        A state with another run id or world size belongs to an earlier run: the result is ``(None, None)``.
        """
        url, rank = self._place(), check_rank(target_rank)
        state = read_state(f"{url}/{state_file_name(rank)}", rank, self.world_size, self.run_id)
        return (None, None) if state is None else state

    def _place(self) -> str:
        if self._url is None:
            raise make_place_error(self)
        return self._url

    def _settle(self, url: str) -> None:
        store, folder = open_store(url)
        name = state_file_name(self.rank)
        own_key, uploads = f"{folder}/{name}", Uploads(store, url)
        if self.run_id is None or read_run_id(f"{url}/{name}") != self.run_id:
            store.delete(own_key)
        for key, upload_id, _ in [*uploads.list_uploads(own_key)]:
            if key == own_key:
                uploads.abort(key, upload_id)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Let errors of the store name the rank."""
        try:
            yield
        except XrankError as error:
            error.about(f"rank {self.rank}", rank=self.rank)
            raise


def _check_url(path: str | os.PathLike[str]) -> str:
    """Return a URL without its superfluous parts; UsageError if ranks cannot write states there."""
    url = clean_path(path)
    want = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, or a directory that all ranks mount"
    if not is_url(url) or split_url(url).scheme not in WRITABLE:
        raise UsageError(
            f"{url}: a workspace is in S3, Google Cloud Storage, Azure, or in a directory", file=url, want=want
        )
    if not split_url(url).key:
        raise UsageError(f"{url} is a whole bucket", file=url, want=want, next_step=f"give {url}/NAME")
    return url
