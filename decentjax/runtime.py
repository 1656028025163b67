"""How long a step takes on a cluster: a model of compute, messages and waiting.

Shapes: T steps, N workers, M messages. Times are in seconds.

Source: our own reconstruction of the runtime model of From Promise to Practice (ICLR
2025), whose equations are not public, and the rules of WAGMA-SGD (2020).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from decentjax.contention import seats, share
from decentjax.exchange import Exchange, Groups, Permutations, Topology

Compute = Callable[[int, int, np.random.Generator], np.ndarray]
"""(step, N, random) to the seconds that each worker computes at that step, [N]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, each with as many workers, which share the node's network card.

    Worker i lives on node i // workers_per_node.

    Args:
      num_nodes: how many.
      workers_per_node: L.
      between_bytes_per_second: of a card, in each direction.
      inside_bytes_per_second: of a worker to others of its node, in each direction.
      between_latency: of a message between nodes.
      inside_latency: of a message inside a node.

    Raises:
      ValueError: if there can be no such cluster.
    """

    num_nodes: int
    workers_per_node: int = 1
    between_bytes_per_second: float
    inside_bytes_per_second: float = math.inf
    between_latency: float = 0.0
    inside_latency: float = 0.0

    def __post_init__(self):
        for name in ("num_nodes", "workers_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("between_bytes_per_second", "inside_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("between_latency", "inside_latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}"
                )

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.workers_per_node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What each worker does in a step.

    Args:
      model_bytes: that are averaged.
      compute: draws how long forward and backward pass take.
      forward_share: of the forward pass in that.

    Raises:
      ValueError: if there can be no such job.
    """

    model_bytes: float
    compute: Compute
    forward_share: float = 1 / 3

    def __post_init__(self):
        if not 0 < self.model_bytes < math.inf:
            raise ValueError(
                f"model_bytes must be positive and finite, got {self.model_bytes}"
            )
        if not 0 <= self.forward_share < 1:
            raise ValueError(
                f"forward_share must be in [0, 1), got {self.forward_share}"
            )


class Times(NamedTuple):
    """What each worker did in each step, all [T, N].

    The next step starts at start + compute + waiting + exposed.

    Args:
      start: since the begin of the first step.
      compute: of forward and backward pass.
      waiting: after that, for workers who were late; what would be left of it on a
        network that takes no time.
      exposed: after that, for messages.
      exchange: from the moment when the worker was ready to exchange until it had
        everything; most of it runs beside the computing.
    """

    start: np.ndarray
    compute: np.ndarray
    waiting: np.ndarray
    exposed: np.ndarray
    exchange: np.ndarray

    @property
    def end(self) -> np.ndarray:
        """Of each step."""
        return self.start + self.compute + self.waiting + self.exposed

    def seconds_per_step(self) -> float:
        """From the first start to the mean end of the last step, over the steps."""
        return float(self.end[-1].mean() / len(self.end))


def constant(seconds: float) -> Compute:
    """Always as long."""
    _check_mean(seconds)
    return lambda step, num_workers, random: np.full(num_workers, seconds)


def normal(seconds: float, sigma: float) -> Compute:
    """Normal with mean `seconds` and deviation `sigma * seconds`, cut off at 0."""
    _check_mean(seconds, sigma)

    def draw(step: int, num_workers: int, random: np.random.Generator) -> np.ndarray:
        del step
        return np.maximum(random.normal(seconds, sigma * seconds, num_workers), 0)

    return draw


def gamma(seconds: float, sigma: float) -> Compute:
    """Gamma with mean `seconds` and deviation `sigma * seconds`."""
    _check_mean(seconds, sigma)
    if sigma == 0:
        return constant(seconds)

    def draw(step: int, num_workers: int, random: np.random.Generator) -> np.ndarray:
        del step
        return random.gamma(sigma**-2, seconds * sigma**2, num_workers)

    return draw


def log_normal(seconds: float, sigma: float) -> Compute:
    """Log-normal with mean `seconds` and deviation `sigma * seconds`."""
    _check_mean(seconds, sigma)
    variance = math.log1p(sigma**2)
    middle = math.log(seconds) - variance / 2

    def draw(step: int, num_workers: int, random: np.random.Generator) -> np.ndarray:
        del step
        return random.lognormal(middle, math.sqrt(variance), num_workers)

    return draw


def delayed(compute: Compute, count: int, seconds: float) -> Compute:
    """Some workers, drawn anew at each step, take so much longer."""
    if count < 0 or not 0 <= seconds < math.inf:
        raise ValueError(
            f"count and seconds must not be negative, got {count} and {seconds}"
        )

    def draw(step: int, num_workers: int, random: np.random.Generator) -> np.ndarray:
        times = compute(step, num_workers, random)
        late = random.choice(num_workers, min(count, num_workers), replace=False)
        times[late] += seconds
        return times

    return draw


