"""Reads live models: the parts in each rank's memory, and their places."""
