"""Corrections for heterogeneous data, for which plain averaging misses the optimum.

Where the gradients of the workers differ at the optimum, decentralized gradient descent
with a constant learning rate converges to a biased point. Gradient tracking reaches the
optimum, and exact diffusion does so up to the rounding of exchanges. Quasi-global
momentum converges to the point of plain averaging, but keeps the workers' momentum from
driving them apart on the way.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decentjax._core.collectives import sum_dtype
from decentjax._core.optax_context import check_is_last
from decentjax._core.optimizer_state import states_of
from decentjax.state import check_arrays, check_optimizer
from decentjax.updates import (
    check_averages_nothing,
    extra_arguments,
)

# These skip the whole call: the inner state does not change either.
_SKIP_WHOLE = "MultiSteps", "apply_if_finite"


class ExactDiffusionState(NamedTuple):
    """State of `exact_diffusion`."""

    adapted: optax.Params  # p, the model after the last local update
    inner_state: optax.OptState


def exact_diffusion(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """D², exact diffusion: `x <- W (p + x - p_before)`, with `p = x + update(grad)`.

    A transformation whose update is that of `inner`, plus the movement of the model by
    the last exchange, `x - p_before`. Anything that scales, clips or delays updates
    goes inside, `exact_diffusion(optax.chain(...))`. Use it over the plan
    `Rounds(graph)`, with a symmetric, constant graph, whose W has no eigenvalue of
    -1/3 or less, such as `topology.damped(graph, 0.5)`. Over a topology it is EXTRA,
    whose exchange does not wait for the gradient and which needs a lower learning rate:

        x <- W (2 x - x_before) + update(grad) - update(grad_before)

    Each exchange has to be complete, as in `gossip.Peers` with `patience=math.inf`: the
    effect of a missing model stays in the sum. So does the rounding of each exchange,
    which no worker knows: with float32 models the mean ends up to 1.3e-8 |x| steps /
    rate from the optimum, 0.25 |x| after 20,000 steps of 1e-3 where plain averaging may
    be closer; with gradient noise, about 1.5e-8 |x| sqrt(steps) / rate. For many steps
    at a low rate use `methods.gradient_tracking`, which accumulates gradients, or
    float64.

    Args:
      inner: local optimizer, such as `optax.sgd`.

    Raises:
      ValueError: in `init`, for params narrower than float32; in `update`, if a
        wrapper of optax changes the updates.
      TypeError: in `init`, if `inner` averages the models itself or skips steps, as
        `optax.MultiSteps` does: wrap that around it.

    Examples:
      >>> import optax
      >>> from decentjax import Rounds, decentralize, exact_diffusion, topology
      >>> plan = Rounds(topology.damped(topology.ring(8), 0.5))
      >>> d2 = decentralize(exact_diffusion(optax.sgd(0.1)), plan, "workers")

    Source: Tang et al., D²: Decentralized Training over Decentralized Data (2018);
    Yuan et al., Exact Diffusion for Distributed Optimization and Learning (2019); Shi
    et al., EXTRA: An Exact First-Order Algorithm for Decentralized Consensus
    Optimization (2015), with (I + W) / 2 as W.
    """
    check_optimizer(inner)

    def init_fn(params):
        check_arrays(params, "exact_diffusion")
        for x in map(jnp.asarray, jax.tree.leaves(params)):
            # The movements by exchanges are summed, and rounding errors with them.
            if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
                raise ValueError(
                    "exact_diffusion needs params of float32 or wider, got "
                    f"{x.dtype.name}"
                )
        # A copy, so that a step can donate both.
        adapted, inner_state = jax.tree.map(jnp.copy, params), inner.init(params)
        check_averages_nothing(inner_state, "what is around exact_diffusion")
        if states_of(inner_state, optax.MultiStepsState):
            raise TypeError(
                "exact_diffusion sums what exchanges move, which does not converge "
                "with an optimizer that skips steps: wrap optax.MultiSteps around it, "
                "as in optax.MultiSteps(exact_diffusion(optax.sgd(0.1)), 4)"
            )
        return ExactDiffusionState(adapted, inner_state)

    def update_fn(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError("exact_diffusion needs the params: pass them to update")
        check_is_last(
            "exact_diffusion, which contain the movement by the last exchange",
            "put it inside, as in exact_diffusion(optax.chain(optax.sgd(0.1), "
            "optax.clip(1.0)))",
            *_SKIP_WHOLE,
        )
        options = extra_arguments(inner, **extra_args)
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **options
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
) -> optax.GradientTransformationExtraArgs:
    """QG-DSGDm: momentum of the model's movement instead of the worker's gradients.

        m <- b m + (1 - b) (x_before - x) / a_before
        x <- W (x - a (b m + g))

    The movement includes the exchange, so workers with different data move in one
    direction. A transformation for the plan `Rounds(graph)`, whose update must not be
    modified. At a fixed point nothing moves and m is 0: it is that of plain
    averaging with the rate a. With `nesterov` the update is `-a (g + b (b m + g))`,
    whose fixed point is that of plain averaging with the rate (1 + b) a, further from
    the optimum. Over a topology x is here the mixed model, W x_before; this form is not
    the paper's.

    Args:
      learning_rate: a, a number or a schedule.
      momentum: b.
      nesterov: whether to look ahead.

    Raises:
      ValueError: for a momentum out of range; in `update`, if a wrapper of optax
        changes the updates.

    Examples:
      >>> from decentjax import Rounds, decentralize, quasi_global_momentum, topology
      >>> inner = quasi_global_momentum(0.1, momentum=0.9)
      >>> optimizer = decentralize(inner, Rounds(topology.ring(8)), "workers")

    Source: Lin et al., Quasi-global Momentum: Accelerating Decentralized Deep Learning
    on Heterogeneous Data (2021), Algorithm 1, and its code.
    """
    if isinstance(momentum, float | int) and not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")

    def rate(count) -> Any:
        return learning_rate(count) if callable(learning_rate) else learning_rate

    def init_fn(params):
        check_arrays(params, "quasi_global_momentum")
        momentum = optax.tree.zeros_like(params)
        # A copy, so that a step can donate both.
        before = jax.tree.map(jnp.copy, params)
        start = jnp.zeros([], jnp.int32), momentum, before
        return QuasiGlobalState(*start, rate=jnp.zeros([], float))

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args  # For other transformations of a chain.
        if params is None:
            raise ValueError(
                "quasi_global_momentum needs the params: pass them to update"
            )
        check_is_last(
            "quasi_global_momentum, which divides the model's movement by its own "
            "learning rate",
            "put it before, and pass a schedule of the rate as its learning_rate",
            *_SKIP_WHOLE,
        )
        # A rate of 0, before the first step or in a warm-up, moves nothing.
        last = state.rate
        scale = jnp.where(last > 0, (1 - momentum) / jnp.where(last > 0, last, 1), 0)

        def followed(m: jax.Array, old: jax.Array, x: jax.Array) -> jax.Array:
            dtype = sum_dtype(x)
            change = scale.astype(dtype) * (old - x).astype(dtype)
            return momentum * m + change.astype(m.dtype)

        moved = jax.tree.map(followed, state.momentum, state.before, params)
        ahead = jax.tree.map(lambda m, g: momentum * m + g, moved, updates)
        if nesterov:
            ahead = jax.tree.map(lambda m, g: g + momentum * m, ahead, updates)
        now = rate(state.count)
        updates = jax.tree.map(lambda x: -now * x.astype(sum_dtype(x)), ahead)
        rates = jnp.asarray(now, state.rate.dtype)
        return updates, QuasiGlobalState(state.count + 1, moved, params, rates)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
