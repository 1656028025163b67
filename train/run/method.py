"""What the workers of a run do in each step: made from a config, and asked by all.

No other file of the program asks for the name of an algorithm.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from decentjax import (
    AXIS,
    Exchange,
    Rounds,
    all_reduce_step,
    atc_step,
    awc_step,
    gossip,
    init_rounds,
    mix,
    round_step,
    runtime,
)
from decentjax.codec import as_permutations
from decentjax.exchange import warn_of_parts
from decentjax.mixing import is_mixed
from decentjax.policy import Policy
from decentjax.schedule import Event, Schedule
from decentjax.topology import Topology, complete
from decentjax.updates import LocalUpdate
from train.config import (
    AutoExchange,
    BackgroundExchange,
    Config,
    FixedPolicy,
    RoundsConfig,
    StepConfig,
)
from train.run.array_placement import Rule, shards_of
from train.run.message_bytes import sent_bytes, sent_schedule, step_bytes
from train.run.policy_choice import build_policy, init_graph
from train.tasks.task import Task, longest_dim

Beside = gossip.AllReduce | gossip.Background | gossip.BackgroundRounds


class Sent(NamedTuple):
    """What the workers send in a step.

    Args:
      exchange: who sends to whom.
      num_bytes: size of a message.
    """

    exchange: Exchange
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class Method:
    """What the workers of a run do in each step.

    Args:
      name: name of the algorithm, for people.
      plan: exchanges or rounds that the steps take in turn.
      graph: exchanges alone.
      order: step of one worker, which takes `adapt`.
      is_early: whether the models are averaged with which a step began, so that
        messages may hide behind its gradient.
      beside: function of a local update and a mesh, with keywords as of
        `gossip.Background`, that returns the step whose exchange is in a second thread.
      init_extra: function of one model's params that returns what the algorithm carries
        beside them.
      sent: function of what a step takes of the plan and of a model as shapes that
        returns what is sent, or None.
      model_bytes: function of a model as shapes that returns the size of its message.
      times: function that returns the simulated times of a run, of whether the exchange
        is in a second thread, cluster, job, number of steps, and seed.
      policy: choice of the exchange; None where the plan is taken as it is.
      rounds: the rounds, if any.
      sends_gradients: whether gradients are averaged in place of models.
    """

    name: str
    plan: Topology | Schedule
    graph: Topology
    order: Callable[..., Any]
    is_early: bool
    beside: Callable[..., Beside]
    init_extra: Callable[[Any], Any]
    sent: Callable[[Any, Any], Sent | None]
    model_bytes: Callable[[Any], float]
    times: Callable[..., runtime.Times]
    policy: Policy | None = None
    rounds: Rounds | None = None
    sends_gradients: bool = False

    @property
    def hides_beside(self) -> bool:
        """Whether a second thread can hide its messages."""
        tracks = self.rounds is not None and self.rounds.tracking
        return self.is_early and not tracks and self.policy is None

    def is_in_thread(self, config: Config, mesh: Mesh | None) -> bool:
        """Whether the exchange runs in a second thread."""
        if not isinstance(config.exchange, AutoExchange):
            return isinstance(config.exchange, BackgroundExchange)
        # XLA's CPU backend does not overlap collectives with compute; a GPU's does, and
        # simulated workers send nothing. A message of the updated model hides nowhere.
        on_cpus = jax.process_count() > 1 and jax.default_backend() == "cpu"
        return mesh is not None and on_cpus and self.hides_beside


def build_method(config: Config, task: Task | None = None) -> Method:
    """Returns the method of a config.

    Args:
      config: config of the run.
      task: its task, by whose model fragments are cut; without one each fragment stands
        for a leaf.

    Raises:
      ValueError: if rounds are given to another algorithm, or no leaf falls into one of
        their fragments.
    """
    if config.step.algorithm != "rounds" and config.rounds != RoundsConfig():
        raise ValueError(
            'the fields of rounds are for step.algorithm = "rounds", got '
            f'"{config.step.algorithm}": set it, or leave them out'
        )
    if config.step.algorithm == "all_reduce":
        return _all_reduce(config)
    if config.step.algorithm == "rounds":
        method = _in_rounds(config, task)
    else:
        method = _every_step(config, longest_dim if task is None else task.shard)
    warn_of_parts(method.plan.name, method.plan.exchanges)
    return method


def _every_step(config: Config, rule: Rule) -> Method:
    is_early = config.step.algorithm == "awc"
    graph, policy = config.topology.build(config.workers), build_policy(config)
    is_fixed = isinstance(config.policy, FixedPolicy)

    def beside(local: LocalUpdate, mesh: Mesh, **options: Any) -> Beside:
        return gossip.Background(local, graph, mesh, **options)

    def times(in_thread: bool, cluster: Any, job: Any, *rest: Any) -> runtime.Times:
        if in_thread:
            return runtime.background(cluster, job, graph, *rest)
        return runtime.in_step(cluster, job, graph, *rest, hidden=is_early)

    return Method(
        config.step.algorithm,
        graph if is_fixed else policy.menu,
        graph,
        functools.partial(
            awc_step if is_early else atc_step, mix=bind_mix(config.step, rule)
        ),
        is_early,
        beside,
        lambda params: init_graph(config.policy),
        _whole(config),
        functools.partial(step_bytes, config),
        times,
        policy=None if is_fixed else policy,
    )


def _in_rounds(config: Config, task: Task | None) -> Method:
    graph = config.topology.build(config.workers)
    rounds = config.rounds.build(graph, _sizes(config, task))

    def beside(local: LocalUpdate, mesh: Mesh, **options: Any) -> Beside:
        return gossip.Background(local, rounds, mesh, **options)

    def sent(taken: Event, model: Any) -> Sent | None:
        one = taken.sends
        if one is None or one.exchange is None:
            return None
        as_sent = as_permutations if rounds.compression else lambda exchange: exchange
        return Sent(as_sent(one.exchange), sent_bytes(rounds, one.leaves, model))

    def times(in_thread: bool, cluster: Any, job: Any, *rest: Any) -> runtime.Times:
        del in_thread  # Their delay says what is hidden.
        return runtime.rounds(cluster, job, sent_schedule(rounds), *rest)

    rule = longest_dim if task is None else task.shard
    average = bind_mix(config.step, rule) if rounds.compression is None else None
    return Method(
        config.step.algorithm,
        rounds.schedule,
        graph,
        functools.partial(round_step, rounds=rounds, mix=average),
        config.rounds.delay > 0,
        beside,
        functools.partial(init_rounds, rounds),
        sent,
        functools.partial(sent_bytes, rounds, None),
        times,
        rounds=rounds,
    )


def _all_reduce(config: Config) -> Method:
    graph = complete(config.workers.num_workers)

    def beside(
        local: LocalUpdate, mesh: Mesh, *, record: gossip.Record | None, **options: Any
    ) -> Beside:
        del options  # Gradients have their own dtype, and are awaited.
        return gossip.AllReduce(local, mesh, record)

    def times(in_thread: bool, *rest: Any) -> runtime.Times:
        del in_thread  # Nothing can hide a mean that the update awaits.
        return runtime.all_reduce(*rest)

    return Method(
        config.step.algorithm,
        graph,
        graph,
        all_reduce_step,
        False,
        beside,
        lambda params: (),
        _whole(config),
        functools.partial(step_bytes, config),
        times,
        sends_gradients=True,
    )


def _whole(config: Config) -> Callable[[Exchange, Any], Sent]:
    """What is sent where each exchange is of the whole model, or its gradient."""
    return lambda taken, model: Sent(taken, step_bytes(config, model))


def _sizes(config: Config, task: Task | None) -> list[int] | None:
    """Numbers of each leaf of the model that travel, where it is cut into fragments."""
    if config.rounds.fragments == 1 or task is None:
        return None
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    return [x.size if is_mixed(x) else 0 for x in jax.tree.leaves(params)]


def bind_mix(config: StepConfig, rule: Rule = longest_dim) -> Callable[..., Any]:
    """The mixing of one worker's params, with the dtype of the config's messages.

    Args:
      config: options of the step.
      rule: how arrays are sharded over the devices of a worker, if it has several.
    """
    average = functools.partial(mix, axis_name=AXIS, message_dtype=config.message_dtype)
    return lambda params, exchange: average(
        params, exchange, shards=shards_of(params, rule)
    )
