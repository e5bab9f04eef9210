"""Checks of gradients from any framework, and their findings."""
