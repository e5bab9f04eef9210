"""Reads checkpoints of torch_checkpointing (https://github.com/meta-pytorch/torch_checkpointing)."""

from xrank.readers.torch_checkpointing.reader import TorchCheckpointingReader

__all__ = ["TorchCheckpointingReader"]