def trace(seconds: np.ndarray) -> Compute:
    """As measured, [T, N]; after the last step again from the first."""
    seconds = np.array(seconds, float)
    if seconds.ndim != 2 or not seconds.size or not (seconds >= 0).all():
        raise ValueError(
            f"a trace is [T, N], of times that are not negative, got {seconds.shape}"
        )

    def draw(step: int, num_workers: int, random: np.random.Generator) -> np.ndarray:
        del random
        if num_workers != seconds.shape[1]:
            raise ValueError(
                f"the trace is of {seconds.shape[1]} workers, the cluster has "
                f"{num_workers}"
            )
        return seconds[step % len(seconds)].copy()

    return draw


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
    _check_steps(num_steps)
    seconds = all_reduce_seconds(cluster, job.model_bytes) / num_buckets
    start, rows = np.zeros(cluster.num_workers), []
    for step in range(num_steps):
        compute = _draw(job, step, cluster.num_workers, seed)
        first = start + job.forward_share * compute
        ready, end = start, -math.inf
        for bucket in range(1, num_buckets + 1):
            share_done = bucket / num_buckets
            ready = first + (1 - job.forward_share) * share_done * compute
            end = max(end, float(ready.max())) + seconds
        waiting = ready.max() - (start + compute)
        exposed = np.full_like(start, end - ready.max())
        rows.append((start, compute, waiting, exposed, end - first))
        start = np.full_like(start, end)
    return Times(*map(np.stack, zip(*rows, strict=True)))


def all_reduce_seconds(cluster: Cluster, num_bytes: float) -> float:
    """Returns the time of an all-reduce on a ring through all nodes.

    2 (N - 1) / N of the bytes leave each worker, and each card; each of the 2 (N - 1)
    rounds has the latency of its slowest message.
    """
    share_sent = 2 * (cluster.num_workers - 1) / cluster.num_workers * num_bytes
    rates, latencies = [math.inf], [0.0]
    if cluster.num_nodes > 1:
        rates.append(cluster.between_bytes_per_second)
        latencies.append(cluster.between_latency)
    if cluster.workers_per_node > 1:
        rates.append(cluster.inside_bytes_per_second)
        latencies.append(cluster.inside_latency)
    return share_sent / min(rates) + 2 * (cluster.num_workers - 1) * max(latencies)


