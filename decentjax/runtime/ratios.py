"""Three numbers that characterize a job on a cluster, and closed forms in them.

Source: gamma, omega and sigma^2 are those of From Promise to Practice (ICLR 2025); the
equations are our own reconstruction, as the paper's are not public.
"""

from typing import NamedTuple

import numpy as np

from decentjax.exchange import Topology
from decentjax.runtime.cluster import (
    Cluster,
    all_reduce_seconds,
    check_not_negative,
    exchange_seconds,
)
from decentjax.runtime.job import Job


class Ratios(NamedTuple):
    """What decides whether decentralized training is faster.

    Args:
      gamma: time of an all-reduce over the mean compute time.
      omega: time of an exchange over that of an all-reduce.
      variance: variance of the compute times over their squared mean, sigma^2.
    """

    gamma: float
    omega: float
    variance: float


def ratios(
    cluster: Cluster, job: Job, topology: Topology, num_steps: int = 100, seed: int = 0
) -> Ratios:
    """Returns gamma, omega and sigma^2.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times.
      topology: the exchanges; their mean over a period counts.
      num_steps: number of steps whose compute times are drawn.
      seed: seed of the compute times.

    Raises:
      ValueError: if the topology has another number of workers.

    Examples:
      >>> from decentjax import runtime, topology
      >>> cluster = runtime.Cluster(num_nodes=8, between_bytes_per_second=1e9)
      >>> job = runtime.Job(model_bytes=100e6, compute=runtime.constant(0.1))
      >>> found = runtime.ratios(cluster, job, topology.one_peer_ring(8))
      >>> print(f"gamma {found.gamma:.2f}, omega {found.omega:.2f}")
      gamma 1.75, omega 0.57
    """
    whole = all_reduce_seconds(cluster, job.model_bytes)
    exchange = exchange_seconds(cluster, topology, job.model_bytes)
    return ratios_of(
        whole, exchange, *moments(job, cluster.num_workers, num_steps, seed)
    )


def ratios_of(
    all_reduce: float, exchange: float, mean: float, variance: float
) -> Ratios:
    """Returns gamma, omega and sigma^2 from known times.

    Args:
      all_reduce: seconds of an all-reduce.
      exchange: seconds of an exchange.
      mean: mean compute time in seconds.
      variance: sigma^2.
    """
    # If an all-reduce takes no time, an exchange takes none either.
    omega = exchange / all_reduce if all_reduce else 1.0
    return Ratios(all_reduce / mean, omega, variance)


def moments(
    job: Job, num_workers: int, num_steps: int = 100, seed: int = 0
) -> tuple[float, float]:
    """Returns the mean compute time, in seconds, and sigma^2.

    Raises:
      ValueError: if all compute times are 0.

    Examples:
      >>> from decentjax import runtime
      >>> job = runtime.Job(model_bytes=1e6, compute=runtime.gamma(0.1, sigma=0.2))
      >>> mean, variance = runtime.moments(job, num_workers=8)
      >>> round(mean, 2), round(variance, 2)
      (0.1, 0.04)
    """
    drawn = np.stack([job.draw(step, num_workers, seed) for step in range(num_steps)])
    mean = float(drawn.mean())
    if mean == 0:
        raise ValueError("ratios need compute times that are not all 0")
    return mean, float(drawn.var()) / mean**2


def all_reduce_without_stragglers(
    gamma: float, forward_share: float = 1 / 3, num_buckets: int = 10
) -> float:
    """Returns the duration of a step of all-reduce over the compute time.

    `max(1 + gamma / B, f + (1 - f) / B + gamma)`, with forward share f and B buckets.

    Raises:
      ValueError: if a number is out of its range.

    Examples:
      >>> from decentjax import runtime
      >>> round(runtime.all_reduce_without_stragglers(gamma=0.5), 3)
      1.05
      >>> round(runtime.all_reduce_without_stragglers(gamma=2.0), 3)
      2.4
    """
    check_not_negative(gamma=gamma)
    if not 0 <= forward_share <= 1 or num_buckets < 1:
        raise ValueError(
            "forward_share must be in [0, 1] and num_buckets positive, got "
            f"{forward_share} and {num_buckets}"
        )
    # Two bounds: the last bucket is sent after the whole backward pass, or the network
    # never pauses after the first bucket.
    in_backward = (1 - forward_share) / num_buckets
    return max(1 + gamma / num_buckets, forward_share + in_backward + gamma)


def exchange_without_stragglers(gamma: float, omega: float) -> float:
    """Returns the duration of a step with a hidden exchange over the compute time.

    `max(1, omega gamma)`, if all exchanges of the topology take equally long.

    Raises:
      ValueError: if a number is out of its range.

    Examples:
      >>> from decentjax import runtime
      >>> runtime.exchange_without_stragglers(gamma=2.0, omega=0.25)
      1.0
    """
    check_not_negative(gamma=gamma, omega=omega)
    return max(1.0, omega * gamma)
