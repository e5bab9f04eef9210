"""Collectives between ranks, and faults that all ranks raise together."""
