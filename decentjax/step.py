"""The train step of one worker: three small functions are three algorithms.

`decentjax.placement` runs them, on a mesh of devices or simulated on one.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from decentjax._collectives import sum_dtype
from decentjax.exchange import Exchange
from decentjax.mixing import Lowering, global_mean, mix
from decentjax.optim import DecentralizeState

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
    params, opt_state = descend(optimizer, grads, state.opt_state, mixed)
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
    adapted, opt_state = descend(optimizer, grads, state.opt_state, state.params)
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
    params, opt_state = descend(optimizer, grads, state.opt_state, state.params)
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
      The gradient, in the dtypes of the params, the new model state and key, and the
      metrics. Parts are summed in float32 at least.

    Raises:
      TypeError: if `loss_fn` returns something else than a `LossFn`.
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


def descend(
    optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """One update of an optimizer that leaves the exchange to the step.

    Returns:
      The params after it, and the optimizer's new state.

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
