"""Proximal policy optimization: advantages, and the loss of a minibatch.

Arrays are [T, B]: a column is an episode from its start, and `played` marks the steps
before its end. Sums and means are over those steps alone.

Sources: Schulman et al. (2017), arXiv:1707.06347; advantages by Schulman et al. (2016),
arXiv:1506.02438; Wijmans et al. (2020), arXiv:1911.00357, for navigation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from train.fields import checked


@checked
class PPOConfig:
    """Options of the updates.

    Args:
      epochs: number of passes over the episodes of an iteration.
      discount: weight of the next step's return.
      gae_lambda: lambda of the generalized advantages: 0 relies on the value of the
        next step, 1 on the whole return.
      clip: largest change that lowers the loss further, of the ratio of probabilities
        and of a value.
      value_weight: weight of the value loss.
      entropy_weight: weight of the entropy bonus.
    """

    epochs: int = 4
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01

    def __post_init__(self):
        if self.epochs < 1:
            raise ValueError(f"epochs must be positive, got {self.epochs}")
        for name in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not self.clip > 0 or self.value_weight < 0 or self.entropy_weight < 0:
            raise ValueError(
                "clip must be positive and the weights not negative, got "
                f"{self.clip}, {self.value_weight} and {self.entropy_weight}"
            )


class Transitions(NamedTuple):
    """The steps of episodes as they were played, [T, B].

    Args:
      action: action taken.
      log_prob: log of its probability under the policy that played.
      value: value that the policy estimated before the action.
      reward: reward of the action.
      played: whether the step is before the end of its episode.
    """

    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    played: jax.Array


def advantages(steps: Transitions, config: PPOConfig) -> jax.Array:
    """Returns generalized advantages, [T, B].

    `A_t = d_t + g l A_(t+1)` with `d_t = r_t + g V_(t+1) - V_t`, where V and A are 0
    after the end of an episode.

    Args:
      steps: the episodes.
      config: discount g and gae_lambda l.
    """

    def back(after: tuple[jax.Array, jax.Array], step: Transitions):
        value, advantage = after
        error = step.reward + config.discount * value - step.value
        advantage = error + config.discount * config.gae_lambda * advantage
        value = jnp.where(step.played, step.value, 0)
        advantage = jnp.where(step.played, advantage, 0)
        return (value, advantage), advantage

    steps = steps._replace(
        value=steps.value.astype(jnp.float32), reward=steps.reward.astype(jnp.float32)
    )
    zeros = jnp.zeros_like(steps.value[0])
    _, found = lax.scan(back, (zeros, zeros), steps, reverse=True)
    return found


def ppo_loss(
    logits: jax.Array,
    values: jax.Array,
    steps: Transitions,
    advantage: jax.Array,
    config: PPOConfig,
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the loss of a minibatch, and its metrics.

    `mean(-min(p A, clip(p) A) + c max((V - R)^2, (clip(V) - R)^2) / 2 - e H)`, with p
    the new probability of an action over the old one, clipped to 1 +- clip, V the new
    value, clipped to the old one +- clip, R the old one plus the advantage, and A the
    advantage after subtracting its mean and dividing by its standard deviation.

    Args:
      logits: logits of the actions by the present policy, [T, B, actions].
      values: values by the present policy, [T, B].
      steps: the episodes as they were played.
      advantage: the result of `advantages`, [T, B].
      config: clip, and the weights c and e.
    """
    logits, values, advantage = (
        x.astype(jnp.float32) for x in (logits, values, advantage)
    )
    count = jnp.maximum(steps.played.sum(), 1).astype(jnp.float32)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(x, where=steps.played, dtype=jnp.float32) / count

    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probs, steps.action[..., None], axis=-1)[..., 0]
    # 0 after the end of an episode, where a ratio that overflows would give a gradient
    # of NaN.
    ratio = jnp.exp(jnp.where(steps.played, chosen - steps.log_prob, 0))
    centred = advantage - mean(advantage)
    scaled = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)
    clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    gain = mean(jnp.minimum(ratio * scaled, clipped * scaled))
    returns = steps.value + advantage
    near = steps.value + jnp.clip(values - steps.value, -config.clip, config.clip)
    errors = jnp.maximum((values - returns) ** 2, (near - returns) ** 2)
    entropy = mean(-jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    loss = -gain + config.value_weight * mean(errors) / 2
    loss -= config.entropy_weight * entropy
    moved = mean(jnp.abs(ratio - 1) > config.clip)
    return loss, {"entropy": entropy, "clipped": moved, "value_error": mean(errors)}
