"""Shards of optimizers: what a rank steps, where it lies in the model, and how it leaves for a workspace."""
