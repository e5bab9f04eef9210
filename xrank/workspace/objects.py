"""A workspace in an S3 bucket: one object per rank, for ranks without a common directory.

A state is uploaded in parts, each confirmed by a checksum, and appears at one instant in the place of the last one. A
reader asks for the name of a rank's state and pins the version that it finds; no listing decides anything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from xrank.errors import XrankError
from xrank.formats.rank_state import state_file_name
from xrank.stores.upload_stream import upload_object
from xrank.workspace.carrying import CarryingWorkspace
from xrank.workspace.identity import check_rank, find_identity
from xrank.workspace.object_messages import ObjectMessages
from xrank.workspace.object_place import ObjectPlace
from xrank.workspace.state_archive import make_state_archive
from xrank.workspace.state_file import read_run_id, read_state

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap


class ObjectWorkspace(CarryingWorkspace):
    """Keeps each rank's state in ``<workspace_path>/rank_<r>_state.pth`` of a bucket, as `NFSWorkspace` in a directory.

    It is a `Workspace` and a `MessageWorkspace`. Construction removes this rank's objects of earlier runs: a state with
    another run id or none, and uploads that were not completed. It leaves other ranks' objects alone. ``xrank gather
    --workspace URL`` reads the states. Credentials and the endpoint come from the environment (docs/stores.md).

    Args:
        workspace_path: ``s3://bucket/prefix``; None leaves the workspace uninitialised.
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

    patience_seconds = ObjectMessages.patience_seconds

    def __init__(
        self,
        workspace_path: str | os.PathLike[str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        run_id: str | None = None,
    ) -> None:
        self._place = None if workspace_path is None else ObjectPlace.from_url(workspace_path)
        self._identity = find_identity(rank, world_size, run_id)
        self._messages = None
        if self._place is not None:
            with self._naming():
                self._settle(self._place)
            self._messages = ObjectMessages(self._place.url, self.rank)

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a URL."""
        return self._place is not None

    @property
    def url(self) -> str | None:
        """The URL of the prefix; None if the workspace is uninitialised."""
        return None if self._place is None else self._place.url

    def write_configs_and_weights(
        self,
        config_json: dict[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        layouts: LayoutMap | None = None,
        step: int | None = None,
    ) -> None:
        """Write this rank's state, completely or not at all; see `Workspace`.

        Tensors are copied as by `NFSWorkspace`, and 20 MiB for the parts on their way. A kill may leave an upload that
        no reader sees; the next construction for this rank removes it, and so does ``xrank clean``.
        """
        place = self._initialised()
        archive = make_state_archive(self._identity, config_json, weights, layouts, step)
        key = place.key(state_file_name(self.rank))
        with self._naming(), contextlib.closing(place.open_uploads()) as uploads:
            mark = secrets.token_hex(8)
            upload_object(uploads, key, archive.pass_to, nbytes=archive.nbytes, mark=mark, replaces=True)

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return what that rank wrote last in this run, or ``(None, None)``; see `Workspace`.

        A state with another run id or world size belongs to an earlier run: the result is ``(None, None)``.
        """
        place, rank = self._initialised(), check_rank(target_rank)
        state = read_state(place.url_of(state_file_name(rank)), rank, self.world_size, self.run_id)
        return (None, None) if state is None else state

    def _initialised(self) -> ObjectPlace:
        if self._place is None:
            raise self._initialisation_error()
        return self._place

    def _settle(self, place: ObjectPlace) -> None:
        name = state_file_name(self.rank)
        with contextlib.closing(place.open_uploads()) as uploads:
            if self.run_id is None or read_run_id(place.url_of(name)) != self.run_id:
                place.store.delete(place.key(name))
            for key, upload_id, _ in [*uploads.list_uploads(place.key(name))]:
                if key == place.key(name):
                    uploads.abort(key, upload_id)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Let errors of the store name the rank."""
        try:
            yield
        except XrankError as error:
            error.about(f"rank {self.rank}", rank=self.rank)
            raise
