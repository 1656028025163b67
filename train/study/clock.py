"""When each worker of a simulated run would be done with each step."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from decentjax import gossip, runtime
from decentjax.rounds import Schedule
from decentjax.topology import butterfly_groups
from train.config import (
    BackgroundExchange,
    Config,
    GroupExchange,
    PeerExchange,
    QuorumExchange,
)
from train.network import MaybeRate, MaybeTime, Time, rate, seconds
from train.run.method import Method, build_method
from train.run.peer_run import wagma_plan
from train.tasks.task import build_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clock:
    """How long workers compute, and how fast their messages are.

    Args:
      compute: mean time of a step's forward and backward pass, such as 390ms.
      sigma: standard deviation of that time, over the mean, of a gamma distribution.
      late_workers: number of workers, drawn at random in each step, that are late.
      late_by: delay of the late workers, such as 320ms.
      trace: file with measured times in place of these, seconds of each step and
        worker [T, N], saved by NumPy; repeated after its last step.
      between: rate of a node to the other nodes, such as 25gbit; without one messages
        take no time.
    """

    compute: MaybeTime = None
    sigma: float = 0.05
    late_workers: int = 0
    late_by: Time = "0s"
    trace: Path | None = None
    between: MaybeRate = None

    def __post_init__(self):
        if bool(self.late_workers) != (seconds("late_by", self.late_by) > 0):
            raise ValueError(
                "late workers are --clock.late-workers, how many, and --clock.late-by, "
                f"how long, got {self.late_workers} and {self.late_by}"
            )
        if self.compute is not None and self.trace is not None:
            raise ValueError(
                "times are computed or measured: give --clock.compute or --clock.trace"
            )
        if not self.runs and (self.late_workers or self.between is not None):
            raise ValueError(
                "late workers and rates need to know how long a step computes: give "
                "--clock.compute, such as 390ms, or --clock.trace"
            )

    @property
    def runs(self) -> bool:
        """Whether there is a clock at all."""
        return self.compute is not None or self.trace is not None

    def facts(self) -> dict[str, object]:
        """Returns the fields, as JSON has them; of a trace the times themselves."""
        times = None if self.trace is None else np.load(self.trace).tolist()
        return {**vars(self), "trace": times}

    def run(self, config: Config, seed: int) -> "Timed":
        """Simulates the times of a run.

        Args:
          config: config of the run.
          seed: seed of the compute times.

        Raises:
          ValueError: if there is no clock, or no model of the time of such a run.
        """
        task, count = build_task(config.task), config.num_steps
        exchange = config.exchange
        method = build_method(config, task)
        if method.policy is not None:
            raise ValueError(
                f"the policy {config.policy.name} chooses the graph as the run goes "
                'on, and has no clock: take "fixed"'
            )
        model, _ = jax.eval_shape(task.init, jax.random.key(0))
        cluster, job = self._cluster(config), self._job(method.model_bytes(model))
        match exchange:
            case PeerExchange():
                _check_peers(exchange, method)
                of_all = cluster, job, method.graph, count, seed
                run = runtime.peers(*of_all, exchange.waits)
                return _timed(run, method.schedule)
            case QuorumExchange():
                assert method.rounds is not None
                schedule = method.schedule
                run = runtime.peer_rounds(
                    *(cluster, job, schedule, count, seed),
                    count=exchange.quorum_of(cluster.num_workers),
                    patience=exchange.waits,
                )
                return _timed(run, schedule)
            case GroupExchange():
                return self._of_groups(config, method, cluster, job, seed)
        in_thread = isinstance(exchange, BackgroundExchange)
        return Timed(method.times(in_thread, cluster, job, count, seed))

    def _of_groups(
        self, config: Config, method: Method, cluster: Any, job: Any, seed: int
    ) -> "Timed":
        if method.is_early:
            raise ValueError(
                "of groups, those with step.algorithm = atc have a clock, got "
                f"{method.name}"
            )
        groups, count = wagma_plan(config, method.is_early), config.num_steps
        inner = butterfly_groups(groups.num_workers, groups.group_size)
        times = runtime.wait_avoiding(cluster, job, inner, count, groups.period, seed)
        return Timed(times, gossip.averages(groups, times.start + times.compute))

    def _cluster(self, config: Config) -> runtime.Cluster:
        workers = config.workers
        between = math.inf if self.between is None else rate("between", self.between)
        return runtime.Cluster(
            num_nodes=workers.num_workers // workers.workers_per_node,
            workers_per_node=workers.workers_per_node,
            between_bytes_per_second=between,
        )

    def _job(self, model_bytes: float) -> runtime.Job:
        if self.trace is not None:
            compute = runtime.trace(np.load(self.trace))
        elif self.compute is not None:
            compute = runtime.gamma(seconds("compute", self.compute), self.sigma)
        else:
            raise ValueError(
                "what a worker of a run of peers mixes depends on when it is done: "
                "give --clock.compute, such as 100ms, or --clock.trace"
            )
        late_by = seconds("late_by", self.late_by)
        compute = runtime.delayed(compute, self.late_workers, late_by)
        return runtime.Job(model_bytes=model_bytes, compute=compute)


class Timed(NamedTuple):
    """A simulated run.

    Args:
      times: when each worker does what.
      records: for a run of peers, what each worker mixes at each step.
      steps: for one, the steps that each worker takes.
    """

    times: runtime.Times
    records: Sequence[gossip.MergeRecord] = ()
    steps: Sequence[Sequence[int]] = ()


def _check_peers(exchange: PeerExchange, method: Method) -> None:
    """Raises a ValueError for peers without a model of their time."""
    if method.rounds:
        raise ValueError(
            "rounds by peers that wait for no quorum have no clock: compare them with "
            "exchange = quorum, or auto, which waits for all"
        )
    if exchange.way != "arrived":
        raise ValueError(
            "of peers, those with exchange.way = arrived have a clock, got "
            f"{exchange.way}"
        )


def _timed(run: runtime.PeerTimes, schedule: Schedule) -> Timed:
    """A run, with what workers use of the versions that have arrived in time."""
    taken: dict[tuple[int, int], list[gossip.Taken]] = {
        (step, worker): []
        for worker, own in enumerate(run.steps)
        for step in own
        if schedule[step].sends
    }
    for one in run.mixed:
        model = gossip.Taken(one.peer, one.version, one.step)
        taken[one.step, one.worker].append(model)
    records = [
        gossip.MergeRecord(step, worker, 0, tuple(models))
        for (step, worker), models in taken.items()
    ]
    return Timed(run.times, records, run.steps)
