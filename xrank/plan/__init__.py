"""The engine: tables of source and output, the proof of coverage, the plan, and its execution."""
