"""Functions of the arrays of a state that belong to params."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, SequenceKey

from decentjax.rounds import RoundState


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
        if isinstance(x, RoundState):
            return jax.tree.map_with_path(by_number, x)
        words = _words(path)
        ends = (words[start:] for start in range(len(words) + 1))
        return applied(next((numbers[end] for end in ends if end in numbers), None), x)

    def by_number(path: Any, x: Any) -> Any:
        key = path[-1].key if isinstance(path[-1], DictKey) else None
        # Several trees like the params may travel, as in tracking.
        return applied(key % len(leaves) if isinstance(key, int) else None, x)

    is_carried = lambda x: isinstance(x, RoundState)  # noqa: E731
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
