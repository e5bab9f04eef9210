"""Gradient plans: what a parameter is to the ranks, and what follows from that; made without processes."""
