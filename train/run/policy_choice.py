"""How a run chooses the exchange of each step, by the policy of its config."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from decentjax import WorkerState
from decentjax import policy as policies
from decentjax.dispersion import measures_of
from train.config import (
    Config,
    DampingPolicy,
    HoldingPolicy,
    MergedPolicy,
    PolicySection,
    ThinningPolicy,
)
from train.run.optimizers import build_schedule


def build_policy(config: Config) -> policies.Policy | None:
    """Returns the policy of a config, with all graphs that it may choose, if any.

    Raises:
      ValueError: if its numbers do not fit the workers.
    """
    workers, num_workers = config.workers, config.workers.num_workers
    match config.policy:
        case ThinningPolicy(
            degree=degree, per_epoch=per_epoch, epoch_steps=epoch_steps
        ):
            most = max(num_workers - 1, 2) if degree is None else degree
            return policies.thinning(num_workers, most, per_epoch, epoch_steps)
        case HoldingPolicy(graphs=names, target=target):
            named = dataclasses.replace(config.topology, make=None)
            graphs = [dataclasses.replace(named, name=x).build(workers) for x in names]
            return policies.holding(graphs or policies.ladder(num_workers), target)
        case DampingPolicy(power=power):
            topology = config.topology.build(workers)
            return policies.damping(topology, _factor(config, power))
        case MergedPolicy():
            return policies.merged(config.topology.build(workers), config.num_steps)
    return None


class Chooser:
    """Chooses a graph by measured dispersion, and keeps the choice in the state.

    So a resumed run continues with the graph that it had.

    Args:
      policy: policy of the run.
      options: its config.
    """

    def __init__(self, policy: policies.Policy, options: PolicySection):
        self._policy, self._options = policy, options
        self._is_new = True

    def begin(self, state: WorkerState) -> None:
        """Takes the graph of the first state."""
        if self._is_new:
            self._policy.current = int(state.extra[GRAPH].addressable_data(0)[0])
        self._is_new = False

    def learn(self, state: WorkerState, norms: jax.Array, step: int) -> WorkerState:
        """Chooses the graph after a step; a collective if it is measured.

        Args:
          state: state after the step.
          norms: norms of the tensors of each worker before they were averaged, [N, L].
          step: the step.

        Returns:
          The state with the graph.
        """
        if not is_measured(self._options, step + 1):
            return state
        whole = multihost_utils.process_allgather(norms, tiled=True)
        learn(self._policy, whole)
        graph = 0 * state.extra[GRAPH] + self._policy.current
        return state._replace(extra={GRAPH: graph})


def is_measured(options: PolicySection, step: int) -> bool:
    """Whether the dispersion is measured after this number of steps."""
    return isinstance(options, HoldingPolicy) and step % options.every_steps == 0


GRAPH = "graph"  # Its number, in the state's extra part.


def first_graph() -> dict[str, jax.Array]:
    """The first graph of a policy that measures, as it is kept in the state."""
    return {GRAPH: jnp.int32(0)}


def learn(policy: policies.Policy, norms: np.ndarray) -> None:
    """Shows a policy the mean over the tensors of their Gini coefficient.

    Args:
      policy: the policy.
      norms: norms of the tensors of each worker, [N, L]. If they are not finite, the
        policy keeps its graph: the run ends by that soon.
    """
    if np.isfinite(norms).all():
        policy.learn(float(measures_of(norms)["gini"].mean()))


def _factor(config: Config, power: float) -> Callable[[int], float]:
    """`(learning rate / peak)^p` after the peak, and 1 before."""
    schedule = build_schedule(config.optimizer, config.num_steps)
    rates = np.array(jax.vmap(schedule)(jnp.arange(config.num_steps)))
    factors = np.clip(rates / rates.max(), 0, 1) ** power
    factors[: rates.argmax()] = 1
    return lambda step: float(factors[step])
