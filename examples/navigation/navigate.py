"""Navigation between rooms, the second paper's reinforcement learning in small.

A task of one file, as docs/guides/own-task.md has it, with its configs: PPO of a
convolution and a GRU, each of 8 workers in rooms of its own. A step of the trainer is
the gradient of a minibatch of episodes. At the first step of an iteration each worker
first plays new episodes, all to their end, which takes some longer than others.

Command: `decentjax train examples/navigation/navigate.py`, or another config of those
below by its name, `examples/navigation/navigate.py:sgp`; the extra `navigate` has the
rooms. Those named uneven_* by `decentjax bench uneven --seeds 2`.
Hardware: 2 cores of an AMD EPYC, all workers simulated on one device.
Result: held-out SPL of the mean model after 600 steps, +- two standard deviations of
three seeds, where random actions have 0.031 and breadth-first search 1. Each learning
rate is the best of four or five, see docs/results/navigate.md.

    wagma      0.942 ± 0.003, on one half of the episodes
    sgp        0.940 ± 0.015
    allreduce  0.933 ± 0.016
    local_sgd  0.928 ± 0.025
    dadam_aer  0.926 ± 0.022
    peers      0.917 ± 0.029, by the clock

wagma, one seed: 0.862 after 100 steps, 0.869 after 200, 0.896 after 400 and 0.932 after
600; 106 s, compiling included.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from train.config import (
    AllReduceMethod,
    AtcMethod,
    AwcMethod,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    GroupExchange,
    OptimizerConfig,
    PeerExchange,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.data.batches import Batch, worker_steps
from train.fields import checked
from train.models.resnet import conv_as_matmul
from train.models.sizes import MOST_EXAMPLES, check_positive
from train.tasks.sampling import Sampling
from train.tasks.task import Amount, Headline, Task, Totals

NUM_ACTIONS = 3  # xminigrid's first three: forward, turn right, turn left.
NUM_KINDS = 2  # Channels of a tile in the view: blocked, goal.
# The step forward by heading, (down, right): up, right, down, left, in xminigrid's
# order. Heading h + 1 is a quarter turn clockwise from h.
HEADINGS = ((-1, 0), (0, 1), (1, 0), (0, -1))
ARROWS = "^>v<"  # By heading.
# Parts of the reward, in the form of Habitat's PointGoal navigation.
AT_GOAL, PER_STEP_NEARER, PER_ACTION = 1.0, 0.05, -0.01
SPLIT_SEED = 0
DRAWS = 16  # Per map wanted: most draws repeat an earlier map.
LARGEST = 99  # Side of a map, in tiles.
BLOCK = 8  # Time steps of the gradient, skipped together after all episodes' ends.
NUM_SHOWN = 4
CONVOLUTIONS = 2  # Of 3 x 3 tiles without padding: each shrinks the view by 2.

# ---- Options ----


@checked
class NavigatorConfig:
    """Sizes of the policy.

    Args:
      view: V, side of the view in tiles, odd.
      channels: channels of the first convolution; the second has twice as many.
      width: D, width of the hidden state.
    """

    view: int = 5
    channels: int = 16
    width: int = 64

    def __post_init__(self):
        check_positive(self, "channels", "width")
        if self.view < 2 * CONVOLUTIONS + 1 or self.view % 2 == 0:
            raise ValueError(f"view must be odd and at least 5, got {self.view}")


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
        check_positive(self, "epochs")


@checked
class NavigateTask:
    """Point-goal navigation between rooms; batches are episodes.

    Args:
      model: sizes of the policy.
      ppo: options of the updates.
      environments: number of episodes that a worker plays side by side in an
        iteration. Minibatches have `step.batch_per_worker` of them, and each episode is
        in `ppo.epochs` minibatches.
      horizon: number of actions after which an episode ends.
      sizes: sides of the maps, in tiles, all different; as many maps of each.
      num_maps: number of training maps.
      num_held_out: number of held-out maps.
      per_map: number of episodes on each map.
      num_eval_episodes: number of held-out episodes in an evaluation, evenly spaced.
    """

    model: NavigatorConfig = dataclasses.field(default_factory=NavigatorConfig)
    ppo: PPOConfig = dataclasses.field(default_factory=PPOConfig)
    environments: int = 16
    horizon: int = 48
    sizes: tuple[int, ...] = (9, 11, 13)
    num_maps: int = 150
    num_held_out: int = 30
    per_map: int = 20
    num_eval_episodes: int = 120

    def __post_init__(self):
        counts = "environments", "num_maps", "num_held_out", "per_map"
        counts += "horizon", "num_eval_episodes"
        check_positive(self, *counts, most=MOST_EXAMPLES)
        view, sizes = self.model.view, self.sizes
        fit = [view < size <= LARGEST for size in sizes]
        # Of one size twice, maps of both splits could be the same.
        if not sizes or not all(fit) or len(set(sizes)) < len(sizes):
            raise ValueError(
                f"sizes must be different, larger than the view of {view} tiles and at "
                f"most {LARGEST}, got {sizes}"
            )
        if self.horizon % BLOCK:
            raise ValueError(
                f"horizon must be a multiple of {BLOCK}, got {self.horizon}"
            )

    def build(self) -> Task:
        parts = Navigation(self)
        return Task(
            batch_shape=parts.batch_shape,
            steps=parts.steps,
            init=parts.init,
            loss_fn=parts.loss_fn,
            validation=lambda: [read_episodes(self)[1]],
            score_fn=parts.score_fn,
            headline=Headline("spl", better="higher"),
            baselines=parts.baselines,
            sample=parts.sample,
            generate=parts.generate,
            units={"success": "share"},
            amount=Amount("episodes", lambda arrays: arrays["rows"].size),
            num_examples=lambda: len(read_episodes(self)[0]),
        )


# ---- Maps, and episodes on them: start, goal and shortest distances ----

Episodes = Mapping[str, Any]
"""Fields of `episode_type` by name, [B, ...]."""


def episode_type(size: int) -> np.dtype:
    """The fields of an episode on a map of `size` x `size` tiles.

    `start` is row, column and heading, `goal` row and column. `distance` is the
    smallest number of actions to the goal from each heading and place, [4, size, size],
    and -1 where the goal is unreachable.
    """
    return np.dtype(
        [
            ("walls", bool, (size, size)),
            ("start", np.int32, 3),
            ("goal", np.int32, 2),
            ("distance", np.int16, (4, size, size)),
        ]
    )


@functools.cache
def read_episodes(options: NavigateTask) -> tuple[Any, Episodes]:
    """Returns all training episodes, and the evaluation's, on other maps.

    They are the same in every call; smaller maps are padded with walls.

    Raises:
      ValueError: if there are too few maps of a size, or the horizon is too short.
    """
    random, sizes, split = np.random.default_rng(SPLIT_SEED), options.sizes, []
    counts = (_shares(x, sizes) for x in (options.num_maps, options.num_held_out))
    for size, train, held_out in zip(sizes, *counts, strict=True):
        maps = random.permutation(draw_maps(size, DRAWS * (train + held_out)))
        if len(maps) < train + held_out:
            raise ValueError(
                f"found {len(maps)} different maps of {size} x {size} tiles, wanted "
                f"{train + held_out}: take fewer or larger maps"
            )
        padded = np.ones((len(maps), max(sizes), max(sizes)), bool)
        padded[:, :size, :size] = maps
        split.append((padded[:train], padded[train : train + held_out]))
    train, held_out = (
        draw_episodes(np.concatenate(walls), options.per_map, random)
        for walls in zip(*split, strict=True)
    )
    longest = max(int(shortest_paths(x).max()) for x in (train, held_out))
    if options.horizon < longest:
        raise ValueError(
            f"the horizon of {options.horizon} actions is shorter than a shortest path "
            f"of {longest} actions: set --task.horizon"
        )
    count = min(len(held_out), options.num_eval_episodes)
    chosen = np.linspace(0, len(held_out) - 1, count).astype(int)
    return train, columns(held_out[chosen])


def draw_maps(size: int, num_draws: int) -> np.ndarray:
    """Returns the distinct maps among draws of xminigrid, bool [maps, size, size]."""
    from xminigrid.core.constants import Tiles  # Of the extra `navigate`.
    from xminigrid.registration import make

    world, params = make("MiniGrid-FourRooms", height=size, width=size)
    keys = jax.random.split(jax.random.key(SPLIT_SEED), num_draws)
    grids = jax.jit(jax.vmap(lambda key: world.reset(params, key).state.grid))(keys)
    return np.unique(np.asarray(grids)[..., 0] == Tiles.WALL, axis=0)


def draw_episodes(
    walls: np.ndarray, per_map: int, random: np.random.Generator
) -> np.ndarray:
    """Returns episodes from a random place to another one, some on each map.

    Args:
      walls: maps, bool [maps, size, size].
      per_map: number of episodes on each map.
      random: generator of starts and goals.
    """
    count, size = len(walls) * per_map, walls.shape[1]
    episodes = np.zeros(count, episode_type(size))
    episodes["walls"] = np.repeat(walls, per_map, axis=0)
    # Two different free tiles: the ones with the smallest random numbers.
    order = random.random((count, size * size))
    order[episodes["walls"].reshape(count, -1)] = 2
    places = np.argsort(order, axis=1)[:, :2]
    rows, columns = np.divmod(places, size)
    episodes["goal"] = np.stack([rows[:, 0], columns[:, 0]], axis=1)
    headings = random.integers(0, len(HEADINGS), count)
    episodes["start"] = np.stack([rows[:, 1], columns[:, 1], headings], axis=1)
    episodes["distance"] = distances(episodes["walls"], episodes["goal"])
    return episodes


def distances(walls: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """Returns the smallest number of actions to a goal, by breadth-first search.

    An action is a step forward, or a quarter turn on the spot.

    Args:
      walls: maps surrounded by walls, bool [n, size, size].
      goals: row and column of the goal on each map, int [n, 2].

    Returns:
      int16 [n, 4, size, size] by heading and place, -1 where the goal is unreachable.
    """
    count, size, _ = walls.shape
    found = np.full((count, len(HEADINGS), size, size), -1, np.int16)
    reached = np.zeros(found.shape, bool)
    reached[np.arange(count), :, goals[:, 0], goals[:, 1]] = True
    actions = 0
    while reached.any():
        found[reached] = actions
        actions += 1
        # All that are one action before those reached: a turn to either side, or a step
        # from the tile behind. No roll crosses the edge of a map, which is walls.
        before = np.roll(reached, 1, axis=1) | np.roll(reached, -1, axis=1)
        for heading, (down, right) in enumerate(HEADINGS):
            before[:, heading] |= np.roll(
                reached[:, heading], (-down, -right), axis=(1, 2)
            )
        reached = before & (found < 0) & ~walls[:, None]
    return found


def shortest_paths(episodes: Any) -> np.ndarray:
    """Returns the smallest number of actions of each episode, int [n]."""
    row, column, heading = episodes["start"].T
    return episodes["distance"][np.arange(len(row)), heading, row, column]


def columns(episodes: Any, _: Any = None) -> dict[str, np.ndarray]:
    """Returns the fields of one or more episodes by name; a transform for `grain`."""
    return {name: episodes[name] for name in episodes.dtype.names}


def _shares(total: int, sizes: tuple[int, ...]) -> list[int]:
    """The number of maps of each size, as equal as possible."""
    return [len(part) for part in np.array_split(np.arange(total), len(sizes))]


@dataclasses.dataclass(frozen=True)
class Iterations:
    """The batches of all steps, for a `grain` dataset to read.

    A batch has `episodes` of the iteration, [workers, E, ...]; `plays`, whether
    this step plays them, as the first step of each iteration does; and `rows`, the
    indices of those in the step's minibatch. Each epoch passes over all episodes, in an
    order of its own for each worker.

    Args:
      episodes: episodes of each iteration.
      epochs: number of epochs in an iteration.
      parts: number of steps in an epoch.
      workers: numbers of the workers whose batches these are.
      seed: seed of the orders.
    """

    episodes: grain.MapDataset[Batch]
    epochs: int
    parts: int
    workers: tuple[int, ...]
    seed: int

    def __len__(self) -> int:
        return min(len(self.episodes) * self.epochs * self.parts, sys.maxsize)

    def __getitem__(self, index: int) -> Batch:
        epoch, part = divmod(int(index), self.parts)
        iteration, epoch_of_it = divmod(epoch, self.epochs)
        batch = self.episodes[iteration]
        assert batch is not None  # In grain's types a dataset may have a filter.
        count = batch.arrays["goal"].shape[1]
        orders = [
            np.random.default_rng((self.seed, worker, epoch)).permutation(count)
            for worker in self.workers
        ]
        rows = np.array_split(np.array(orders, np.int32), self.parts, axis=1)[part]
        plays = np.full(len(self.workers), epoch_of_it == part == 0)
        return Batch({"episodes": batch.arrays, "plays": plays, "rows": rows})


# ---- The policy. Leading dims, then V side of a view, D width, A actions ----


class Observation(NamedTuple):
    """What an agent sees.

    Args:
      view: kinds of the tiles ahead, float32 [..., V, V, NUM_KINDS].
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

    def __init__(self, config: NavigatorConfig, *, rngs: nnx.Rngs):
        channels, side = config.channels, config.view - 2 * CONVOLUTIONS
        self.near = _convolution(NUM_KINDS, channels, rngs)
        self.far = _convolution(channels, 2 * channels, rngs)
        seen = 2 * channels * side**2 + 3
        self.mixed = nnx.Linear(seen, config.width, rngs=rngs)
        self.into_gates = nnx.Linear(config.width, 3 * config.width, rngs=rngs)
        self.to_gates = nnx.Linear(config.width, 3 * config.width, rngs=rngs)
        # Small, so that all actions begin with nearly the same probability.
        small = nnx.initializers.variance_scaling(1e-4, "fan_in", "normal")
        self.actor = nnx.Linear(config.width, NUM_ACTIONS, kernel_init=small, rngs=rngs)
        self.critic = nnx.Linear(config.width, 1, rngs=rngs)

    def see(self, observation: Observation) -> jax.Array:
        """Returns the inputs of the gates, [..., 3 D]."""
        tiles = jax.nn.relu(self.far(jax.nn.relu(self.near(observation.view))))
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


