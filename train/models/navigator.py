"""A recurrent policy: convolutions, a GRU, and heads for actions and values.

Shapes: any leading dims, then V the side of a view in tiles, C channels, D the width of
the hidden state, A actions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from train.fields import checked
from train.models.resnet import conv_as_matmul
from train.models.sizes import check_positive

CONVOLUTIONS = 2  # Of 3 x 3 tiles without padding: each shrinks the view by 2.


@checked
class NavigatorConfig:
    """Sizes of the policy.

    Args:
      view: V, odd.
      channels: channels of the first convolution; the second has twice as many.
      width: D.
    """

    view: int = 5
    channels: int = 16
    width: int = 64

    def __post_init__(self):
        check_positive(self, "channels", "width")
        least = 2 * CONVOLUTIONS + 1
        if self.view < least or self.view % 2 == 0:
            raise ValueError(
                f"view must be odd and at least {least}, as {CONVOLUTIONS} "
                f"convolutions shrink it by 2 each, got {self.view}"
            )


class Observation(NamedTuple):
    """What an agent sees.

    Args:
      view: kinds of the tiles ahead, float32 [..., V, V, C].
      compass: direction of the goal, as cosine and sine of the angle from straight
        ahead, and a tenth of its distance in tiles, float32 [..., 3].
    """

    view: jax.Array
    compass: jax.Array


class Navigator(nnx.Module):
    """A recurrent policy in three parts.

    `see` encodes an observation, `remember` updates the hidden state with it, and
    `decide` maps the hidden state to logits [..., A] and a value [...].
    """

    def __init__(
        self, config: NavigatorConfig, kinds: int, actions: int, *, rngs: nnx.Rngs
    ):
        channels, side = config.channels, config.view - 2 * CONVOLUTIONS
        self.near = _convolution(kinds, channels, rngs)
        self.far = _convolution(channels, 2 * channels, rngs)
        seen = 2 * channels * side**2 + 3
        self.mixed = nnx.Linear(seen, config.width, rngs=rngs)
        self.into_gates = nnx.Linear(config.width, 3 * config.width, rngs=rngs)
        self.to_gates = nnx.Linear(config.width, 3 * config.width, rngs=rngs)
        # Small, so that all actions begin with nearly the same probability.
        small = nnx.initializers.variance_scaling(1e-4, "fan_in", "normal")
        self.actor = nnx.Linear(config.width, actions, kernel_init=small, rngs=rngs)
        self.critic = nnx.Linear(config.width, 1, rngs=rngs)

    def see(self, observation: Observation) -> jax.Array:
        """Returns the inputs of the gates, [..., 3 D]."""
        tiles = jax.nn.relu(self.near(observation.view))
        tiles = jax.nn.relu(self.far(tiles))
        flat = tiles.reshape(*tiles.shape[:-3], -1)
        mixed = self.mixed(jnp.concatenate([flat, observation.compass], axis=-1))
        return self.into_gates(jax.nn.relu(mixed))

    def remember(self, memory: jax.Array, seen: jax.Array) -> jax.Array:
        """Returns the next hidden state, [..., D], by a gated recurrent unit."""
        reset_in, keep_in, new_in = jnp.split(seen, 3, axis=-1)
        reset, keep, new = jnp.split(self.to_gates(memory), 3, axis=-1)
        keep = jax.nn.sigmoid(keep_in + keep)
        new = jnp.tanh(new_in + jax.nn.sigmoid(reset_in + reset) * new)
        return keep * memory + (1 - keep) * new

    def decide(self, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the logits of the actions, and the value."""
        return self.actor(memory), self.critic(memory)[..., 0]


def _convolution(channels: int, out: int, rngs: nnx.Rngs) -> nnx.Conv:
    # As a matrix product, since workers are batched: see `ResNetConfig.convolution`.
    return nnx.Conv(
        channels,
        out,
        (3, 3),
        padding=0,
        kernel_init=nnx.initializers.he_normal(),
        conv_general_dilated=conv_as_matmul,
        rngs=rngs,
    )
