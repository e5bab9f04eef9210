"""Reads live models: what each rank holds in memory, and where it belongs."""
