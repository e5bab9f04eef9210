"""What ranks lend one another of a live model, and how it is read."""
