"""Learning to navigate: decentralized PPO of a recurrent policy, on maps of rooms.

A step of the trainer is the gradient of a minibatch of episodes. At the first step of
an iteration each worker first plays new episodes, all to their end, which takes some
workers longer than others.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from train.data.batches import Batch, worker_steps
from train.data.grid_maps import (
    columns,
    episode_type,
    read_episodes,
    shortest_paths,
)
from train.data.iterations import Iterations
from train.fields import checked
from train.models.navigator import Navigator, NavigatorConfig, Observation
from train.models.sizes import MOST_EXAMPLES, check_positive
from train.tasks.grid_world import (
    NUM_ACTIONS,
    NUM_KINDS,
    Agent,
    Rollout,
    World,
    empty_rollout,
    measure,
    pack,
    play,
    shortest_path_policy,
    uniform,
    unpack,
)
from train.tasks.paths import as_records, check_numbers, draw
from train.tasks.ppo import PPOConfig, Transitions, advantages, ppo_loss
from train.tasks.sampling import Sampling
from train.tasks.task import Amount, Headline, Task, Totals

BLOCK = 8  # Time steps of the gradient, skipped together after all episodes' ends.
NUM_SHOWN = 4
LARGEST = 99  # Side of a map, in tiles.


class PPOState(NamedTuple):
    """The model state of a worker.

    Args:
      rollout: episodes of this iteration, as of `pack`.
      actions: number of actions taken so far.
    """

    rollout: Rollout
    actions: jax.Array


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
        view = self.model.view
        if not self.sizes or not view < min(self.sizes) <= max(self.sizes) <= LARGEST:
            raise ValueError(
                f"sizes must be larger than the view of {view} tiles, and at most "
                f"{LARGEST}, got {self.sizes}"
            )
        if len(set(self.sizes)) < len(self.sizes):
            raise ValueError(
                "sizes must differ, or maps of both splits could be the same, got "
                f"{self.sizes}"
            )
        if self.horizon % BLOCK:
            raise ValueError(
                f"horizon must be a multiple of {BLOCK}, got {self.horizon}"
            )

    def build(self) -> Task:
        return _navigation(self)


class Data(NamedTuple):
    """The episodes of a run.

    Args:
      train: training episodes, of `episode_type`.
      evaluated: episodes of an evaluation, fields by name.
    """

    train: Any
    evaluated: dict[str, np.ndarray]


def _navigation(options: NavigateTask) -> Task:
    world = World(max(options.sizes), options.model.view, options.horizon)
    make = functools.partial(Navigator, options.model, NUM_KINDS, NUM_ACTIONS)
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    # Read at its first use, as a task is also built where xminigrid is not installed.
    data = functools.cache(functools.partial(_read, options))
    play_greedily = jax.jit(functools.partial(_play_greedily, world, graph))

    def init(key: jax.Array) -> tuple[Any, PPOState]:
        empty = pack(empty_rollout(world, options.environments))
        return nnx.state(make(rngs=nnx.Rngs(key))), PPOState(empty, jnp.zeros(()))

    def shown(params: Any, numbers: Sequence[int]) -> list[dict[str, Any]]:
        chosen = jax.tree.map(lambda x: x[np.array(numbers)], data().evaluated)
        return as_records(chosen, *play_greedily(params, chosen))

    def hardest(params: Any, _: Any) -> list[dict[str, Any]]:
        # Those with the longest ways: most are a few steps, and show little.
        longest = np.argsort(-shortest_paths(data().evaluated), kind="stable")
        return shown(params, longest[:NUM_SHOWN].tolist())

    def generate(
        params: Any, _: Any, lines: Sequence[str], sampling: Sampling
    ) -> Iterable[Iterable[str]]:
        if sampling != Sampling():
            raise ValueError(
                "episodes are played by the likeliest actions, without sampling: leave "
                "out its options"
            )
        numbers = check_numbers(lines, len(data().evaluated["goal"]))
        return [[draw(*shown(params, [number]))] for number in numbers]

    return Task(
        batch_shape=functools.partial(_batch_shape, options, world),
        steps=functools.partial(_steps, options, data),
        init=init,
        loss_fn=functools.partial(_loss_fn, world, graph, options.ppo),
        validation=lambda: [data().evaluated],
        score_fn=functools.partial(_score_fn, world, graph),
        headline=Headline("spl", better="higher"),
        baselines=lambda: _baselines(world, data().evaluated),
        sample=lambda *model: "\n\n".join(map(draw, hardest(*model))),
        generate=generate,
        prompts=("0",),
        paths=hardest,
        units={"success": "share"},
        amount=Amount("episodes", lambda arrays: arrays["rows"].size),
        num_examples=lambda: len(data().train),
    )


def _read(options: NavigateTask) -> Data:
    """The episodes, if the horizon allows the shortest path of each."""
    found = read_episodes(
        options.sizes, options.num_maps, options.num_held_out, options.per_map
    )
    longest = max(int(shortest_paths(split).max()) for split in found)
    if options.horizon < longest:
        raise ValueError(
            f"the horizon of {options.horizon} actions is shorter than a shortest path "
            f"of {longest} actions: set --task.horizon"
        )
    train, held_out = found
    count = min(len(held_out), options.num_eval_episodes)
    chosen = held_out[np.linspace(0, len(held_out) - 1, count).astype(int)]
    return Data(train, columns(chosen))


def _steps(
    options: NavigateTask,
    data: Callable[[], Data],
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
            "navigation has no micro-batches: set step.num_micro_batches to 1, and a "
            "smaller step.batch_per_worker"
        )
    num_parts = _num_parts(options, batch_per_worker)
    plays = worker_steps(
        data().train, num_workers, options.environments, seed, workers, columns
    )
    iterations = Iterations(plays, options.ppo.epochs, num_parts, tuple(workers), seed)
    return grain.MapDataset.source(iterations)


def _loss_fn(
    world: World,
    graph: Any,
    ppo: PPOConfig,
    params: Any,
    model_state: PPOState,
    batch: Any,
    key: jax.Array,
):
    old = unpack(model_state.rollout)
    live, rows = batch["plays"], batch["rows"]
    player = nnx.merge(graph, lax.stop_gradient(params))
    policy, memory = _with_memory(player, old.reached.shape[1])
    rollout = play(world, policy, memory, batch["episodes"], key, old=old, live=live)
    actions = model_state.actions + jnp.where(live, rollout.steps.played.sum(), 0)
    part = jax.tree.map(lambda x: x[:, rows], rollout)
    logits, values = _replay(nnx.merge(graph, params), part.observation, part.steps)
    loss, metrics = ppo_loss(
        logits, values, part.steps, advantages(part.steps, ppo), ppo
    )
    lengths = rollout.steps.played.sum(0)
    metrics |= {
        "episodes_reached": (rollout.reached & rollout.steps.played).any(0).mean(),
        "episode_actions": lengths.mean(),
        "longest_episode": lengths.max().astype(jnp.float32),
        "environment_steps": actions,
    }
    return loss, (PPOState(pack(rollout), actions), metrics)


def _with_memory(net: Navigator, num_episodes: int) -> tuple[Agent, jax.Array]:
    """The policy of a network, and its hidden state at the start of episodes."""

    def policy(memory: jax.Array, observation: Observation, place: jax.Array):
        del place
        memory = net.remember(memory, net.see(observation))
        return memory, *net.decide(memory)

    return policy, jnp.zeros((num_episodes, net.mixed.out_features))


def _replay(
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


def _play_greedily(
    world: World, graph: Any, params: Any, episodes: Any
) -> tuple[Rollout, dict[str, jax.Array]]:
    """A rollout of the likeliest actions, and its scores."""
    policy, memory = _with_memory(nnx.merge(graph, params), len(episodes["goal"]))
    key = jax.random.key(0)
    rollout = play(world, policy, memory, episodes, key, greedy=True)
    return rollout, measure(rollout, episodes)


def _score_fn(
    world: World, graph: Any, params: Any, ppo_state: PPOState, batch: Any
) -> Totals:
    _, scores = _play_greedily(world, graph, params, batch)
    count = jnp.asarray(len(batch["goal"]))
    totals = {name: (score.sum(), count) for name, score in scores.items()}
    # Not a score, but its cost: reports draw the scores against it.
    return totals | {"environment_steps": (ppo_state.actions * count, count)}


def _baselines(world: World, episodes: Any) -> dict[str, float]:
    """SPL of random actions, and of shortest paths."""

    def score(policy: Agent, greedy: bool) -> float:
        memory = jnp.zeros((len(episodes["goal"]), 0))
        key = jax.random.key(0)
        run = jax.jit(functools.partial(play, world, policy, greedy=greedy))
        rollout = run(memory, episodes, key)
        return float(measure(rollout, episodes)["spl"].mean())

    return {
        "random actions": score(uniform, greedy=False),
        "breadth-first search": score(shortest_path_policy(episodes), greedy=True),
    }


def _batch_shape(options: NavigateTask, world: World, batch_per_worker: int) -> Any:
    _num_parts(options, batch_per_worker)
    one = np.zeros(options.environments, episode_type(world.size))
    shape = jax.ShapeDtypeStruct
    return {
        "episodes": {k: shape(x.shape, x.dtype) for k, x in columns(one).items()},
        "plays": shape((), bool),
        "rows": shape((batch_per_worker,), np.int32),
    }


def _num_parts(options: NavigateTask, batch_per_worker: int) -> int:
    """The number of minibatches in an epoch."""
    if options.environments % batch_per_worker:
        raise ValueError(
            f"step.batch_per_worker = {batch_per_worker} must divide "
            f"task.environments = {options.environments}"
        )
    return options.environments // batch_per_worker
