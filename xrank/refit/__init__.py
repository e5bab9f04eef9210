"""Weights from the ranks of a trainer straight into the ranks of an engine of another job, while both live.

The two jobs share a directory and no process group. The trainer's first rank leaves a card there that describes what
all its ranks lend; each engine rank leaves a card with its own state. Everything that changes afterwards lies in the
ranks' memory: steps, progress and failures (`status`). An engine rank plans once which runs of bytes of which trainer
rank fill its tensors (`transfer`), and copies them at each step.
"""
