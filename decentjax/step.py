"""The train step of one worker: three small functions are three algorithms.

`decentjax.placement` runs them, on a mesh of devices or simulated on one.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from decentjax.exchange import Exchange
from decentjax.mixing import Lowering, global_mean, mix

AXIS = "workers"


class WorkerState(NamedTuple):
    """What one worker carries from step to step; stacked, each leaf is [N, ...]."""

    params: Any
    opt_state: Any
    model_state: Any  # batch statistics and the like; () where there are none
    key: jax.Array  # this worker's own randomness


class LossFn(Protocol):
    """Loss of one worker on its own batch.

    Returns the scalar loss, and as auxiliary output the new model state and a dict of
    scalar metrics.
    """

    def __call__(
        self, params: Any, model_state: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]: ...


Metrics = dict[str, jax.Array]


class Step(Protocol):
    """The step of one worker, as `awc_step` with its keywords bound."""

    def __call__(
        self, state: WorkerState, batch: Any, exchange: Exchange
    ) -> tuple[WorkerState, Metrics]: ...


def awc_step(
    state: WorkerState,
    batch: Any,
    exchange: Exchange,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
    message_dtype: DTypeLike | None = None,
    shards: Any = None,
    lowering: Lowering = Lowering(),
) -> tuple[WorkerState, Metrics]:
    """Adapt while communicating: `x_i <- sum_j W_ij x_j + update(grad f_i(x_i))`.

    The gradient waits for no message and no message for the gradient, so the compiler
    runs the exchange beside the forward and the backward pass. Weight decay is taken
    from the mixed model. On CPU no compiler does: see `decentjax.gossip`.

    Args:
      state: of this worker.
      batch: of this worker, any pytree of arrays [examples, ...].
      exchange: static.
      loss_fn: see `LossFn`.
      optimizer: any optax optimizer; its state is never mixed.
      num_micro_batches: the batch is cut into so many equal parts, one after the other
        in memory; gradients, loss and metrics are their means.
      message_dtype: as in `mix`.
      shards: as in `mix`.
      lowering: as in `mix`.

    Returns:
      The new state, and the metrics with `loss` among them.

    Source: From Promise to Practice (ICLR 2025), equation 1.
    """
    mixed = mix(state.params, exchange, AXIS, message_dtype, shards, lowering)
    # GPU compilers let a message arrive just before it is needed: if that is before any
    # update, the last ones run beside the backward pass too. And fused with the update,
    # a sum may be contracted and round otherwise than it does where the exchange is a
    # program of its own.
    mixed = lax.optimization_barrier(mixed)
    return adapt(
        state,
        batch,
        mixed,
        loss_fn=loss_fn,
        optimizer=optimizer,
        num_micro_batches=num_micro_batches,
    )


def adapt(
    state: WorkerState,
    batch: Any,
    mixed: Any,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
) -> tuple[WorkerState, Metrics]:
    """What `awc_step` does beside the exchange: `x_i <- mixed_i + update(grad f(x_i))`.

    Args:
      state: of this worker, with the unmixed model.
      batch: of this worker.
      mixed: the model after the exchange.
      loss_fn: as in `awc_step`.
      optimizer: as in `awc_step`.
      num_micro_batches: as in `awc_step`.

    Returns:
      As `awc_step`.
    """
    grads, model_state, key, metrics = gradient(
        loss_fn, state, batch, num_micro_batches
    )
    updates, opt_state = optimizer.update(grads, state.opt_state, mixed)
    params = optax.apply_updates(mixed, updates)
    return WorkerState(params, opt_state, model_state, key), metrics


def atc_step(
    state: WorkerState,
    batch: Any,
    exchange: Exchange,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
    message_dtype: DTypeLike | None = None,
    shards: Any = None,
    lowering: Lowering = Lowering(),
) -> tuple[WorkerState, Metrics]:
    """Adapt, then combine: `x_i <- sum_j W_ij (x_j + update(grad f_j(x_j)))`.

    The exchange waits for the update. Arguments and result as in `awc_step`.
    """
    grads, model_state, key, metrics = gradient(
        loss_fn, state, batch, num_micro_batches
    )
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    adapted = optax.apply_updates(state.params, updates)
    params = mix(adapted, exchange, AXIS, message_dtype, shards, lowering)
    return WorkerState(params, opt_state, model_state, key), metrics


def all_reduce_step(
    state: WorkerState,
    batch: Any,
    exchange: Exchange,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
) -> tuple[WorkerState, Metrics]:
    """The baseline: `x <- x + update(1/N sum_j grad f_j(x))`, the same x everywhere.

    Takes no notice of the exchange. Arguments and result as in `awc_step`.
    """
    del exchange
    grads, model_state, key, metrics = gradient(
        loss_fn, state, batch, num_micro_batches
    )
    grads = global_mean(grads, AXIS)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return WorkerState(params, opt_state, model_state, key), metrics


def gradient(
    loss_fn: LossFn, state: WorkerState, batch: Any, num_micro_batches: int
) -> tuple[Any, Any, jax.Array, Metrics]:
    """The gradient of one worker's loss, in so many parts one after the other.

    Args:
      loss_fn: see `LossFn`.
      state: of this worker; its optimizer state is not looked at.
      batch: of this worker.
      num_micro_batches: as in `awc_step`.

    Returns:
      The gradient, the new model state and key, and the metrics.

    Raises:
      ValueError: if the batch cannot be cut into so many parts of one size.
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
        return (model_state, jax.tree.map(jnp.add, total, grads)), metrics

    cut = functools.partial(_cut, num_parts=num_micro_batches)
    parts = (jax.tree.map(cut, batch), jax.random.split(step_key, num_micro_batches))
    start = (state.model_state, jax.tree.map(jnp.zeros_like, state.params))
    (model_state, total), metrics = lax.scan(add_micro_batch, start, parts)
    grads = jax.tree.map(lambda g: g / num_micro_batches, total)
    return grads, model_state, key, jax.tree.map(lambda x: x.mean(0), metrics)


