"""Workspaces: where ranks leave their states for others."""
