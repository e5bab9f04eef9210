"""Readers of Megatron's checkpoints: torch_dist, and one file for each model-parallel rank."""
