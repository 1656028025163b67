"""Checks a run before its cluster exists: overlap, memory, options of XLA."""
