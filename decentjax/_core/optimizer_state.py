"""Models and random keys in an optimizer's state, which an exchange has to handle.

Schedule-free optimizers, for example, keep a second model in addition to the params.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax import contrib

from decentjax._core.collectives import AxisName, sum_over, varying_as
from decentjax._core.slices import on_own_slice, worker_number

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
_OF_OPTAX = tuple(
    kind
    for module in (optax, contrib)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and kind.__name__.endswith("State")
    and len(getattr(kind, "_fields", ())) > 1
)
_KEY_NAMES = {"key", "keys", "prng", "prngkey", "rng", "rngs"}


def check_averageable(opt_state: Any) -> None:
    """Raises a TypeError for an optimizer whose steps undo an average of models.

    Args:
      opt_state: state of the optimizer.
    """
    for kind, _ in states_of(opt_state, *_REFUSED):
        raise TypeError(
            f"the optimizer with the state {kind.__name__} does not keep averaged "
            f"models: {_REFUSED[kind]}; use another optimizer, such as optax.adamw, "
            "or methods.all_reduce, which averages gradients"
        )


def check_no_own_model(opt_state: Any, what: str) -> None:
    """Raises a TypeError for an optimizer with a model that `what` does not average."""
    if own_models(opt_state):
        raise TypeError(
            "schedule_free keeps a second model z, which has to be averaged with "
            f"the params, and {what} averages only the params: use a "
            "topology or Rounds(topology) in the step, or another optimizer"
        )


def own_models(opt_state: Any) -> list[Any]:
    """The models that an optimizer keeps in addition to the params."""
    found = [x.get("z") for _, x in states_of(opt_state, contrib.ScheduleFreeState)]
    return [z for z in found if jax.tree.leaves(z)]  # A mask may remove all of one.


def average_own_models(opt_state: Any, average: Callable[[Any], Any]) -> Any:
    """The state of an optimizer, with its models other than the params averaged.

    This is z of schedule-free optimizers, which would otherwise drift apart between
    workers without bound.

    Args:
      opt_state: state of the optimizer.
      average: function of a tree like the params.
    """
    leaves, structure = jax.tree.flatten(opt_state)
    for numbers in own_models(structure.unflatten(range(len(leaves)))):
        model = average(jax.tree.map(leaves.__getitem__, numbers))
        for number, x in zip(
            jax.tree.leaves(numbers), jax.tree.leaves(model), strict=True
        ):
            leaves[number] = x
    return structure.unflatten(leaves)


def map_keys(function: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """Applies the function to the random keys in the tree."""
    return jax.tree.map(lambda x, k: function(x) if k else x, tree, keys_in(tree))


def check_no_common_keys(states: Any) -> None:
    """Raises a ValueError for random keys in states that are the same on all workers.

    Args:
      states: states of transformations that are called before `decentralize`.
    """
    if any(jax.tree.leaves(keys_in(states))):
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


def keys_in(tree: Any) -> Any:
    """Which leaves of a tree hold random keys, as a tree of booleans.

    Typed keys do, and those in jax's old form if they are named so, as `key`,
    `dropout_rng` or anything in `rngs`: counters and packed weights have their dtype
    and shape too.
    """

    def holds(path: Any, x: Any) -> bool:
        if is_typed_key(x):
            return True
        if not (_has_form_of_key(x) and _is_named_key(names_of(path))):
            return False
        warnings.warn(
            f"{jax.tree_util.keystr(path)} is taken for a random key in jax's old "
            "form, by its name: make typed keys with jax.random.key instead",
            stacklevel=2,
        )
        return True

    return jax.tree.map_with_path(holds, tree)


def _has_form_of_key(x: Any) -> bool:
    if jnp.result_type(x) != jnp.uint32:
        return False
    return jnp.shape(x)[-1:] == jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape


def _is_named_key(names: list[str]) -> bool:
    *around, last = names or [""]
    is_one = not _KEY_NAMES.isdisjoint(last.lower().split("_"))
    return is_one or (last != "count" and "rngs" in around)


def names_of(path: Any) -> list[str]:
    """The names on the way to a leaf, without places in tuples."""
    keys = (getattr(key, "name", getattr(key, "key", None)) for key in path)
    # Of a variable of flax NNX.
    return [key for key in keys if isinstance(key, str) and key != "value"]


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


def states_of(opt_state: Any, *kinds: type) -> list[tuple[type, dict[str, Any]]]:
    """The states of these types within an optimizer's state: type and fields."""
    is_one = lambda x: _kind_of(x, kinds) is not None  # noqa: E731
    leaves = jax.tree.leaves(opt_state, is_leaf=is_one)
    found = [(_kind_of(x, kinds), x) for x in leaves]
    return [(kind, _fields(x)) for kind, x in found if kind is not None]


def is_of_optax(x: Any) -> bool:
    """Whether it is a state of optax, or was one before it became a mapping."""
    is_typed = type(x).__module__.startswith("optax.") and hasattr(x, "_fields")
    return is_typed or _kind_of(x, _OF_OPTAX) is not None


def leaves_of_others(opt_state: Any, *known: type) -> list[int]:
    """The numbers of the leaves that neither optax nor this library keeps.

    All of optax was tested; the states inside of its own may be anyone's.

    Args:
      opt_state: state of an optimizer, or what contains it.
      known: types of this library that may have become mappings.
    """

    def is_known(x: Any) -> bool:
        is_ours = hasattr(x, "_fields") and type(x).__module__.startswith("decentjax.")
        return is_ours or is_of_optax(x) or _kind_of(x, known) is not None

    def others(x: Any) -> Any:
        if not is_known(x):
            return x
        inner = {name: part for name, part in _fields(x).items() if "state" in name}
        return jax.tree.map(others, inner, is_leaf=is_known)

    structure = jax.tree.structure(opt_state)
    marked = structure.unflatten(range(structure.num_leaves))
    return jax.tree.leaves(jax.tree.map(others, marked, is_leaf=is_known))


def _kind_of(x: Any, kinds: tuple[type, ...]) -> type | None:
    """Which of these named tuples it is, or was.

    `nnx.split`, flax's `to_state_dict` and orbax make mappings of named tuples. Fields
    without arrays, as the states of some optimizers inside, are then missing.
    """
    for kind in kinds:
        names: set[str] = set(getattr(kind, "_fields", ()))
        needed = {name for name in names if "state" not in name}
        if isinstance(x, kind):
            return kind
        if isinstance(x, Mapping) and x and needed <= set(x) <= names:
            return kind
    return None


def _fields(state: Any) -> dict[str, Any]:
    return dict(state) if isinstance(state, Mapping) else state._asdict()
