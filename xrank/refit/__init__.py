"""Weights from the ranks of a trainer straight into the ranks of an engine of another job, while both live.

The two jobs share a directory and no process group. The trainer's first rank registers there what all its ranks lend;
each engine rank registers its own state (`directory`). Everything that changes afterwards is in the ranks' memory:
steps, progress and failures (`peers`). An engine rank plans once which runs of bytes of which trainer rank fill its
tensors (`targets`), and copies them at each step.
"""
