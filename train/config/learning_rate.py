"""The learning rate of each step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from train.config.optimizer import OptimizerConfig
from train.fields import place_of

DROP = 0.1  # The factor at each of `decay_steps`.


def build_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """A linear warm-up, then the config's decay; or its own schedule.

    Raises:
      ValueError: if the function of its own returns no schedule.
    """
    if callable(config.decay):
        return _own_schedule(config.decay, num_steps)
    peak, warmup = config.learning_rate, config.warmup_over(num_steps)
    if config.decay == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=config.initial_learning_rate,
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=num_steps,
            end_value=config.final_learning_rate,
        )

    # `join_schedules` counts `past` from the end of the warm-up, and below 0 during it,
    # where the root would be of a negative number.
    def inverse_sqrt(past):
        return peak * jnp.sqrt(warmup / (warmup + jnp.maximum(past, 0)))

    factors = {step - warmup: DROP for step in config.decay_steps}
    after = {
        "inverse_sqrt": inverse_sqrt,
        "steps": optax.piecewise_constant_schedule(peak, factors),
    }
    rising = optax.linear_schedule(config.initial_learning_rate, peak, warmup)
    return optax.join_schedules([rising, after[config.decay]], boundaries=[warmup])


def _own_schedule(
    make: Callable[[int], optax.Schedule], num_steps: int
) -> optax.Schedule:
    made = make(num_steps)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    # The loop counts in Python and the optimizer in an array: both must do.
    rate = jax.eval_shape(made, step) if callable(made) else None
    if getattr(rate, "shape", None) != ():
        raise ValueError(
            f"optimizer.decay = {place_of(make)} must return a function from a step "
            f"to a learning rate, a scalar, got {made!r}"
        )
    return made
