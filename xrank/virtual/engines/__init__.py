"""Engines: devices as threads or processes, and the host that starts them, monitors them and reports failures."""
