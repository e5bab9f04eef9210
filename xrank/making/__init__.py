"""Tensors and files made by plan, alone or by several ranks together."""