def decentralized(
    cluster: Cluster,
    job: Job,
    topology: Topology,
    num_steps: int,
    seed: int = 0,
    hidden: bool = True,
) -> Times:
    """Simulates neighbour averaging.

    A message starts when both its ends are ready, and those that share a card share its
    bandwidth. The models of step t leave when the step starts, beside the gradient, and
    are needed at its end; or, where they are not hidden, leave at its end.

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
    _check_steps(num_steps)
    _check_fit(cluster, topology)
    plans = [_plan(cluster, exchange) for exchange in topology]
    start, rows = np.zeros(cluster.num_workers), []
    for step in range(num_steps):
        compute = _draw(job, step, cluster.num_workers, seed)
        computed = start + compute
        ready = start if hidden else computed
        plan = plans[step % topology.period]
        met = _exchange(plan, job.model_bytes, ready, free=True)
        done = _exchange(plan, job.model_bytes, ready)
        waiting = np.maximum(met - computed, 0)
        exposed = np.maximum(done - computed, 0) - waiting
        rows.append((start, compute, waiting, exposed, done - ready))
        start = np.maximum(computed, done)
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
    _check_steps(num_steps)
    _check_fit(cluster, topology)
    if sync_every < 1:
        raise ValueError(f"sync_every must be positive, got {sync_every}")
    plans = [_plan(cluster, exchange) for exchange in topology]
    whole = all_reduce_seconds(cluster, job.model_bytes)
    start, rows = np.zeros(cluster.num_workers), []
    for step in range(num_steps):
        compute = _draw(job, step, cluster.num_workers, seed)
        computed = start + compute
        if (step + 1) % sync_every == 0:
            met = np.full_like(start, computed.max())
            done = met + whole
        else:
            met = np.full_like(start, computed.min())
            done = _exchange(plans[step % topology.period], job.model_bytes, met)
        waiting = np.maximum(met - computed, 0)
        exposed = np.maximum(done - computed, 0) - waiting
        rows.append((start, compute, waiting, exposed, np.maximum(done - computed, 0)))
        start = np.maximum(computed, done)
    return Times(*map(np.stack, zip(*rows, strict=True)))


def exchange_seconds(cluster: Cluster, topology: Topology, num_bytes: float) -> float:
    """Returns the mean time of an exchange for which all are ready at once.

    Raises:
      ValueError: if the topology is of another number of workers.
    """
    _check_fit(cluster, topology)
    ready = np.zeros(cluster.num_workers)
    ends = [
        _exchange(_plan(cluster, exchange), num_bytes, ready).max()
        for exchange in topology
    ]
    return float(np.mean(ends))


class _Messages(NamedTuple):
    """Messages of one kind, inside nodes or between them; M of them.

    Args:
      chosen: their numbers among those of the stage.
      sending: numbers of each card's messages that it sends, see `seats`.
      receiving: numbers of those that it gets.
      rate: bytes per second of a card.
      latency: of a message.
    """

    chosen: np.ndarray
    sending: np.ndarray
    receiving: np.ndarray
    rate: float
    latency: float


class _Stage(NamedTuple):
    """A part of an exchange: who has to be ready together, and what they then send.

    Args:
      together: workers, [S, groups]: messages start when all of the group are ready,
        and the group has everything when all of its messages are through.
      share: of the model's bytes, in each message.
      rounds: of latency.
      kinds: the messages; of each group as many, [messages of a group, groups].
    """

    together: np.ndarray
    share: float
    rounds: int
    kinds: tuple[_Messages, ...]


def _plan(cluster: Cluster, exchange: Exchange) -> tuple[_Stage, ...]:
    """The stages of an exchange, in levels, as the library sends them.

    Half a mean inside each node, a part of the model of each worker between nodes, the
    other half of the mean.
    """
    local = exchange.workers_per_node
    between = exchange.between
    if isinstance(between, Groups):
        groups = _spread(np.array(between.members).T, local)
        size = len(groups)
        middle = _ring(cluster, groups, 2 * (1 - 1 / size) / local, 2 * (size - 1))
    else:
        pairs = _spread(_edges(between), local)
        middle = _Stage(pairs, 1 / local, 1, _kinds(cluster, *pairs))
    if local == 1:
        return (middle,)
    nodes = np.arange(exchange.num_workers).reshape(-1, local).T
    half = _ring(cluster, nodes, 1 - 1 / local, local - 1)
    return half, middle, half


def _ring(cluster: Cluster, groups: np.ndarray, share: float, rounds: int) -> _Stage:
    """Each member sends to the next one."""
    if len(groups) == 1:
        return _Stage(groups, 0.0, 0, ())
    receivers = np.roll(groups, -1, axis=0)
    kinds = _kinds(cluster, groups.ravel(), receivers.ravel())
    return _Stage(groups, share, rounds, kinds)


def _kinds(
    cluster: Cluster, senders: np.ndarray, receivers: np.ndarray
) -> tuple[_Messages, ...]:
    per_node = cluster.workers_per_node
    crossing = senders // per_node != receivers // per_node
    inside, outside = np.flatnonzero(~crossing), np.flatnonzero(crossing)
    kinds = (
        _Messages(
            inside,
            seats(senders[inside]),
            seats(receivers[inside]),
            cluster.inside_bytes_per_second,
            cluster.inside_latency,
        ),
        _Messages(
            outside,
            seats(senders[outside] // per_node),
            seats(receivers[outside] // per_node),
            cluster.between_bytes_per_second,
            cluster.between_latency,
        ),
    )
    return tuple(kind for kind in kinds if len(kind.chosen))


def _exchange(
    plan: tuple[_Stage, ...], num_bytes: float, ready: np.ndarray, free: bool = False
) -> np.ndarray:
    """When each worker has everything; on a free network messages take no time."""
    for stage in plan:
        begun = ready[stage.together].max(0)
        through = begun
        if not free and stage.kinds:
            through = _deliver(stage, num_bytes, begun)
        ready = np.array(ready)
        for members in stage.together:
            np.maximum.at(ready, members, through)
    return ready


def _deliver(stage: _Stage, num_bytes: float, begun: np.ndarray) -> np.ndarray:
    """When all messages of a group are through, at both ends, [groups].

    A card shares what it sends, and shares what it gets.
    """
    number = sum(len(kind.chosen) for kind in stage.kinds)
    starts = np.tile(begun, number // len(begun))
    through = np.array(starts)
    for kind in stage.kinds:
        first = starts[kind.chosen]
        seconds = np.full(len(first), stage.share * num_bytes / kind.rate)
        both = (
            share(first, seconds, table) for table in (kind.sending, kind.receiving)
        )
        through[kind.chosen] = np.maximum(*both) + stage.rounds * kind.latency
    return through.reshape(-1, len(begun)).max(0)


def _edges(between: Permutations) -> np.ndarray:
    """Sender and receiver of each message, [2, M]."""
    sources = np.array(between.sources)
    receivers = np.broadcast_to(np.arange(between.size), sources.shape)
    moving = sources != receivers
    code = np.unique(sources[moving] * between.size + receivers[moving])
    return np.stack(np.divmod(code, between.size))


def _spread(nodes: np.ndarray, local: int) -> np.ndarray:
    """The same among the workers of those nodes, each with those of its place."""
    places = np.arange(local)
    return (nodes[:, :, None] * local + places).reshape(len(nodes), -1)


def _draw(job: Job, step: int, num_workers: int, seed: int) -> np.ndarray:
    times = job.compute(step, num_workers, np.random.default_rng((seed, step)))
    if times.shape != (num_workers,) or not (times >= 0).all():
        raise ValueError(f"compute times must be [N] and not negative, got {times}")
    return times


def _check_mean(seconds: float, sigma: float = 0.0) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"compute takes a positive time, got {seconds} s")
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma must not be negative, got {sigma}")


def _check_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"num_steps must be positive, got {num_steps}")


def _check_fit(cluster: Cluster, topology: Topology) -> None:
    if topology.num_workers != cluster.num_workers:
        raise ValueError(
            f"{topology.name} is of {topology.num_workers} workers, the cluster has "
            f"{cluster.num_workers}"
        )
