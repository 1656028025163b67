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

from decentjax._core.collectives import sum_dtype
from decentjax._core.norms import norm_of, sums_of_squares
from decentjax.mixing import AxisName, global_mean
from decentjax.state import WorkerState
from decentjax.updates import Adapt, Gradient, LocalUpdate, Metrics, halves_of

NORMS = "norms"
"""Metric name of the norms."""


def tensor_norms(params: Any) -> jax.Array:
    """Returns the L2 norm of each leaf of one model, float32 [L]."""
    return norm_of(jnp.stack([sums_of_squares([x]) for x in jax.tree.leaves(params)]))


def tensor_distances(params: Any, axis_name: AxisName) -> jax.Array:
    """Returns `sqrt(1/N sum_i |x_i - mean|^2)` of each leaf, float32 [L].

    Args:
      params: one worker's model.
      axis_name: mapped axis of the workers, over which the model is averaged.
    """
    wide = [x.astype(sum_dtype(x)) for x in jax.tree.leaves(params)]
    pairs = zip(wide, global_mean(wide, axis_name), strict=True)
    of_leaves = jnp.stack([sums_of_squares([x - mean]) for x, mean in pairs])
    return norm_of(global_mean(of_leaves, axis_name))


def tensor_names(params: Any) -> list[str]:
    """Returns the names of the leaves, in the order of `tensor_norms`."""
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


def measures_of(values: Any) -> dict[str, np.ndarray]:
    """Returns measures of spread over the first dim, the replicas; 0 where all are 0.

        gini                       sum_ij |x_i - x_j| / (2 n^2 mean)
        index_of_dispersion        variance / mean
        coefficient_of_variation   deviation / mean
        quartile_coefficient       (Q3 - Q1) / (Q3 + Q1)

    Args:
      values: norms of replicas, [N, ...], none of them negative.
    """
    x = np.sort(np.asarray(values, np.float64), axis=0) if np.ndim(values) else None
    if x is None or not len(x) or not (x >= 0).all():
        raise ValueError(
            "dispersion needs norms of replicas, [N, ...], none of them "
            f"negative, got shape {np.shape(values)}"
        )
    n, mean = len(x), x.mean(0)
    # Sorted, each x_i is added i times and subtracted n - 1 - i times.
    ranks = np.arange(1 - n, n, 2).reshape(-1, *[1] * (x.ndim - 1))
    low, high = np.quantile(x, [0.25, 0.75], axis=0)
    return {
        "gini": _ratio((ranks * x).sum(0), n**2 * mean),
        "index_of_dispersion": _ratio(x.var(0), mean),
        "coefficient_of_variation": _ratio(x.std(0), mean),
        "quartile_coefficient": _ratio(high - low, high + low),
    }


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The ratio, which is 0 for tensors that are 0 in every replica."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
