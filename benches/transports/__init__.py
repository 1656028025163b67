"""Transports of models between peers, side by side: `python -m benches.transports`."""
