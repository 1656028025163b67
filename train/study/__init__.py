"""Runs of many seeds, on one device or by a clock, and their comparison."""
