"""What a conversion decides before a byte moves: names, dtypes, ties, files, and the proven plan."""
