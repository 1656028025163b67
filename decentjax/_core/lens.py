"""The params within the train state of somebody else: which leaves they are."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from decentjax._core.collectives import is_mixed
from decentjax._core.optimizer_state import (
    is_of_optax,
    leaves_of_others,
    names_of,
    own_models,
)


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


class Copy(NamedTuple):
    """A leaf of a train state that equals a leaf of the params.

    Args:
      of: number of the leaf of the params.
      number: number of the copy.
      where: the tree to which it belongs, as it is written.
    """

    of: int
    number: int
    where: str


def copies_of_params(lens: Lens, state: Any, *known: type) -> list[Copy]:
    """The leaves that have the name, the shape and the values of one of the params.

    Their dtype may be another. Leaves of one value are compared only if there are no
    others, as moments begin at zero.

    Args:
      lens: the params.
      state: train state.
      known: types of states whose copies are known, as in `leaves_of_others`.
    """
    leaves = jax.tree.leaves(state)
    pairs = [x for x in _namesakes(lens, state, known) if _have_values(leaves, x)]
    values = {one.of: _values(leaves[one.of]) for one in pairs}
    varied = {n for n, x in values.items() if (x.ravel() != x.ravel()[:1]).any()}
    return [
        one
        for one in pairs
        if one.of in (varied or values)
        and _are_equal(values[one.of], _values(leaves[one.number]))
    ]


def _namesakes(lens: Lens, state: Any, known: tuple[type, ...]) -> Iterator[Copy]:
    leaves = jax.tree.leaves_with_path(state)
    for end, n in jax.tree.leaves_with_path(lens.params.unflatten(lens.numbers)):
        name = names_of(end)
        for other in leaves_of_others(state, *known):
            path, _ = leaves[other]
            if other != n and (not name or names_of(path)[-len(name) :] == name):
                tree = jax.tree_util.keystr(path[: len(path) - len(name)])
                yield Copy(n, other, f"state{tree}")


def _have_values(leaves: list[Any], copy: Copy) -> bool:
    """Whether both are arrays of floats, of one shape."""
    x, y = leaves[copy.of], leaves[copy.number]
    is_array = not any(isinstance(a, Tracer | jax.ShapeDtypeStruct) for a in (x, y))
    return is_array and is_mixed(x) and is_mixed(y) and jnp.shape(x) == jnp.shape(y)


def _values(x: Any) -> jax.Array:
    """An array, of a sharded one this process's first part."""
    return jnp.asarray(x).addressable_shards[0].data


def _are_equal(x: jax.Array, y: jax.Array) -> bool:
    narrow = min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
    there = jax.device_put(y, x.device)
    return bool(jnp.array_equal(x.astype(narrow), there.astype(narrow)))


def default_params(state: Any) -> Any:
    """The params of a train state, by its type or by the names of its parts.

    Raises:
      ValueError: if there are none, or several trees that may be they, or an
        optimizer's state is where they should be.
    """
    if hasattr(state, "params"):
        return state.params
    if isinstance(state, Mapping) and "params" in state:
        return state["params"]
    # Moments that optax keeps of a state of NNX are `nnx.Param`s too, but come second.
    first, second = _first_two(state)
    if first is not None and _is_of_optimizer(first):
        raise ValueError(
            "the first item of the train state is averaged, and here it has an "
            "optimizer's state: put the model first, or pass a function that selects "
            "the params, params=lambda state: state[1]"
        )
    if first is not None and _form(first) == _form(second):
        raise ValueError(
            "the first two items of the train state are alike, as a model and its "
            "moving average: pass a function that selects the params, "
            "params=lambda state: state[0], or state[1]"
        )
    whole = state if first is None else first
    if (found := _nnx_params(whole)) and not _has_several_models(whole):
        return found
    if first is not None:
        return first
    raise ValueError(
        f"found no params in a train state of type {type(state).__name__}, or several "
        "that may be: pass a function that selects them, "
        f"params=lambda state: state{_likely(state)}"
    )


def _first_two(state: Any) -> tuple[Any, Any]:
    """The first items of a tuple, also of one that NNX has split; None of others."""
    items: Any = state
    if isinstance(state, Mapping):
        return (items[0], items[1]) if {0, 1} <= set(state) else (None, None)
    is_tuple = isinstance(state, tuple | list) and len(state) > 1
    return (items[0], items[1]) if is_tuple else (None, None)


def _form(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of its floats."""
    leaves = jax.tree.leaves_with_path(tree)
    return [(jax.tree_util.keystr(p), jnp.shape(x)) for p, x in leaves if is_mixed(x)]


def _has_several_models(state: Any) -> bool:
    """Whether several items of a dict have params of NNX, as moments of them do."""
    return type(state) is dict and sum(bool(_nnx_params(x)) for x in state.values()) > 1


def _likely(state: Any) -> str:
    """The part of a state that is most likely its params, as it is written."""
    paths = [path[:1] for path, _ in jax.tree.leaves_with_path(state) if path]
    parts = [*dict.fromkeys(map(jax.tree_util.keystr, paths)), ".model"]
    likely = [x for x in parts if re.search("model|param|net", x) and "ema" not in x]
    return likely[0]


def _is_of_optimizer(tree: Any) -> bool:
    """Whether there is a state of optax in it, or one that is called opt_state."""
    found = jax.tree.leaves_with_path(tree, is_leaf=is_of_optax)
    names = {name for path, _ in found for name in names_of(path)}
    return any(is_of_optax(x) for _, x in found) or "opt_state" in names


def _nnx_params(state: Any) -> list[Any]:
    """The values of the `nnx.Param`s in a state of flax NNX."""
    # Not imported here: a state of NNX comes with it.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    variables = jax.tree.leaves(state, is_leaf=is_variable)
    return [jax.tree.leaves(x) for x in variables if isinstance(x, nnx.Param)]