# ---- Episodes as they are played, arrays [T, B] ----


class Transitions(NamedTuple):
    """The steps of episodes, [T, B]: a column is an episode from its start.

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


class World:
    """xminigrid's environment, in which an agent sees tiles and a compass.

    Args:
      size: side of the map, in tiles.
      view: side of the view, in tiles.
      horizon: T, number of actions after which an episode ends.
    """

    def __init__(self, size: int, view: int, horizon: int):
        from xminigrid.core.constants import Colors, Tiles  # Of the extra `navigate`.
        from xminigrid.registration import make

        self.size, self.view, self.horizon = size, view, horizon
        sides = {"height": size, "width": size, "view_size": view}
        self._env, self._params = make("MiniGrid-FourRooms", **sides, max_steps=horizon)
        first = self._env.reset(self._params, jax.random.PRNGKey(0))
        # In NumPy, as arrays of a trace on a mesh cannot be used off it.
        self._first = jax.tree.map(np.asarray, first)
        floor, wall = (Tiles.FLOOR, Colors.BLACK), (Tiles.WALL, Colors.GREY)
        self._tiles = floor, wall, (Tiles.GOAL, Colors.GREEN)

    def empty(self, num_episodes: int) -> Rollout:
        """Returns a rollout in which no step has been played."""
        shape = self.horizon, num_episodes
        numbers = functools.partial(jnp.zeros, shape)
        view = jnp.zeros((*shape, self.view, self.view, NUM_KINDS), jnp.uint8)
        zeros = numbers()
        steps = Transitions(numbers(int), zeros, zeros, zeros, numbers(bool))
        seen = Observation(view, jnp.zeros((*shape, 3)))
        place = jnp.zeros((*shape, 3), jnp.int16)
        return Rollout(seen, steps, place, numbers(bool))

    def begin(self, episode: Episodes) -> tuple[jax.Array, Any, jax.Array]:
        """The grid of an episode, the agent in it, and the tiles that it sees."""
        from xminigrid.core.observation import transparent_field_of_view

        kinds = episode["walls"].astype(int).at[tuple(episode["goal"])].set(2)
        grid = jnp.asarray(self._tiles, self._first.state.grid.dtype)[kinds]
        start = episode["start"]
        agent = jax.tree.map(jnp.asarray, self._first.state.agent)
        agent = agent.replace(position=start[:2], direction=start[2])
        return grid, agent, transparent_field_of_view(grid, agent, self.view, self.view)

    def step(
        self, grid: jax.Array, agent: Any, number: jax.Array, action: jax.Array
    ) -> Any:
        """The library's time step after action `number` of an episode."""
        first = jax.tree.map(jnp.asarray, self._first)
        # Rules and goal stay as at the first time step, constants: if they were
        # batched, the library would compute every kind of rule and goal in each step.
        state = first.state.replace(grid=grid, agent=agent, step_num=number)
        return self._env.step(self._params, first.replace(state=state), action)


