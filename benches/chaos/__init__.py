"""Faults on purpose: real jobs, real signals, and whether the promises hold."""
