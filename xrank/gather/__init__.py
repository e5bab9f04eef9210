"""Live gathers: tensors and configs from the memory of many ranks.

To add a transport of tensors, see `xrank.workspace`. Whole models are read by `xrank.lending`; the command
``xrank gather`` is `xrank.conversion.gather`.
"""
