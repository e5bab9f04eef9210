"""Predictions of a conversion's reads, writes, exchanges and time, from its real plan without moving data."""