def play(
    world: World,
    policy: Agent,
    memory: jax.Array,
    episodes: Episodes,
    key: jax.Array,
    *,
    old: Rollout | None = None,
    live: jax.Array | bool = True,
    greedy: bool = False,
) -> Rollout:
    """Plays each episode to its end.

    The loop has as many steps as the longest of them.

    Args:
      world: the world.
      policy: policy that plays.
      memory: its hidden state at the start, [B, D].
      episodes: the episodes.
      key: random key of the actions.
      old: rollout to return if nothing is played.
      live: whether the episodes are played. A loop of no steps and not `lax.cond`,
        which under `jax.vmap` plays in every step of the trainer.
      greedy: whether to take the likeliest action and not to sample.
    """
    blank = world.empty(len(memory))
    old = blank if old is None else old
    rollout = jax.tree.map(functools.partial(jnp.where, live), blank, old)
    episodes = {name: jnp.asarray(x) for name, x in episodes.items()}
    grid, agent, tiles = jax.vmap(world.begin)(episodes)
    step = jax.vmap(world.step, (0, 0, None, 0))

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


def _place(agent: Any) -> jax.Array:
    """Row, column and heading of each agent, [B, 3]."""
    return jnp.concatenate([agent.position, agent.direction[:, None]], axis=1)


