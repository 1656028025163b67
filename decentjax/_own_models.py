"""What an optimizer's state keeps for itself, and an exchange of models must know of.

A model in the state, beside the params, and random keys.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax import contrib

from decentjax._collectives import AxisName, sum_over, varying_as
from decentjax._slices import on_own_slice, worker_number

_FROM_OWN_MODEL = "it computes its params from a model or sums of its own"
_REFUSED: dict[type, str] = {
    contrib.COCOBState: _FROM_OWN_MODEL,
    contrib.MadgradState: _FROM_OWN_MODEL,
    contrib.MechanicState: _FROM_OWN_MODEL,
    contrib.ProdigyState: "it takes the exchange for progress of its own",
    contrib.DAdaptAdamWState: "its estimated learning rate grows without end",
    optax.ScaleByLBFGSState: "it takes the exchange for a step along its gradient",
    optax.ScaleByRpropState: "its steps grow while its own gradient keeps its sign",
}
"""Why the average is lost, by the state of the optimizer; all of optax were tried."""


def check_averageable(opt_state: Any) -> None:
    """Raises a TypeError for an optimizer whose steps undo an average of models.

    Args:
      opt_state: state of the optimizer.
    """
    for state in _found(opt_state, *_REFUSED):
        name = type(state).__name__
        raise TypeError(
            f"the optimizer with the state {name} does not keep averaged models: "
            f"{_REFUSED[type(state)]}; take another optimizer, such as optax.adamw, "
            "or all_reduce_step, which averages gradients"
        )


def check_no_own_model(opt_state: Any, what: str) -> None:
    """Raises a TypeError for an optimizer with a model that `what` does not average."""
    if _found(opt_state, contrib.ScheduleFreeState):
        raise TypeError(
            "schedule_free keeps a model z of its own, which has to be averaged with "
            f"the params, and {what} averages the params alone: use awc_step, "
            "atc_step or decentralize, or another optimizer"
        )


def average_own_models(opt_state: Any, average: Callable[[Any], Any]) -> Any:
    """The state of an optimizer, in which models beside the params are averaged.

    That is z of schedule-free optimizers, which a worker's own gradients would move
    away from all others without end.

    Args:
      opt_state: state of the optimizer.
      average: function of a tree like the params.
    """

    def averaged(state: Any) -> Any:
        if not isinstance(state, contrib.ScheduleFreeState):
            return state
        return state._replace(z=average(state.z))

    is_one = lambda x: isinstance(x, contrib.ScheduleFreeState)  # noqa: E731
    return jax.tree.map(averaged, opt_state, is_leaf=is_one)


def map_keys(function: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """The tree, in which the function has been applied to random keys."""

    def one(path: Any, x: Any) -> Any:
        return function(x) if _is_key(path, x) else x

    return jax.tree.map_with_path(one, tree)


def own_keys(tree: Any, axis_name: AxisName) -> Any:
    """The tree with random keys of this worker, where the workers' axis is mapped."""
    try:
        lax.axis_index(axis_name)
    except NameError:
        return tree
    return map_keys(lambda key: _own(key, axis_name), tree)


def first_keys(tree: Any, count: jax.Array, axis_name: AxisName) -> Any:
    """The tree, before the first step with random keys of this worker.

    An optimizer's `init` gives all workers one key, and need not know their axis.
    """

    def chosen(key: jax.Array) -> jax.Array:
        return jnp.where(count == 0, _own(key, axis_name), key)

    return map_keys(chosen, tree)


def common_keys(tree: Any, axis_name: AxisName) -> Any:
    """The tree with the random keys of the first worker, on all workers."""

    def of_first(key: jax.Array) -> jax.Array:
        is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        bits = jax.random.key_data(key) if is_typed else key
        own = jnp.where(lax.axis_index(axis_name) == 0, bits, 0)
        bits = varying_as(bits, on_own_slice(sum_over, own, axis_name))
        if not is_typed:
            return bits
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key))

    return map_keys(of_first, tree)


def _own(key: jax.Array, axis_name: AxisName) -> jax.Array:
    return jax.random.fold_in(key, worker_number(axis_name, key))


def _is_key(path: Any, x: Any) -> bool:
    """Whether a leaf is a random key, in the new form or, by its field, in the old."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return True
    field = getattr(path[-1], "name", "") if path else ""
    return x.dtype == jnp.uint32 and x.ndim > 0 and field in ("key", "rng_key", "rng")


def _found(tree: Any, *kinds: type) -> list[Any]:
    is_one = lambda x: isinstance(x, kinds)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_one) if is_one(x)]
