"""The optimizer of a run, with its schedule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decentjax.optim import (
    accum_adam,
    accum_adamw,
    exact_diffusion,
    quasi_global_momentum,
)
from train.config import OptimizerConfig, build_schedule
from train.fields import place_of
from train.run.nonfinite import watch_gradients


class Kind(NamedTuple):
    """A kind of optimizer.

    Args:
      make: function of the schedule and the options.
      options: fields of the config that it takes, after the schedule.
      decouples: whether it decays the weights itself, apart from the gradient.
    """

    make: Callable[..., optax.GradientTransformation]
    options: tuple[str, ...]
    decouples: bool


def _exact_diffusion(
    schedule: optax.Schedule, b1: float
) -> optax.GradientTransformation:
    return exact_diffusion(optax.sgd(schedule, b1))


def _muon(
    schedule: optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Callable[[Any], Any],
) -> optax.GradientTransformation:
    # The rate -1 leaves the direction as it is. Its own decay would be without the mask
    # for all that is no matrix: kernels of convolutions and biases alike.
    direction = optax.contrib.muon(-1.0, beta=b1, eps=eps, adam_b1=b1, adam_b2=b2)
    return optax.chain(
        direction,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )


MOMENTS = ("b1", "b2", "eps")
OPTIMIZERS = {
    "accum_adamw": Kind(accum_adamw, ("accum_steps", *MOMENTS), decouples=True),
    "accum_adam": Kind(accum_adam, ("accum_steps", *MOMENTS), decouples=False),
    "adamw": Kind(optax.adamw, MOMENTS, decouples=True),
    "adam": Kind(optax.adam, MOMENTS, decouples=False),
    "lion": Kind(optax.lion, ("b1", "b2"), decouples=True),
    "muon": Kind(_muon, MOMENTS, decouples=True),
    "sgd": Kind(optax.sgd, ("b1",), decouples=False),
    "exact_diffusion": Kind(_exact_diffusion, ("b1",), decouples=False),
    "qg_dsgdm": Kind(quasi_global_momentum, ("b1",), decouples=False),
}


def build_optimizer(
    config: OptimizerConfig, num_steps: int
) -> optax.GradientTransformation:
    """Returns the config's optimizer with its schedule over a run of `num_steps`."""
    return optimizer_with(config, build_schedule(config, num_steps))


def optimizer_with(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Watches and clips the worker's gradient, decays the weights, and steps.

    Raises:
      ValueError: if the function of the config's own returns no optimizer.
    """
    # One flat chain: a checkpoint stores the optimizer state in the chain's order.
    # The watch comes first, as clipping would spread a NaN of one leaf to all.
    steps = [watch_gradients()]
    if config.clip_norm is not None:
        steps.append(clip_by_global_norm(config.clip_norm))
    if callable(config.name):
        return optax.chain(*steps, _own_optimizer(config.name, schedule))
    make, options, decouples = OPTIMIZERS[config.name]
    values = (getattr(config, option) for option in options)
    decay: dict[str, Any] = {"weight_decay": config.weight_decay, "mask": _has_two_dims}
    if decouples:
        return optax.chain(*steps, make(schedule, *values, **decay))
    steps.append(optax.add_decayed_weights(**decay))
    return optax.chain(*steps, make(schedule, *values))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """As that of optax, also for numbers whose squares overflow.

    For these the norm of optax is infinite, and so each clipped update is 0.
    """

    def update_fn(updates, state, params=None):
        del params
        updates = jax.tree.map(jnp.asarray, updates)
        wide = jax.tree.map(
            lambda x: x.astype(np.promote_types(x.dtype, np.float32)), updates
        )
        plain = optax.tree.norm(wide)
        # Of numbers within 2^80 of the largest, a power of two changes no digit.
        scale = jnp.where(jnp.isfinite(plain), 1, 2.0**-80)
        norm = optax.tree.norm(jax.tree.map(lambda x: scale * x, wide))

        def clip(x, given):
            clipped = scale * x / norm * max_norm
            return jnp.where(plain < max_norm, given, clipped.astype(given.dtype))

        return jax.tree.map(clip, wide, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)


def _own_optimizer(
    make: Callable[[optax.Schedule], Any], schedule: optax.Schedule
) -> optax.GradientTransformation:
    made = make(schedule)
    if isinstance(made, optax.MultiSteps):
        made = made.gradient_transformation()
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"optimizer.name = {place_of(make)} must return an optax optimizer, a "
            f"GradientTransformation, got {made!r}"
        )
    return made


def _has_two_dims(params: Any) -> Any:
    """The mask of kernels and embeddings: biases and norms are not decayed."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)
