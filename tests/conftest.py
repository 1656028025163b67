"""Eight simulated devices, and strictness."""

import os

# XLA runs the devices of a CPU mesh on one pool of threads, and a collective holds its
# thread until all devices have come: with too few threads they wait for ever.
os.environ.setdefault("NPROC", "64")
# On a busy machine a device may come late; by default XLA aborts after 40 s.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
