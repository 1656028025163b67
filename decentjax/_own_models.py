"""Models and random keys in an optimizer's state, which an exchange has to handle.

Schedule-free optimizers, for example, keep a second model in addition to the params.
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
    contrib.ProdigyState: "it mistakes the exchange for its own progress",
    contrib.DAdaptAdamWState: "its estimated learning rate grows without bound",
    optax.ScaleByLBFGSState: "it mistakes the exchange for a step along its gradient",
    optax.ScaleByRpropState: "its steps grow while its own gradient keeps its sign",
}
"""Why the average is lost, by type of optimizer state; all of optax was tested."""


def check_averageable(opt_state: Any) -> None:
    """Raises a TypeError for an optimizer whose steps undo an average of models.

    Args:
      opt_state: state of the optimizer.
    """
    for state in states_of(opt_state, *_REFUSED):
        name = type(state).__name__
        raise TypeError(
            f"the optimizer with the state {name} does not keep averaged models: "
            f"{_REFUSED[type(state)]}; use another optimizer, such as optax.adamw, "
            "or all_reduce_step, which averages gradients"
        )


def check_no_own_model(opt_state: Any, what: str) -> None:
    """Raises a TypeError for an optimizer with a model that `what` does not average."""
    if own_models(opt_state):
        raise TypeError(
            "schedule_free keeps a second model z, which has to be averaged with "
            f"the params, and {what} averages only the params: use awc_step, "
            "atc_step or decentralize, or another optimizer"
        )


def own_models(opt_state: Any) -> list[Any]:
    """The models that an optimizer keeps in addition to the params."""
    found = [x.z for x in states_of(opt_state, contrib.ScheduleFreeState)]
    return [z for z in found if jax.tree.leaves(z)]  # A mask may remove all of one.


def average_own_models(opt_state: Any, average: Callable[[Any], Any]) -> Any:
    """The state of an optimizer, with its models other than the params averaged.

    This is z of schedule-free optimizers, which would otherwise drift apart between
    workers without bound.

    Args:
      opt_state: state of the optimizer.
      average: function of a tree like the params.
    """

    def averaged(state: Any) -> Any:
        # As in `own_models`.
        if isinstance(state, contrib.ScheduleFreeState) and jax.tree.leaves(state.z):
            return state._replace(z=average(state.z))
        return state

    is_one = lambda x: isinstance(x, contrib.ScheduleFreeState)  # noqa: E731
    return jax.tree.map(averaged, opt_state, is_leaf=is_one)


def map_keys(function: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """Applies the function to the random keys in the tree."""
    return jax.tree.map(lambda x: function(x) if is_key(x) else x, tree)


def check_no_common_keys(states: Any) -> None:
    """Raises a ValueError for random keys in states that are the same on all workers.

    Args:
      states: states of transformations that are called before `decentralize`.
    """
    if any(map(is_key, jax.tree.leaves(states))):
        raise ValueError(
            "a transformation before decentralize in a chain has a random key, like "
            "optax.add_noise, which is the same on all workers: put it inside, "
            "decentralize(optax.chain(optax.add_noise(...), optax.sgd(0.1)), ...), "
            "which gives each worker its own"
        )


def folded(key: jax.Array, number: jax.Array) -> jax.Array:
    """`fold_in` of a number into a random key, or into each of an array of keys."""
    fold = jax.random.fold_in
    for _ in range(jnp.ndim(key) - (0 if is_typed_key(key) else 1)):
        fold = jax.vmap(fold, (0, None))
    return fold(key, number)


def is_key(x: Any) -> bool:
    """Whether a leaf holds random keys, typed or (by its shape) raw."""
    if is_typed_key(x):
        return True
    if jnp.result_type(x) != jnp.uint32:
        return False
    return jnp.shape(x)[-1:] == jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape


def own_keys(tree: Any, axis_name: AxisName) -> Any:
    """The tree with this worker's own random keys, if the workers' axis is mapped."""
    try:
        lax.axis_index(axis_name)
    except NameError:
        return tree
    return map_keys(lambda key: _own(key, axis_name), tree)


def first_keys(tree: Any, count: jax.Array, axis_name: AxisName) -> Any:
    """The tree; before the first step, its random keys become this worker's own.

    An optimizer's `init` gives all workers the same key, and need not know their axis.
    """

    def chosen(key: jax.Array) -> jax.Array:
        return jnp.where(count == 0, _own(key, axis_name), key)

    return map_keys(chosen, tree)


def common_keys(tree: Any, axis_name: AxisName) -> Any:
    """The tree with the random keys of the first worker, on all workers."""

    def of_first(key: jax.Array) -> jax.Array:
        bits = jax.random.key_data(key) if is_typed_key(key) else key
        own = jnp.where(lax.axis_index(axis_name) == 0, bits, 0)
        bits = varying_as(bits, on_own_slice(sum_over, own, axis_name))
        if not is_typed_key(key):
            return bits
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key))

    return map_keys(of_first, tree)


def _own(key: jax.Array, axis_name: AxisName) -> jax.Array:
    return folded(key, worker_number(axis_name, key))


def is_typed_key(x: Any) -> bool:
    """Whether a leaf holds typed random keys."""
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def states_of(opt_state: Any, *kinds: type) -> list[Any]:
    """The states of these types within an optimizer's state."""
    is_one = lambda x: isinstance(x, kinds)  # noqa: E731
    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(x)]
