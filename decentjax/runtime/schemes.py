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
    """What each worker did in each step, all [T, N].

    The next step starts at start + compute + waiting + exposed.

    Args:
      start: since the begin of the first step.
      compute: of forward and backward pass.
      waiting: after that, for workers who were late; what would be left in this step
        on a network that takes no time.
      exposed: after that, for messages.
      sent: when the worker was ready for the exchange that the step needs.
      exchange: from then until it had everything; most of it runs beside the computing.
    """

    start: np.ndarray
    compute: np.ndarray
    waiting: np.ndarray
    exposed: np.ndarray
    sent: np.ndarray
    exchange: np.ndarray

    @property
    def end(self) -> np.ndarray:
        """Of each step."""
        return self.start + self.compute + self.waiting + self.exposed

    def seconds_per_step(self, skipped: int = 0) -> float:
        """Returns the mean time of a worker's step, but for the first ones skipped."""
        seconds = (self.end[-1] - self.start[skipped]).mean()
        return float(seconds / (len(self.start) - skipped))


def all_reduce(
    cluster: Cluster, job: Job, num_steps: int, seed: int = 0, num_buckets: int = 10
) -> Times:
    """Simulates all-reduce of gradients, bucket by bucket beside the backward pass.

    Bucket b of B is ready when all have it, and the buckets go one after the other:

        r_b = max_i s_i + C_i (f + (1 - f) b / B)
        e_b = max(e_{b-1}, r_b) + R / B

    with starts s, compute times C, forward share f and the time R of an all-reduce.

    Args:
      cluster: of the workers.
      job: what they do.
      num_steps: T.
      seed: of the compute times.
      num_buckets: B; 1 where nothing overlaps.
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
        waiting = np.maximum(ready.max() - (start + compute), 0)  # But for rounding.
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

    The models of step t leave when the step starts, beside the gradient, and are needed
    at its end; or, where they are not hidden, leave at its end. A message starts when
    both its ends are ready. Those of an exchange that share a card share its bandwidth;
    a card carries one exchange after the other.

    Args:
      cluster: of the workers.
      job: what they do.
      topology: whose models they average.
      num_steps: T.
      seed: of the compute times.
      hidden: whether messages run beside the gradient.

    Raises:
      ValueError: if the topology is of another number of workers.
    """
    _check_positive(num_steps=num_steps)
    check_fit(cluster, topology)
    plans = [plan(cluster, exchange) for exchange in topology]
    start, free, rows = np.zeros(cluster.num_workers), idle(cluster), []
    for step in range(num_steps):
        compute = job.draw(step, cluster.num_workers, seed)
        computed = start + compute
        ready = start if hidden else computed
        stages = plans[step % topology.period]
        met = meet(stages, ready)
        done = finish(stages, job.model_bytes, ready, free)
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
    """Simulates neighbour averaging bucket by bucket, beside all of the next step.

    Bucket b of B is updated as soon as its gradient and its neighbours' models are
    there, and at once sent on, for the next step:

        u_b = max(u_{b-1} + (1 - f) C / B, c_b),  u_0 = s + f C,  s' = u_B

    with start s, compute time C, forward share f, and c_b when the exchange of bucket b
    is done, which all of its group started after their last u_b and c_{b-1}. Messages
    share cards as in `in_step`. With one bucket it is `in_step`.

    Args:
      cluster: of the workers.
      job: what they do.
      topology: whose models they average.
      num_steps: T.
      seed: of the compute times.
      num_buckets: B.

    Raises:
      ValueError: if the topology is of another number of workers.

    Source: as the code of From Promise to Practice (ICLR 2025), Decent-DP, does.
    """
    _check_positive(num_steps=num_steps, num_buckets=num_buckets)
    check_fit(cluster, topology)
    plans = [plan(cluster, exchange) for exchange in topology]
    start, free, rows = np.zeros(cluster.num_workers), idle(cluster), []
    updated = np.zeros((num_buckets, cluster.num_workers))
    for step in range(num_steps):
        stages = plans[step % topology.period]
        met, done = [], [np.zeros(cluster.num_workers)]
        for ready in updated:
            met.append(meet(stages, ready))
            begun = np.maximum(ready, done[-1])
            done.append(finish(stages, job.model_bytes / num_buckets, begun, free))
        compute = job.draw(step, cluster.num_workers, seed)
        sent = updated[0]
        updated = _update(job, start, compute, done[1:])
        computed = start + compute
        waited = np.maximum(_update(job, start, compute, met)[-1], computed)
        end = np.maximum(updated[-1], computed)  # But for rounding it is the former.
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
    """Simulates averaging in groups that waits for nobody.

    The fastest worker of all triggers the groups of its step. Those who are late have
    sent what they had before, and find the sum when they come. Every so many steps all
    wait for all, in an all-reduce of models.

    Args:
      cluster: of the workers.
      job: what they do.
      topology: the groups, as `decentjax.topology.butterfly_groups` makes them.
      num_steps: T.
      sync_every: steps from one all-reduce to the next.
      seed: of the compute times.

    Raises:
      ValueError: if the topology is of another number of workers.

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
            stages = plans[step % topology.period]
            done = finish(stages, job.model_bytes, met, free)
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
    """A step, [N], of an exchange that all met for, and that was then done."""
    computed = start + compute
    waiting = np.maximum(met - computed, 0)
    exposed = np.maximum(done - computed, 0) - waiting
    return Times(start, compute, waiting, exposed, ready, done - ready)


def _update(
    job: Job, start: np.ndarray, compute: np.ndarray, arrived: list[np.ndarray]
) -> np.ndarray:
    """When each bucket is updated, [B, N], whose exchanges are done at those times."""
    moment = start + job.forward_share * compute
    part = (1 - job.forward_share) / len(arrived) * compute
    moments = []
    for there in arrived:
        moment = np.maximum(moment + part, there)
        moments.append(moment)
    return np.stack(moments)


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be positive, got {number}")
