"""The train step of one worker: an algorithm is the order of `adapt` and `mix`.

`adapt` is the local update, with the loss and the optimizer bound by
`functools.partial`; `mix` averages models. `decentjax.placement` runs the steps, on a
mesh of devices or simulated on one.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from decentjax._collectives import sum_dtype
from decentjax._own_models import (
    average_own_models,
    check_averageable,
    common_keys,
    folded,
    is_key,
    is_typed_key,
    map_keys,
    states_of,
)
from decentjax._slices import by_compiler, specs_of
from decentjax.exchange import Exchange
from decentjax.loss import LossFn, check_call, check_loss
from decentjax.loss import Metrics as Metrics
from decentjax.mixing import global_mean
from decentjax.mixing import mix as mix_over

AXIS = "workers"


class WorkerState(NamedTuple):
    """What one worker carries from step to step; stacked, each leaf is [N, ...]."""

    params: Any
    opt_state: Any
    model_state: Any  # batch statistics, for example; () for a model without any
    key: jax.Array  # the worker's own random key
    extra: Any = ()  # state of the algorithm, such as a tracked gradient; () for none


Mix = Callable[[Any, Exchange], Any]
"""(params, exchange) to the mixed params; `mix` with its other arguments bound."""

mix_workers: Mix = functools.partial(mix_over, axis_name=AXIS)

ADAPT_ARGUMENTS = "state", "batch", "mixed"


class Adapt(Protocol):
    """The local update of one worker, as `adapt` with its keywords bound.

    For `decentjax.gossip` it must be a function of arrays alone: without collectives,
    `axis_index` and, where it uses `mixed`, side effects.
    """

    def __call__(
        self, state: WorkerState, batch: Any, mixed: Any
    ) -> tuple[WorkerState, Metrics]: ...


class Step(Protocol):
    """The step of one worker, as `awc_step` with its keywords bound.

    It takes an exchange, or another static value that says what the step sends.
    """

    def __call__(
        self, state: WorkerState, batch: Any, exchange: Any, /
    ) -> tuple[WorkerState, Metrics]: ...


def awc_step(
    state: WorkerState,
    batch: Any,
    exchange: Exchange,
    *,
    adapt: Adapt,
    mix: Mix = mix_workers,
) -> tuple[WorkerState, Metrics]:
    """Adapt while communicating: `x_i <- sum_j W_ij x_j + update(grad f_i(x_i))`.

    The gradient waits for no message, and no message for the gradient. A GPU or TPU
    compiler therefore runs the exchange beside the forward and the backward pass. On
    CPU no compiler does: use `decentjax.gossip` there. Weight decay is taken from the
    mixed model.

    Args:
      state: this worker's state.
      batch: this worker's batch, any pytree of arrays [examples, ...].
      exchange: the static exchange of this step, as in `topology[step]`.
      adapt: the local update, `decentjax.adapt` with its keywords bound.
      mix: the averaging, `decentjax.mix` with its keywords bound.

    Returns:
      The new state, and the metrics with `loss` among them.

    Examples:
      >>> import functools
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import adapt, awc_step, init_state, simulate, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return jnp.sum((params - batch) ** 2), (model_state, {})
      >>> optimizer = optax.sgd(0.1)
      >>> local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optimizer)
      >>> step = functools.partial(awc_step, adapt=local)
      >>> train_step = simulate(step, topology.complete(2))
      >>> state = init_state(jnp.zeros(()), optimizer, jax.random.key(0), num_workers=2)
      >>> state, metrics = train_step(state, jnp.array([1.0, 3.0]), 0)
      >>> print(state.params, metrics["loss"])
      [0.2 0.6] [1. 9.]

    Source: From Promise to Practice (ICLR 2025), equation 1.
    """
    # The barrier has two effects. GPU compilers let a message arrive just before its
    # first use: with the barrier that is before the first update, so the last messages
    # overlap the backward pass too. And without it a sum that is fused with the update
    # may be contracted, which rounds differently from an exchange in its own program.
    opt_state = average_own_models(state.opt_state, lambda z: mix(z, exchange))
    mixed = lax.optimization_barrier(mix(state.params, exchange))
    return adapt(state._replace(opt_state=opt_state), batch, mixed)


def atc_step(
    state: WorkerState,
    batch: Any,
    exchange: Exchange,
    *,
    adapt: Adapt,
    mix: Mix = mix_workers,
) -> tuple[WorkerState, Metrics]:
    """Adapt, then combine: `x_i <- sum_j W_ij (x_j + update(grad f_j(x_j)))`.

    The exchange waits for the update, so nothing hides it. Arguments and result as in
    `awc_step`.

    Examples:
      >>> import functools
      >>> import optax
      >>> from decentjax import adapt, atc_step, simulate, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optax.sgd(0.1))
      >>> step = functools.partial(atc_step, adapt=local)
      >>> train_step = simulate(step, topology.ring(8))
    """
    state, metrics = adapt(state, batch, state.params)
    opt_state = average_own_models(state.opt_state, lambda z: mix(z, exchange))
    mixed = mix(state.params, exchange)
    return state._replace(params=mixed, opt_state=opt_state), metrics


def all_reduce_step(
    state: WorkerState, batch: Any, exchange: Exchange, *, adapt: Callable
) -> tuple[WorkerState, Metrics]:
    """The baseline: `x <- x + update(1/N sum_j grad f_j(x))`, one x on all workers.

    The optimizer is given the mean loss, and its random numbers are the same on all
    workers. Each worker counts once, whatever the weight of its loss.

    Args:
      state: this worker's state.
      batch: this worker's batch.
      exchange: ignored; the mean is over all workers in every step.
      adapt: the local update, which takes `mean` as `decentjax.adapt` does.

    Returns:
      As `awc_step`.

    Examples:
      >>> import functools
      >>> import optax
      >>> from decentjax import adapt, all_reduce_step, simulate, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optax.sgd(0.1))
      >>> step = functools.partial(all_reduce_step, adapt=local)
      >>> train_step = simulate(step, topology.complete(8))
    """
    del exchange
    check_call(adapt, "the adapt of all_reduce_step", *ADAPT_ARGUMENTS, mean=None)
    mean = functools.partial(global_mean, axis_name=AXIS)
    state = state._replace(opt_state=common_keys(state.opt_state, AXIS))
    return adapt(state, batch, state.params, mean=mean)


def adapt(
    state: WorkerState,
    batch: Any,
    mixed: Any,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
    reduce_gradients: Callable[[Any], Any] | None = None,
    mean: Callable[[Any], Any] | None = None,
) -> tuple[WorkerState, Metrics]:
    """The local update: `x_i <- mixed_i + update(grad f_i(x_i))`.

    Args:
      state: this worker's state, with the unmixed model x_i.
      batch: this worker's batch, any pytree of arrays [examples, ...].
      mixed: the model after the exchange.
      loss_fn: the loss, see `LossFn`.
      optimizer: optax optimizer; one that watches the loss is given it as `value`.
      num_micro_batches: number of equal parts of the batch, computed one after the
        other to save memory; gradients, loss and metrics are their means, by the
        weights that the loss returns, if it does.
      reduce_gradients: function of the worker's gradient, applied before the
        optimizer; by default none.
      mean: function of a tree that returns its mean over the workers who take one
        update together, as in `all_reduce_step`; called with the gradient, and then
        with the loss. By default each worker updates alone.

    Returns:
      The new state, and the metrics with `loss` among them.

    Raises:
      TypeError: if `loss_fn` is no `LossFn`, or the optimizer averages models itself,
        undoes their average, or needs other arguments.
      ValueError: if the batch has no `num_micro_batches` equal parts.

    Examples:
      >>> import functools
      >>> import optax
      >>> from decentjax import adapt
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).mean(), (model_state, {})
      >>> local = functools.partial(
      ...     adapt,
      ...     loss_fn=loss_fn,
      ...     optimizer=optax.adamw(1e-3),
      ...     num_micro_batches=4,
      ... )
    """
    grads, model_state, key, metrics = gradient(
        loss_fn, state, batch, num_micro_batches
    )
    loss = metrics["loss"]
    if mean is None:
        check_averageable(state.opt_state)
    else:
        grads, loss = mean(grads), mean(loss)
    if reduce_gradients is not None:
        grads = reduce_gradients(grads)
    params, opt_state = descend(optimizer, grads, state.opt_state, mixed, loss)
    state = state._replace(
        params=params, opt_state=opt_state, model_state=model_state, key=key
    )
    return state, metrics


def gradient(
    loss_fn: LossFn, state: WorkerState, batch: Any, num_micro_batches: int
) -> tuple[Any, Any, jax.Array, Metrics]:
    """The gradient of one worker's loss, accumulated over micro-batches.

    Args:
      loss_fn: the loss, see `LossFn`.
      state: this worker's state; the optimizer's state is not used.
      batch: this worker's batch.
      num_micro_batches: number of equal parts of the batch.

    Returns:
      The gradient, in the dtypes of the params, the new model state and key, and the
      metrics. Micro-batches are summed in float32 at least.

    Raises:
      TypeError: if `loss_fn` takes or returns something other than a `LossFn` does.
      ValueError: if the batch has no `num_micro_batches` equal parts.
    """
    key, step_key = jax.random.split(state.key)
    differentiate = jax.grad(_with_loss_metric(loss_fn), has_aux=True)
    params, model_state = state.params, state.model_state

    def grad(*args):
        grads, aux = differentiate(*args)
        # Of a complex number jax gives the conjugate of the direction of ascent.
        return jax.tree.map(jnp.conj, grads), aux

    if num_micro_batches == 1:
        grads, (model_state, metrics, _) = grad(params, model_state, batch, step_key)
        return grads, model_state, key, metrics

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
        count, mean = num_micro_batches, lambda x: x.mean(0)
    else:  # Where all weights are zero, the sums are zero too.
        count = jnp.where(weights.any(), weights.sum(), 1)
        mean = lambda x: x.sum(0) / count  # noqa: E731
    grads = jax.tree.map(lambda s, x: (s / count).astype(x.dtype), total, params)
    return grads, model_state, key, jax.tree.map(mean, metrics)


def _weighted(tree: Any, weight: jax.Array | None) -> Any:
    """The terms of a weighted sum, in float32 at least; without a weight the tree."""
    if weight is None:
        return tree

    def term(x: jax.Array) -> jax.Array:
        dtype = sum_dtype(x)
        product = weight.astype(dtype) * x.astype(dtype)
        # Of no tokens the mean is 0 / 0, and counts for nothing.
        return jnp.where(weight == 0, jnp.zeros_like(product), product)

    return jax.tree.map(term, tree)


class DecentralizeState(NamedTuple):
    """State of `decentralize`.

    It is defined here, below `decentralize`, for the steps to recognise it.
    """

    count: jax.Array  # int32, []; number of steps done
    inner_state: optax.OptState
    extra: Any = ()  # of rounds, what they carry


def check_averages_nothing(opt_state: Any, what: str) -> None:
    """Raises a TypeError for the state of an optimizer by `decentralize`."""
    if states_of(opt_state, DecentralizeState):
        raise TypeError(
            "the optimizer averages the models itself, by decentralize, and so does "
            f"{what}: give it the inner optimizer, as optax.adamw(1e-3)"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raises a TypeError unless this is an optimizer, and not the function of one."""
    # By its methods: optax.MultiSteps is no GradientTransformation.
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        got = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise TypeError(
            f"wanted an optax optimizer, such as optax.adamw(1e-3), got {got}"
        )


