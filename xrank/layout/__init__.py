"""Which rank holds what: nests, meshes, the notation, layout maps. No torch, no I/O beyond layout files."""
