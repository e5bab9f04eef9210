"""Drafts of recipes: which tensors of a source become which of a base model, from names, shapes and sampled values.

`draft` decides, and names all that it cannot decide. Nothing else in xrank rests on a draft: a gather by the drafted
recipe proves and compares as it does by any other.
"""
