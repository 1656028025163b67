"""The loss of one worker: its signature, its compute dtype, and its checks."""

import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Metrics = dict[str, jax.Array]
Weighted = tuple[jax.Array, jax.Array | None]
"""(loss, weight), scalars; the loss of a batch in parts is their weighted mean."""


class LossFn(Protocol):
    """The loss of one worker on its own batch.

    Returns the scalar loss, and as auxiliary output the new model state and a dict of
    scalar metrics, none of them called "loss". The new model state has the structure,
    shapes and dtypes of the old. A loss that is a mean over something other than the
    examples, such as tokens without padding, is returned as a pair, `(loss, weight)`,
    with their number as the weight, so that micro-batches do not change the mean.

    Examples:
      >>> import jax.numpy as jnp
      >>> def loss_fn(params, model_state, batch, key):
      ...     x, y = batch
      ...     errors = x @ params - y
      ...     metrics = {"largest_error": jnp.max(jnp.abs(errors))}
      ...     return jnp.mean(errors**2), (model_state, metrics)
    """

    def __call__(
        self, params: Any, model_state: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array | Weighted, tuple[Any, Metrics]]: ...


def cast_compute(loss_fn: LossFn, dtype: DTypeLike) -> LossFn:
    """The same loss with float parameters cast to `dtype`; gradients keep theirs.

    Args:
      loss_fn: any loss.
      dtype: dtype of the forward and the backward pass, usually `jnp.bfloat16`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import cast_compute
      >>> def loss_fn(params, model_state, batch, key):
      ...     return jnp.mean(batch @ params), (model_state, {})
      >>> narrow = cast_compute(loss_fn, jnp.bfloat16)
      >>> batch = jnp.ones((4, 2), jnp.bfloat16)
      >>> narrow(jnp.ones(2), (), batch, None)[0].dtype
      dtype(bfloat16)
    """

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    @functools.wraps(loss_fn)
    def cast_loss_fn(params, model_state, batch, key):
        return loss_fn(jax.tree.map(cast, params), model_state, batch, key)

    return cast_loss_fn


def check_call(function: Any, name: str, *arguments: str, **options: Any) -> None:
    """Raises a TypeError unless a function takes the arguments of its calls.

    Args:
      function: the function.
      name: its name, for the error.
      arguments: names of its positional arguments.
      options: its keyword arguments.
    """
    shown = ", ".join([*arguments, *(f"{option}=..." for option in options)])
    wanted = f"{name} is called as {name}({shown})"
    if not callable(function):
        raise TypeError(f"{wanted}, got {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # For some functions written in C.
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"{wanted}: {error}") from None


def check_loss(result: Any, model_state: Any) -> tuple[Weighted, tuple[Any, Metrics]]:
    """Returns the result of a `LossFn`, with the weight of the loss, or None.

    Checked during tracing, at no runtime cost.

    Args:
      result: result of the loss.
      model_state: the model state that the loss was given.

    Raises:
      TypeError: if it is not a valid result of a `LossFn`.
    """
    match result:
        case (loss, (new_state, Mapping() as metrics)):
            pass
        case _:
            raise TypeError(
                "loss_fn must return (loss, (model_state, metrics)), the metrics a "
                "dict, as in `return loss, (model_state, {})`; got the structure "
                f"{jax.tree.structure(result)}"
            )
    weight = None
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, weight = loss
    if weight is not None:
        _check_scalar("weight of the loss", weight)
        weight = jnp.asarray(weight)
    _check_scalar("loss", loss)
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(
            f"the loss must be a float, got {jnp.result_type(loss)}: only a float has "
            "a gradient"
        )
    if "loss" in metrics:  # The steps add the loss under that name.
        raise TypeError(
            "loss_fn returns a metric 'loss', the name of the loss itself: give it "
            "another name, or leave it out"
        )
    for name, metric in metrics.items():
        _check_scalar(f"metric {name!r}", metric)
    _check_same_kind(model_state, new_state)
    _warn_of_kept_keys(model_state, new_state)
    metrics = {name: jnp.asarray(metric) for name, metric in metrics.items()}
    return (jnp.asarray(loss), weight), (new_state, metrics)


def kinds(tree: Any) -> dict[str, str]:
    """Returns dtype and shape of each leaf by path, such as float32[3, 4]."""
    return {
        jax.tree_util.keystr(path): f"{jnp.result_type(x)}{list(jnp.shape(x))}"
        for path, x in jax.tree.leaves_with_path(tree)
    }


def _check_scalar(name: str, value: Any) -> None:
    try:
        shape = jax.typeof(value).shape
    except TypeError:  # None, a string or a dict.
        got = type(value).__name__
        raise TypeError(f"the {name} must be a scalar, got {got}") from None
    if shape:
        raise TypeError(
            f"the {name} must be a scalar, got shape {shape}: return its mean or sum"
        )


def _check_same_kind(old: Any, new: Any) -> None:
    wanted, got = kinds(old), kinds(new)
    for path in wanted | got:
        if wanted.get(path) != got.get(path):
            raise TypeError(
                "loss_fn must return a model_state with the structure, shapes and "
                f"dtypes that it was given: model_state{path} was {wanted.get(path)} "
                f"and is {got.get(path)}"
            )
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise TypeError(
            "loss_fn must return a model_state with the structure that it was "
            f"given: it was {jax.tree.structure(old)} and is {jax.tree.structure(new)}"
        )


def _warn_of_kept_keys(old: Any, new: Any) -> None:
    """Warns if the random keys of a model state, and its counts, do not change."""
    # The rngs of flax NNX are a constant key and a count that each draw increases. An
    # unchanged leaf is the same tracer; a copy of it would be a new one.
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    pairs = [(x, y) for x, y in pairs if not jnp.issubdtype(x.dtype, jnp.inexact)]
    has_keys = any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x, _ in pairs)
    if has_keys and all(x is y for x, y in pairs):
        warnings.warn(
            "loss_fn returns the random keys of its model_state unchanged, so each "
            "step draws the same numbers, such as one dropout mask: draw from the key "
            "that loss_fn is given, or return the state after the draws",
            stacklevel=2,
        )
