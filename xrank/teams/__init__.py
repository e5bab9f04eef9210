"""Ranks that convert together: who they are, and what they agree on."""
