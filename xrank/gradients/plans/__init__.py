"""Gradient plans: the role of each parameter on each rank, and the exchanges that follow. Needs no processes."""
