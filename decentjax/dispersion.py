"""How far replicas differ: the norms of their parameters, and measures of spread.

Norms can be equal while models differ; the true distance is `consensus_distance`.

Source: Xie et al., Scaling up Data Parallelism in Decentralized Deep Learning (2025),
which compares the norms of each tensor over the replicas before they are averaged. Its
formulas are not public: these are the textbook ones.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decentjax._core.norms import norm_of, sums_of_squares
from decentjax.mixing import AxisName, global_mean
from decentjax.state import WorkerState
from decentjax.updates import Adapt, Gradient, LocalUpdate, Metrics, halves_of

NORMS = "norms"
"""Metric name of the norms."""


def tensor_norms(params: Any) -> jax.Array:
    """Returns the L2 norm of each leaf of one model, float32 [L].

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import dispersion
      >>> params = {"b": jnp.zeros(2), "w": jnp.array([3.0, 4.0])}
      >>> print(dispersion.tensor_norms(params))
      [0. 5.]
    """
    return norm_of(jnp.stack([sums_of_squares([x]) for x in jax.tree.leaves(params)]))


def tensor_distances(params: Any, axis_name: AxisName) -> jax.Array:
    """Returns `sqrt(1/N sum_i |x_i - mean|^2)` of each leaf, float32 [L].

    Args:
      params: one worker's model.
      axis_name: mapped axis of the workers, over which the model is averaged.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import AXIS, dispersion, over_workers
      >>> distances = over_workers(lambda x: dispersion.tensor_distances(x, AXIS))
      >>> print(distances({"w": jnp.array([1.0, 3.0])}))
      [[1.]
       [1.]]
    """

    wide = [
        x.astype(np.promote_types(x.dtype, np.float32)) for x in jax.tree.leaves(params)
    ]
    pairs = zip(wide, global_mean(wide, axis_name), strict=True)
    of_leaves = jnp.stack([sums_of_squares([x - mean]) for x, mean in pairs])
    return norm_of(global_mean(of_leaves, axis_name))


def tensor_names(params: Any) -> list[str]:
    """Returns the names of the leaves, in the order of `tensor_norms`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import dispersion
      >>> dispersion.tensor_names({"dense": {"b": jnp.zeros(2), "w": jnp.zeros(2)}})
      ['dense.b', 'dense.w']
    """
    paths = jax.tree.leaves_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def measured(adapt: Adapt, before_update: bool = True) -> LocalUpdate:
    """Adds the norms of a worker's model before it is averaged to its metrics.

    The metric is "norms", [L]. Neither the exchange nor the update waits for it.

    Args:
      adapt: the local update, with its two halves, see `local_update`.
      before_update: whether the plan averages the models that a step began with, as a
        topology, or those after the update, as `Rounds(topology)`.

    Raises:
      TypeError: if it has no halves, or when traced, if it has a metric "norms".

    Examples:
      >>> import optax
      >>> from decentjax import Rounds, dispersion, local_update, simulate, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> local = dispersion.measured(local, before_update=False)
      >>> train_step = simulate(local, Rounds(topology.ring(8)))
    """
    halves = halves_of(adapt, "measured")

    def descend(
        found: Gradient, state: WorkerState, mixed: Any
    ) -> tuple[WorkerState, Metrics]:
        new, metrics = halves.descend(found, state, mixed)
        if NORMS in metrics:
            raise TypeError(
                f"loss_fn returns a metric {NORMS!r}, which is the name of the norms: "
                "give it another name"
            )
        params = state.params if before_update else new.params
        return new, {**metrics, NORMS: tensor_norms(params)}

    return LocalUpdate(halves.gradient, descend, halves.init)


def gini(values: Any) -> np.ndarray:
    """Returns `sum_ij |x_i - x_j| / (2 n^2 mean)` over the first dim, [...].

    Examples:
      >>> from decentjax import dispersion
      >>> print(dispersion.gini([1.0, 3.0]))
      0.25
    """
    x = _sorted(values)
    n = len(x)
    # Sorted, each x_i is added i times and subtracted n - 1 - i times.
    ranks = np.arange(1 - n, n, 2).reshape(-1, *[1] * (x.ndim - 1))
    return _ratio((ranks * x).sum(0), n**2 * x.mean(0))


def index_of_dispersion(values: Any) -> np.ndarray:
    """Returns `variance / mean` over the first dim, [...].

    Examples:
      >>> from decentjax import dispersion
      >>> print(dispersion.index_of_dispersion([1.0, 3.0]))
      0.5
    """
    x = _sorted(values)
    return _ratio(x.var(0), x.mean(0))


def coefficient_of_variation(values: Any) -> np.ndarray:
    """Returns `deviation / mean` over the first dim, [...].

    Examples:
      >>> from decentjax import dispersion
      >>> print(dispersion.coefficient_of_variation([1.0, 3.0]))
      0.5
    """
    x = _sorted(values)
    return _ratio(x.std(0), x.mean(0))


def quartile_coefficient(values: Any) -> np.ndarray:
    """Returns `(Q3 - Q1) / (Q3 + Q1)` over the first dim, [...].

    Examples:
      >>> from decentjax import dispersion
      >>> print(dispersion.quartile_coefficient([1.0, 3.0]))
      0.25
    """
    low, high = np.quantile(_sorted(values), [0.25, 0.75], axis=0)
    return _ratio(high - low, high + low)


MEASURES = {
    "gini": gini,
    "index_of_dispersion": index_of_dispersion,
    "coefficient_of_variation": coefficient_of_variation,
    "quartile_coefficient": quartile_coefficient,
}


def _sorted(values: Any) -> np.ndarray:
    x = np.asarray(values, np.float64)
    if not x.ndim or not len(x) or not (x >= 0).all():
        raise ValueError(
            "dispersion needs norms of replicas, [N, ...], none of them "
            f"negative, got shape {x.shape}"
        )
    return np.sort(x, axis=0)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The ratio, which is 0 for tensors that are 0 in every replica."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
