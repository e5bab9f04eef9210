"""Servers for all tests of stores."""

from tests.stores.servers import bucket, moto_server, small_bucket, small_server

__all__ = ["bucket", "moto_server", "small_bucket", "small_server"]
