"""Other systems' terms for layouts, each to and from xrank's."""

from xrank.dialects.placements import describe_mesh, from_placements

__all__ = ["describe_mesh", "from_placements"]
