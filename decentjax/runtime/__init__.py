"""How long a training step takes on a cluster: compute, messages and waiting."""

from decentjax.runtime.cluster import Cluster, all_reduce_seconds, exchange_seconds
from decentjax.runtime.compute_times import (
    Compute,
    constant,
    delayed,
    gamma,
    log_normal,
    normal,
    trace,
)
from decentjax.runtime.goodput import (
    WorkerFailures,
    goodput_of_elastic,
    goodput_of_quorum,
    goodput_of_restarts,
)
from decentjax.runtime.job import Job
from decentjax.runtime.peer_runs import Mixed, PeerTimes, peer_rounds, peers
from decentjax.runtime.ratios import (
    Ratios,
    all_reduce_without_stragglers,
    exchange_without_stragglers,
    moments,
    ratios,
)
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
    "Mixed",
    "PeerTimes",
    "Ratios",
    "Times",
    "WorkerFailures",
    "all_reduce",
    "all_reduce_seconds",
    "all_reduce_without_stragglers",
    "background",
    "constant",
    "delayed",
    "exchange_seconds",
    "exchange_without_stragglers",
    "gamma",
    "goodput_of_elastic",
    "goodput_of_quorum",
    "goodput_of_restarts",
    "in_step",
    "log_normal",
    "moments",
    "normal",
    "peer_rounds",
    "peers",
    "ratios",
    "rounds",
    "trace",
    "wait_avoiding",
]
