"""Channels from end to end: what a message is, and the shared memory that messages and arrays pass through."""
