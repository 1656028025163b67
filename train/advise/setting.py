"""The question: a cluster, a job, and how exchanges overlap with compute."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from decentjax import Topology, runtime
from decentjax.plan import Plan
from decentjax.runtime import Cluster, Compute, Job, Times
from decentjax.units import count, rate, seconds
from train.config import TopologyConfig
from train.network import ClusterSpec, MaybeRate, ParamCount, Rate, Time

Overlap = Literal["in_step", "background", "none"]

# Only a compiled step on an accelerator sends a part of the gradient before the rest.
FORWARD_SHARES: dict[Overlap, float] = {
    "in_step": 1 / 3,
    "background": 1.0,
    "none": 1.0,
}
SIGMA = 0.05  # Where none is given.
SIGMA_ASSUMED = (
    f"sigma = {SIGMA:g} is assumed: on fast links the advice rests on it; give "
    "--sigma, or measure it by --measure CONFIG"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster and a job, from flags or measured.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times.
      overlap: whether exchanges run beside the gradient in the step, in a second
        thread, or after it.
      measured: seconds of an exchange by topology, and of an all-reduce by None, where
        they are known; all messages are slowed down to match.
      own: topologies to compare in addition to the candidates.
      method: own method to compare with the rounds.
      bytes_per_param: bytes of a parameter in the job's model.
      facts: lines about where the numbers come from.
    """

    cluster: Cluster
    job: Job
    overlap: Overlap = "in_step"
    measured: Mapping[Topology | None, float] = dataclasses.field(default_factory=dict)
    own: tuple[TopologyConfig, ...] = ()
    method: Callable[[int], Plan] | None = None
    bytes_per_param: float = 4.0
    facts: tuple[str, ...] = ()

    def gamma_and_sigma(self, num_steps: int, seed: int) -> tuple[float, float]:
        """Returns the time of an all-reduce, and the deviation of the compute times.

        Both are over the mean compute time.
        """
        workers = self.cluster.num_workers
        drawn = [self.job.draw(step, workers, seed) for step in range(num_steps)]
        if (mean := float(np.mean(drawn))) == 0:
            raise ValueError("gamma and sigma need compute times that are not all 0")
        return self.exchange_seconds(None) / mean, float(np.std(drawn)) / mean

    def omega(self, topology: Topology | None) -> float:
        """Returns the time of an exchange over that of an all-reduce."""
        # If an all-reduce takes no time, an exchange takes none either.
        whole = self.exchange_seconds(None)
        return self.exchange_seconds(topology) / whole if whole else 1.0

    def exchange_seconds(self, topology: Topology | None) -> float:
        """Returns the mean time of an exchange, with None of an all-reduce."""
        return self.measured.get(topology, self._predicted_seconds(topology))

    def simulate(self, topology: Topology | None, num_steps: int, seed: int) -> Times:
        """Simulates averaging with the topology; with None, all-reduce."""
        cluster, job = self.cluster_of(topology), self.job
        if topology is None:
            return runtime.all_reduce(cluster, job, num_steps, seed)
        if self.overlap == "background":
            return runtime.background(cluster, job, topology, num_steps, seed)
        hidden = self.overlap == "in_step"
        return runtime.in_step(cluster, job, topology, num_steps, seed, hidden)

    def cluster_of(self, topology: Topology | None) -> Cluster:
        """Returns the cluster with links as fast as the exchanges were measured."""
        # Only the messages are slowed down: what overlaps them is still simulated.
        predicted = self._predicted_seconds(topology)
        # A worker alone sends nothing, which no factor makes longer.
        if topology in self.measured and predicted:
            return self.cluster.slowed(self.measured[topology] / predicted)
        return self.cluster

    def _predicted_seconds(self, topology: Topology | None) -> float:
        """What the rates and latencies alone give."""
        if topology is None:
            return runtime.all_reduce_seconds(self.cluster, self.job.model_bytes)
        return runtime.exchange_seconds(self.cluster, topology, self.job.model_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """A cluster and a job, as text.

    Args:
      nodes: number of nodes.
      workers_per_node: number of workers per node, one for each GPU.
      between: rate of a node to the other nodes, over all its network cards, in each
        direction, such as 25gbit.
      inside: rate of a worker to the others of its node, in each direction.
      between_latency: latency of a message between nodes.
      inside_latency: latency of a message inside a node.
      compute: mean time of a step's forward and backward pass.
      sigma: standard deviation of that time, over the mean, of a gamma distribution; by
        default 0.05.
      late_workers: number of workers, drawn at random in each step, that are late.
      late_by: delay of the late workers.
      params: number of parameters of the model.
      bytes_per_param: bytes per parameter in messages.
      forward_share: share of the compute time before the backward pass begins, 1 if
        the whole gradient is available at once; by default 1/3 in the step, else 1.
      overlap: whether exchanges run beside the gradient in the step (GPU, TPU), in a
        second thread, or after the step.
    """

    nodes: int
    workers_per_node: int = 1
    between: Rate
    inside: MaybeRate = None
    between_latency: Time = "20us"
    inside_latency: Time = "5us"
    compute: Time
    sigma: float | None = None
    late_workers: int = 0
    late_by: Time = "0s"
    params: ParamCount
    bytes_per_param: float = 4.0
    forward_share: float | None = None
    overlap: Overlap = "in_step"

    def setting(self) -> Setting:
        """Returns the setting that the flags describe.

        Raises:
          ValueError: if a flag cannot be read, or is out of its range.
        """
        if self.inside is None and self.workers_per_node > 1:
            raise ValueError(
                f"nodes of {self.workers_per_node} workers need --inside, such as "
                "600gbit"
            )
        spec = ClusterSpec(
            num_nodes=self.nodes,
            workers_per_node=self.workers_per_node,
            between=rate("between", self.between),
            # A worker alone in its node sends nothing inside it.
            inside=math.inf if self.inside is None else rate("inside", self.inside),
            between_latency=seconds("between_latency", self.between_latency),
            inside_latency=seconds("inside_latency", self.inside_latency),
        )
        share = self.forward_share
        job = Job(
            model_bytes=count("params", self.params) * self.bytes_per_param,
            compute=self._compute(spec.num_nodes * spec.workers_per_node),
            forward_share=FORWARD_SHARES[self.overlap] if share is None else share,
        )
        facts = (SIGMA_ASSUMED,) if self.sigma is None else ()
        cluster = spec.runtime_cluster()
        return Setting(
            cluster=cluster,
            job=job,
            overlap=self.overlap,
            bytes_per_param=self.bytes_per_param,
            facts=facts,
        )

    def _compute(self, num_workers: int) -> Compute:
        sigma = SIGMA if self.sigma is None else self.sigma
        compute = runtime.gamma(seconds("compute", self.compute), sigma)
        late_by = seconds("late_by", self.late_by)
        # One of the two alone would silently have no effect.
        if (self.late_workers == 0) != (late_by == 0):
            raise ValueError(
                "late_workers and late_by need each other, got "
                f"{self.late_workers} and {self.late_by}"
            )
        if late_by == 0:
            return compute
        if self.late_workers > num_workers:
            raise ValueError(
                f"late_workers must be at most {num_workers}, the number of all "
                f"workers, got {self.late_workers}"
            )
        return runtime.delayed(compute, self.late_workers, late_by)
