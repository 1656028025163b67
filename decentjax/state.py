"""The state of a worker, and the initial state of all."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from decentjax._own_models import folded, keys_in, map_keys


class WorkerState(NamedTuple):
    """The state of one worker between steps; stacked, each leaf is [N, ...]."""

    params: Any
    opt_state: Any
    model_state: Any  # batch statistics, for example; () for a model without any
    key: jax.Array  # the worker's own random key
    extra: Any = ()  # state of the algorithm, such as a tracked gradient; () for none


class DecentralizeState(NamedTuple):
    """State of `decentralize`.

    Defined here, below `decentralize`, so that the local update can recognise it.
    """

    count: jax.Array  # int32, []; number of steps done
    inner_state: optax.OptState
    extra: Any = ()  # state of the rounds, if any


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    num_workers: int,
    model_state: Any = (),
    workers: Sequence[int] | None = None,
    extra: Any = (),
) -> WorkerState:
    """Returns the initial state: one model for all workers, and a random key for each.

    Args:
      params: one model.
      optimizer: the optimizer, initialised for each worker.
      key: random key, split among the workers.
      num_workers: N.
      model_state: model state of one model; random keys in it are split among the
        workers: typed keys, and those in jax's old form in a part that is named so,
        such as `key`, `dropout_rng`, or within `rngs`.
      workers: numbers of the workers to initialise, as `local_workers(mesh)` in a job
        of several processes; by default all.
      extra: the algorithm's own state of one worker.

    Returns:
      The stacked state, each leaf [N, ...].

    Raises:
      TypeError: if `optimizer` is not an optimizer, or `key` not a random key.
      ValueError: if a worker does not exist, or the model has no leaf.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import init_state
      >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
      >>> key = jax.random.key(0)
      >>> state = init_state(params, optax.adam(1e-3), key, num_workers=4)
      >>> state.params["w"].shape
      (4, 3, 2)
    """
    check_optimizer(optimizer)
    if not hasattr(key, "dtype"):
        raise TypeError(f"key must be a random key, as jax.random.key(0), got {key!r}")
    check_workers(num_workers, workers)
    check_arrays((params, model_state, extra), "init_state")
    if not jax.tree.leaves(params):
        raise ValueError("nothing to train: the params have no leaves")
    numbers = jnp.arange(num_workers) if workers is None else jnp.asarray(workers)
    keys = jax.random.split(key, num_workers)[numbers]

    def init_optimizer(params: Any, number: jax.Array) -> Any:
        return map_keys(lambda key: folded(key, number), optimizer.init(params))

    params, extra = jax.tree.map(lambda x: _rows(x, len(keys)), (params, extra))
    model_state = own_rows(model_state, numbers)
    opt_state = jax.vmap(init_optimizer)(params, numbers)
    # Some optimizers keep the params themselves, but a buffer is donated only once.
    opt_state = jax.tree.map(lambda x: strong(x.copy()), opt_state)
    return WorkerState(params, opt_state, model_state, keys, extra)


def check_arrays(tree: Any, what: str) -> None:
    """Raises a TypeError for the shape of an array in the place of an array."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        raise TypeError(
            f"{what} takes arrays, got the shape of one: call it on shapes by "
            "jax.eval_shape"
        )


def check_workers(num_workers: int, workers: Sequence[int] | None) -> None:
    """Raises a ValueError unless there are such workers."""
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least one, got {num_workers}")
    if workers is not None and not all(0 <= i < num_workers for i in workers):
        raise ValueError(
            f"workers must be from 0 to {num_workers - 1}, got {list(workers)}"
        )


def own_rows(tree: Any, numbers: ArrayLike) -> Any:
    """Returns a row of each leaf for each worker; random keys become its own.

    Args:
      tree: arrays of one worker.
      numbers: numbers of the workers, [K].
    """
    return jax.tree.map(functools.partial(rows_of, numbers), tree, keys_in(tree))


def rows_of(numbers: ArrayLike, x: Any, holds_keys: bool) -> jax.Array:
    """Returns the rows of one leaf; see `own_rows`."""
    numbers = jnp.asarray(numbers)
    if not holds_keys:
        return _rows(x, len(numbers))
    # With the same key all workers would drop the same units and add the same noise.
    return jax.vmap(folded, (None, 0))(jnp.asarray(x), numbers)


def _rows(x: Any, count: int) -> jax.Array:
    return jnp.repeat(strong(x)[None], count, axis=0)


def strong(x: Any) -> jax.Array:
    """The array, never of a weak type, for which a step would compile twice."""
    x = jnp.asarray(x)
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x  # Keys have none.


def check_optimizer(optimizer: Any) -> None:
    """Raises a TypeError unless this is an optimizer, rather than a function of one."""
    # By its methods: optax.MultiSteps is not a GradientTransformation.
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        got = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise TypeError(
            f"wanted an optax optimizer, such as optax.adamw(1e-3), got {got}"
        )
