"""The place of an output in an object store, and the objects that xrank keeps beside it while it writes.

PARENT/.NAME.xrank/journal.json        owner, plan, and the uploads under way; it is also the lock
PARENT/.NAME.xrank/FILE.json           a file whose parts are all uploaded: their numbers, etags, checksums, and digests

The parts themselves are uploads under the output's final names, which no reader sees before they are completed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from xrank.errors import UsageError, option
from xrank.stores.client import Store, open_store
from xrank.stores.uploads import WRITABLE
from xrank.stores.url import clean_path, split_url


@dataclass(frozen=True, slots=True)
class StorePlace:
    """The place of an output in a store."""

    store: Store
    key: str
    """Prefix of the output's objects, without a slash at its end."""

    @classmethod
    def from_url(cls, out: str | os.PathLike[str]) -> StorePlace:
        """Return the place of an output's URL.

        Raises:
            UsageError: it is a whole bucket, or a store that xrank cannot write to.
        """
        url = clean_path(out)
        place = split_url(url)
        if place.scheme == "hf":
            raise UsageError(
                f"{url}: a repository of the Hub is written by one commit from a folder",
                file=url,
                next_step=f"give {option('out')} a folder, and upload it: hf upload {url.removeprefix('hf://')} FOLDER",
            )
        if place.scheme not in WRITABLE:
            raise UsageError(
                f"{url}: outputs are not written to {place.scheme}:// stores",
                file=url,
                want="s3://, gs:// or az://, whose uploads appear at one instant, or a folder",
                next_step=f"choose another {option('out')}",
            )
        if not place.key:
            raise UsageError(
                f"{url} is a whole bucket, not a name for an output",
                file=url,
                next_step=f"name a new prefix in it, such as {url}/model",
            )
        store, key = open_store(url)
        return cls(store, key)

    @property
    def url(self) -> str:
        """The URL of the output."""
        return self.store.url(self.key)

    @property
    def stage_key(self) -> str:
        """The prefix of the objects that xrank keeps beside the output."""
        parent, slash, name = self.key.rpartition("/")
        return f"{parent}{slash}.{name}.xrank"

    @property
    def journal_key(self) -> str:
        """The key of the journal."""
        return f"{self.stage_key}/journal.json"

    def record_key(self, name: str) -> str:
        """Return the key of the record of an uploaded file."""
        return f"{self.stage_key}/{name}.json"

    def file_key(self, name: str) -> str:
        """Return the key of a file of the output."""
        return f"{self.key}/{name}"

    def file_url(self, name: str) -> str:
        """Return the URL of a file of the output."""
        return self.store.url(self.file_key(name))
