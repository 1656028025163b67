"""All-reduce beside each topology: what a step takes, what it sends, what to choose."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from decentjax import Topology, analysis
from decentjax.topology import complete
from train.advise.quantities import duration
from train.advise.setting import Overlap, Setting
from train.config import TopologyConfig, WorkersConfig

MOST_WORKERS = 4096  # Some graphs are built as a matrix of all of them.
MOST_FOR_CONSENSUS = 1024  # The norm of such a matrix takes longer.
OPTIONS = {
    "base_k": ("degree",),
    "butterfly_groups": ("group_size",),
    "hierarchical": ("between",),
    "random_matching": ("period", "seed"),
    "ring_lattice": ("degree",),
}
WORTH = 1.05  # The speed-up from which on decentralized training is advised.
AS_FAST = 1.02  # Within that of the fastest, consensus decides.


class Row(NamedTuple):
    """What a step of a scheme takes and sends, in the mean over steps and workers.

    Args:
      name: of the scheme.
      flags: that train with it.
      step: seconds.
      compute: seconds of that.
      exposed: seconds of that, for messages that nothing hides.
      waiting: seconds of that, for others.
      speed_up: over all-reduce.
      messages: that the busiest worker sends in a step.
      worker_bytes: that the busiest worker sends in a step.
      node_bytes: that cross the busiest node's card in a step, in each direction.
      consensus_factor: on the consensus distance, for each step; None where N is too
        large to say.
      consensus_factor_per_second: likewise.
      exact_after: steps, where every worker then has the exact mean.
      exchange: seconds of an exchange for which all are ready at once.
      omega: that over the time of an all-reduce.
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
    def comes_to_consensus(self) -> bool:
        return self.consensus_factor is None or self.consensus_factor < 1 - 1e-9

    @property
    def to_consensus(self) -> float:
        """Seconds in which the consensus distance falls to a tenth."""
        if self.consensus_factor is None or not self.comes_to_consensus:
            return math.inf
        if self.exact_after is not None:
            return self.exact_after * self.step
        return self.step * math.log(0.1) / math.log(self.consensus_factor)


class Advice(NamedTuple):
    """What to do, and why.

    Args:
      choice: the scheme.
      other: what it was compared with: all-reduce, or the best topology where
        all-reduce is the choice; None if there is no other.
      reason: in sentences.
    """

    choice: Row
    other: Row | None
    reason: str


