"""All-reduce beside each topology: step times, traffic, and which one to choose."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from decentjax import Topology, analysis
from decentjax import topology as topologies
from train.advise.setting import Overlap, Setting
from train.config import TopologyConfig, WorkersConfig
from train.config.graph import MOST_WORKERS, graph_names
from train.fields import place_of
from train.network import duration

MOST_FOR_CONSENSUS = 1024  # It is the norm of an N x N matrix.
WORTH = 1.05  # Smallest speed-up for which decentralized training is advised.
AS_FAST = 1.02  # Topologies within that factor of the fastest: consensus decides.
# Numbers of peers, where the default would repeat another graph.
DEGREES = {"base_k": 1, "ring_lattice": 4}
# A config has a topology too, which must fit the workers; this one fits any.
ALL_REDUCE = "--method all_reduce --topology.name complete"


class Prediction(NamedTuple):
    """What a step of a scheme takes and sends, averaged over steps and workers.

    Args:
      name: name of the scheme.
      flags: options of `decentjax train` that select it.
      step: seconds of a step.
      compute: seconds of compute in a step.
      exposed: seconds of a step spent on messages that nothing hides.
      waiting: seconds of a step spent waiting for other workers.
      speed_up: speed-up over all-reduce.
      messages: messages per step of the busiest worker.
      worker_bytes: bytes per step that the busiest worker sends.
      node_bytes: bytes per step over the busiest node's card, in each direction.
      consensus_factor: factor on the consensus distance per step; None if N is too
        large to compute it.
      consensus_factor_per_second: the same factor per second.
      exact_after: number of steps after which every worker has the exact mean.
      exchange: seconds of an exchange that all workers start at the same time.
      omega: that time over the time of an all-reduce.
    """

    name: str
    flags: str
    step: float
    compute: float
    exposed: float
    waiting: float
    speed_up: float
    messages: float
    worker_bytes: float
    node_bytes: float
    consensus_factor: float | None
    consensus_factor_per_second: float | None
    exact_after: int | None
    exchange: float
    omega: float

    @property
    def reaches_consensus(self) -> bool:
        return self.consensus_factor is None or self.consensus_factor < 1 - 1e-9

    @property
    def to_consensus(self) -> float:
        """Seconds after which the consensus distance is a tenth."""
        if self.consensus_factor is None or not self.reaches_consensus:
            return math.inf
        if self.exact_after is not None:
            return self.exact_after * self.step
        return self.step * math.log(0.1) / math.log(self.consensus_factor)


class Advice(NamedTuple):
    """Which scheme to use, and why.

    Args:
      choice: the scheme.
      other: the scheme it was compared with: all-reduce, or the best topology if
        all-reduce is the choice; None if there is no other.
      reason: sentences for people.
    """

    choice: Prediction
    other: Prediction | None
    reason: str


class Findings(NamedTuple):
    """The predictions, and the advice.

    Args:
      setting: the question.
      gamma: time of an all-reduce over the mean compute time.
      sigma: standard deviation of the compute times over their mean.
      rows: predictions for all-reduce and for each topology that fits.
      topologies: topologies that fit, in the order of their rows.
      unfit: reasons why the other topologies do not fit, by name.
      advice: the choice.
    """

    setting: Setting
    gamma: float
    sigma: float
    rows: list[Prediction]
    topologies: list[Topology]
    unfit: dict[str, str]
    advice: Advice


def compare(
    setting: Setting,
    num_steps: int,
    seed: int,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Findings:
    """Simulates all-reduce and each topology that fits.

    Args:
      setting: the question.
      num_steps: number of simulated steps.
      seed: seed of the compute times.
      progress: wrapper of the iteration that shows how far it is.

    Raises:
      ValueError: if there are no steps, or too many workers.
    """
    if num_steps < 1:
        raise ValueError(f"steps must be positive, got {num_steps}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    cluster = setting.cluster
    fit, unfit = fitting(cluster.num_workers, cluster.workers_per_node, setting.own)
    row = functools.partial(predict, setting, num_steps, seed)
    baseline = row()
    rows = [row(config, topology, baseline.step) for config, topology in progress(fit)]
    gamma, sigma = setting.gamma_and_sigma(num_steps, seed)
    return Findings(
        setting=setting,
        gamma=gamma,
        sigma=sigma,
        rows=[baseline, *rows],
        topologies=[topology for _, topology in fit],
        unfit=unfit,
        advice=advise(baseline, rows),
    )


def candidates(num_workers: int, workers_per_node: int) -> list[TopologyConfig]:
    """Returns the topologies to compare, whether they fit the workers or not."""
    # Of "alone" models never agree.
    names = set(graph_names()) - {"alone", "hierarchical"}
    configs = [
        TopologyConfig(name=name, degree=DEGREES.get(name, 2)) for name in sorted(names)
    ]
    if 1 < workers_per_node < num_workers:
        between = "one_peer_ring", "one_peer_exponential", "complete"
        configs += [TopologyConfig(name="hierarchical", between=b) for b in between]
    return configs


def fitting(
    num_workers: int, workers_per_node: int, own: Sequence[TopologyConfig] = ()
) -> tuple[list[tuple[TopologyConfig, Topology]], dict[str, str]]:
    """Returns the candidates that fit the workers, and why the others do not.

    Args:
      num_workers: number of workers, N.
      workers_per_node: number of workers per node, L.
      own: topologies to compare in addition to the candidates.

    Raises:
      ValueError: if there are too many workers.
    """
    if num_workers > MOST_WORKERS:
        raise ValueError(
            f"advice is for up to {MOST_WORKERS:,} workers, got {num_workers:,}; "
            "decentjax.runtime simulates more"
        )
    workers = WorkersConfig(num_workers=num_workers, workers_per_node=workers_per_node)
    fit, unfit = [], {}
    wanted = [*candidates(num_workers, workers_per_node), *own]
    # Unique by name: configs that differ in options of other topologies are the same.
    for config in {_name(config): config for config in wanted}.values():
        try:
            fit.append((config, config.build(workers)))
        except ValueError as error:
            unfit[_name(config)] = str(error)
    return fit, unfit


def predict(
    setting: Setting,
    num_steps: int,
    seed: int,
    config: TopologyConfig | None = None,
    topology: Topology | None = None,
    all_reduce_step: float | None = None,
) -> Prediction:
    """Returns the row of a topology, or that of all-reduce, which has none.

    Args:
      setting: the question.
      num_steps: number of simulated steps that count.
      seed: seed of the compute times.
      config: config of the topology, for its name and options.
      topology: the topology.
      all_reduce_step: seconds of a step of all-reduce, for the speed-up.
    """
    cluster, job = setting.cluster, setting.job
    # All-reduce sends and agrees as one exchange in which all average with all.
    sends = topology or topologies.complete(cluster.num_workers)
    # Whole periods. The first tenth is left out: all workers start at the same time
    # there, and it takes some steps until their lateness has spread.
    period = sends.period
    skipped = period * math.ceil(num_steps / 10 / period)
    total = skipped + period * math.ceil(num_steps / period)
    times = setting.simulate(topology, total, seed)
    step = times.seconds_per_step(skipped)
    parts = (times.compute, times.exposed, times.waiting)
    compute, exposed, waiting = (float(x[skipped:].mean()) for x in parts)
    sent = analysis.traffic(sends, job.model_bytes, cluster.workers_per_node)
    # The mean over the period first: each exchange may have another busiest worker.
    messages, worker_bytes, node_bytes = (
        float(np.mean([getattr(x, name) for x in sent], axis=0).max())
        for name in ("messages", "worker_bytes", "node_bytes")
    )
    factor = exact_after = None
    if cluster.num_workers <= MOST_FOR_CONSENSUS:
        exact_after = analysis.exact_after(sends)
        exact = exact_after is not None
        # Rounding would leave 1e-17 of an exact mean, whose logarithm is finite.
        factor = 0.0 if exact else analysis.consensus_factor(sends) ** (1 / period)
    return Prediction(
        name="all-reduce" if config is None else _name(config),
        flags=ALL_REDUCE if config is None else _flags(config, setting.overlap),
        step=step,
        compute=compute,
        exposed=exposed,
        waiting=waiting,
        speed_up=1.0 if all_reduce_step is None else all_reduce_step / step,
        messages=messages,
        worker_bytes=worker_bytes,
        node_bytes=node_bytes,
        consensus_factor=factor,
        consensus_factor_per_second=None if factor is None else factor ** (1 / step),
        exact_after=exact_after,
        exchange=setting.exchange_seconds(topology),
        omega=setting.omega(topology),
    )


def advise(baseline: Prediction, rows: list[Prediction]) -> Advice:
    """Returns the choice: of the fastest topologies the one nearest to consensus."""
    if not any(row.messages for row in rows):
        return Advice(baseline, None, "There is one worker, and nothing to average.")
    # Fast because it sends too little to train one model.
    rows = [row for row in rows if row.reaches_consensus]
    fastest = min(rows, key=lambda row: row.step)
    if fastest.speed_up < WORTH:
        return Advice(baseline, fastest, _why_stay(baseline, fastest))
    # Differences this small are noise of the simulation.
    near = [
        row
        for row in rows
        if row.step <= AS_FAST * fastest.step and row.speed_up >= WORTH
    ]
    best = min(near, key=lambda row: (row.to_consensus, row.step))
    return Advice(best, baseline, _why_go(baseline, best, len(near)))


def _why_go(baseline: Prediction, best: Prediction, num_near: int) -> str:
    times = (best.step, baseline.step, baseline.exposed, baseline.waiting)
    step, instead, exposed, waiting = map(duration, times)
    sentences = [
        f"A step takes {step} instead of {instead}. A step of all-reduce has {exposed} "
        f"of exposed communication and {waiting} of waiting for the slowest worker; "
        f"here they are {duration(best.exposed)} and {duration(best.waiting)}."
    ]
    if num_near > 1 and best.consensus_factor is not None:
        sentences.append(
            f"Of the {num_near} topologies within {AS_FAST - 1:.0%} of the fastest, "
            "this one first brings models to a tenth of their distance."
        )
    return " ".join(sentences)


def _why_stay(baseline: Prediction, best: Prediction) -> str:
    share = baseline.compute / baseline.step
    what = (
        f"compute takes {share:.0%} of a step of all-reduce, so the speed-up is at "
        f"most {baseline.step / baseline.compute:.2f}x"
        if baseline.step < WORTH * baseline.compute
        else f"an exchange takes {best.omega:.2f} of the time of an all-reduce; "
        f"{duration(best.exposed)} of it are exposed, and {duration(best.waiting)} are "
        "waiting for other workers"
    )
    return (
        f"No topology is {WORTH - 1:.0%} faster (the best, {best.name}, is "
        f"{best.speed_up:.2f}x as fast): {what}. All-reduce averages exactly, so keep "
        "it."
    )


def _options(config: TopologyConfig) -> list[str]:
    """Returns the fields on which the topology depends, by its function's signature."""
    if config.make is not None:
        return []
    parameters = inspect.signature(getattr(topologies, config.name)).parameters
    return [name for name in parameters if hasattr(config, name)]


def _name(config: TopologyConfig) -> str:
    values = (getattr(config, option) for option in _options(config))
    options = [str(value) for value in values if value is not None]
    name = config.name if config.make is None else place_of(config.make)
    name = f"{name} ({', '.join(options)})" if options else name
    if config.factor != 1:
        name = f"{name}, damped by {config.factor:g}"
    if config.mean_every is not None:
        name = f"{name}, mean every {config.mean_every}"
    return name


def _flags(config: TopologyConfig, overlap: Overlap) -> str:
    """Returns the options with which any config trains with this topology."""
    where = "background" if overlap == "background" else "in_step"
    own = [] if config.make is None else [f"--topology {place_of(config.make)}"]
    options = [
        f"--topology.{option.replace('_', '-')} {getattr(config, option)}"
        for option in ("name", *_options(config), "factor", "mean_every")
        if option != "name" or config.make is None
    ]
    return " ".join([f"--method awc --exchange {where}", *own, *options])
