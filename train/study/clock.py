"""When each worker of a simulated run would be done with each step."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np

from decentjax import Rounds, gossip, runtime
from decentjax.topology import butterfly_groups
from decentjax.units import rate, seconds
from train.config import (
    ApartExchange,
    BackgroundExchange,
    Config,
    GroupExchange,
    PeerExchange,
    QuorumExchange,
    WorkersConfig,
)
from train.network import MaybeRate, MaybeTime, Time
from train.run.method import Method
from train.run.peer_run import wagma_plan
from train.run.setup import Run
from train.study.peer_clock import Timed, simulate_peers
from train.study.recorded_times import recorded_times


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clock:
    """How long workers compute, and how fast their messages are.

    Args:
      compute: mean time of a step's forward and backward pass, such as 390ms.
      sigma: standard deviation of that time, over the mean, of a gamma distribution.
      late_workers: number of workers, drawn at random in each step, that are late.
      late_by: delay of the late workers, such as 320ms.
      trace: measured times in place of these, repeated after their last step: the
        folder of a run with --log.timeline, or a file with the seconds of each step and
        worker [T, N], saved by NumPy.
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

    def is_needed(self, config: Config) -> bool:
        """Whether what a config trains depends on the clock."""
        return isinstance(config.exchange, ApartExchange)

    def facts(self) -> dict[str, object]:
        """Returns the fields, as JSON has them; of a trace the times themselves."""
        times = None if self.trace is None else self._traced().tolist()
        return {**vars(self), "trace": times}

    def run(self, run: Run, seed: int) -> Timed:
        """Simulates the times of a run.

        Args:
          run: the run.
          seed: seed of the compute times.

        Raises:
          ValueError: if there is no clock, or no model of the time of such a run.
        """
        config, method, count = run.config, run.method, run.config.num_steps
        exchange = config.exchange
        if method.policy is not None:
            raise ValueError(
                f"the policy {method.policy.name} chooses the graph as the run goes "
                'on, and has no clock: take "fixed"'
            )
        model, _ = jax.eval_shape(run.task.init, jax.random.key(0))
        cluster = self._cluster(config.workers)
        job = self._job(method.model_bytes(model), cluster.num_workers)
        match exchange:
            case PeerExchange():
                _check_peers(exchange, method)
                schedule = Rounds(method.graph, delay=1).schedule
                of_all = cluster, job, schedule, count, seed
                return simulate_peers(*of_all, patience=exchange.waits)
            case QuorumExchange():
                return simulate_peers(
                    *(cluster, job, method.schedule, count, seed),
                    count=exchange.quorum_of(cluster.num_workers),
                    patience=exchange.waits,
                )
            case GroupExchange():
                return self._of_groups(run, cluster, job, seed)
        in_thread = isinstance(exchange, BackgroundExchange)
        return Timed(method.times(in_thread, cluster, job, count, seed))

    def _of_groups(
        self, run: Run, cluster: runtime.Cluster, job: runtime.Job, seed: int
    ) -> Timed:
        if run.method.is_early:
            raise ValueError(
                "of groups, those with method = atc have a clock, got "
                f"{run.method.name}"
            )
        groups, count = wagma_plan(run), run.config.num_steps
        inner = butterfly_groups(groups.num_workers, groups.group_size)
        times = runtime.wait_avoiding(cluster, job, inner, count, groups.period, seed)
        return Timed(times, gossip.averages(groups, times.start + times.compute))

    def _cluster(self, workers: WorkersConfig) -> runtime.Cluster:
        between = math.inf if self.between is None else rate("between", self.between)
        return runtime.Cluster(
            num_nodes=workers.num_workers // workers.workers_per_node,
            workers_per_node=workers.workers_per_node,
            between_bytes_per_second=between,
        )

    def _traced(self) -> np.ndarray:
        """The measured times of each worker, or of each process of a run."""
        assert self.trace is not None
        if self.trace.is_dir():
            return recorded_times(self.trace)
        try:
            return np.load(self.trace)
        except ValueError as error:  # NumPy's is of pickles.
            raise ValueError(
                f"{self.trace} must be a file .npy with the seconds of each step and "
                "worker, or the folder of a run with --log.timeline"
            ) from error

    def _job(self, model_bytes: float, num_workers: int) -> runtime.Job:
        if self.trace is not None:
            times = self._traced()
            if self.trace.is_dir():  # All workers of a process take as long.
                each, rest = divmod(num_workers, times.shape[1])
                if rest:
                    raise ValueError(
                        f"{self.trace} has the times of {times.shape[1]} processes, "
                        f"which {num_workers} workers cannot share evenly: set "
                        "--workers.num-workers to a multiple of them"
                    )
                times = np.repeat(times, each, axis=1)
            compute = runtime.trace(times)
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