class Findings(NamedTuple):
    """All that was found.

    Args:
      setting: that was asked about.
      gamma: time of an all-reduce over the mean compute time.
      sigma: deviation of the compute times over their mean.
      rows: all-reduce, and the topologies that fit.
      topologies: of the latter, in their order.
      unfit: names of the others, and why they do not.
      advice: what to do.
    """

    setting: Setting
    gamma: float
    sigma: float
    rows: list[Row]
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
      setting: that is asked about.
      num_steps: that are simulated.
      seed: of the compute times.
      progress: told how far it is.

    Raises:
      ValueError: if there are no steps, or too many workers.
    """
    if num_steps < 1:
        raise ValueError(f"steps must be positive, got {num_steps}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    cluster = setting.cluster
    fit, unfit = fitting(cluster.num_workers, cluster.workers_per_node, setting.own)
    baseline = all_reduce_row(setting, num_steps, seed)
    rows = [
        topology_row(setting, config, topology, baseline, num_steps, seed)
        for config, topology in progress(fit)
    ]
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
    """Returns each topology that is worth a look, whether it fits or not."""
    root = 2 ** max(1, round(math.log2(num_workers) / 2))
    configs = [
        TopologyConfig(name="ring"),
        TopologyConfig(name="one_peer_ring"),
        TopologyConfig(name="torus"),
        TopologyConfig(name="exponential"),
        TopologyConfig(name="one_peer_exponential"),
        TopologyConfig(name="hypercube"),
        TopologyConfig(name="base_k", degree=1),
        TopologyConfig(name="butterfly_groups", group_size=root),
        TopologyConfig(name="complete"),
    ]
    if workers_per_node > 1:
        configs.append(TopologyConfig(name="alternating_exponential_ring"))
        between = "one_peer_ring", "one_peer_exponential", "complete"
        configs += [TopologyConfig(name="hierarchical", between=b) for b in between]
    return configs


def fitting(
    num_workers: int, workers_per_node: int, own: Sequence[TopologyConfig] = ()
) -> tuple[list[tuple[TopologyConfig, Topology]], dict[str, str]]:
    """Returns the candidates that fit the workers, and of the others, why not.

    Args:
      num_workers: N.
      workers_per_node: L.
      own: other topologies to look at.

    Raises:
      ValueError: if there are too many to look at.
    """
    if num_workers > MOST_WORKERS:
        raise ValueError(
            f"advice is for up to {MOST_WORKERS:,} workers, got {num_workers:,}; "
            "decentjax.runtime simulates more"
        )
    workers = WorkersConfig(num_workers=num_workers, workers_per_node=workers_per_node)
    fit, unfit = [], {}
    wanted = [*candidates(num_workers, workers_per_node), *own]
    # By name, which leaves out options that are of other topologies.
    for config in {_name(config): config for config in wanted}.values():
        try:
            fit.append((config, config.build(workers)))
        except ValueError as error:
            unfit[_name(config)] = str(error)
    return fit, unfit


def all_reduce_row(setting: Setting, num_steps: int, seed: int) -> Row:
    """Returns the row to which all others are compared."""
    topology = complete(setting.cluster.num_workers)
    # A config has a topology too, which must fit the workers; this one fits any.
    flags = "--step.algorithm all_reduce --topology.name complete"
    return _row(setting, None, topology, num_steps, seed)._replace(
        name="all-reduce", flags=flags
    )


def topology_row(
    setting: Setting,
    config: TopologyConfig,
    topology: Topology,
    baseline: Row,
    num_steps: int,
    seed: int,
) -> Row:
    """Returns the row of a topology."""
    row = _row(setting, topology, topology, num_steps, seed)
    return row._replace(
        name=_name(config),
        flags=_flags(config, setting.overlap),
        speed_up=baseline.step / row.step,
    )


def advise(baseline: Row, rows: list[Row]) -> Advice:
    """Returns the choice: of the fastest topologies the one that agrees soonest."""
    if not any(row.messages for row in rows):
        return Advice(baseline, None, "There is one worker, and nothing to average.")
    rows = [row for row in rows if row.comes_to_consensus]
    fastest = min(rows, key=lambda row: row.step)
    if fastest.speed_up < WORTH:
        return Advice(baseline, fastest, _why_stay(baseline, fastest))
    near = [
        row
        for row in rows
        if row.step <= AS_FAST * fastest.step and row.speed_up >= WORTH
    ]
    best = min(near, key=lambda row: (row.to_consensus, row.step))
    return Advice(best, baseline, _why_go(baseline, best, len(near)))


def _row(
    setting: Setting,
    simulated: Topology | None,
    topology: Topology,
    num_steps: int,
    seed: int,
) -> Row:
    cluster, job = setting.cluster, setting.job
    # Whole periods, and the first of them, from a standing start, does not count.
    period = topology.period
    skipped = period * math.ceil(num_steps / 10 / period)
    total = skipped + period * math.ceil(num_steps / period)
    times = setting.simulate(simulated, total, seed)
    step = times.seconds_per_step(skipped)
    parts = (times.compute, times.exposed, times.waiting)
    compute, exposed, waiting = (float(x[skipped:].mean()) for x in parts)
    sent = analysis.traffic(topology, job.model_bytes, cluster.workers_per_node)
    factor = exact_after = None
    if cluster.num_workers <= MOST_FOR_CONSENSUS:
        factor = analysis.consensus_factor(topology) ** (1 / period)
        exact_after = analysis.exact_after(topology)
        factor = 0.0 if exact_after is not None else factor
    whole, exchange = map(setting.exchange_seconds, (None, simulated))
    return Row(
        name="",
        flags="",
        step=step,
        compute=compute,
        exposed=exposed,
        waiting=waiting,
        speed_up=1.0,
        messages=float(np.mean([x.messages for x in sent], axis=0).max()),
        worker_bytes=float(np.mean([x.worker_bytes for x in sent], axis=0).max()),
        node_bytes=float(np.mean([x.node_bytes for x in sent], axis=0).max()),
        consensus_factor=factor,
        consensus_factor_per_second=None if factor is None else factor ** (1 / step),
        exact_after=exact_after,
        exchange=exchange,
        omega=exchange / whole if whole else 1.0,
    )


def _why_go(baseline: Row, best: Row, num_near: int) -> str:
    times = (best.step, baseline.step, baseline.exposed, baseline.waiting)
    step, instead, exposed, waiting = map(duration, times)
    sentences = [
        f"A step takes {step} instead of {instead}: of an all-reduce's step {exposed} "
        f"are messages that nothing hides and {waiting} waiting for the slowest "
        f"worker; here {duration(best.exposed)} and {duration(best.waiting)}."
    ]
    if num_near > 1 and best.consensus_factor is not None:
        sentences.append(
            f"Of the {num_near} topologies that are within "
            f"{AS_FAST - 1:.0%} of the fastest the workers agree soonest with this one."
        )
    return " ".join(sentences)


def _why_stay(baseline: Row, best: Row) -> str:
    share = baseline.compute / baseline.step
    what = (
        f"computing takes {share:.0%} of an all-reduce's step, so at most "
        f"{baseline.step / baseline.compute:.2f}x could be gained"
        if baseline.step < WORTH * baseline.compute
        else f"an exchange takes {best.omega:.2f} of the time of an all-reduce; "
        f"{duration(best.exposed)} of it stay visible, and {duration(best.waiting)} "
        "are waiting for others"
    )
    return (
        f"No topology is {WORTH - 1:.0%} faster (the best, {best.name}, is "
        f"{best.speed_up:.2f}x as fast): {what}. All-reduce averages exactly, so stay "
        "with it."
    )


def _name(config: TopologyConfig) -> str:
    options = [str(getattr(config, option)) for option in OPTIONS.get(config.name, ())]
    name = f"{config.name} ({', '.join(options)})" if options else config.name
    return name if config.factor == 1 else f"{name}, damped by {config.factor:g}"


def _flags(config: TopologyConfig, overlap: Overlap) -> str:
    """What makes any config train with this topology."""
    where = "background" if overlap == "background" else "in_step"
    options = [
        f"--topology.{option.replace('_', '-')} {getattr(config, option)}"
        for option in ("name", *OPTIONS.get(config.name, ()), "factor")
    ]
    return " ".join([f"--step.algorithm awc --exchange.where {where}", *options])
