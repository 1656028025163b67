"""What the workers of a run do in each step: made from a config, and asked by all.

No other file of the program asks for the kind of a method.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from decentjax import AXIS, Rounds, WorkerState, gossip, mix, runtime, stack
from decentjax.codec import as_permutations
from decentjax.exchange import Exchange
from decentjax.mixing import is_mixed
from decentjax.plan import (
    Event,
    GradientMean,
    Plan,
    policy_of,
    schedule_of,
    topology_of,
    warn_of_plan,
)
from decentjax.policy import Policy
from decentjax.rounds import Schedule
from decentjax.topology import Topology
from decentjax.updates import LocalUpdate
from train.config import (
    Config,
    EveryStepMethod,
    StepConfig,
)
from train.run.array_placement import Rule, shards_of
from train.run.message_bytes import sent_bytes, sent_schedule, step_bytes
from train.run.policy_choice import first_graph
from train.tasks.task import Task, longest_dim

InThread = gossip.AllReduce | gossip.Background
Average = Callable[..., Any]
"""The averaging of one worker's leaves, as `bind_mix` returns it."""
Size = Callable[[Any], float]
"""The size of a message in bytes, of a model as shapes."""


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
      plan: who averages what, and when.
      graph: exchanges alone.
      mix: averaging of one worker's leaves; None for that of the plan.
      is_early: whether the models are averaged with which a step began, so that
        messages may hide behind its gradient.
      beside: function of a local update and a mesh, with keywords as of
        `gossip.Background`, that returns the step whose exchange is in a second thread.
      sent: function of what begins and ends in a step and of a model as shapes that
        returns what is sent, or None.
      model_bytes: function of a model as shapes that returns the size of its message.
      times: function that returns the simulated times of a run, of whether the exchange
        is in a second thread, cluster, job, number of steps, and seed.
      rounds: the rounds, if any.
      sends_gradients: whether gradients are averaged in place of models.
      first: the first step that sends what most of them send.
    """

    name: str
    plan: Plan
    graph: Topology
    mix: Callable[..., Any] | None
    is_early: bool
    beside: Callable[..., InThread]
    sent: Callable[[Event, Any], Sent | None]
    model_bytes: Callable[[Any], float]
    times: Callable[..., runtime.Times]
    rounds: Rounds | None = None
    sends_gradients: bool = False
    first: int = 0

    @property
    def schedule(self) -> Schedule:
        """What begins and ends in each step."""
        return schedule_of(self.plan)

    @property
    def policy(self) -> Policy | None:
        """The policy of the plan, if it has one."""
        return policy_of(self.plan)

    def with_graph(self, state: WorkerState, workers: Sequence[int]) -> WorkerState:
        """The first state of some workers, with the graph of a policy that measures."""
        if self.policy is None or not self.policy.measures:
            return state
        kept = stack(first_graph(), self.plan.num_workers, workers=workers)
        return state._replace(extra=kept)

    @property
    def hides_beside(self) -> bool:
        """Whether a second thread can hide its messages."""
        return self.is_early and self.policy is None


def build_method(config: Config, task: Task | None = None) -> Method:
    """Returns the method of a config.

    Args:
      config: config of the run.
      task: its task, by whose model fragments are cut; without one each fragment stands
        for a leaf.

    Raises:
      ValueError: if no leaf falls into one of the fragments of its rounds.
    """
    own = config.method
    plan = config.plan_of(_sizes(own, task))
    warn_of_plan(plan)
    size = functools.partial(step_bytes, config.step.message_dtype)
    average = bind_mix(config.step, longest_dim if task is None else task.shard)
    if isinstance(plan, GradientMean):
        method = _all_reduce(plan)
    elif isinstance(plan, Rounds) and not isinstance(own, EveryStepMethod):
        method = _in_rounds(plan, average)
    else:
        method = _every_step(plan, average, size)
    name = getattr(own, "name", getattr(own, "__name__", ""))
    return dataclasses.replace(method, name=name)


def _every_step(
    plan: Topology | Policy | Rounds, average: Average, size: Size
) -> Method:
    is_early, graph = not isinstance(plan, Rounds), topology_of(plan)

    def times(in_thread: bool, cluster: Any, job: Any, *rest: Any) -> runtime.Times:
        if in_thread:
            return runtime.background(cluster, job, graph, *rest)
        return runtime.in_step(cluster, job, graph, *rest, hidden=is_early)

    return Method(
        "",
        plan,
        graph,
        average,
        is_early,
        functools.partial(_in_thread, plan),
        _whole(size),
        size,
        times,
    )


def _in_thread(plan: Plan, local: LocalUpdate, mesh: Mesh, **options: Any) -> InThread:
    return gossip.Background(local, plan, mesh, **options)


def _in_rounds(rounds: Rounds, average: Average) -> Method:

    def sent(taken: Event, model: Any) -> Sent | None:
        one = taken.sends
        if one is None or one.exchange is None:
            return None
        as_sent = as_permutations if rounds.compression else lambda exchange: exchange
        return Sent(as_sent(one.exchange), sent_bytes(rounds, one.leaves, model))

    def times(in_thread: bool, cluster: Any, job: Any, *rest: Any) -> runtime.Times:
        del in_thread  # Their delay says what is hidden.
        return runtime.rounds(cluster, job, sent_schedule(rounds), *rest)

    return Method(
        "",
        rounds,
        topology_of(rounds),
        average if rounds.compression is None else None,
        rounds.delay > 0,
        functools.partial(_in_thread, rounds),
        sent,
        functools.partial(sent_bytes, rounds, None),
        times,
        rounds=rounds,
    )


def _all_reduce(plan: GradientMean) -> Method:

    def beside(
        local: LocalUpdate, mesh: Mesh, *, record: gossip.Record | None, **options: Any
    ) -> InThread:
        del options  # Gradients have their own dtype, and are awaited.
        return gossip.AllReduce(local, mesh, record, plan)

    def times(in_thread: bool, *rest: Any) -> runtime.Times:
        del in_thread  # Nothing can hide a mean that the update awaits.
        return runtime.all_reduce(*rest)

    def sent(taken: Event, model: Any) -> Sent:
        return Sent(plan.topology[0], plan.num_bytes(taken, model))

    return Method(
        "",
        plan,
        plan.topology,
        None,
        False,
        beside,
        sent,
        functools.partial(plan.num_bytes, plan.schedule[plan.begin_at]),
        times,
        sends_gradients=True,
        first=plan.begin_at,
    )


def _whole(size: Size) -> Callable[[Event, Any], Sent]:
    """What is sent where each exchange is of the whole model."""

    def sent(taken: Event, model: Any) -> Sent:
        assert taken.sends is not None
        assert taken.sends.exchange is not None
        return Sent(taken.sends.exchange, size(model))

    return sent


def _sizes(method: object, task: Task | None) -> list[int] | None:
    """Numbers of each leaf of the model that travel, where it is cut into fragments."""
    if task is None or getattr(method, "fragments", 1) == 1:
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
