"""Servers for all tests of stores."""

from tests.storage.servers import (
    azurite_server,
    bucket,
    moto_server,
    small_azure,
    small_bucket,
    small_google,
    small_server,
)

__all__ = ["azurite_server", "bucket", "moto_server", "small_azure", "small_bucket", "small_google", "small_server"]
