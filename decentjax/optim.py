"""AccumAdam, and the wrapper that makes an optax optimizer decentralized."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from decentjax._core.collectives import AxisName, same_on_all, sum_dtype
from decentjax._core.dtypes import float_dtype
from decentjax._core.optax_context import check_is_last, in_conditional, states_before
from decentjax._core.optimizer_state import (
    check_no_common_keys,
    first_keys,
    own_keys,
    states_of,
)
from decentjax._core.slices import worker_number
from decentjax._rounds.schedule import Event
from decentjax.exchange import Topology
from decentjax.mixing import axis_size, mix
from decentjax.plan import (
    Plan,
    Turn,
    check_plan,
    init_carried,
    schedule_of,
    turn_of,
    warn_of_plan,
    worker_step,
)
from decentjax.rounds import Rounds, mix_of
from decentjax.state import (
    DecentralizeState,
    WorkerState,
    check_arrays,
    check_optimizer,
    strong,
)
from decentjax.updates import (
    Gradient,
    LocalUpdate,
    check_averages_nothing,
    check_keeps_no_model,
    extra_arguments,
)

__all__ = [
    "accum_adam",
    "accum_adamw",
    "decentralize",
    "exact_diffusion",
    "quasi_global_momentum",
    "scale_by_accum_adam",
]


class ScaleByAccumAdamState(NamedTuple):
    """State of `scale_by_accum_adam`."""

    count: jax.Array  # int32, []; steps done
    mu: optax.Updates  # first moment, as of the last full window
    nu: optax.Updates  # second moment, likewise
    acc: optax.Updates  # sum g / s of the window so far, in float32 or wider
    # Of an s that may change: full windows and steps of this one, int32, []; acc is
    # then the mean of the window so far.
    window: tuple[jax.Array, jax.Array] | tuple[()] = ()


def scale_by_accum_adam(
    accum_steps: int | jax.Array = 4,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales by Adam moments that are updated once every `accum_steps` steps.

    Every step updates the parameters. The moments are updated with the mean gradient of
    s steps, instead of with s noisy gradients. With :math:`k = \lceil t/s \rceil`,

    .. math::
        m = \beta_1 \bar m + (1-\beta_1) g, \quad
        v = \beta_2 \bar v + (1-\beta_2) g^2, \quad
        u = \frac{m / (1-\beta_1^k)}
            {\sqrt{v / (1-\beta_2^k) + \epsilon_{root}} + \epsilon}

    and :math:`b \leftarrow b + g/s`; where s divides t, also
    :math:`\bar m \leftarrow \beta_1 \bar m + (1-\beta_1) b`,
    :math:`\bar v \leftarrow \beta_2 \bar v + (1-\beta_2) b^2`, :math:`b \leftarrow 0`.
    With `accum_steps=1` this is Adam. `optax.MultiSteps` differs: it updates the
    parameters once every k steps.

    An array s, as a schedule in `optax.inject_hyperparams`, may change from step to
    step: a window is full once it has s steps or more, :math:`b` is the mean of their
    gradients, and k is the number of windows begun.

    Args:
      accum_steps: s, the window in steps; the paper scales it with the number of
        workers (N/2 in most runs). The same kind, int or array, in `init` and `update`.
      b1: decay rate of the first moment, per window.
      b2: decay rate of the second moment, per window.
      eps: constant outside the root, as in the released code.
      eps_root: constant inside the root, as in the paper.

    Returns:
      A gradient transformation.

    Raises:
      ValueError: if `accum_steps` is less than one.

    Examples:
      >>> import optax
      >>> from decentjax.optim import scale_by_accum_adam
      >>> optimizer = optax.chain(
      ...     scale_by_accum_adam(accum_steps=8), optax.scale_by_learning_rate(1e-3)
      ... )

    Source: From Promise to Practice (ICLR 2025), Algorithm 4, with beta2 in the update
    of the second moment, where the paper misprints beta1.
    """
    if isinstance(accum_steps, float):
        raise TypeError(f"accum_steps must be a whole number, got {accum_steps}")
    is_fixed = isinstance(accum_steps, int | np.integer)
    if is_fixed and accum_steps < 1:
        raise ValueError(f"accum_steps must be at least one, got {accum_steps}")
    adam: Any = optax.scale_by_adam(b1, b2, eps, eps_root)

    def init_fn(params):
        # Numbers of Python become arrays; shapes stay what they are.
        is_array = lambda x: hasattr(x, "dtype")  # noqa: E731
        params = jax.tree.map(lambda x: x if is_array(x) else jnp.asarray(x), params)
        acc = jax.tree.map(lambda x: jnp.zeros_like(x, sum_dtype(x)), params)
        window = (
            () if is_fixed else (jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32))
        )
        return ScaleByAccumAdamState(*adam.init(params), acc=acc, window=window)

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args  # The latter for other transformations of a chain.
        if is_fixed != (state.window == ()):
            raise TypeError(
                "accum_steps must be an int, or an array, in init and update, got "
                f"{type(accum_steps).__name__} and the state of the other"
            )
        updates = jax.tree.map(jnp.asarray, updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        if is_fixed:
            num_full, place = (count - 1) // accum_steps, (count - 1) % accum_steps + 1
        else:
            num_full, place = state.window[0], state.window[1] + 1

        def accumulated(b, g):
            g = g.astype(b.dtype)
            return b + (
                g / accum_steps if is_fixed else (g - b) / place.astype(b.dtype)
            )

        # The state of Adam after the last full window. s = 4: steps 1 to 4 each act as
        # its first step, and the mean of their gradients then advances it.
        last = optax.ScaleByAdamState(num_full, state.mu, state.nu)
        direction, _ = adam.update(updates, last)
        acc = jax.tree.map(accumulated, state.acc, updates)
        # The direction of the mean gradient is not used, so XLA does not compute it.
        _, moved = adam.update(acc, last)
        # A select, not a conditional: XLA fuses nothing across a branch.
        full = place >= accum_steps
        mu, nu, acc = jax.tree.map(
            lambda new, old: jnp.where(full, new.astype(old.dtype), old),
            (moved.mu, moved.nu, optax.tree.zeros_like(acc)),
            (state.mu, state.nu, acc),
        )
        window = num_full + full.astype(jnp.int32), jnp.where(full, 0, place)
        window = () if is_fixed else window
        return direction, ScaleByAccumAdamState(count, mu, nu, acc, window)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def accum_adam(
    learning_rate: optax.ScalarOrSchedule,
    accum_steps: int | jax.Array = 4,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """AccumAdam: `scale_by_accum_adam`, times minus the learning rate.

    The other arguments are those of `scale_by_accum_adam`.

    Args:
      learning_rate: number or schedule.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax.optim import accum_adam
      >>> optimizer = accum_adam(1e-3, accum_steps=8)
      >>> state = optimizer.init(jnp.zeros(3))

    Source: From Promise to Practice (ICLR 2025), Algorithm 4.
    """
    return optax.chain(
        scale_by_accum_adam(accum_steps, b1, b2, eps, eps_root),
        optax.scale_by_learning_rate(learning_rate),
    )


def accum_adamw(
    learning_rate: optax.ScalarOrSchedule,
    accum_steps: int | jax.Array = 4,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AccumAdam with decoupled weight decay, `x <- x - lr (u + weight_decay x)`.

    The decay uses the params given to `update`: the mixed model in a decentralized
    step. The other arguments are those of `scale_by_accum_adam`.

    Args:
      learning_rate: number or schedule.
      weight_decay: weight decay per step, a factor of the learning rate.
      mask: leaves to decay, as in `optax.adamw`; all by default.

    Examples:
      >>> import optax
      >>> from decentjax.optim import accum_adamw
      >>> rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)
      >>> optimizer = accum_adamw(rate, accum_steps=4, weight_decay=0.1)

    Source: AccumAdamW of Decent-DP, with decay of the leaves in the mask.
    """
    return optax.chain(
        scale_by_accum_adam(accum_steps, b1, b2, eps, eps_root),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def decentralize(
    inner: optax.GradientTransformation,
    plan: Plan,
    axis_name: AxisName,
    message_dtype: DTypeLike | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer decentralized: its updates carry the exchange of the models.

    It wraps the whole optimizer, `decentralize(optax.chain(...), ...)`, and its updates
    go to `optax.apply_updates` unchanged: anything that scales, clips or delays them
    afterwards would do the same to the exchange. Transformations of gradients may come
    before it in a chain; wrappers of optax that change its updates are rejected.

    Over a topology, with u the update of `inner`, `optax.apply_updates(params,
    updates)` becomes

        x_i <- sum_j W_ij x_j + u(grads, sum_j W_ij x_j)

    The exchange does not wait for the gradient, and overlaps it. Gradients must be
    taken at the unmixed params. Decentralized Adam, DAdam, is
    `decentralize(optax.adam(...), topology, axis_name)`, and so is DAdamW, whose weight
    decay is that of the mixed model. The paper has `eps_root`, inside the root; its
    released code `eps`, outside. Over `Rounds(topology)` it is adapt-then-combine,

        x_i <- sum_j W_ij (x_j + u_j(grads, x_j))

    and nothing hides the exchange; over other rounds models are averaged now and then,
    and over `methods.all_reduce` gradients.

    Use it where the axis is mapped, in `jax.shard_map` or in `jax.vmap` with the
    `axis_name`, with plain params and gradients. Do not use it inside the steps of
    `decentjax`, which average the models themselves.

    Every worker takes part in every exchange. `optax.apply_if_finite` and
    `optax.MultiSteps` go inside, where they skip only the update: with k micro-steps
    there are k exchanges. Updates are float32 or wider, the difference between the new
    params and the old. Random keys in the optimizer's state, such as that of
    `optax.add_noise`, become the worker's own at the first step.

    The transformation counts its steps itself, in one compiled step; a plan of several
    exchanges is a conditional in it, which no compiler overlaps. Over a topology
    `update` takes a static keyword `step`, the step as a Python int: one step is then
    compiled for each exchange, which overlaps the gradient.

    Args:
      inner: any optimizer whose params may be averaged, as most of optax; z of
        schedule-free ones is averaged too.
      plan: who averages what, and when, with as many workers as the axis.
      axis_name: mapped axis of the workers.
      message_dtype: as in `mix`; with `optax.inject_hyperparams` by name, "bfloat16".
      seed: seed of a codec's stochastic rounding.

    Raises:
      ValueError: if encoded messages have shards, or they or tracking a
        `message_dtype`; in `update`, if a wrapper of optax changes the updates, one
        before it in a chain has random keys, or it is called in a conditional in which
        workers may take different branches. These are detected during tracing: not in a
        loop whose length differs between workers, nor around a `jax.jit` that was
        traced elsewhere.
      TypeError: if the plan is none; in `update`, if the optimizer undoes the average,
        as `optax.lbfgs`, `optax.rprop` and, of `optax.contrib`, `cocob`,
        `dadapt_adamw`, `madgrad`, `mechanize` and `prodigy` do, or averages itself, or
        for a static step of another plan than a topology.

    Examples:
      >>> import optax
      >>> from decentjax import decentralize, methods, topology
      >>> adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
      >>> optimizer = decentralize(adamw, topology.ring(8), "workers")
      >>> diloco = decentralize(adamw, methods.diloco(num_workers=8), "workers")

    Source: From Promise to Practice (ICLR 2025), equation 1.
    """
    check_plan(plan)
    _check_dtype(message_dtype)
    check_optimizer(inner)
    warn_of_plan(plan)
    average = functools.partial(mix, axis_name=axis_name, message_dtype=message_dtype)
    has_keys = isinstance(plan, Rounds) and plan.compression is not None
    if isinstance(plan, Rounds):
        _check_messages(plan, message_dtype)
        if plan.compression is not None:
            average = functools.partial(mix_of(plan.compression), axis_name=axis_name)
    schedule = schedule_of(plan)
    is_one = schedule.period == 1 and schedule.delay <= 1  # All steps are alike.

    def init_fn(params):
        count = jnp.zeros([], jnp.int32)
        # A mask may leave nothing to average.
        extra = init_carried(plan, params) if jax.tree.leaves(params) else ()
        inner_state = jax.tree.map(strong, own_keys(inner.init(params), axis_name))
        check_averages_nothing(inner_state, "the decentralize around it")
        return DecentralizeState(count, inner_state, extra)

    def update_fn(updates, state, params=None, *, step=None, **extra_args):
        _check_arguments(params, step, plan)
        check_is_last(
            "decentralize, and thereby the exchange of the models, which they contain",
            "put it inside, as in decentralize(optax.chain(optax.adam(1e-3), "
            "optax.clip(1.0)), topology, axis_name)",
        )
        if not jax.tree.leaves(params):
            return updates, state
        axis_size(axis_name)
        _check_can_mix(params, axis_name)
        check_no_common_keys(states_before())
        options = extra_arguments(inner, **extra_args)
        check_keeps_no_model(inner, params, state.inner_state, **options)

        # A worker's step, with the gradient in place of the batch, and the count in
        # place of the key.
        count, inner_state = state.count, state.inner_state
        key = _key(seed, count, axis_name) if has_keys else count
        inner_state = first_keys(inner_state, count, axis_name)
        worker = WorkerState(params, inner_state, (), key, state.extra)
        local = _given_gradient(inner, options)
        one_step = worker_step(local, plan, average, axis_name=axis_name)
        if step is not None or is_one:
            event: Event | Turn = schedule[step or 0]
        else:
            event = turn_of(plan, same_on_all(count, axis_name))
        worker, metrics = one_step(worker, updates, event)
        updates = jax.tree.map(_difference, worker.params, params, metrics["u"])
        return updates, DecentralizeState(count + 1, worker.opt_state, worker.extra)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_messages(rounds: Rounds, message_dtype: DTypeLike | None) -> None:
    """Raises a ValueError for messages that a transformation cannot send."""
    if rounds.keeps_sums and message_dtype is not None:
        raise ValueError(
            "gradient tracking accumulates the rounding of messages: leave "
            f"message_dtype at None, got {message_dtype}"
        )
    one = rounds.compression
    if one is not None and (message_dtype is not None or one.shards is not None):
        raise ValueError(
            "encoded messages of a transformation have the codec's dtype and no "
            "shards: leave message_dtype and the compression's shards at None"
        )


def _key(seed: int, count: jax.Array, axis_name: AxisName) -> jax.Array:
    """A random key for each worker and step."""
    key = jax.random.fold_in(jax.random.key(seed), count)
    return jax.random.fold_in(key, worker_number(axis_name, count))


def _given_gradient(
    inner: optax.GradientTransformation, options: dict[str, Any]
) -> LocalUpdate:
    """The local update of a gradient that is given in the place of the batch.

    There is no loss, and the update is in the place of the metrics.
    """

    def gradient(worker, grads):
        return Gradient(grads, jnp.zeros([]), (), worker.key, {})

    def descend(found, worker, mixed):
        given = found.grads, worker.opt_state, mixed
        update, opt_state = inner.update(*given, **options)
        # Not of params: the optimizer's update is relative to the mixed model.
        target = optax.apply_updates(mixed, update)
        return worker._replace(params=target, opt_state=opt_state), {"u": update}

    return LocalUpdate(gradient, descend)


def _check_dtype(message_dtype: DTypeLike | None) -> None:
    # optax.inject_hyperparams would turn bfloat16, as a callable, into a schedule.
    if isinstance(message_dtype, jax.Array):
        raise TypeError(
            "message_dtype must be a dtype, got an array: inject_hyperparams takes a "
            'dtype such as jnp.bfloat16 for a schedule; give its name, "bfloat16"'
        )
    if message_dtype is not None:
        float_dtype("message_dtype", message_dtype)  # For its error.


def _difference(target: jax.Array, params: jax.Array, step: jax.Array) -> jax.Array:
    """The update that moves params to the target, in float32 or wider."""
    params = jnp.asarray(params)
    if not jnp.issubdtype(params.dtype, jnp.inexact):
        return step
    dtype = sum_dtype(params)
    return target.astype(dtype) - params.astype(dtype)


def _check_arguments(params: Any, step: Any, plan: Plan) -> None:
    if params is None:
        raise ValueError("decentralize averages the models: pass params to update")
    if step is not None and not isinstance(plan, Topology):
        raise TypeError(
            "decentralize counts the steps of rounds itself, so that no message is "
            f"lost: leave out step, got {step!r}"
        )
    if step is not None and not isinstance(step, int):
        raise TypeError(
            "step is static, a Python int: make it a static argument of your jit, "
            f"or leave it out; got {type(step).__name__}"
        )


def _check_can_mix(params: Any, axis_name: AxisName) -> None:
    if in_conditional(axis_name):
        raise ValueError(
            "decentralize is called in a conditional, and workers that take different "
            "branches would deadlock: put the conditional inside, "
            "as in decentralize(optax.apply_if_finite(inner, 5), ...); to average "
            "every few steps, use a topology with exchanges of topology.alone"
        )
    for x in map(jnp.asarray, jax.tree.leaves(params)):
        if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize == 1:
            raise TypeError(
                f"optax cannot add updates to a leaf in {x.dtype.name}: mask it, as in "
                "optax.masked(decentralize(...), mask), and average it by decentjax.mix"
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
      >>> from decentjax import Rounds, decentralize, topology
      >>> from decentjax.optim import exact_diffusion
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
      >>> from decentjax import Rounds, decentralize, topology
      >>> from decentjax.optim import quasi_global_momentum
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
