"""Bytes to structure and back, for each container format; no policy, no torch."""
