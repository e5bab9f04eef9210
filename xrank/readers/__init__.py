"""Readers of source formats, one module or package each: they find where tensors lie, from metadata alone.

To add a format, write a class with the methods of `xrank.readers.base.Reader`, list it in `xrank.readers.discovery`
(another package names it under the entry point ``xrank.readers``), and subclass `xrank.testing.ReaderContract`.
`xrank.readers.placement` places the parts of formats that have a file per rank. Lists that may need an entry:
`discovery` (formats of whole models, markers of steps), `records` (a trainer's markers), and
`xrank.engine.companions` (suffixes of weight files).

This package exports the names that a reader of your own needs.
"""

from xrank.layout.stored_model import RecordTable, SourceFile, StoredModel, StoredShard
from xrank.readers.base import Hints, Reader

__all__ = ["Hints", "Reader", "RecordTable", "SourceFile", "StoredModel", "StoredShard"]
