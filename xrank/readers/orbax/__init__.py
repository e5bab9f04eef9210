"""Reads checkpoints of Orbax (https://github.com/google/orbax), the format of JAX, Flax and MaxText."""

from xrank.readers.orbax.reader import OrbaxReader

__all__ = ["OrbaxReader"]
