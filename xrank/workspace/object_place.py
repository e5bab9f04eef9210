"""The place of a workspace in a store: a prefix in a bucket of S3 or Google, or an Azure container."""

from __future__ import annotations

import os
from dataclasses import dataclass

from xrank.errors import UsageError
from xrank.stores.client import Store, open_store
from xrank.stores.uploads import WRITABLE, Uploads, open_uploads
from xrank.stores.url import clean_path, is_url, split_url


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """A prefix in a bucket. It holds no connection, so that a forked process may use it."""

    url: str

    @classmethod
    def from_url(cls, path: str | os.PathLike[str]) -> ObjectPlace:
        """Return the place of a URL.

        Raises:
            UsageError: ranks cannot write there: xrank writes to no such store, or it is a whole bucket, or no URL.
        """
        url = clean_path(path)
        want = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, or a directory that all ranks mount"
        if not is_url(url) or split_url(url).scheme not in WRITABLE:
            raise UsageError(
                f"{url}: a workspace is in S3, Google Cloud Storage, Azure, or in a directory", file=url, want=want
            )
        if not split_url(url).key:
            raise UsageError(f"{url} is a whole bucket", file=url, want=want, next_step=f"give {url}/NAME")
        return cls(url)

    @property
    def store(self) -> Store:
        """The bucket."""
        return open_store(self.url)[0]

    def open_uploads(self) -> Uploads:
        """Return uploads to the bucket; the caller closes them."""
        return open_uploads(self.store, self.url)

    def key(self, name: str) -> str:
        """Return the key of an object in this place."""
        return f"{split_url(self.url).key}/{name}"

    def url_of(self, name: str) -> str:
        """Return the URL of an object in this place."""
        return f"{self.url}/{name}"
