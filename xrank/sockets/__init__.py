"""Sockets between ranks that share no memory: a service of bytes, and its readers, who prove that they know a token."""
