"""Engines: threads or processes as devices, and the host that starts them, watches them and says what failed."""
