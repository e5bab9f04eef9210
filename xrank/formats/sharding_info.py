"""Read the place of each piece in its tensor, which torch DCP writes into safetensors headers."""

from __future__ import annotations

from xrank.formats.entries import Entry
from xrank.formats.regular_file import Origin, quote
from xrank.formats.safetensors_header import SafetensorsHeader

_KEY = "DCP_SHARDING_INFO"


def read_saved_offsets(header: SafetensorsHeader, origin: Origin) -> dict[str, tuple[int, ...]]:
    """Return name -> the first index in the whole tensor of the file's piece.

    Raises:
        CorruptError: the header lacks it for one of its tensors, or has it for others.
    """
    text = header.metadata.get(_KEY)
    if text is None:
        raise origin.corrupt(f"its header has no {_KEY}: torch did not write it as a shard")
    recorded = Entry.parse(text, lambda fault: origin.corrupt(f"its {_KEY} is damaged", got=fault))
    found = {name: entry["saved_offsets"] for name, entry in recorded.items()}
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if found.keys() != shapes.keys():
        name = sorted(found.keys() ^ shapes.keys())[0]
        raise origin.corrupt(
            f"its {_KEY} and its tensors disagree about {quote(name)}",
            got=f"{len(found)} names there",
            want=f"the {len(shapes)} names of the tensors",
        )
    for name, offsets in found.items():
        if len(offsets.counts(below=1 << 62)) != len(shapes[name]):
            offsets.refuse(f"{len(shapes[name])} offsets")
    return {name: offsets.counts() for name, offsets in found.items()}
