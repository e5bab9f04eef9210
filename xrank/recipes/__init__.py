"""Recipes: how a training framework's tensors become those that Hugging Face names; one TOML file a model family."""