def _distance_left(episodes: Episodes, place: jax.Array) -> jax.Array:
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


def measure(rollout: Rollout, episodes: Episodes) -> dict[str, jax.Array]:
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


def draw(
    episodes: Episodes, rollout: Rollout, scores: Mapping[str, jax.Array], i: int
) -> str:
    """Returns episode i as text: a path of arrows on its map, to the goal G."""
    tiles = np.where(episodes["walls"][i], "#", " ")
    path = np.asarray(rollout.place)[np.asarray(rollout.steps.played)[:, i], i]
    for row, column, heading in path:
        tiles[row, column] = ARROWS[heading]
    tiles[tuple(episodes["goal"][i])] = "G"
    reached = "reached" if scores["success"][i] else "missed"
    text = f"{reached} after {len(path)} actions, SPL {scores['spl'][i]:.2f}"
    return "\n".join([text, *(" ".join(line).rstrip() for line in tiles)])


# ---- Two policies to compare with ----


def uniform(memory: jax.Array, observation: Observation, place: jax.Array):
    """A policy that samples all actions with the same probability."""
    del observation
    return memory, jnp.zeros((len(place), NUM_ACTIONS)), jnp.zeros(len(place))


def shortest_path_policy(episodes: Episodes) -> Agent:
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
        logits = jax.vmap(after)(jnp.asarray(episodes["distance"]), place)
        return memory, logits, jnp.zeros(len(place))

    return policy


