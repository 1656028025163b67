"""Looks at a run before its cluster is there."""
