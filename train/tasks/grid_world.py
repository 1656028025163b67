"""Point-goal navigation in the world of xminigrid, and rollouts of a policy.

An agent sees the tiles ahead of it and a compass that points to the goal, and turns or
steps forward; the episode ends at the goal or at the horizon.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from train.data.grid_maps import HEADINGS
from train.models.navigator import Observation
from train.tasks.ppo import Transitions

NUM_ACTIONS = 3  # xminigrid's first three: forward, turn right, turn left.
NUM_KINDS = 2  # Channels of a tile in the view: blocked, goal.
# Parts of the reward, in the form of Habitat's PointGoal navigation.
AT_GOAL = 1.0
PER_STEP_NEARER = 0.05
PER_ACTION = -0.01


class World(NamedTuple):
    """The constants of all episodes.

    Args:
      size: side of the map, in tiles.
      view: side of the view, in tiles.
      horizon: T, number of actions after which an episode ends.
    """

    size: int
    view: int
    horizon: int


class Rollout(NamedTuple):
    """B episodes as they were played, [T, B].

    Args:
      observation: observations before each action, the view as uint8.
      steps: actions and rewards.
      place: row, column and heading before each action, int16 [T, B, 3].
      reached: whether the action led to the goal.
    """

    observation: Observation
    steps: Transitions
    place: jax.Array
    reached: jax.Array


Agent = Callable[
    [jax.Array, Observation, jax.Array], tuple[jax.Array, jax.Array, jax.Array]
]
"""(memory, observation, place) -> (memory, logits, values).

The memory is the hidden state, [B, D]; logits are [B, A] and values [B].
"""


def empty_rollout(world: World, num_episodes: int) -> Rollout:
    """Returns a rollout in which no step has been played."""
    shape = world.horizon, num_episodes
    numbers = functools.partial(jnp.zeros, shape)
    view = jnp.zeros((*shape, world.view, world.view, NUM_KINDS), jnp.uint8)
    steps = Transitions(numbers(int), numbers(), numbers(), numbers(), numbers(bool))
    place = jnp.zeros((*shape, 3), jnp.int16)
    return Rollout(
        Observation(view, jnp.zeros((*shape, 3))), steps, place, numbers(bool)
    )


def pack(rollout: Rollout) -> Rollout:
    """Returns a rollout whose floats are integers of the same bits.

    Model states of workers may be averaged, as where a run resumes with another number
    of them. Of integers the mean takes worker 0's, so a packed rollout stays whole.
    """
    return jax.tree.map(lambda x: _bits(x, jnp.uint32, of=jnp.float32), rollout)


def unpack(rollout: Rollout) -> Rollout:
    """Returns the rollout that `pack` packed."""
    return jax.tree.map(lambda x: _bits(x, jnp.float32, of=jnp.uint32), rollout)


def _bits(x: jax.Array, dtype: Any, of: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if x.dtype == of else x


def play(
    world: World,
    policy: Agent,
    memory: jax.Array,
    episodes: Mapping[str, jax.Array],
    key: jax.Array,
    *,
    old: Rollout | None = None,
    live: jax.Array | bool = True,
    greedy: bool = False,
) -> Rollout:
    """Plays each episode to its end.

    The loop has as many steps as the longest of them.

    Args:
      world: the constants of all episodes.
      policy: policy that plays.
      memory: its hidden state at the start, [B, D].
      episodes: fields of `train.data.grid_maps.episode_type` by name, [B, ...].
      key: random key of the actions.
      old: rollout to return if nothing is played.
      live: whether the episodes are played. A loop of no steps and not `lax.cond`,
        which under `jax.vmap` plays in every step of the trainer.
      greedy: whether to take the likeliest action and not to sample.
    """
    blank = empty_rollout(world, len(memory))
    old = blank if old is None else old
    rollout = jax.tree.map(functools.partial(jnp.where, live), blank, old)
    episodes = {name: jnp.asarray(x) for name, x in episodes.items()}
    grid, agent, tiles = jax.vmap(functools.partial(_begin, world))(episodes)
    step = jax.vmap(functools.partial(_step, world), (0, 0, None, 0))

    def go_on(carry) -> jax.Array:
        *_, ended = carry
        return ~ended.all()

    def move(carry):
        number, rollout, agent, tiles, memory, ended = carry
        place = _place(agent)
        observation = jax.vmap(_observe)(tiles, place, episodes["goal"])
        memory, logits, value = policy(memory, observation, place)
        drawn = jax.random.categorical(jax.random.fold_in(key, number), logits)
        action = logits.argmax(-1) if greedy else drawn
        then = step(grid, agent, number, action)
        reached = then.discount == 0
        nearer = _distance_left(episodes, place) - _distance_left(
            episodes, _place(then.state.agent)
        )
        reward = PER_STEP_NEARER * nearer + PER_ACTION + AT_GOAL * reached
        log_prob = -optax.softmax_cross_entropy_with_integer_labels(logits, action)
        steps = Transitions(action, log_prob, value, reward, ~ended)
        rollout = jax.tree.map(
            lambda all, one: all.at[number].set(one.astype(all.dtype)),
            rollout,
            Rollout(observation, steps, place, reached),
        )
        ended |= then.last()
        return number + 1, rollout, then.state.agent, then.observation, memory, ended

    ended = jnp.broadcast_to(~jnp.asarray(live), len(memory))
    return lax.while_loop(go_on, move, (0, rollout, agent, tiles, memory, ended))[1]


def measure(
    rollout: Rollout, episodes: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns success, return and SPL of each episode, [B]."""
    played = rollout.steps.played
    success = (rollout.reached & played).any(0)
    shortest = _distance_left(episodes, episodes["start"])
    return {
        "success": success.astype(jnp.float32),
        "return": jnp.sum(rollout.steps.reward, axis=0, where=played),
        "spl": spl(success, shortest, played.sum(0)),
    }


