"""Shards of optimizers: the slices that a rank steps, their places in the model, and their way into a workspace."""
