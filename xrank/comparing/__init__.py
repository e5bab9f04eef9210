"""Compares a converted model with its source."""
