"""Readers of source formats, one module or package each: they find where tensors lie, from metadata alone.

This package exports the names that a reader of your own needs.
"""

from xrank.plan.source import RecordTable, SourceFile, StoredModel, StoredShard
from xrank.readers.base import Hints, Reader

__all__ = ["Hints", "Reader", "RecordTable", "SourceFile", "StoredModel", "StoredShard"]
