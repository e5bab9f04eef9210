"""Programs as data: their steps and registers, what builds them, and the kernels that they call by name."""
