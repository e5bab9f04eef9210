"""Copies a workspace and flips one bit in a tensor of one rank, as a bad disk or cable would."""

from __future__ import annotations

import argparse
import os
import shutil

from xrank.formats.rank_state import WEIGHT
from xrank.formats.torch_archive import read_archive
from xrank.storage.places import state_file_name


def flip_byte(file: str, name: str) -> int:
    """Flip the lowest bit of the byte in the middle of a tensor, and return the byte's place in the file."""
    archive = read_archive(file)
    record = archive.records[archive.value[WEIGHT][name].key]
    place = record.offset + record.nbytes // 2
    with open(file, "r+b") as state:
        state.seek(place)
        byte = state.read(1)[0]
        state.seek(place)
        state.write(bytes([byte ^ 1]))
    return place


def main() -> None:
    """Copy, flip, and say where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workspace")
    parser.add_argument("copy")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tensor", default="model.embed_tokens.weight")
    options = parser.parse_args()
    shutil.copytree(options.workspace, options.copy)
    file = os.path.join(options.copy, state_file_name(options.rank))
    place = flip_byte(file, options.tensor)
    print(f"flipped  one bit at byte {place:,} of {file}, in {options.tensor}")


if __name__ == "__main__":
    main()
