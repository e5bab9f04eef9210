"""The decision about a source: names by a recipe, adapters, ties, dtypes, transforms and quantization.

Recipes map the tensors of training frameworks to those of Hugging Face: one TOML file per model family.

To add a family, add a TOML file beside this one; gathers choose it by the names in it. docs/recipe-notation.md explains
its tables. While you write it, try it with ``xrank recipe check FILE SRC``. Names that Megatron-core cuts and
`xrank.readers.megatron.layouts` lacks need a rule there. Tests take the families from ``tests/recipes/families``, and
docs/families.md lists them. ``transformers.json`` has transformers' conversions between files and memory, generated
from its own tables (`xrank.recipes.conversions`).
"""
