"""Corrections for uneven data, with which plain averaging stops short of the optimum.

Where the gradients of the workers differ at the optimum, decentralized gradient descent
with a constant learning rate comes to rest beside it. Exact diffusion and gradient
tracking reach it. Quasi-global momentum rests where plain averaging does, but keeps the
workers' momentum from pulling them apart on the way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decentjax._collectives import sum_dtype
from decentjax.exchange import Exchange
from decentjax.step import Metrics, Mix, WorkerState, check_optimizer, mix_workers


class ExactDiffusionState(NamedTuple):
    """State of `exact_diffusion`."""

    adapted: optax.Params  # p, the model after the last local update
    inner_state: optax.OptState


def exact_diffusion(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """D², exact diffusion: `x <- W (p + x - p_before)`, with `p = x + update(grad)`.

    An ordinary transformation: its update is that of `inner`, plus what the last
    exchange has moved the model, `x - p_before`. Give it to `atc_step`, or inside
    `decentralize_atc`, over a symmetric graph whose W has no eigenvalue of -1/3 or
    less, such as `topology.damped(graph, 0.5)`.

    Args:
      inner: local optimizer, such as `optax.sgd`.

    Raises:
      ValueError: by its init, for params narrower than float32.

    Examples:
      >>> import optax
      >>> from decentjax import decentralize_atc, exact_diffusion, topology
      >>> graph = topology.damped(topology.ring(8), 0.5)
      >>> d2 = decentralize_atc(exact_diffusion(optax.sgd(0.1)), graph, "workers")

    Source: Tang et al., D²: Decentralized Training over Decentralized Data (2018);
    Yuan et al., Exact Diffusion for Distributed Optimization and Learning (2019).
    """
    check_optimizer(inner)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        for x in map(jnp.asarray, jax.tree.leaves(params)):
            # What the exchanges have moved is summed up: so would be each rounding.
            if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
                raise ValueError(
                    "exact_diffusion needs params of float32 or wider, got "
                    f"{x.dtype.name}"
                )
        # A copy, so that a step can donate both.
        adapted = jax.tree.map(jnp.copy, params)
        return ExactDiffusionState(adapted, inner.init(params))

    def update_fn(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError("exact_diffusion needs the params: pass them to update")
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        adapted = optax.apply_updates(params, updates)
        updates = jax.tree.map(
            lambda u, x, p: u + (x - p), updates, params, state.adapted
        )
        return updates, ExactDiffusionState(adapted, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class QuasiGlobalState(NamedTuple):
    """State of `quasi_global_momentum`."""

    count: jax.Array  # int32, []; steps done
    momentum: optax.Updates  # of the movement of the model, exchanges included
    before: optax.Params  # the model before the last update
    rate: jax.Array  # float32, []; of the last update, 0 before the first


def quasi_global_momentum(
    learning_rate: optax.ScalarOrSchedule, momentum: float = 0.9, nesterov: bool = False
) -> optax.GradientTransformation:
    """QG-DSGDm: momentum of how the model has moved, and not of the worker's gradients.

        m <- b m + (1 - b) (x_before - x) / a_before
        x <- W (x - a (b m + g))

    The movement contains what the exchange has done, so workers with different data
    push in one direction. An ordinary transformation for `atc_step`, or inside
    `decentralize_atc`. With `nesterov` the update is `-a (g + b (b m + g))`.

    Args:
      learning_rate: a, a number or a schedule.
      momentum: b.
      nesterov: whether to look ahead.

    Examples:
      >>> from decentjax import decentralize_atc, quasi_global_momentum, topology
      >>> inner = quasi_global_momentum(0.1, momentum=0.9)
      >>> optimizer = decentralize_atc(inner, topology.ring(8), "workers")

    Source: Lin et al., Quasi-global Momentum: Accelerating Decentralized Deep Learning
    on Heterogeneous Data (2021), Algorithm 1, and its code.
    """
    if isinstance(momentum, float | int) and not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")

    def rate(count) -> Any:
        return learning_rate(count) if callable(learning_rate) else learning_rate

    def init_fn(params):
        momentum = optax.tree.zeros_like(params)
        # A copy, so that a step can donate both.
        before = jax.tree.map(jnp.copy, params)
        start = jnp.zeros([], jnp.int32), momentum, before
        return QuasiGlobalState(*start, rate=jnp.zeros([], float))

    def update_fn(updates, state, params=None):
        if params is None:
            raise ValueError(
                "quasi_global_momentum needs the params: pass them to update"
            )
        # A rate of 0, as before the first step or in a warm-up, has moved nothing.
        last = state.rate
        scale = jnp.where(last > 0, (1 - momentum) / jnp.where(last > 0, last, 1), 0)
        moved = jax.tree.map(
            lambda m, old, x: momentum * m + (scale * (old - x)).astype(m.dtype),
            state.momentum,
            state.before,
            params,
        )
        ahead = jax.tree.map(lambda m, g: momentum * m + g, moved, updates)
        if nesterov:
            ahead = jax.tree.map(lambda m, g: g + momentum * m, ahead, updates)
        now = rate(state.count)
        updates = jax.tree.map(lambda x: -now * x, ahead)
        rates = jnp.asarray(now, state.rate.dtype)
        return updates, QuasiGlobalState(state.count + 1, moved, params, rates)

    return optax.GradientTransformation(init_fn, update_fn)


class Tracked(NamedTuple):
    """What `tracking_step` carries, as `extra`: y and the gradient of the last step.

    In float32 at least: each rounding of y would stay in it.
    """

    tracker: Any
    gradient: Any


def init_tracking(params: Any) -> Tracked:
    """The first `extra` of `tracking_step`, for one model.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import init_state, init_tracking
      >>> params, key = jnp.zeros(3), jax.random.key(0)
      >>> extra = init_tracking(params)
      >>> state = init_state(params, optax.sgd(0.1), key, num_workers=4, extra=extra)
    """
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, sum_dtype(x)), params)
    return Tracked(zeros, jax.tree.map(jnp.copy, zeros))


def tracking_step(
    state: WorkerState,
    batch: Any,
    exchange: Exchange,
    *,
    adapt: Callable,
    mix: Mix = mix_workers,
) -> tuple[WorkerState, Metrics]:
    """Gradient tracking: each worker descends along an estimate of the mean gradient.

        y <- W y + g - g_before,  x <- W x + update(y)

    The mean of all y is the mean of all gradients. Two models travel, and both beside
    the gradient, as in `awc_step`.

    Args:
      state: this worker's state, with `init_tracking` as its `extra`.
      batch: this worker's batch.
      exchange: the static exchange of this step.
      adapt: the local update, which takes `reduce_gradients` as `decentjax.adapt` does.
      mix: the averaging, `decentjax.mix` with its keywords bound; without `shards`.

    Returns:
      As `awc_step`.

    Raises:
      TypeError: if the state carries something else.

    Examples:
      >>> import functools
      >>> import optax
      >>> from decentjax import adapt, simulate, topology, tracking_step
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optax.sgd(0.1))
      >>> step = functools.partial(tracking_step, adapt=local)
      >>> train_step = simulate(step, topology.ring(8))

    Source: Nedić, Olshevsky, Shi: Achieving Geometric Convergence for Distributed
    Optimization over Time-Varying Graphs (2017), DIGing.
    """
    before = state.extra
    if not isinstance(before, Tracked):
        raise TypeError(
            "tracking_step carries a gradient: give init_state extra="
            f"init_tracking(params), got {type(before).__name__}"
        )
    params, tracker = jax.lax.optimization_barrier(
        mix((state.params, before.tracker), exchange)
    )
    found = []

    def track(gradient: Any) -> Any:
        wide = jax.tree.map(lambda y, g: g.astype(y.dtype), tracker, gradient)
        new = jax.tree.map(
            lambda y, g, old: y + jnp.subtract(g, old), tracker, wide, before.gradient
        )
        found.append(Tracked(new, wide))
        return jax.tree.map(lambda y, g: y.astype(g.dtype), new, gradient)

    state, metrics = adapt(state, batch, params, reduce_gradients=track)
    return state._replace(extra=found[0]), metrics
