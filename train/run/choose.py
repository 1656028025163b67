"""How a run chooses the exchange of each step, by the policy of its config."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from decentjax import WorkerState
from decentjax import policy as policies
from decentjax.dispersion import MEASURES
from train.config import Config, PolicyConfig
from train.run.optimizers import build_schedule


def build_policy(config: Config) -> policies.Policy:
    """Returns the policy of a config, with all graphs that it may choose.

    Raises:
      ValueError: if its numbers do not fit the workers.
    """
    options, num_workers = config.policy, config.workers.num_workers
    if options.name == "thinning":
        degree = max(num_workers - 1, 2) if options.degree is None else options.degree
        return policies.thinning(num_workers, degree, options.per_epoch, options.least)
    if options.name == "holding":
        graphs = [
            dataclasses.replace(config.topology, name=name, make=None).build(
                config.workers
            )
            for name in options.graphs
        ]
        graphs = graphs or policies.ladder(num_workers)
        return policies.holding(graphs, options.target, options.slack)
    topology = config.topology.build(config.workers)
    if options.name == "damping":
        return policies.damping(topology, _factor(config), options.levels)
    if options.name == "merged":
        return policies.merged(topology, config.num_steps)
    return policies.fixed(topology)


class Chooser:
    """Chooses the exchange of each step, and keeps the choice in the state.

    So a run that resumes goes on with the graph that it had.

    Args:
      policy: policy of the run.
      options: its config.
    """

    def __init__(self, policy: policies.Policy, options: PolicyConfig):
        self.policy, self._options = policy, options
        self._is_new = True

    def __call__(self, state: WorkerState, step: int) -> int:
        """Returns the place of a step's exchange in the menu."""
        if self.policy.measures and self._is_new:
            self.policy.current = int(state.extra[GRAPH].addressable_data(0)[0])
        self._is_new = False
        return self.policy(step, step / self._options.epoch_steps)

    def learn(self, state: WorkerState, norms: jax.Array, step: int) -> WorkerState:
        """Chooses the graph after a step; a collective where it is measured.

        Args:
          state: state after the step.
          norms: norms of the tensors of each worker before they were averaged, [N, L].
          step: the step.

        Returns:
          The state with the graph.
        """
        if (step + 1) % self._options.every_steps:
            return state
        whole = multihost_utils.process_allgather(norms, tiled=True)
        epoch = (step + 1) / self._options.epoch_steps
        self.policy(step + 1, epoch, dispersion(whole, self._options))
        graph = 0 * state.extra[GRAPH] + self.policy.current
        return state._replace(extra={GRAPH: graph})


GRAPH = "graph"  # Its number, in the state's extra part.


def init_graph(options: PolicyConfig) -> Any:
    """The first graph of a policy that measures, as it is kept in the state."""
    return {GRAPH: jnp.int32(0)} if options.name == "holding" else ()


def dispersion(norms: np.ndarray, options: PolicyConfig) -> float | None:
    """The mean over the tensors of a measure over all workers.

    Args:
      norms: norms of the tensors of each worker, [N, L].
      options: options of the policy, with the measure.

    Returns:
      The dispersion, or None of models that are not finite: the run ends by that soon.
    """
    if not np.isfinite(norms).all():
        return None
    return float(MEASURES[options.measure](norms).mean())


def _factor(config: Config) -> Callable[[int], float]:
    """`(learning rate / peak)^p` after the peak, and 1 before."""
    schedule = build_schedule(config.optimizer, config.num_steps)
    rates = np.array(jax.vmap(schedule)(jnp.arange(config.num_steps)))
    factors = np.clip(rates / rates.max(), 0, 1) ** config.policy.power
    factors[: rates.argmax()] = 1
    return lambda step: float(factors[step])
