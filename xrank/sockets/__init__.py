"""Sockets between ranks that share no memory: a service of bytes, and its readers, which prove knowledge of a token."""
