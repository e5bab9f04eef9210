"""Predicted costs of a run: bytes and flops of its programs, and seconds over links."""
