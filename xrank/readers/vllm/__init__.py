"""Reads vLLM's ``sharded_state``: the parameters of an engine's ranks."""

from xrank.readers.vllm.reader import VllmReader

__all__ = ["VllmReader"]
