"""Shipped helpers for testing code that runs on ranks; never imported by the library."""
