"""Eight simulated devices, and strictness."""

import os

# XLA runs the devices of a CPU mesh on one pool of threads, and a collective holds its
# thread until all devices have come: with too few threads they wait for ever.
os.environ.setdefault("NPROC", "64")

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
