"""Rendezvous, waiting, death detection and failure reports of ranks. No other package waits for a rank."""
