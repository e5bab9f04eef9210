"""Pipelines: schedules, stages, and a multi-layer perceptron trained by them."""
