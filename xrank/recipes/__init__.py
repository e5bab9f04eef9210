"""Recipes map the tensors of training frameworks to those of Hugging Face: one TOML file per model family."""
