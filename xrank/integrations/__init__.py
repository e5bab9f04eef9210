"""Integrations: training frameworks call xrank at their saves. Each module imports its framework; this one, nothing."""
