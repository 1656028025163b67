"""How long a training step takes on a cluster: compute, messages and waiting."""

from decentjax.runtime.cluster import Cluster, all_reduce_seconds, exchange_seconds
from decentjax.runtime.job import Compute, Job, constant, delayed, gamma, trace
from decentjax.runtime.schemes import (
    Times,
    all_reduce,
    background,
    in_step,
    rounds,
    wait_avoiding,
)

__all__ = [
    "Cluster",
    "Compute",
    "Job",
    "Times",
    "all_reduce",
    "all_reduce_seconds",
    "background",
    "constant",
    "delayed",
    "exchange_seconds",
    "gamma",
    "in_step",
    "rounds",
    "trace",
    "wait_avoiding",
]
