"""Predictions: what a conversion will read, write, exchange and take, from its real plan; no byte moves."""
