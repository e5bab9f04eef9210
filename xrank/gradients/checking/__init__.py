"""Checks of gradients, whoever made them, and what they find."""
