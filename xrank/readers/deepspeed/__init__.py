"""Reads DeepSpeed's checkpoints: ZeRO 1, 2 and 3, universal ones, and those without ZeRO."""
