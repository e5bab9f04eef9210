"""How Megatron-core cuts a model: by names, by attributes of live parameters, by the mesh of its ranks."""
