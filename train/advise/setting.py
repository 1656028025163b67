"""What is asked about: a cluster, a job, and how the two overlap."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from decentjax import Topology, runtime
from decentjax.runtime import Cluster, Compute, Job, Times
from train.advise.quantities import count, rate, seconds
from train.config import TopologyConfig

Overlap = Literal["in_step", "background", "none"]

# Only a compiled step on an accelerator sends a part of the gradient before the rest.
FORWARD_SHARES: dict[Overlap, float] = {
    "in_step": 1 / 3,
    "background": 1.0,
    "none": 1.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster and a job, as told or as measured.

    Args:
      cluster: of the workers.
      job: of each of them.
      overlap: whether exchanges run beside the gradient in the step, in a second
        thread, or not at all.
      measured: seconds of an exchange of a topology, and for None of an all-reduce,
        where they are known; all of its messages then take so many times as long as on
        the cluster.
      own: topologies to look at besides.
      facts: lines about where the numbers come from.
    """

    cluster: Cluster
    job: Job
    overlap: Overlap = "in_step"
    measured: Mapping[Topology | None, float] = dataclasses.field(default_factory=dict)
    own: tuple[TopologyConfig, ...] = ()
    facts: tuple[str, ...] = ()

    def gamma_and_sigma(self, num_steps: int, seed: int) -> tuple[float, float]:
        """Returns the time of an all-reduce, and the deviation of the compute times.

        Both over the mean compute time.
        """
        num_workers = self.cluster.num_workers
        mean, variance = runtime.moments(self.job, num_workers, num_steps, seed)
        return self.exchange_seconds(None) / mean, math.sqrt(variance)

    def exchange_seconds(self, topology: Topology | None) -> float:
        """Returns the mean time of an exchange, with None of an all-reduce."""
        return self.measured.get(topology, _seconds(self.cluster, self.job, topology))

    def simulate(self, topology: Topology | None, num_steps: int, seed: int) -> Times:
        """Simulates averaging with the topology; with None, all-reduce."""
        cluster, job = self._cluster(topology), self.job
        if topology is None:
            return runtime.all_reduce(cluster, job, num_steps, seed)
        if self.overlap == "background":
            return runtime.background(cluster, job, topology, num_steps, seed)
        hidden = self.overlap == "in_step"
        return runtime.in_step(cluster, job, topology, num_steps, seed, hidden)

    def _cluster(self, topology: Topology | None) -> Cluster:
        wanted = self.measured.get(topology)
        alone = _seconds(self.cluster, self.job, topology)
        if wanted is None or alone == 0:
            return self.cluster
        return self.cluster.slowed(wanted / alone)


def _seconds(cluster: Cluster, job: Job, topology: Topology | None) -> float:
    if topology is None:
        return runtime.all_reduce_seconds(cluster, job.model_bytes)
    return runtime.exchange_seconds(cluster, topology, job.model_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """A cluster and a job, in words.

    Args:
      nodes: machines.
      workers_per_node: GPUs of each.
      between: rate of a node to the others, of its network cards together, in each
        direction.
      inside: rate of a worker to the others of its node, if there are any.
      between_latency: of a message between nodes.
      inside_latency: of a message inside a node.
      compute: mean time of a step's forward and backward pass.
      sigma: standard deviation of that, over the mean.
      distribution: of that.
      late_workers: so many, drawn anew at each step, are late ...
      late_by: ... by so much.
      params: of the model.
      bytes_per_param: as sent.
      forward_share: share of the compute time before the backward pass begins, 1 where
        the whole gradient comes at once; by default a third in the step, else 1.
      overlap: whether exchanges run beside the gradient in the step (GPU, TPU), in a
        second thread, or not at all.
    """

    nodes: int
    workers_per_node: int = 1
    between: str
    inside: str | None = None
    between_latency: str = "20us"
    inside_latency: str = "5us"
    compute: str
    sigma: float = 0.05
    distribution: Literal["constant", "normal", "gamma", "log_normal"] = "gamma"
    late_workers: int = 0
    late_by: str = "0s"
    params: str
    bytes_per_param: float = 4.0
    forward_share: float | None = None
    overlap: Overlap = "in_step"

    def setting(self) -> Setting:
        """Returns what the flags say.

        Raises:
          ValueError: if there can be no such cluster, or job.
        """
        if self.inside is None and self.workers_per_node > 1:
            raise ValueError(
                f"nodes of {self.workers_per_node} workers need --inside, such as "
                "600gbit"
            )
        inside = math.inf if self.inside is None else rate("inside", self.inside)
        cluster = Cluster(
            num_nodes=self.nodes,
            workers_per_node=self.workers_per_node,
            between_bytes_per_second=rate("between", self.between),
            inside_bytes_per_second=inside,
            between_latency=seconds("between_latency", self.between_latency),
            inside_latency=seconds("inside_latency", self.inside_latency),
        )
        job = Job(
            model_bytes=count("params", self.params) * self.bytes_per_param,
            compute=self._compute(),
            forward_share=FORWARD_SHARES[self.overlap]
            if self.forward_share is None
            else self.forward_share,
        )
        return Setting(cluster=cluster, job=job, overlap=self.overlap)

    def _compute(self) -> Compute:
        mean = seconds("compute", self.compute)
        if self.distribution == "constant":
            compute = runtime.constant(mean)
        else:
            compute = getattr(runtime, self.distribution)(mean, self.sigma)
        late_by = seconds("late_by", self.late_by)
        if (self.late_workers == 0) != (late_by == 0):
            raise ValueError(
                "late_workers and late_by need each other, got "
                f"{self.late_workers} and {self.late_by}"
            )
        if late_by == 0:
            return compute
        return runtime.delayed(compute, self.late_workers, late_by)
