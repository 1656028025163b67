"""The state of a worker, and the initial state of all."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, SequenceKey
from jax.typing import ArrayLike

from decentjax._core.optimizer_state import folded, keys_in


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


class RoundState(NamedTuple):
    """State of a worker between rounds, by number of the leaf.

    Args:
      anchor: z, in float32 or wider; empty without an outer optimizer.
      outer: state of the outer optimizer, for each fragment of the schedule.
      sent: leaves as last sent; empty if a round ends in the step in which it begins.
      coded: state of the compression; None without any.
      tokens: of weighted means, the tokens since each fragment was last sent, and those
        for which it was sent, float [2, P]; None without weights.
    """

    anchor: dict[int, jax.Array]
    outer: tuple[Any, ...]
    sent: dict[int, jax.Array]
    coded: Any = None
    tokens: jax.Array | None = None


class MeanState(NamedTuple):
    """State of a worker whose gradients are averaged by low-rank factors, by leaf.

    Args:
      errors: what earlier means have left out of its gradients, in float32 or wider.
      bases: orthonormal columns to begin with, the same on all workers.
    """

    errors: dict[int, jax.Array]
    bases: dict[int, jax.Array]


Values = dict[str, Any]
"""Own values, by name; each a pytree of arrays."""


class OwnState(NamedTuple):
    """State of a worker whose plan has own values.

    Args:
      carried: state of the rounds.
      values: the own values, by name.
    """

    carried: Any
    values: Values


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
        return equal_rows(x, len(numbers))
    # With the same key all workers would drop the same units and add the same noise.
    return jax.vmap(folded, (None, 0))(jnp.asarray(x), numbers)


def equal_rows(x: Any, count: int) -> jax.Array:
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


def map_params(
    function: Callable[..., Any], params: Any, state: Any, *trees: Any
) -> Any:
    """Applies a function to each array of a state that belongs to a param.

    These are arrays with the path and the shape of a param, wherever they are: the
    params themselves, moments of the optimizer, y of tracking; and in the state of
    rounds, which counts the leaves, anchors, the outer optimizer's moments, leaves as
    sent, and errors of a compression. Others stay, such as counts, random keys and
    encoded messages.

    Args:
      function: function of an array, and of the leaves of `trees` at its param.
      params: params whose leaves are shaped as in the state: stacked, [N, ...], if it
        is. Modules of NNX have names in the `train_states` of `wrap` alone.
      state: state of arrays or of their shapes, such as a `WorkerState`, the state of
        `decentralize`, or of another optimizer.
      trees: trees like the params, such as their partition specs.

    Returns:
      The state, with the results in the place of these arrays.

    Raises:
      ValueError: if one of the trees is not like the params.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import init_state, map_params, methods
      >>> params, plan = {"w": jnp.zeros(3)}, methods.diloco(2)
      >>> state = init_state(params, optax.adam(1e-3), jax.random.key(0), plan)
      >>> narrow = lambda x: x.astype("bfloat16")
      >>> state = map_params(narrow, state.params, state)
      >>> state.opt_state[0].mu["w"].dtype.name, state.extra.anchor[0].dtype.name
      ('bfloat16', 'bfloat16')
    """
    leaves, structure = jax.tree.flatten(params)
    beside = [structure.flatten_up_to(tree) for tree in trees]
    numbers = _numbers_of(params)

    def applied(number: int | None, x: Any) -> Any:
        if number is None or _form(x) != _form(leaves[number]):
            return x
        return function(x, *(tree[number] for tree in beside))

    def by_path(path: Any, x: Any) -> Any:
        if is_carried(x):
            return jax.tree.map_with_path(by_number, x)
        words = _words(path)
        ends = (words[start:] for start in range(len(words) + 1))
        return applied(next((numbers[end] for end in ends if end in numbers), None), x)

    def by_number(path: Any, x: Any) -> Any:
        key = path[-1].key if isinstance(path[-1], DictKey) else None
        # Several trees like the params may travel, as in tracking.
        return applied(key % len(leaves) if isinstance(key, int) else None, x)

    is_carried = lambda x: isinstance(x, RoundState | MeanState)  # noqa: E731
    return jax.tree.map_with_path(by_path, state, is_leaf=is_carried)


def _numbers_of(params: Any) -> dict[tuple[Any, ...], int]:
    """The numbers of the leaves by their paths, also without leading places in tuples.

    Params may be `(params, [z])`, and the moments are of the first.
    """
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    is_place = lambda key: isinstance(key, SequenceKey)  # noqa: E731
    inner = [_words(itertools.dropwhile(is_place, path)) for path in paths]
    first = {path: inner.index(path) for path in inner if path}
    return first | {_words(path): number for number, path in enumerate(paths)}


def _words(path: Iterable[Any]) -> tuple[Any, ...]:
    names = "key", "name", "idx"
    return tuple(
        next((getattr(key, x) for x in names if hasattr(key, x)), key) for key in path
    )


def _form(x: Any) -> tuple[Any, bool]:
    is_inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return getattr(x, "shape", ()), is_inexact