def descend(
    optimizer: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    loss: jax.Array,
) -> tuple[Any, Any]:
    """One update of an optimizer that leaves the exchange to the step.

    An optimizer that takes `value`, as `optax.contrib.reduce_on_plateau`, has the loss.

    Returns:
      The updated params, and the optimizer's new state.

    Raises:
      TypeError: if the optimizer averages the models itself, or needs other arguments.
    """
    check_averages_nothing(opt_state, "this step")
    check_optimizer(optimizer)
    options = extra_arguments(optimizer, value=loss)
    try:
        updates, opt_state = optimizer.update(grads, opt_state, params, **options)
    except TypeError as error:
        if isinstance(error, jax.errors.JAXTypeError):
            raise
        raise TypeError(
            "the optimizer's update is called with grads, state, params"
            f"{' and value=loss' if options else ''}, and says: {error}. For one that "
            "takes other arguments, such as grad_fn or value_fn, use decentralize, "
            "whose update hands them on"
        ) from error
    return optax.apply_updates(params, updates), opt_state


def extra_arguments(optimizer: optax.GradientTransformation, **given: Any) -> dict:
    """Returns the keyword arguments that the optimizer's update takes.

    By its signature: `optax.MultiSteps` takes all, and would get none of them by
    `optax.with_extra_args_support`.

    Args:
      optimizer: the optimizer.
      given: the keyword arguments that there are.
    """
    parameters = inspect.signature(optimizer.update).parameters.values()
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        return given
    names = {x.name for x in parameters}
    return {name: value for name, value in given.items() if name in names}


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    num_workers: int,
    model_state: Any = (),
    workers: Sequence[int] | None = None,
    extra: Any = (),
) -> WorkerState:
    """The first state: one model for all workers, and a random key for each.

    Args:
      params: one model.
      optimizer: the optimizer, initialised for each worker.
      key: random key, split among the workers.
      num_workers: N.
      model_state: model state of one model; each worker gets a random key of its own
        from each random key in it.
      workers: numbers of the workers to make, as `local_workers(mesh)` in a job of
        several processes; by default all.
      extra: the algorithm's own state of one worker.

    Returns:
      The stacked state, each leaf [N, ...].

    Raises:
      TypeError: if `optimizer` is no optimizer, or `key` no key.
      ValueError: if there is no such worker, or the model has no leaf.

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
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least one, got {num_workers}")
    if workers is not None and not all(0 <= i < num_workers for i in workers):
        raise ValueError(
            f"workers must be from 0 to {num_workers - 1}, got {list(workers)}"
        )
    if not jax.tree.leaves(params):
        raise ValueError("nothing to train: the params have no leaves")
    numbers = jnp.arange(num_workers) if workers is None else jnp.asarray(workers)
    keys = jax.random.split(key, num_workers)[numbers]

    def repeat(x: Any) -> jax.Array:
        return jnp.repeat(jnp.asarray(x)[None], len(keys), axis=0)

    # Counts of draws beside a key, as of flax NNX, may look as one in the old form.
    has_typed = any(map(is_typed_key, jax.tree.leaves(model_state)))

    # With one key all workers would drop the same units, and add the same noise.
    def repeat_or_split(x: Any) -> jax.Array:
        if not (is_typed_key if has_typed else is_key)(x):
            return repeat(x)
        return jax.vmap(folded, (None, 0))(jnp.asarray(x), numbers)

    def init_optimizer(params: Any, number: jax.Array) -> Any:
        return map_keys(lambda key: folded(key, number), optimizer.init(params))

    params, extra = jax.tree.map(repeat, (params, extra))
    model_state = jax.tree.map(repeat_or_split, model_state)
    opt_state = jax.vmap(init_optimizer)(params, numbers)
    # Some optimizers keep the params themselves, and a buffer is donated only once.
    opt_state = jax.tree.map(lambda x: x.copy(), opt_state)
    return WorkerState(params, opt_state, model_state, keys, extra)


def _cut(batch: Any, num_parts: int) -> Any:
    """The batch in parts of consecutive examples; each part has all of a scalar."""
    shapes = {
        jax.tree_util.keystr(path): jnp.shape(x)
        for path, x in jax.tree.leaves_with_path(batch)
    }
    sizes = {path: shape[0] for path, shape in shapes.items() if shape}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "micro-batches cut each array of the batch by its examples, and a worker's "
            f"arrays have other numbers of these: {sizes}; let what belongs to the "
            "whole batch be a scalar, or repeat it for each example"
        )
    size = max(sizes.values(), default=num_parts)
    if num_parts < 1 or size % num_parts:
        raise ValueError(
            f"a worker's batch of {size} cannot be cut into {num_parts} micro-batches "
            "of one size"
        )

    def cut(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim == 0:
            return jnp.broadcast_to(x, num_parts)
        # On explicit axes the examples of each part lie as those of the batch.
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
