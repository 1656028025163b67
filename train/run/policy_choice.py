"""The graph of a policy that measures, chosen during a run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from decentjax import WorkerState
from decentjax import policy as policies
from decentjax.dispersion import measures_of
from train.config import HoldingPolicy


class Chooser:
    """Chooses a graph by measured dispersion, and keeps the choice in the state.

    So a resumed run continues with the graph that it had.

    Args:
      policy: policy of the run.
      method: method section of the config.
    """

    def __init__(self, policy: policies.Policy, method: object):
        self._policy, self._method = policy, method
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
        if not is_measured(self._method, step + 1):
            return state
        whole = multihost_utils.process_allgather(norms, tiled=True)
        learn(self._policy, whole)
        graph = 0 * state.extra[GRAPH] + self._policy.current
        return state._replace(extra={GRAPH: graph})


def is_measured(method: object, step: int) -> bool:
    """Whether a method's policy measures the dispersion after this number of steps."""
    policy = getattr(method, "policy", None)
    return isinstance(policy, HoldingPolicy) and step % policy.every_steps == 0


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