def compute_in(loss_fn: LossFn, dtype: DTypeLike) -> LossFn:
    """The same loss with float parameters cast to `dtype`; gradients keep theirs.

    Args:
      loss_fn: any.
      dtype: of the forward and the backward pass, `jnp.bfloat16` as a rule.
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
) -> WorkerState:
    """All workers start from one model, each with a random key of its own.

    Args:
      params: one model.
      optimizer: initialised for each worker.
      key: split among the workers.
      num_workers: N.
      model_state: of one model.
      workers: the numbers of those to make, as `local_workers(mesh)` in a job of
        several processes; by default all.

    Returns:
      The stacked state, each leaf [N, ...].
    """
    keys = jax.random.split(key, num_workers)
    if workers is not None:
        keys = keys[jnp.asarray(workers)]
    params, model_state = jax.tree.map(
        lambda x: jnp.repeat(jnp.asarray(x)[None], len(keys), axis=0),
        (params, model_state),
    )
    # Some optimizers keep the params themselves, and no buffer can be given up twice.
    opt_state = jax.tree.map(lambda x: x.copy(), jax.vmap(optimizer.init)(params))
    return WorkerState(params, opt_state, model_state, keys)


def _cut(x: jax.Array, num_parts: int) -> jax.Array:
    if x.shape[0] % num_parts:
        raise ValueError(
            f"a worker's batch of {x.shape[0]} cannot be cut into {num_parts} "
            "micro-batches of one size"
        )
    return x.reshape(num_parts, -1, *x.shape[1:])


def _with_loss_metric(loss_fn: LossFn):
    def with_loss(params, model_state, batch, key):
        loss, (model_state, metrics) = loss_fn(params, model_state, batch, key)
        return loss, (model_state, {"loss": loss, **metrics})

    return with_loss
