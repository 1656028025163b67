"""Faults on purpose: real jobs, real signals, and whether the promises hold."""

import train.cli  # noqa: F401 - Hides the CUDA plugin, before the first import of jax.
