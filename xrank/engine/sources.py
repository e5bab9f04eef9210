"""The source of a model's records, whatever form they have: in files or objects, compressed, changed or quantized."""

from __future__ import annotations

from xrank.engine.buffers import FileSource, OpenSource
from xrank.engine.object_records import ObjectSource, holds_objects
from xrank.layout.stored_model import StoredModel


def open_source(model: StoredModel, folder: str | None = None) -> OpenSource:
    """Return a source of a model's records, which the caller closes.

    Records that are made whole go to a folder on a disk, which must exist when the first is read; None: that of
    `scratch_folder`.
    """
    source: OpenSource = ObjectSource(model) if holds_objects(model) else FileSource(model)
    if model.records.encoded_nbytes is not None or model.records.inline:
        from xrank.engine.decoded_records import DecodedSource  # most sources contain none of these

        source = DecodedSource(model, source, folder)
    if model.records.changed:
        from xrank.engine.changed_records import ChangedSource

        source = ChangedSource(model, source, folder)
    if model.records.quantized:
        from xrank.engine.quantized_records import QuantizedSource

        source = QuantizedSource(model.records, source)
    return source
