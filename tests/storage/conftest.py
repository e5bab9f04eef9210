"""Servers for all tests of stores."""

from tests.storage.azure_servers import azurite_server, small_azure
from tests.storage.google_servers import small_google
from tests.storage.servers import bucket, moto_server, small_bucket, small_server

__all__ = ["azurite_server", "bucket", "moto_server", "small_azure", "small_bucket", "small_google", "small_server"]
