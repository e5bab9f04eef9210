"""The one composition that the commands and Python callers use."""
