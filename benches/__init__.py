"""Benchmarks: each measures its contestants side by side, in rounds, in one run."""
