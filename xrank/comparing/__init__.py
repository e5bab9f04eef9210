"""Comparison of a made model with what it was made of."""
