"""The train step of one worker: an algorithm is the order of `adapt` and `mix`.

`adapt` is the local update, as `local_update` returns it; `mix` averages models.
`decentjax.train_step` runs the steps, on a mesh of devices or simulated on one.
"""

from collections.abc import Callable
from typing import Any, Protocol

from decentjax._core.optimizer_state import average_own_models, common_keys
from decentjax.exchange import Exchange
from decentjax.loss import Metrics
from decentjax.mixing import global_mean
from decentjax.mixing import mix as mix_over
from decentjax.placement import bound_axis
from decentjax.state import WorkerState
from decentjax.updates import Adapt, halves_of

Mix = Callable[[Any, Exchange], Any]
"""Maps (params, exchange) to the mixed params; `mix` with its other arguments bound."""


def mix_workers(params: Any, exchange: Exchange, **options: Any) -> Any:
    """`mix` over the axis of the workers."""
    return mix_over(params, exchange, bound_axis(), **options)


class Step(Protocol):
    """The step of one worker, as `awc_step` with its keywords bound.

    It takes an exchange, or another static value that defines what the step sends.
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
    CPU no compiler does: use `decentjax.gossip` there. Weight decay uses the mixed
    model.

    Args:
      state: this worker's state.
      batch: this worker's batch, any pytree of arrays [examples, ...].
      exchange: the static exchange of this step, as in `topology[step]`.
      adapt: the local update, as `local_update` returns it.
      mix: the averaging, `decentjax.mix` with its keywords bound.

    Returns:
      The new state, and the metrics with `loss` among them.

    Examples:
      >>> import functools
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import awc_step, init_state, local_update, simulate, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return jnp.sum((params - batch) ** 2), (model_state, {})
      >>> optimizer = optax.sgd(0.1)
      >>> local = local_update(loss_fn, optimizer)
      >>> step = functools.partial(awc_step, adapt=local)
      >>> train_step = simulate(step, topology.complete(2))
      >>> state = init_state(jnp.zeros(()), optimizer, jax.random.key(0), num_workers=2)
      >>> state, metrics = train_step(state, jnp.array([1.0, 3.0]), 0)
      >>> print(state.params, metrics["loss"])
      [0.2 0.6] [1. 9.]

    Source: From Promise to Practice (ICLR 2025), equation 1.
    """
    opt_state = average_own_models(state.opt_state, lambda z: mix(z, exchange))
    mixed = mix(state.params, exchange)
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
      >>> from decentjax import atc_step, local_update, simulate, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> step = functools.partial(atc_step, adapt=local)
      >>> train_step = simulate(step, topology.ring(8))
    """
    state, metrics = adapt(state, batch, state.params)
    opt_state = average_own_models(state.opt_state, lambda z: mix(z, exchange))
    mixed = mix(state.params, exchange)
    return state._replace(params=mixed, opt_state=opt_state), metrics


def all_reduce_step(
    state: WorkerState, batch: Any, exchange: Exchange, *, adapt: Adapt
) -> tuple[WorkerState, Metrics]:
    """The baseline: `x <- x + update(1/N sum_j grad f_j(x))`, one x on all workers.

    The optimizer gets the mean loss, and its random numbers are the same on all
    workers. Each worker counts once, whatever the weight of its loss.

    Args:
      state: this worker's state.
      batch: this worker's batch.
      exchange: ignored; the mean is over all workers in every step.
      adapt: the local update; the mean is taken between its two halves.

    Returns:
      As `awc_step`.

    Examples:
      >>> import functools
      >>> import optax
      >>> from decentjax import all_reduce_step, local_update, simulate, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> step = functools.partial(all_reduce_step, adapt=local)
      >>> train_step = simulate(step, topology.complete(8))
    """
    del exchange
    axis = bound_axis()
    halves = halves_of(adapt, "all_reduce_step")
    state = state._replace(opt_state=common_keys(state.opt_state, axis))
    found = halves.gradient(state, batch)
    found = found._replace(
        grads=global_mean(found.grads, axis), loss=global_mean(found.loss, axis)
    )
    return halves.descend(found, state, state.params)
