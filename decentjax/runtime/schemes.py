"""How long a step takes on a cluster: a model of compute, messages and waiting.

Shapes: T steps, N workers. Times are in seconds.

Source: our own reconstruction of the runtime model of From Promise to Practice (ICLR
2025), whose equations are not public, and the rules of WAGMA-SGD (2020).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from decentjax._rounds.schedule import Schedule
from decentjax.exchange import Exchange, Topology
from decentjax.runtime.cluster import (
    Cluster,
    all_reduce_seconds,
    check_positive,
    finish,
    meet,
    plans,
)
from decentjax.runtime.job import Job

Instants = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
StepTimes = Callable[[int, np.ndarray, np.ndarray], Instants]
"""Maps (step, starts [N], compute times [N]) to four instants of each worker, [N].

They are: ready for the exchange that the step needs; everything received; parameters
updated if messages took no time; parameters updated.
"""


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

    Examples:
      >>> from decentjax import runtime
      >>> cluster = runtime.Cluster(num_nodes=4, between_bytes_per_second=1e9)
      >>> job = runtime.Job(model_bytes=100e6, compute=runtime.constant(0.1))
      >>> times = runtime.all_reduce(cluster, job, num_steps=10)
      >>> round(times.seconds_per_step(), 3)
      0.19
    """
    check_positive(num_buckets=num_buckets)
    seconds = all_reduce_seconds(cluster, job.model_bytes) / num_buckets
    # The share of the backward pass after which each bucket is ready, [B, 1].
    shares = np.arange(1, num_buckets + 1)[:, None] / num_buckets

    def scheme(step: int, start: np.ndarray, compute: np.ndarray) -> Instants:
        first = start + job.forward_share * compute
        ready = first + (1 - job.forward_share) * shares * compute
        end = -math.inf
        for slowest in ready.max(1):
            end = max(end, slowest) + seconds
        done = np.full_like(start, end)
        return ready[0], done, np.full_like(start, ready[-1].max()), done

    return _simulate(cluster, job, num_steps, seed, scheme)


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

    Examples:
      >>> from decentjax import runtime, topology
      >>> cluster = runtime.Cluster(num_nodes=4, between_bytes_per_second=1e9)
      >>> job = runtime.Job(model_bytes=100e6, compute=runtime.constant(0.1))
      >>> times = runtime.in_step(cluster, job, topology.one_peer_ring(4), num_steps=10)
      >>> round(times.seconds_per_step(), 3)
      0.1
    """
    planned = plans(cluster, topology)
    free = np.zeros(cluster.num_nodes)

    def scheme(step: int, start: np.ndarray, compute: np.ndarray) -> Instants:
        # Mixed are the models of the start of the step or, if not hidden, those after
        # the local update.
        ready = start if hidden else start + compute
        legs = planned[step % topology.period]
        met = meet(legs, ready)
        done = finish(legs, job.model_bytes, ready, free)
        return ready, done, met, done

    return _simulate(cluster, job, num_steps, seed, scheme)


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

    Examples:
      >>> from decentjax import runtime, topology
      >>> cluster = runtime.Cluster(num_nodes=4, between_bytes_per_second=1e9)
      >>> job = runtime.Job(model_bytes=200e6, compute=runtime.constant(0.1))
      >>> ring = topology.one_peer_ring(4)
      >>> times = runtime.background(cluster, job, ring, num_steps=10)
      >>> round(float(times.exposed[-1].mean()), 3)
      0.1

    Source: the code of From Promise to Practice (ICLR 2025), Decent-DP.
    """
    check_positive(num_buckets=num_buckets)
    planned = plans(cluster, topology)
    free = np.zeros(cluster.num_nodes)
    updated = np.zeros((num_buckets, cluster.num_workers))

    def scheme(step: int, start: np.ndarray, compute: np.ndarray) -> Instants:
        nonlocal updated
        legs = planned[step % topology.period]
        sent, met, done = updated, [], [np.zeros(cluster.num_workers)]
        for ready in sent:
            met.append(meet(legs, ready))
            # One thread sends: a bucket starts after the exchange of the bucket before.
            begun = np.maximum(ready, done[-1])
            done.append(finish(legs, job.model_bytes / num_buckets, begun, free))
        updated = _update(job, start, compute, done[1:])
        # Step t needs the exchange that started inside step t - 1: `sent` may be before
        # `start`, and only what is left of it at the end of the compute is exposed.
        return sent[0], done[-1], _update(job, start, compute, met)[-1], updated[-1]

    return _simulate(cluster, job, num_steps, seed, scheme)


