"""The reader of torch's distributed checkpoints."""
