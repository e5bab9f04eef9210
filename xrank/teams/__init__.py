"""Ranks that convert together: their launch, their messages, and their agreement."""