def rounds(
    cluster: Cluster,
    job: Job,
    schedule: Schedule,
    num_steps: int,
    seed: int = 0,
    hidden: bool = True,
) -> Times:
    """Simulates rounds of communication, which begin in some of the steps.

    A round with delay 0 is sent at the end of its step, which waits for it. One with
    delay d is sent at the start of step t, and needed at the end of step t + d - 1; if
    not hidden, where that step starts. Messages share cards as in `in_step`.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times; of several fragments each is an equal part of
        the model.
      schedule: the rounds, `Rounds(...).schedule`.
      num_steps: number of steps, T.
      seed: seed of the compute times.
      hidden: whether messages run beside the gradient of the step that merges them.

    Raises:
      ValueError: if the schedule has another number of workers.

    Examples:
      >>> from decentjax import Rounds, runtime, topology
      >>> cluster = runtime.Cluster(num_nodes=4, between_bytes_per_second=1e8)
      >>> job = runtime.Job(model_bytes=100e6, compute=runtime.constant(0.1))
      >>> plan = Rounds(topology.complete(4), every=50).schedule
      >>> round(runtime.rounds(cluster, job, plan, num_steps=100).seconds_per_step(), 3)
      0.13
    """
    exchanges = {one.exchange for one in schedule.rounds if one.exchange is not None}
    legs = {one: plans(cluster, Topology("one", (one,)))[0] for one in exchanges}
    part = job.model_bytes / len(schedule.fragments)
    free = np.zeros(cluster.num_nodes)
    under_way: dict[int, Instants] = {}  # By the step that merges.

    def send(exchange: Exchange, ready: np.ndarray) -> Instants:
        met = meet(legs[exchange], ready)
        done = finish(legs[exchange], part, ready, free)
        return ready, done, met, done

    def scheme(step: int, start: np.ndarray, compute: np.ndarray) -> Instants:
        begun = schedule[step].sends
        exchange = None if begun is None else begun.exchange
        if exchange is not None and schedule.delay == 0:
            return send(exchange, start + compute)
        if exchange is not None:
            under_way[step + schedule.delay - 1] = send(exchange, start)
        if step not in under_way:
            return start, start, start, start
        ready, received, *ends = under_way.pop(step)
        rest = 0.0 if hidden else compute
        met, done = (np.maximum(end, start) + rest for end in ends)
        return ready, received, met, done

    return _simulate(cluster, job, num_steps, seed, scheme)


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

    Examples:
      >>> from decentjax import runtime, topology
      >>> cluster = runtime.Cluster(num_nodes=8, between_bytes_per_second=1e9)
      >>> late = runtime.delayed(runtime.constant(0.1), count=1, seconds=0.3)
      >>> job = runtime.Job(model_bytes=1e6, compute=late)
      >>> groups = topology.butterfly_groups(8)
      >>> times = runtime.wait_avoiding(cluster, job, groups, 100, sync_every=10)
      >>> round(times.seconds_per_step(), 2)
      0.19

    Source: Li et al., WAGMA-SGD (2020), section 3.
    """
    check_positive(sync_every=sync_every)
    planned = plans(cluster, topology)
    whole = all_reduce_seconds(cluster, job.model_bytes)
    free = np.zeros(cluster.num_nodes)

    def scheme(step: int, start: np.ndarray, compute: np.ndarray) -> Instants:
        computed = start + compute
        if (step + 1) % sync_every == 0:
            met = np.full_like(start, computed.max())
            done = met + whole
        else:
            # The fastest worker triggers the exchange; all others join at once.
            met = np.full_like(start, computed.min())
            legs = planned[step % topology.period]
            done = finish(legs, job.model_bytes, met, free)
        # A late worker has its own model, and receives the sum, at the later moment.
        return computed, np.maximum(computed, done), met, done

    return _simulate(cluster, job, num_steps, seed, scheme)


def _simulate(
    cluster: Cluster, job: Job, num_steps: int, seed: int, scheme: StepTimes
) -> Times:
    """Plays steps one after the other, each from the ends of the one before."""
    check_positive(num_steps=num_steps)
    start, rows = np.zeros(cluster.num_workers), []
    for step in range(num_steps):
        compute = job.draw(step, cluster.num_workers, seed)
        sent, received, met, done = scheme(step, start, compute)
        computed = start + compute
        # A scheme may add up the same durations in another order than `start + compute`
        # does; the maxima keep rounding errors from becoming negative durations.
        waited = np.maximum(met, computed)
        end = np.maximum(done, computed)
        exposed = np.maximum(end - waited, 0)
        row = start, compute, waited - computed, exposed, sent, received - sent
        rows.append(row)
        start = end
    return Times(*map(np.stack, zip(*rows, strict=True)))


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