def spl(success: jax.Array, shortest: jax.Array, taken: jax.Array) -> jax.Array:
    """Returns success weighted by path length, `S l / max(p, l)`, of each episode.

    Args:
      success: S, whether the goal was reached.
      shortest: l, length of the shortest path.
      taken: p, length of the path that was taken.

    Source: Anderson et al. (2018), arXiv:1807.06757, equation 1.
    """
    return jnp.where(success, shortest / jnp.maximum(taken, shortest), 0)


def uniform(memory: jax.Array, observation: Observation, place: jax.Array):
    """A policy that samples all actions with the same probability."""
    del observation
    return memory, jnp.zeros((len(place), NUM_ACTIONS)), jnp.zeros(len(place))


def shortest_path_policy(episodes: Mapping[str, jax.Array]) -> Agent:
    """A policy that knows the map: its likeliest action is on a shortest path."""

    def after(distance: jax.Array, place: jax.Array) -> jax.Array:
        row, column, heading = place
        down, right = jnp.asarray(HEADINGS)[heading]
        there = jnp.stack(
            [
                distance[heading, row + down, column + right],
                distance[(heading + 1) % 4, row, column],
                distance[(heading - 1) % 4, row, column],
            ]
        )
        return -jnp.where(there < 0, jnp.inf, there)  # Into a wall.

    def policy(memory: jax.Array, observation: Observation, place: jax.Array):
        del observation
        logits = jax.vmap(after)(episodes["distance"], place)
        return memory, logits, jnp.zeros(len(place))

    return policy


@functools.cache
def _library(world: World) -> Any:
    """xminigrid's environment, its params, a first time step, and kinds of tiles."""
    # It makes arrays when it is imported; in a trace these would be tracers.
    with jax.ensure_compile_time_eval():
        from xminigrid.core.constants import Colors, Tiles  # Of the extra `navigate`.
        from xminigrid.registration import make

        env, params = make(
            "MiniGrid-FourRooms",
            height=world.size,
            width=world.size,
            view_size=world.view,
            max_steps=world.horizon,
        )
        first = env.reset(params, jax.random.PRNGKey(0))
    # In NumPy, as arrays of a trace on a mesh cannot be used off it.
    first = jax.tree.map(np.asarray, first)
    floor, wall = (Tiles.FLOOR, Colors.BLACK), (Tiles.WALL, Colors.GREY)
    return env, params, first, (floor, wall, (Tiles.GOAL, Colors.GREEN))


def _begin(
    world: World, episode: Mapping[str, jax.Array]
) -> tuple[jax.Array, Any, jax.Array]:
    """The grid of an episode, the agent in it, and the tiles that it sees."""
    *_, first, tiles = _library(world)
    from xminigrid.core.observation import transparent_field_of_view

    kinds = episode["walls"].astype(int).at[tuple(episode["goal"])].set(2)
    grid = jnp.asarray(tiles, first.state.grid.dtype)[kinds]
    start = episode["start"]
    agent = jax.tree.map(jnp.asarray, first.state.agent)
    agent = agent.replace(position=start[:2], direction=start[2])
    view = transparent_field_of_view(grid, agent, world.view, world.view)
    return grid, agent, view


def _step(
    world: World, grid: jax.Array, agent: Any, number: jax.Array, action: jax.Array
) -> Any:
    env, params, first, _ = _library(world)
    first = jax.tree.map(jnp.asarray, first)
    # Rules and goal are those of the first time step, constants: if they were batched,
    # the library would compute every kind of rule and goal in each step.
    state = first.state.replace(grid=grid, agent=agent, step_num=number)
    return env.step(params, first.replace(state=state), action)


def _place(agent: Any) -> jax.Array:
    """Row, column and heading of each agent, [B, 3]."""
    return jnp.concatenate([agent.position, agent.direction[:, None]], axis=1)


def _distance_left(episodes: Mapping[str, jax.Array], place: jax.Array) -> jax.Array:
    """The smallest number of actions from each place to the goal, float32 [B]."""
    row, column, heading = place.T
    left = episodes["distance"][jnp.arange(len(row)), heading, row, column]
    return left.astype(jnp.float32)


def _observe(tiles: jax.Array, place: jax.Array, goal: jax.Array) -> Observation:
    from xminigrid.core.constants import Tiles

    kinds = tiles[..., 0]
    blocked = (kinds == Tiles.WALL) | (kinds == Tiles.EMPTY)  # Beyond the map.
    view = jnp.stack([blocked, kinds == Tiles.GOAL], axis=-1).astype(jnp.float32)
    down, right = (goal - place[:2]).astype(jnp.float32)
    # Turned so that the agent looks along the first axis.
    ahead_down, ahead_right = jnp.asarray(HEADINGS, jnp.float32)[place[2]]
    ahead = down * ahead_down + right * ahead_right
    aside = down * ahead_right - right * ahead_down
    distance = jnp.sqrt(ahead**2 + aside**2)
    cosine, sine = ahead / jnp.maximum(distance, 1), aside / jnp.maximum(distance, 1)
    return Observation(view, jnp.stack([cosine, sine, distance / 10]))
