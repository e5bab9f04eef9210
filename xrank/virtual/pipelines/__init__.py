"""Pipelines: schedules, stages, and a perceptron that they train."""
