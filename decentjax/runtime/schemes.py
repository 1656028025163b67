"""How long a step takes on a cluster: a model of compute, messages and waiting.

Shapes: T steps, N workers. Times are in seconds.

Source: our own reconstruction of the runtime model of From Promise to Practice (ICLR
2025), whose equations are not public, and the rules of WAGMA-SGD (2020).
"""

import math
from typing import NamedTuple

import numpy as np

from decentjax.exchange import Topology
from decentjax.runtime.cluster import (
    Cluster,
    all_reduce_seconds,
    check_fit,
    finish,
    idle,
    meet,
    plan,
)
from decentjax.runtime.job import Job


class Times(NamedTuple):
    """What each worker does in each step, in seconds, all [T, N].

    The next step starts at start + compute + waiting + exposed.

    Args:
      start: time since the start of the first step.
      compute: duration of the forward and the backward pass.
      waiting: time after that for late workers: what would remain of this step's
        communication if messages took no time.
      exposed: time after that for messages.
      sent: time at which the worker is ready for the exchange that the step needs.
      exchange: duration from then until the worker has received everything; most of it
        overlaps with compute.
    """

    start: np.ndarray
    compute: np.ndarray
    waiting: np.ndarray
    exposed: np.ndarray
    sent: np.ndarray
    exchange: np.ndarray

    @property
    def end(self) -> np.ndarray:
        """The end of each step."""
        return self.start + self.compute + self.waiting + self.exposed

    def seconds_per_step(self, skipped: int = 0) -> float:
        """Returns the mean duration of a step over workers, after `skipped` steps."""
        seconds = (self.end[-1] - self.start[skipped]).mean()
        return float(seconds / (len(self.start) - skipped))


def all_reduce(
    cluster: Cluster, job: Job, num_steps: int, seed: int = 0, num_buckets: int = 10
) -> Times:
    """Simulates all-reduce of gradients in buckets that overlap the backward pass.

    Bucket b of B is sent once all workers have it, one bucket after the other:

        r_b = max_i s_i + C_i (f + (1 - f) b / B)
        e_b = max(e_{b-1}, r_b) + R / B

    with starts s, compute times C, forward share f and the time R of an all-reduce.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times.
      num_steps: number of steps, T.
      seed: seed of the compute times.
      num_buckets: number of buckets, B; with 1 nothing overlaps.
    """
    _check_positive(num_steps=num_steps, num_buckets=num_buckets)
    seconds = all_reduce_seconds(cluster, job.model_bytes) / num_buckets
    start, rows = np.zeros(cluster.num_workers), []
    for step in range(num_steps):
        compute = job.draw(step, cluster.num_workers, seed)
        first = start + job.forward_share * compute
        ready, end = start, -math.inf
        for bucket in range(1, num_buckets + 1):
            share_done = bucket / num_buckets
            ready = first + (1 - job.forward_share) * share_done * compute
            end = max(end, float(ready.max())) + seconds
        # Not negative but for rounding: the last bucket is ready when compute ends.
        waiting = np.maximum(ready.max() - (start + compute), 0)
        exposed = np.full_like(start, end - ready.max())
        sent = first + (1 - job.forward_share) / num_buckets * compute
        rows.append((start, compute, waiting, exposed, sent, end - sent))
        start = np.full_like(start, end)
    return Times(*map(np.stack, zip(*rows, strict=True)))


def in_step(
    cluster: Cluster,
    job: Job,
    topology: Topology,
    num_steps: int,
    seed: int = 0,
    hidden: bool = True,
) -> Times:
    """Simulates neighbour averaging inside the compiled step.

    The models of step t are sent when the step starts, beside the gradient, and are
    needed at its end; if not hidden, they are sent at its end. A message starts when
    sender and receiver are ready. Messages of one exchange share the rate of a card; a
    card carries one exchange after the other.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times.
      topology: the exchanges, taken in turn.
      num_steps: number of steps, T.
      seed: seed of the compute times.
      hidden: whether messages run beside the gradient.

    Raises:
      ValueError: if the topology has another number of workers.
    """
    _check_positive(num_steps=num_steps)
    check_fit(cluster, topology)
    plans = [plan(cluster, exchange) for exchange in topology]
    start, free, rows = np.zeros(cluster.num_workers), idle(cluster), []
    for step in range(num_steps):
        compute = job.draw(step, cluster.num_workers, seed)
        computed = start + compute
        ready = start if hidden else computed
        legs = plans[step % topology.period]
        met = meet(legs, ready)
        done = finish(legs, job.model_bytes, ready, free)
        rows.append(_row(start, compute, met, done, ready))
        start = np.maximum(computed, done)
    return Times(*map(np.stack, zip(*rows, strict=True)))


