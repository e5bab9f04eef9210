"""Reads state dicts that every rank saved by itself, as FSDP trainers do: verl's, SkyRL's and accelerate's."""
