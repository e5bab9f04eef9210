"""Channels: message headings, and the shared memory that carries messages and arrays between processes."""