# ---- PPO. Sums and means are over the steps that were played alone ----
# Schulman et al. (2017), arXiv:1707.06347; advantages by Schulman et al. (2016),
# arXiv:1506.02438; Wijmans et al. (2020), arXiv:1911.00357, for navigation.


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
      logits: logits of the actions by the present policy, [T, B, A].
      values: values by the present policy, [T, B].
      steps: the episodes as they were played.
      advantage: the result of `advantages`, [T, B].
      config: clip, and the weights c and e.
    """
    # Of narrow logits and values too, sums are in float32.
    logits, values = logits.astype(jnp.float32), values.astype(jnp.float32)
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


# ---- The task ----


class PPOState(NamedTuple):
    """The model state of a worker.

    Args:
      rollout: episodes of this iteration, as of `pack`.
      actions: number of actions taken so far.
    """

    rollout: Rollout
    actions: jax.Array


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


class Navigation:
    """The functions of a `NavigateTask`, see `train.tasks.task.Task`."""

    def __init__(self, options: NavigateTask):
        self.options = options
        self.world = World(max(options.sizes), options.model.view, options.horizon)
        make = functools.partial(Navigator, options.model)
        self.graph = nnx.graphdef(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
        self._played = jax.jit(self._play_greedily)

    def batch_shape(self, batch_per_worker: int) -> Any:
        self._num_parts(batch_per_worker)
        one = np.zeros(self.options.environments, episode_type(self.world.size))
        shape = jax.ShapeDtypeStruct
        return {
            "episodes": {k: shape(x.shape, x.dtype) for k, x in columns(one).items()},
            "plays": shape((), bool),
            "rows": shape((batch_per_worker,), np.int32),
        }

    def steps(
        self,
        num_workers: int,
        batch_per_worker: int,
        seed: int,
        workers: Sequence[int],
        *,
        multiple_of: int = 1,
        **parts: Any,
    ) -> grain.MapDataset[Batch]:
        del parts  # Parts by class; episodes have no classes.
        if multiple_of > 1:
            raise ValueError(
                "navigation has no micro-batches: set step.num_micro_batches to 1, and "
                "a smaller step.batch_per_worker"
            )
        num_parts, epochs = self._num_parts(batch_per_worker), self.options.ppo.epochs
        train, each = read_episodes(self.options)[0], self.options.environments
        plays = worker_steps(train, num_workers, each, seed, workers, columns)
        iterations = Iterations(plays, epochs, num_parts, tuple(workers), seed)
        return grain.MapDataset.source(iterations)

    def _num_parts(self, batch_per_worker: int) -> int:
        """The number of minibatches in an epoch."""
        if self.options.environments % batch_per_worker:
            raise ValueError(
                f"step.batch_per_worker = {batch_per_worker} must divide "
                f"task.environments = {self.options.environments}"
            )
        return self.options.environments // batch_per_worker

    def init(self, key: jax.Array) -> tuple[Any, PPOState]:
        empty = pack(self.world.empty(self.options.environments))
        net = Navigator(self.options.model, rngs=nnx.Rngs(key))
        return nnx.state(net), PPOState(empty, jnp.zeros(()))

    def loss_fn(self, params: Any, model_state: PPOState, batch: Any, key: jax.Array):
        ppo, old = self.options.ppo, unpack(model_state.rollout)
        live, rows, start = batch["plays"], batch["rows"], batch["episodes"]
        player = nnx.merge(self.graph, lax.stop_gradient(params))
        agent = _with_memory(player, self.options.environments)
        rollout = play(self.world, *agent, start, key, old=old, live=live)
        actions = model_state.actions + jnp.where(live, rollout.steps.played.sum(), 0)
        part = jax.tree.map(lambda x: x[:, rows], rollout)
        net = nnx.merge(self.graph, params)
        found = replay(net, part.observation, part.steps)
        loss, metrics = ppo_loss(*found, part.steps, advantages(part.steps, ppo), ppo)
        lengths = rollout.steps.played.sum(0)
        metrics |= {
            "episodes_reached": (rollout.reached & rollout.steps.played).any(0).mean(),
            "episode_actions": lengths.mean(),
            "longest_episode": lengths.max().astype(jnp.float32),
            "environment_steps": actions,
        }
        return loss, (PPOState(pack(rollout), actions), metrics)

    def score_fn(self, params: Any, model_state: PPOState, batch: Any) -> Totals:
        _, scores = self._play_greedily(params, batch)
        count = jnp.asarray(len(batch["goal"]))
        totals = {name: (score.sum(), count) for name, score in scores.items()}
        # Not a score, but its cost: reports draw the scores against it.
        return totals | {"environment_steps": (model_state.actions * count, count)}

    def _play_greedily(
        self, params: Any, episodes: Any
    ) -> tuple[Rollout, dict[str, jax.Array]]:
        """A rollout of the likeliest actions, and its scores."""
        agent = _with_memory(nnx.merge(self.graph, params), len(episodes["goal"]))
        rollout = play(self.world, *agent, episodes, jax.random.key(0), greedy=True)
        return rollout, measure(rollout, episodes)

    def baselines(self) -> dict[str, float]:
        """SPL of random actions, and of shortest paths."""
        episodes = read_episodes(self.options)[1]

        def score(policy: Agent, greedy: bool) -> float:
            memory = jnp.zeros((len(episodes["goal"]), 0))
            run = jax.jit(functools.partial(play, self.world, policy, greedy=greedy))
            rollout = run(memory, episodes, jax.random.key(0))
            return float(measure(rollout, episodes)["spl"].mean())

        return {
            "random actions": score(uniform, greedy=False),
            "breadth-first search": score(shortest_path_policy(episodes), greedy=True),
        }

    def sample(self, params: Any, model_state: Any) -> str:
        """The episodes with the longest ways: most are a few steps, and show little."""
        ways = shortest_paths(read_episodes(self.options)[1])
        longest = np.argsort(-ways, kind="stable")
        return "\n\n".join(self._shown(params, longest[:NUM_SHOWN]))

    def generate(
        self, params: Any, model_state: Any, lines: Sequence[str], sampling: Sampling
    ) -> Iterable[Iterable[str]]:
        """Episodes by their numbers."""
        if sampling != Sampling():
            raise ValueError(
                "episodes are played by the likeliest actions, without sampling: leave "
                "out its options"
            )
        count = len(read_episodes(self.options)[1]["goal"])
        for line in lines:
            if not (line.isdecimal() and int(line) < count):
                raise ValueError(
                    f"give numbers of episodes, from 0 to {count - 1}, got {line!r}"
                )
        return [self._shown(params, [int(line)]) for line in lines]

    def _shown(self, params: Any, numbers: Any) -> Iterator[str]:
        episodes = read_episodes(self.options)[1]
        chosen = {name: x[np.array(numbers)] for name, x in episodes.items()}
        rollout, scores = self._played(params, chosen)
        return (draw(chosen, rollout, scores, i) for i in range(len(numbers)))


def _with_memory(net: Navigator, num_episodes: int) -> tuple[Agent, jax.Array]:
    """The policy of a network, and its hidden state at the start of episodes."""

    def policy(memory: jax.Array, observation: Observation, place: jax.Array):
        del place
        memory = net.remember(memory, net.see(observation))
        return memory, *net.decide(memory)

    return policy, jnp.zeros((num_episodes, net.mixed.out_features))


def replay(
    net: Navigator, observation: Observation, steps: Transitions
) -> tuple[jax.Array, jax.Array]:
    """Logits [T, B, A] and values [T, B] of a network, given the observations."""

    def moment(memory: jax.Array, seen: jax.Array):
        memory = net.remember(memory, seen)
        return memory, memory

    def block(memory: jax.Array, part: tuple[Observation, jax.Array]):
        observation, played = part
        view = observation.view.astype(jnp.float32)

        def run(memory: jax.Array):
            seen = net.see(observation._replace(view=view))
            memory, memories = lax.scan(moment, memory, seen)
            return memory, net.decide(memories)

        def skip(memory: jax.Array):
            logits = jnp.zeros((*played.shape, NUM_ACTIONS))
            return memory, (logits, jnp.zeros(played.shape))

        return lax.cond(played.any(), run, skip, memory)

    blocks = jax.tree.map(
        lambda x: x.reshape(-1, BLOCK, *x.shape[1:]), (observation, steps.played)
    )
    _, memory = _with_memory(net, steps.played.shape[1])
    _, found = lax.scan(block, memory, blocks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


# ---- Configs ----

# WAGMA-SGD, the mean of all every 8 steps.
config = wagma = Config(
    name="navigate_wagma",
    num_steps=600,
    task=NavigateTask(environments=16),
    workers=WorkersConfig(num_workers=8),
    topology=TopologyConfig(name="butterfly_groups", group_size=4, mean_every=8),
    method=AtcMethod(),
    step=StepConfig(batch_per_worker=8),
    optimizer=OptimizerConfig(
        name="adam",
        learning_rate=3.2e-2,
        final_learning_rate=1e-4,
        warmup_steps=20,
        weight_decay=0.0,
        clip_norm=0.5,
    ),
    evaluation=EvaluationConfig(every_steps=100),
    checkpoint=CheckpointConfig(every_steps=200),
)


def _with(base: Config, name: str, learning_rate: float, **fields: Any) -> Config:
    """A config like `base`, with another name, learning rate and fields."""
    optimizer = dataclasses.replace(base.optimizer, learning_rate=learning_rate)
    fields |= {"name": f"navigate_{name}", "optimizer": optimizer}
    return dataclasses.replace(base, **fields)


# The mean of the gradients, as DD-PPO has it.
allreduce = _with(
    wagma,
    "allreduce",
    1.6e-2,
    topology=TopologyConfig(name="complete"),
    method=AllReduceMethod(),
)
# DAdam, alternating exponential ring.
dadam_aer = _with(
    wagma,
    "dadam_aer",
    3.2e-2,
    workers=WorkersConfig(num_workers=8, workers_per_node=2),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    method=AwcMethod(),
)
# Local SGD, the mean of all every 8 steps.
local_sgd = _with(
    wagma, "local_sgd", 8e-3, topology=TopologyConfig(name="alone", mean_every=8)
)
# WAGMA-SGD whose groups wait for no late worker, from peer to peer: `decentjax launch
# -n 4 examples/navigation/navigate.py:peers` runs it in four processes.
peers = _with(wagma, "peers", 6.4e-2, exchange=GroupExchange())
# SGP with two peers.
sgp = _with(
    wagma, "sgp", 3.2e-2, topology=TopologyConfig(name="k_peer_exponential", degree=2)
)

# Uneven work: an iteration is one episode of each worker, on a map of 9, 25 or 41
# tiles, so that one worker collects for much longer than another. A fifth of a core for
# each of eight processes; SPL and steps a second, two seeds. Each learning rate is the
# best of four or five.
#
# The mean of the gradients: 0.866 ± 0.006 after 700 steps, 7.67 steps a second.
uneven_allreduce = _with(
    allreduce,
    "uneven_allreduce",
    1.5e-3,
    num_steps=700,
    task=NavigateTask(
        model=NavigatorConfig(channels=32, width=128),
        environments=1,
        horizon=160,
        sizes=(9, 25, 41),
        per_map=5,
        ppo=PPOConfig(epochs=2),
    ),
    step=StepConfig(batch_per_worker=1),
)
# D-PSGD on a ring: 0.858 ± 0.063 after 900 steps, 9.03 steps a second.
uneven_dpsgd = _with(
    uneven_allreduce,
    "uneven_dpsgd",
    1.2e-2,
    num_steps=900,
    topology=TopologyConfig(name="ring"),
    method=AwcMethod(),
)
# Models of the peers as they come: 0.816 ± 0.003 after 1,100 steps, 9.47 steps a
# second.
uneven_peers = _with(
    uneven_allreduce,
    "uneven_peers",
    6e-3,
    num_steps=1100,
    topology=TopologyConfig(name="one_peer_exponential"),
    method=AwcMethod(),
    exchange=PeerExchange(),
)
# WAGMA-SGD in groups of two, the mean of all every 64 steps: 0.862 ± 0.004 after 1,000
# steps, 8.31 steps a second.
uneven_wagma = _with(
    uneven_peers,
    "uneven_wagma",
    6e-3,
    num_steps=1000,
    topology=TopologyConfig(name="butterfly_groups", group_size=2, mean_every=64),
    method=AtcMethod(),
    exchange=GroupExchange(),
)
# Workers who exchange nothing, how fast steps can be: 0.567 after 1,100 steps, 10.82
# steps a second, one seed.
uneven_alone = _with(
    uneven_peers, "uneven_alone", 6e-3, topology=TopologyConfig(name="alone")
)
