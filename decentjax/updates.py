"""The local update of one worker: a gradient, followed by a descent step.

An algorithm that averages gradients, or corrects them, does so between the two.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from decentjax._core.collectives import sum_dtype
from decentjax._core.dataflow import copies, summands
from decentjax._core.dtypes import float_dtype
from decentjax._core.optimizer_state import (
    check_averageable,
    leaves_of_others,
    states_of,
)
from decentjax._core.slices import by_compiler, specs_of
from decentjax.state import DecentralizeState, WorkerState, check_optimizer

__all__ = ["Gradient", "LocalUpdate", "LossFn", "cast_compute", "local_update"]

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


class Adapt(Protocol):
    """The local update of one worker, as `local_update` returns it.

    For `decentjax.gossip` it must be a function of arrays alone: without collectives,
    `axis_index` and, where it uses `mixed`, side effects.
    """

    def __call__(
        self, state: WorkerState, batch: Any, mixed: Any
    ) -> tuple[WorkerState, Metrics]: ...


class Gradient(NamedTuple):
    """The gradient of one worker on a batch.

    Args:
      grads: gradient of the loss, in the dtypes of the params.
      loss: loss, for an optimizer that uses it; float, [].
      model_state: model state after the batch.
      key: the worker's next random key.
      metrics: metrics of the batch, with `loss` among them.
    """

    grads: Any
    loss: jax.Array
    model_state: Any
    key: jax.Array
    metrics: Metrics


@dataclasses.dataclass(frozen=True)
class LocalUpdate:
    """The local update `x_i <- mixed_i + update(grad f_i(x_i))`, in two halves.

    It is called as `local(state, batch, mixed)` in steps in which each worker uses its
    own gradient. All-reduce and gradient tracking change the gradient between the two
    halves. For `decentjax.gossip` it must be a function of arrays alone: without
    collectives, `axis_index` and, where it uses `mixed`, side effects.

    Args:
      gradient: function of state and batch that returns a `Gradient`.
      descend: function of a `Gradient`, the state before it, and the model after the
        exchange, that returns the new state and metrics.
      init: function of the params that returns the state of the optimizer, for `init`
        of a train step; None if there is none.

    Raises:
      TypeError: if one of them is not such a function.

    Examples:
      >>> import dataclasses
      >>> import optax
      >>> from decentjax import local_update
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).mean(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> def clipped(state, batch):
      ...     found = local.gradient(state, batch)
      ...     return found._replace(grads=found.grads.clip(-1, 1))
      >>> clipping = dataclasses.replace(local, gradient=clipped)
    """

    gradient: Callable[[WorkerState, Any], Gradient]
    descend: Callable[[Gradient, WorkerState, Any], tuple[WorkerState, Any]]
    init: Callable[[Any], Any] | None = None

    def __post_init__(self):
        check_call(self.gradient, "gradient", "state", "batch")
        check_call(self.descend, "descend", "found", "state", "mixed")

    def __call__(
        self, state: WorkerState, batch: Any, mixed: Any
    ) -> tuple[WorkerState, Metrics]:
        self.check_keeps_averages(state)
        return self.descend(self.gradient(state, batch), state, mixed)

    def check_keeps_averages(self, state: WorkerState) -> None:
        """Raises a TypeError for an optimizer whose steps undo an average of models."""
        check_averageable(state.opt_state)
        # An own function of the second half need not have one.
        if optimizer := getattr(self.descend, "keywords", {}).get("optimizer"):
            options = extra_arguments(optimizer, value=jnp.zeros([]))
            check_keeps_no_model(optimizer, state.params, state.opt_state, **options)


def local_update(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
) -> LocalUpdate:
    """Returns the local update `x_i <- mixed_i + update(grad f_i(x_i))`.

    Args:
      loss_fn: the loss, see `LossFn`.
      optimizer: optax optimizer; one that uses the loss gets it as `value`.
      num_micro_batches: number of equal parts of the batch, computed one after another
        to save memory; gradients, loss and metrics are their means, weighted if the
        loss returns weights.

    Returns:
      The update, a function of a `WorkerState`, a batch [examples, ...], and the model
      after the exchange, that returns the new state and the metrics. When traced it
      raises a TypeError if `loss_fn` is not a `LossFn`, or the optimizer averages
      models itself, undoes their average, or needs other arguments, and a ValueError if
      the batch has no `num_micro_batches` equal parts.

    Raises:
      TypeError: if `optimizer` is not an optimizer.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import WorkerState, local_update
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).mean(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.5))
      >>> x = jnp.array(1.0)
      >>> state = WorkerState(x, local.init(x), (), jax.random.key(0))
      >>> state, metrics = local(state, jnp.array([3.0]), x + 10)
      >>> print(state.params, metrics["loss"])
      13.0 4.0
    """
    check_optimizer(optimizer)
    return LocalUpdate(
        functools.partial(
            gradient, loss_fn=loss_fn, num_micro_batches=num_micro_batches
        ),
        functools.partial(descend, optimizer=optimizer),
        optimizer.init,
    )


def halves_of(local: Any, name: str) -> LocalUpdate:
    """Returns the two halves of a local update.

    Args:
      local: a `LocalUpdate`.
      name: name of the caller, for the error.

    Raises:
      TypeError: if it is something else, whose gradient is inaccessible.
    """
    if isinstance(local, LocalUpdate):
        return local
    raise TypeError(
        f"{name} changes the gradient before the optimizer gets it: pass "
        "local_update(loss_fn, optimizer), or your own decentjax.LocalUpdate, "
        f"got {getattr(local, '__name__', type(local).__name__)}"
    )


def init_of(local: Any) -> Callable[[Any], Any]:
    """Returns the function that makes the optimizer's state of a local update.

    Raises:
      TypeError: if there is none.
    """
    init = getattr(local, "init", None)
    if init is None:
        raise TypeError(
            "this local update does not say how its optimizer's state begins: pass "
            "local_update(loss_fn, optimizer), a LocalUpdate with init=optimizer.init, "
            "or call init_state"
        )
    return init


def gradient(
    state: WorkerState, batch: Any, *, loss_fn: LossFn, num_micro_batches: int = 1
) -> Gradient:
    """The gradient of one worker's loss, accumulated over micro-batches.

    Args:
      state: this worker's state; the optimizer's state is not used.
      batch: this worker's batch.
      loss_fn: the loss, see `LossFn`.
      num_micro_batches: number of equal parts of the batch, summed in float32 at least.

    Raises:
      TypeError: if `loss_fn` is not a `LossFn`.
      ValueError: if the batch has no `num_micro_batches` equal parts.
    """
    key, step_key = jax.random.split(state.key)
    differentiate = jax.grad(_with_loss_metric(loss_fn), has_aux=True)
    params, model_state = state.params, state.model_state

    def grad(*args):
        grads, aux = differentiate(*args)
        # For a complex number jax gives the conjugate of the direction of ascent.
        return jax.tree.map(jnp.conj, grads), aux

    if num_micro_batches == 1:
        grads, (model_state, metrics, _) = grad(params, model_state, batch, step_key)
        return Gradient(grads, metrics["loss"], model_state, key, metrics)

    def add_micro_batch(carry, part):
        model_state, total = carry
        grads, (model_state, metrics, weight) = grad(params, model_state, *part)
        terms = _weighted(grads, weight)
        total = jax.tree.map(lambda s, g: s + g.astype(s.dtype), total, terms)
        wide = None if weight is None else weight.astype(sum_dtype(weight))
        return (model_state, total), (_weighted(metrics, weight), wide)

    parts = (
        _cut(batch, num_micro_batches),
        jax.random.split(step_key, num_micro_batches),
    )
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, sum_dtype(x)), params)
    (model_state, total), (metrics, weights) = lax.scan(
        add_micro_batch, (model_state, zeros), parts
    )
    if weights is None:
        count, mean = num_micro_batches, lambda x: x.astype(sum_dtype(x)).mean(0)
    else:  # If all weights are zero, the sums are zero too.
        count = jnp.where(weights.any(), weights.sum(), 1)
        mean = lambda x: x.sum(0) / count  # noqa: E731
    grads = jax.tree.map(lambda s, x: (s / count).astype(x.dtype), total, params)
    metrics = jax.tree.map(mean, metrics)
    return Gradient(grads, metrics["loss"], model_state, key, metrics)


def descend(
    found: Gradient,
    state: WorkerState,
    mixed: Any,
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[WorkerState, Metrics]:
    """One optimizer update, from the model after the exchange.

    An optimizer that takes `value`, as `optax.contrib.reduce_on_plateau`, gets the
    loss.

    Args:
      found: result of `gradient`, with its gradient possibly changed.
      state: this worker's state.
      mixed: the model after the exchange.
      optimizer: optimizer that does not average models.

    Returns:
      The new state, and the metrics.

    Raises:
      TypeError: if the optimizer averages the models itself, or needs other arguments.
    """
    check_averages_nothing(state.opt_state, "this step")
    check_optimizer(optimizer)
    options = extra_arguments(optimizer, value=found.loss)
    try:
        updates, opt_state = optimizer.update(
            found.grads, state.opt_state, mixed, **options
        )
    except TypeError as error:
        if isinstance(error, jax.errors.JAXTypeError):
            raise
        raise TypeError(
            "the optimizer's update is called with grads, state, params"
            f"{' and value=loss' if options else ''}, and raises: {error}. For one "
            "that takes other arguments, such as grad_fn or value_fn, use "
            "decentralize, whose update passes them on"
        ) from error
    params = optax.apply_updates(mixed, updates)
    learned = found.model_state, found.key
    return WorkerState(params, opt_state, *learned, state.extra), found.metrics


def extra_arguments(optimizer: optax.GradientTransformation, **given: Any) -> dict:
    """Returns the keyword arguments that the optimizer's update takes.

    Determined by its signature: `optax.MultiSteps` takes all, and would get none by
    `optax.with_extra_args_support`.

    Args:
      optimizer: the optimizer.
      given: the available keyword arguments.
    """
    parameters = inspect.signature(optimizer.update).parameters.values()
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        return given
    names = {x.name for x in parameters}
    return {name: value for name, value in given.items() if name in names}


def check_keeps_no_model(
    optimizer: optax.GradientTransformation, params: Any, opt_state: Any, **options: Any
) -> None:
    """Raises a TypeError for an optimizer that steps from a copy of the params.

    An exchange averages the params, and the update, `copy + step - params`, takes that
    back. A copy that no update starts from, such as a moving average, does no harm.

    Args:
      optimizer: the optimizer.
      params: params of one worker.
      opt_state: its state.
      options: keyword arguments of its update.
    """
    first = len(jax.tree.leaves(params))
    try:
        begun = jax.make_jaxpr(optimizer.init)(params)
        kept = {*copies(begun, range(first))} & {*leaves_of_others(opt_state)}
        if not kept:
            return
        update = functools.partial(optimizer.update, **options)
        program = jax.make_jaxpr(update)(params, opt_state, params)
    except TypeError:  # The step raises it again, and explains it.
        return
    for number in summands(program, range(first), [first + n for n in kept]):
        path, _ = jax.tree.leaves_with_path(opt_state)[number - first]
        raise TypeError(
            f"the optimizer steps from {jax.tree_util.keystr(path) or 'its state'}, a "
            "copy of the params, and so takes every average of them back: for float32 "
            "masters of narrow params train float32 params, and cast them in the loss; "
            "or use methods.all_reduce, which averages gradients"
        )


def check_averages_nothing(opt_state: Any, what: str) -> None:
    """Raises a TypeError for the state of an optimizer wrapped by `decentralize`."""
    if states_of(opt_state, DecentralizeState):
        raise TypeError(
            "the optimizer averages the models itself, by decentralize, and so does "
            f"{what}: pass the inner optimizer, as optax.adamw(1e-3)"
        )


def _weighted(tree: Any, weight: jax.Array | None) -> Any:
    """The terms of a weighted sum, in float32 or wider; without a weight, the tree."""
    if weight is None:
        return tree

    def term(x: jax.Array) -> jax.Array:
        dtype = sum_dtype(x)
        product = weight.astype(dtype) * x.astype(dtype)
        # The mean over no tokens is 0 / 0, and has no weight.
        return jnp.where(weight == 0, jnp.zeros_like(product), product)

    return jax.tree.map(term, tree)


def _cut(batch: Any, num_parts: int) -> Any:
    """The batch in parts of consecutive examples; each part gets the scalars."""
    shapes = {
        jax.tree_util.keystr(path): jnp.shape(x)
        for path, x in jax.tree.leaves_with_path(batch)
    }
    sizes = {path: shape[0] for path, shape in shapes.items() if shape}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "micro-batches split each array of the batch by examples, but a worker's "
            f"arrays have different numbers of these: {sizes}; make data of the "
            "whole batch a scalar, or repeat it for each example"
        )
    size = max(sizes.values(), default=num_parts)
    if num_parts < 1 or size % num_parts:
        raise ValueError(
            f"a worker's batch of {size} cannot be split into {num_parts} equal "
            "micro-batches"
        )

    def cut(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim == 0:
            return jnp.broadcast_to(x, num_parts)
        # On explicit axes the examples of each part keep the sharding of the batch.
        parts = PartitionSpec(None, *specs_of(x))
        return by_compiler(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), parts)(x)

    return jax.tree.map(cut, batch)


def _with_loss_metric(loss_fn: LossFn) -> Callable:
    check_call(loss_fn, "loss_fn", "params", "model_state", "batch", "key")

    def with_loss(params, model_state, batch, key):
        result = loss_fn(params, model_state, batch, key)
        (loss, weight), (model_state, metrics) = check_loss(result, model_state)
        return loss, (model_state, {"loss": loss, **metrics}, weight)

    return with_loss


def cast_compute(loss_fn: LossFn, dtype: DTypeLike) -> LossFn:
    """The same loss with float parameters cast to `dtype`; gradients keep theirs.

    Args:
      loss_fn: any loss.
      dtype: dtype of the forward and the backward pass, usually `jnp.bfloat16`, or
        its name.

    Raises:
      ValueError: if it is no dtype of floats.

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

    wanted = float_dtype("dtype", dtype)

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(wanted) if jnp.issubdtype(x.dtype, jnp.floating) else x

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
