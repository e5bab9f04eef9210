"""Models that ranks still hold in memory, as sources and destinations."""
