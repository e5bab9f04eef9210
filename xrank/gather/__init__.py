"""Live gathers: tensors, configs and whole models from the memory of many ranks."""
