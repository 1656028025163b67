"""The train step of one worker: an algorithm is the order of `adapt` and `mix`.

`adapt` is the local update, with the loss and the optimizer bound by
`functools.partial`; `mix` averages models. `decentjax.placement` runs the steps, on a
mesh of devices or simulated on one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from decentjax._collectives import sum_dtype
from decentjax.exchange import Exchange
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


class LossFn(Protocol):
    """The loss of one worker on its own batch.

    Returns the scalar loss, and as auxiliary output the new model state and a dict of
    scalar metrics.
    """

    def __call__(
        self, params: Any, model_state: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]: ...


Metrics = dict[str, jax.Array]
Mix = Callable[[Any, Exchange], Any]
"""(params, exchange) to the mixed params; `mix` with its other arguments bound."""

mix_workers: Mix = functools.partial(mix_over, axis_name=AXIS)


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

    Source: From Promise to Practice (ICLR 2025), equation 1.
    """
    # The barrier has two effects. GPU compilers let a message arrive just before its
    # first use: with the barrier that is before the first update, so the last messages
    # overlap the backward pass too. And without it a sum that is fused with the update
    # may be contracted, which rounds differently from an exchange in its own program.
    mixed = lax.optimization_barrier(mix(state.params, exchange))
    return adapt(state, batch, mixed)


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
    """
    state, metrics = adapt(state, batch, state.params)
    return state._replace(params=mix(state.params, exchange)), metrics


def all_reduce_step(
    state: WorkerState, batch: Any, exchange: Exchange, *, adapt: Callable
) -> tuple[WorkerState, Metrics]:
    """The baseline: `x <- x + update(1/N sum_j grad f_j(x))`, one x on all workers.

    Args:
      state: this worker's state.
      batch: this worker's batch.
      exchange: ignored; the mean is over all workers in every step.
      adapt: the local update, which takes `reduce_gradients` as `decentjax.adapt` does.

    Returns:
      As `awc_step`.
    """
    del exchange
    mean = functools.partial(global_mean, axis_name=AXIS)
    return adapt(state, batch, state.params, reduce_gradients=mean)


def adapt(
    state: WorkerState,
    batch: Any,
    mixed: Any,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
    reduce_gradients: Callable[[Any], Any] | None = None,
) -> tuple[WorkerState, Metrics]:
    """The local update: `x_i <- mixed_i + update(grad f_i(x_i))`.

    Args:
      state: this worker's state, with the unmixed model x_i.
      batch: this worker's batch, any pytree of arrays [examples, ...].
      mixed: the model after the exchange.
      loss_fn: the loss, see `LossFn`.
      optimizer: any optax optimizer; its state is never mixed.
      num_micro_batches: number of equal parts of the batch, computed one after the
        other to save memory; gradients, loss and metrics are their means.
      reduce_gradients: function of the worker's gradient, applied before the
        optimizer; by default none.

    Returns:
      The new state, and the metrics with `loss` among them.

    Raises:
      TypeError: if `loss_fn` is no `LossFn`, or the optimizer averages models itself.
      ValueError: if the batch has no `num_micro_batches` equal parts.
    """
    grads, model_state, key, metrics = gradient(
        loss_fn, state, batch, num_micro_batches
    )
    if reduce_gradients is not None:
        grads = reduce_gradients(grads)
    params, opt_state = descend(optimizer, grads, state.opt_state, mixed)
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
      TypeError: if `loss_fn` returns something other than a `LossFn` does.
      ValueError: if the batch has no `num_micro_batches` equal parts.
    """
    key, step_key = jax.random.split(state.key)
    grad = jax.grad(_with_loss_metric(loss_fn), has_aux=True)
    if num_micro_batches == 1:
        grads, (model_state, metrics) = grad(
            state.params, state.model_state, batch, step_key
        )
        return grads, model_state, key, metrics

    def add_micro_batch(carry, part):
        model_state, total = carry
        grads, (model_state, metrics) = grad(state.params, model_state, *part)
        total = jax.tree.map(lambda s, g: s + g.astype(s.dtype), total, grads)
        return (model_state, total), metrics

    cut = functools.partial(_cut, num_parts=num_micro_batches)
    parts = (jax.tree.map(cut, batch), jax.random.split(step_key, num_micro_batches))
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, sum_dtype(x)), state.params)
    start = (state.model_state, zeros)
    (model_state, total), metrics = lax.scan(add_micro_batch, start, parts)
    grads = jax.tree.map(
        lambda s, x: (s / num_micro_batches).astype(x.dtype), total, state.params
    )
    return grads, model_state, key, jax.tree.map(lambda x: x.mean(0), metrics)


class DecentralizeState(NamedTuple):
    """State of `decentralize`.

    It is defined here, below `decentralize`, for the steps to recognise it.
    """

    count: jax.Array  # int32, []; number of steps done
    inner_state: optax.OptState
    extra: Any = ()  # of rounds, their `RoundState`


def descend(
    optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """One update of an optimizer that leaves the exchange to the step.

    Returns:
      The updated params, and the optimizer's new state.

    Raises:
      TypeError: if the optimizer averages the models itself.
    """
    is_decentralized = lambda x: isinstance(x, DecentralizeState)  # noqa: E731
    if any(map(is_decentralized, jax.tree.leaves(opt_state, is_leaf=is_decentralized))):
        raise TypeError(
            "the optimizer averages the models itself, by decentralize, and so does "
            "this step: give it the inner optimizer, as optax.adamw(1e-3)"
        )
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def compute_in(loss_fn: LossFn, dtype: DTypeLike) -> LossFn:
    """The same loss with float parameters cast to `dtype`; gradients keep theirs.

    Args:
      loss_fn: any loss.
      dtype: dtype of the forward and the backward pass, usually `jnp.bfloat16`.
    """

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    @functools.wraps(loss_fn)
    def cast_loss_fn(params, model_state, batch, key):
        return loss_fn(jax.tree.map(cast, params), model_state, batch, key)

    return cast_loss_fn


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
      model_state: model state of one model.
      workers: numbers of the workers to make, as `local_workers(mesh)` in a job of
        several processes; by default all.
      extra: the algorithm's own state of one worker.

    Returns:
      The stacked state, each leaf [N, ...].
    """
    keys = jax.random.split(key, num_workers)
    if workers is not None:
        keys = keys[jnp.asarray(workers)]
    params, model_state, extra = jax.tree.map(
        lambda x: jnp.repeat(jnp.asarray(x)[None], len(keys), axis=0),
        (params, model_state, extra),
    )
    # Some optimizers keep the params themselves, and a buffer is donated only once.
    opt_state = jax.tree.map(lambda x: x.copy(), jax.vmap(optimizer.init)(params))
    return WorkerState(params, opt_state, model_state, keys, extra)


def _cut(x: jax.Array, num_parts: int) -> jax.Array:
    if x.shape[0] % num_parts:
        raise ValueError(
            f"a worker's batch of {x.shape[0]} cannot be cut into {num_parts} "
            "micro-batches of one size"
        )
    return x.reshape(num_parts, -1, *x.shape[1:])


def _with_loss_metric(loss_fn: LossFn):
    def with_loss(params, model_state, batch, key):
        result = loss_fn(params, model_state, batch, key)
        match result:
            case (loss, (model_state, Mapping() as metrics)):
                return loss, (model_state, {"loss": loss, **metrics})
        raise TypeError(
            "loss_fn must return (loss, (model_state, metrics)), the metrics a dict, "
            "as in `return loss, (model_state, {})`; got the structure "
            f"{jax.tree.structure(result)}"
        )

    return with_loss
