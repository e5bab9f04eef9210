"""Activates the rank pool for all tests."""

pytest_plugins = ["xrank.testing.plugin"]
