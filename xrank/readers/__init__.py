"""One module a source format: what lies where, found from metadata alone.

What a reader of one's own is made of, and describes a source with, has its names here.
"""

from xrank.plan.source import RecordTable, SourceFile, StoredModel, StoredShard
from xrank.readers.base import Hints, Reader

__all__ = ["Hints", "Reader", "RecordTable", "SourceFile", "StoredModel", "StoredShard"]
