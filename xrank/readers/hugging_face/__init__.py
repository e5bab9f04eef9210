"""Readers of Hugging Face folders: whole tensors in safetensors or .bin files, and torch's shards of them."""
