"""Reads state dicts that every rank saved by itself, as FSDP trainers do: verl's, SkyRL's and accelerate's."""

from xrank.readers.fsdp.reader import AccelerateRanksReader, VerlReader

__all__ = ["AccelerateRanksReader", "VerlReader"]
