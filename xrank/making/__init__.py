"""Makes tensors and files by plan, alone or with several ranks together."""
