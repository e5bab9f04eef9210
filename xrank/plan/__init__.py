"""The engine: what lies where (source, output), the proof of coverage, the plan, and its execution."""
