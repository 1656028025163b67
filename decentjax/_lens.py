"""The params within the train state of somebody else: which leaves they are."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decentjax._own_models import own_models
from decentjax.mixing import is_mixed


class Lens(NamedTuple):
    """The params within a train state.

    Args:
      structure: structure of the state.
      params: structure of the params.
      numbers: numbers of the state's leaves that are params, in their order.
    """

    structure: Any
    params: Any
    numbers: tuple[int, ...]

    def split(self, state: Any) -> tuple[Any, Any]:
        """Returns the params, and the rest: the state with None in their place."""
        leaves = jax.tree.leaves(state)
        params = [leaves[number] for number in self.numbers]
        for number in self.numbers:
            leaves[number] = None
        return self.params.unflatten(params), self.structure.unflatten(leaves)

    def join(self, params: Any, rest: Any) -> Any:
        """Returns the state of which these are the parts."""
        found = dict(zip(self.numbers, jax.tree.leaves(params), strict=True))
        others = iter(jax.tree.leaves(rest))
        count = self.structure.num_leaves
        leaves = (found[n] if n in found else next(others) for n in range(count))
        return self.structure.unflatten(leaves)


def find_lens(select: Callable[[Any], Any], state: Any) -> Lens:
    """Returns the lens on the leaves of a state that a function selects.

    Raises:
      TypeError: if a leaf of the state is no array.
      ValueError: if the function selects anything but arrays of it, or no floats.
    """
    leaves, structure = jax.tree.flatten(state)
    for path, x in jax.tree.leaves_with_path(state):
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
            raise TypeError(
                f"state{jax.tree_util.keystr(path)} is a {type(x).__name__}: a train "
                "state consists of arrays; keep the rest outside, as nnx.split and "
                "eqx.partition do"
            )
    # Stand-ins of the same shapes, each an object of its own.
    marks = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    numbers = {id(mark): number for number, mark in enumerate(marks)}
    marked = structure.unflatten(marks)
    wanted, others = select(marked), own_models(marked)
    # A second model, z of schedule-free optimizers, moves and is averaged likewise.
    selected, params = jax.tree.flatten((wanted, others) if others else wanted)
    found = [numbers[id(x)] for x in selected if id(x) in numbers]
    if len({*found}) < len(selected):
        raise ValueError(
            "params must select arrays of the train state, each once, as in "
            "lambda state: state.params; it returned others"
        )
    if not any(map(is_mixed, selected)):
        raise ValueError(
            "params selects no arrays of floats from the train state: there would be "
            "nothing to average"
        )
    return Lens(structure, params, tuple(found))


def default_params(state: Any) -> Any:
    """The params of a train state, by its type or by the names of its parts.

    Raises:
      ValueError: if there are none, or an optimizer's state is where they should be.
    """
    if hasattr(state, "params"):
        return state.params
    if isinstance(state, Mapping) and "params" in state:
        return state["params"]
    # Moments that optax keeps of a state of NNX are `nnx.Param`s too, but come second.
    first = _first(state)
    if first is not None and _is_of_optimizer(first):
        raise ValueError(
            "the first item of the train state is averaged, and here it has an "
            "optimizer's state: put the model first, or pass a function that selects "
            "the params, params=lambda state: state[1]"
        )
    if found := _nnx_params(state if first is None else first):
        return found
    if first is not None:
        return first
    raise ValueError(
        f"found no params in a train state of type {type(state).__name__}: pass a "
        "function that selects them, params=lambda state: state.model"
    )


def _first(state: Any) -> Any:
    """The first item of a tuple, also of one that NNX has split; None of others."""
    if isinstance(state, tuple | list):
        return state[0] if len(state) > 1 else None
    return state[0] if isinstance(state, Mapping) and 0 in state else None


def _is_of_optimizer(tree: Any) -> bool:
    """Whether there is a state of optax in it, or one that is called opt_state."""

    def is_state(x: Any) -> bool:
        kind = type(x)
        return kind.__module__.startswith("optax.") and kind.__name__.endswith("State")

    found = jax.tree.leaves_with_path(tree, is_leaf=is_state)
    keys = [key for path, _ in found for key in path]
    names = {str(getattr(key, "name", getattr(key, "key", None))) for key in keys}
    return any(is_state(x) for _, x in found) or "opt_state" in names


def _nnx_params(state: Any) -> list[Any]:
    """The values of the `nnx.Param`s in a state of flax NNX."""
    # Not imported here: a state of NNX comes with it.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    variables = jax.tree.leaves(state, is_leaf=is_variable)
    return [jax.tree.leaves(x) for x in variables if isinstance(x, nnx.Param)]
