"""Decisions of a conversion before a byte moves: names, dtypes, ties, files, and the proven plan."""
