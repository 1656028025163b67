"""The graph of each step; see `decentjax.policy`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decentjax import policy as policies
from decentjax.policy import Policy
from decentjax.topology import Topology
from train.config.checks import check_at_least, check_at_most
from train.config.graph import MOST_WORKERS, TopologyConfig, TopologyName, WorkersConfig
from train.config.learning_rate import build_schedule
from train.config.optimizer import OptimizerConfig
from train.fields import checked


class PlanParts(NamedTuple):
    """What decides the plan of a run, with the sizes of `RoundsMethod.over`."""

    topology: TopologyConfig
    workers: WorkersConfig
    optimizer: OptimizerConfig
    num_steps: int
    sizes: Sequence[int] | None = None

    @property
    def graph(self) -> Topology:
        """The topology of the workers."""
        return self.topology.build(self.workers)


@checked
class FixedPolicy:
    """The topology; with `topology.mean_every` Gossip-PGA."""

    name: ClassVar[str] = "fixed"

    def build(self, parts: PlanParts) -> Topology:
        """Returns the graph."""
        return parts.graph


@checked
class ThinningPolicy:
    """Ada: a ring lattice that loses neighbours with each epoch.

    Args:
      degree: number of neighbours at the start; None for all.
      per_epoch: number of neighbours lost per epoch.
      epoch_steps: number of steps that are an epoch.
    """

    name: ClassVar[str] = "thinning"

    degree: int | None = None
    per_epoch: float = 1.0
    epoch_steps: int = 100

    def __post_init__(self):
        check_at_least(self, 1, "epoch_steps")
        check_at_most(self, MOST_WORKERS, "degree")
        # Raises for invalid numbers.
        degree = 2 if self.degree is None else self.degree
        policies.thinning(2, degree, self.per_epoch, self.epoch_steps)

    def build(self, parts: PlanParts) -> Policy:
        """Returns the policy, with all graphs that it may choose."""
        count = parts.workers.num_workers
        most = max(count - 1, 2) if self.degree is None else self.degree
        return policies.thinning(count, most, self.per_epoch, self.epoch_steps)


@checked
class HoldingPolicy:
    """The fewest neighbours that hold a dispersion, measured during the run.

    Args:
      graphs: names of the graphs, from many connections to few; by default the complete
        graph and ring lattices with fewer and fewer neighbours.
      target: dispersion to hold, the mean over all tensors of the Gini coefficient of
        their norms over the workers.
      every_steps: number of steps between measurements.
    """

    name: ClassVar[str] = "holding"

    graphs: tuple[TopologyName, ...] = ()
    target: float = 0.01
    every_steps: int = 10

    def __post_init__(self):
        check_at_least(self, 1, "every_steps")
        policies.holding(policies.ladder(2), self.target)

    def build(self, parts: PlanParts) -> Policy:
        """Returns the policy, with all graphs that it may choose."""
        named = dataclasses.replace(parts.topology, make=None)
        graphs = [
            dataclasses.replace(named, name=name).build(parts.workers)
            for name in self.graphs
        ]
        ladder = graphs or policies.ladder(parts.workers.num_workers)
        return policies.holding(ladder, self.target)


@checked
class DampingPolicy:
    """DSGD-AC: the topology with a mixing factor that falls with the learning rate."""

    name: ClassVar[str] = "damping"

    def build(self, parts: PlanParts) -> Policy:
        """Returns the policy; its factors are computed at the first step.

        A factor is the learning rate over its peak, and 1 before it.
        """

        @functools.cache
        def factors() -> np.ndarray:
            schedule = build_schedule(parts.optimizer, parts.num_steps)
            rates = np.array(jax.vmap(schedule)(jnp.arange(parts.num_steps)))
            found = np.clip(rates / rates.max(), 0, 1)
            found[: rates.argmax()] = 1
            return found

        graph = parts.graph
        return policies.damping(graph, lambda step: float(factors()[step]))


@checked
class MergedPolicy:
    """The topology, with a mean of all models at the last step."""

    name: ClassVar[str] = "merged"

    def build(self, parts: PlanParts) -> Policy:
        """Returns the policy, whose last exchange is a mean of all models."""
        graph = parts.graph
        return policies.merged(graph, parts.num_steps)


PolicySection = (
    FixedPolicy | ThinningPolicy | HoldingPolicy | DampingPolicy | MergedPolicy
)