def background(
    cluster: Cluster,
    job: Job,
    topology: Topology,
    num_steps: int,
    seed: int = 0,
    num_buckets: int = 10,
) -> Times:
    """Simulates neighbour averaging in buckets that overlap the whole next step.

    Bucket b of B is updated as soon as its gradient is computed and its neighbours'
    models have arrived, and is immediately sent for the next step:

        u_b = max(u_{b-1} + (1 - f) C / B, c_b),  u_0 = s + f C,  s' = u_B

    with start s, compute time C, forward share f, and the end c_b of bucket b's
    exchange, which its group starts after their last u_b and c_{b-1}. Messages share
    cards as in `in_step`. With one bucket the result is that of `in_step`.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times.
      topology: the exchanges, taken in turn.
      num_steps: number of steps, T.
      seed: seed of the compute times.
      num_buckets: number of buckets, B.

    Raises:
      ValueError: if the topology has another number of workers.

    Source: the code of From Promise to Practice (ICLR 2025), Decent-DP.
    """
    _check_positive(num_steps=num_steps, num_buckets=num_buckets)
    check_fit(cluster, topology)
    plans = [plan(cluster, exchange) for exchange in topology]
    start, free, rows = np.zeros(cluster.num_workers), idle(cluster), []
    updated = np.zeros((num_buckets, cluster.num_workers))
    for step in range(num_steps):
        legs = plans[step % topology.period]
        met, done = [], [np.zeros(cluster.num_workers)]
        for ready in updated:
            met.append(meet(legs, ready))
            begun = np.maximum(ready, done[-1])
            done.append(finish(legs, job.model_bytes / num_buckets, begun, free))
        compute = job.draw(step, cluster.num_workers, seed)
        sent = updated[0]
        updated = _update(job, start, compute, done[1:])
        computed = start + compute
        waited = np.maximum(_update(job, start, compute, met)[-1], computed)
        end = np.maximum(updated[-1], computed)  # The former, but for rounding.
        parts = compute, waited - computed, np.maximum(end - waited, 0)
        rows.append((start, *parts, sent, done[-1] - sent))
        start = end
    return Times(*map(np.stack, zip(*rows, strict=True)))


def wait_avoiding(
    cluster: Cluster,
    job: Job,
    topology: Topology,
    num_steps: int,
    sync_every: int,
    seed: int = 0,
) -> Times:
    """Simulates averaging in groups that does not wait for late workers.

    The fastest worker triggers the groups of its step. Late workers contribute the
    model that they had before, and receive the sum when they are done. Every
    `sync_every` steps all workers wait for each other, in an all-reduce of models.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times.
      topology: the groups, such as `decentjax.topology.butterfly_groups`.
      num_steps: number of steps, T.
      sync_every: number of steps from one all-reduce to the next.
      seed: seed of the compute times.

    Raises:
      ValueError: if the topology has another number of workers.

    Source: Li et al., WAGMA-SGD (2020), section 3.
    """
    _check_positive(num_steps=num_steps, sync_every=sync_every)
    check_fit(cluster, topology)
    plans = [plan(cluster, exchange) for exchange in topology]
    whole = all_reduce_seconds(cluster, job.model_bytes)
    start, free, rows = np.zeros(cluster.num_workers), idle(cluster), []
    for step in range(num_steps):
        compute = job.draw(step, cluster.num_workers, seed)
        computed = start + compute
        if (step + 1) % sync_every == 0:
            met = np.full_like(start, computed.max())
            done = met + whole
        else:
            met = np.full_like(start, computed.min())
            legs = plans[step % topology.period]
            done = finish(legs, job.model_bytes, met, free)
        end = np.maximum(computed, done)
        rows.append(_row(start, compute, met, end, computed))
        start = end
    return Times(*map(np.stack, zip(*rows, strict=True)))


def _row(
    start: np.ndarray,
    compute: np.ndarray,
    met: np.ndarray,
    done: np.ndarray,
    ready: np.ndarray,
) -> Times:
    """Returns one step of `Times`, [N].

    Args:
      start: start of the step.
      compute: duration of the compute.
      met: time at which the exchange would be done if messages took no time.
      done: time at which the exchange is done.
      ready: time at which the worker is ready for it.
    """
    computed = start + compute
    waiting = np.maximum(met - computed, 0)
    exposed = np.maximum(done - computed, 0) - waiting
    return Times(start, compute, waiting, exposed, ready, done - ready)


def _update(
    job: Job, start: np.ndarray, compute: np.ndarray, arrived: list[np.ndarray]
) -> np.ndarray:
    """Returns when each bucket is updated, [B, N], given the ends of its exchanges."""
    moment = start + job.forward_share * compute
    part = (1 - job.forward_share) / len(arrived) * compute
    moments = []
    for exchanged in arrived:
        moment = np.maximum(moment + part, exchanged)
        moments.append(moment)
    return np.stack(moments)


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be positive, got {number}")
