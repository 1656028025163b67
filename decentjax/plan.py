"""Plans: who averages what, and when; and the train step of one worker over a plan.

A topology is the shortest plan, `x_i <- sum_j W_ij x_j + update(grad f_i(x_i))`.
`Rounds` say the rest, and `GradientMean` is the baseline, all-reduce.
`decentjax.train_step` runs the steps, on a mesh of devices or simulated on one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from decentjax._core.collectives import AxisName
from decentjax._core.optimizer_state import (
    average_own_models,
    common_keys,
    folded,
    map_keys,
)
from decentjax._rounds.low_rank import LowRank
from decentjax._rounds.low_rank_mean import init_mean, low_rank_mean, num_bytes
from decentjax._rounds.schedule import Event, Round, Schedule, every
from decentjax.exchange import Topology, apply, check_whole, warn_of_parts
from decentjax.mixing import global_mean
from decentjax.placement import bound_axis
from decentjax.policy import Policy
from decentjax.rounds import (
    Mix,
    Rounds,
    check_carried,
    count_batch,
    default_mix,
    receive,
    send,
    travelling,
    without_messages,
)
from decentjax.state import (
    MeanState,
    WorkerState,
    check_arrays,
    check_optimizer,
    check_workers,
    equal_rows,
    own_rows,
    strong,
)
from decentjax.topology import complete
from decentjax.updates import Adapt, LocalUpdate, Metrics, halves_of


@dataclasses.dataclass(frozen=True)
class GradientMean:
    """The plan of all-reduce: `x <- x + update(1/N sum_j grad f_j(x))`.

    The optimizer gets the mean loss, and its random numbers are the same on all
    workers. Each worker counts once, whatever the weight of its loss.

    Args:
      num_workers: N.
      compression: low-rank factors in place of gradients, or None.
      begin_at: the first step that sends them.

    Raises:
      TypeError: if the compression is another one.
      ValueError: if the step is negative, or nothing begins at it.
    """

    num_workers: int
    compression: LowRank | None = None
    begin_at: int = 0

    def __post_init__(self):
        check_whole("num_workers", self.num_workers)
        check_whole("begin_at", self.begin_at)
        if not isinstance(self.compression, LowRank | None):
            raise TypeError(
                "all-reduce sends gradients whole, or with compression=low_rank(rank), "
                f"got {getattr(self.compression, 'name', self.compression)}: use "
                "Rounds for messages with a codec"
            )
        if self.begin_at < 0 or (self.begin_at and self.compression is None):
            raise ValueError(
                "begin_at is the step, from 0 on, at which low-rank factors begin, got "
                f"{self.begin_at} with compression={self.compression}"
            )

    @functools.cached_property
    def topology(self) -> Topology:
        """The graph over which gradients are averaged."""
        return complete(self.num_workers)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Means of gradients: whole ones in turn 0, and of their factors in turn 1."""
        plain = every(self.topology, num_steps=1)
        if self.compression is None:
            return plain
        (whole,) = plain.rounds
        rounds = whole, whole._replace(turn=1)
        if self.begin_at == 0:
            return dataclasses.replace(plain, rounds=rounds[1:])
        return dataclasses.replace(plain, rounds=rounds, turn=self.turn)

    def turn(self, step: Any) -> Any:
        """The form of the messages of a step, an int or an array of int32."""
        return (step >= self.begin_at) * 1

    def mean(
        self, event: Event, grads: Any, carried: Any, axis_name: AxisName
    ) -> tuple[Any, Any]:
        """Returns the mean gradient of a step, and what the worker keeps for the next.

        Args:
          event: what the step sends.
          grads: gradient of one worker.
          carried: its `WorkerState.extra`.
          axis_name: mapped axis of the workers.

        Raises:
          TypeError: if that is not of this plan.
        """
        one = event.sends
        assert one is not None
        assert one.exchange is not None
        if self.compression is None or not one.turn:
            return global_mean(grads, axis_name), carried
        if not isinstance(carried, MeanState):
            raise TypeError(
                "low-rank factors of gradients need a state of their own: make it by "
                "step.init(params, key) or init_state(params, optimizer, key, plan), "
                f"got {type(carried).__name__}"
            )
        given = self.compression, grads, carried, one.exchange
        return low_rank_mean(*given, axis_name)

    def num_bytes(self, event: Event, params: Any) -> float:
        """Returns the size of what a worker adds to the sums of a step, in bytes."""
        if self.compression is not None and event.sends and event.sends.turn:
            return num_bytes(self.compression, params)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


Plan = Topology | Policy | Rounds | GradientMean
"""Who averages what, and when."""


def check_plan(plan: Any) -> None:
    """Raises a TypeError unless this is a plan."""
    if not isinstance(plan, Plan):
        got = getattr(plan, "__name__", type(plan).__name__)
        raise TypeError(
            "wanted a plan: a topology, as topology.ring(8), or rounds, as "
            f"methods.diloco(8), got {got}; call a function of decentjax.topology or "
            "decentjax.methods with its arguments"
        )


def mixing_matrix(plan: Plan, step: int) -> np.ndarray:
    """Returns the mixing matrix W of what is sent in a step of a plan, float64 [N, N].

    Row i has the weights of worker i's average, `sum_j W_ij x_j`. It is the identity
    if a step sends nothing.

    Args:
      plan: the plan.
      step: number of the step; of rounds, that in which a round begins.

    Examples:
      >>> from decentjax import gossip, topology
      >>> print(gossip.mixing_matrix(topology.one_peer_ring(4), step=1))
      [[0.5 0.  0.  0.5]
       [0.  0.5 0.5 0. ]
       [0.  0.5 0.5 0. ]
       [0.5 0.  0.  0.5]]
    """
    check_plan(plan)
    identity, sends = np.eye(plan.num_workers), schedule_of(plan)[step].sends
    if sends is None or sends.exchange is None:
        return identity
    return apply(sends.exchange, identity)


def topology_of(plan: Plan) -> Topology:
    """Returns the exchanges of a plan; of a policy all that it may choose."""
    graph = plan if isinstance(plan, Topology | Policy) else plan.topology
    return graph.menu if isinstance(graph, Policy) else graph


def policy_of(plan: Plan) -> Policy | None:
    """Returns the policy of a plan, if it has one."""
    graph = plan.topology if isinstance(plan, Rounds) else plan
    return graph if isinstance(graph, Policy) else None


def schedule_of(plan: Plan) -> Schedule:
    """Returns what begins and ends in each step of a plan."""
    return (plan if isinstance(plan, GradientMean) else rounds_of(plan)).schedule


class Turn(NamedTuple):
    """One of several events, chosen in the compiled step.

    Args:
      events: the events.
      index: int32, []; number of the event, the same on all workers.
    """

    events: tuple[Event, ...]
    index: jax.Array


def turn_of(plan: Plan, count: jax.Array) -> Turn:
    """Returns the event of a step whose number is counted in an array.

    Args:
      plan: the plan.
      count: int32, []; steps done so far, the same on all workers.
    """
    schedule = schedule_of(plan)
    if isinstance(plan, GradientMean):
        events = schedule[0], schedule[plan.begin_at]
        return Turn(events, plan.turn(count))
    if schedule.turn is not None:
        raise ValueError(
            "a policy chooses an exchange by the step as a Python int, and this "
            "program has an array: use simulate or on_mesh"
        )
    # The first steps receive nothing, as nothing was sent before them; at the same
    # positions of later periods, messages of the previous period arrive.
    period, first = schedule.period, max(0, schedule.delay - 1)
    events = [schedule[t] for t in range(first + period)]
    place = jnp.where(count < first, count, first + (count - first) % period)
    distinct = tuple(dict.fromkeys(events))
    table = jnp.array([distinct.index(one) for one in events], jnp.int32)
    return Turn(distinct, table[place])


def rounds_of(plan: Plan) -> Rounds:
    """Returns a plan that averages models as rounds; a topology's are of every step.

    Raises:
      TypeError: for another plan.
    """
    if isinstance(plan, Topology | Policy):
        return _every_step(plan)
    if not isinstance(plan, Rounds):
        raise TypeError(
            f"wanted Rounds, such as methods.diloco(8), got {type(plan).__name__}"
        )
    return plan


@functools.lru_cache(maxsize=64)
def _every_step(topology: Topology | Policy) -> Rounds:
    return Rounds(topology, delay=1)


def warn_of_plan(plan: Plan) -> None:
    """Warns if the models of a plan can never agree."""
    if not isinstance(plan, GradientMean):
        warn_of_parts(topology_of(plan).name, topology_of(plan).exchanges)


def init_carried(plan: Plan, params: Any) -> Any:
    """Returns what a worker keeps for a plan beside its model, `WorkerState.extra`."""
    if isinstance(plan, GradientMean) and plan.compression is not None:
        return init_mean(plan.compression, params)
    return plan.init(params) if isinstance(plan, Rounds) else ()


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    plan: Plan | int,
    model_state: Any = (),
    workers: Sequence[int] | None = None,
) -> WorkerState:
    """Returns the initial state: one model for all workers, and a random key for each.

    `step.init` of a train step is the same with its optimizer and its plan.

    Args:
      params: one model.
      optimizer: the optimizer, initialised for each worker.
      key: random key, split among the workers.
      plan: the plan; for one that keeps nothing, the number of workers N will do.
      model_state: model state of one model; random keys in it are split among the
        workers: typed keys, and those in jax's old form in a part that is named so,
        such as `key`, `dropout_rng`, or within `rngs`.
      workers: numbers of the workers to initialise, as `local_workers(mesh)` in a job
        of several processes; by default all.

    Returns:
      The stacked state, each leaf [N, ...].

    Raises:
      TypeError: if `optimizer` is not an optimizer, or `key` not a random key.
      ValueError: if a worker does not exist, or the model has no leaf.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import init_state, methods
      >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
      >>> plan, key = methods.diloco(num_workers=4), jax.random.key(0)
      >>> state = init_state(params, optax.adam(1e-3), key, plan)
      >>> state.params["w"].shape
      (4, 3, 2)
    """
    check_optimizer(optimizer)
    return first_state(params, optimizer.init, key, plan, model_state, workers)


def first_state(
    params: Any,
    init: Callable[[Any], Any],
    key: jax.Array,
    plan: Plan | int,
    model_state: Any = (),
    workers: Sequence[int] | None = None,
) -> WorkerState:
    """Returns the initial state, as `init_state`, by the `init` of an optimizer."""
    if isinstance(plan, int):
        num_workers, extra = plan, ()
    else:
        check_plan(plan)
        num_workers, extra = plan.num_workers, init_carried(plan, params)
    if not hasattr(key, "dtype"):
        raise TypeError(f"key must be a random key, as jax.random.key(0), got {key!r}")
    check_workers(num_workers, workers)
    check_arrays((params, model_state, extra), "init_state")
    if not jax.tree.leaves(params):
        raise ValueError("nothing to train: the params have no leaves")
    numbers = jnp.arange(num_workers) if workers is None else jnp.asarray(workers)
    keys = jax.random.split(key, num_workers)[numbers]

    def init_optimizer(params: Any, number: jax.Array) -> Any:
        return map_keys(lambda key: folded(key, number), init(params))

    params, extra = jax.tree.map(lambda x: equal_rows(x, len(keys)), (params, extra))
    model_state = own_rows(model_state, numbers)
    opt_state = jax.vmap(init_optimizer)(params, numbers)
    # Some optimizers keep the params themselves, but a buffer is donated only once.
    opt_state = jax.tree.map(lambda x: strong(x.copy()), opt_state)
    return WorkerState(params, opt_state, model_state, keys, extra)


class Step(Protocol):
    """The step of one worker; it takes what begins and ends in it."""

    def __call__(
        self, state: WorkerState, batch: Any, event: Any, /
    ) -> tuple[WorkerState, Metrics]: ...


Send = Callable[[Rounds, Round, WorkerState], WorkerState]
Receive = Callable[[Rounds, Round, WorkerState, Any], WorkerState]


def worker_step(
    local: Adapt,
    plan: Plan,
    mix: Mix | None = None,
    *,
    shards: Any = None,
    axis_name: AxisName | None = None,
    send: Send = send,
    receive: Receive = receive,
) -> Step:
    """Returns the train step of one worker over a plan.

    Of a topology, and of rounds without a delay in every step, it is

        x_i <- sum_j W_ij x_j + update(grad f_i(x_i))
        x_i <- sum_j W_ij (x_j + update(grad f_j(x_j)))

    Compiled, the messages of the first overlap the gradient, and those of rounds with a
    delay that of the step that merges them.

    Args:
      local: the local update, as `local_update` returns it.
      plan: the plan.
      mix: the averaging, `decentjax.mix` with its keywords bound; of rounds that of
        leaves by number.
      shards: as in `mix`, where the averaging is not given.
      axis_name: axis of the workers; by default the mapped one.
      send: the beginning of a round, if it is a separate program.
      receive: its end, likewise.

    Raises:
      TypeError: if the plan is none, or the gradient of the local update is
        inaccessible to a plan that changes it.
      ValueError: if an averaging is given for means weighted by tokens.
    """
    check_plan(plan)
    if isinstance(plan, GradientMean):
        halves = halves_of(local, "all-reduce")
        return functools.partial(_gradient_mean_step, halves, plan, axis_name)
    plan = rounds_of(plan)
    if plan.count_tokens is not None and mix is not None:
        raise ValueError(
            "means weighted by tokens count those of a batch, and send them with the "
            "leaves: use simulate, on_mesh or gossip.Background without mix, or leave "
            "out count_tokens"
        )
    local = plan.adapt(local)
    average = mix or default_mix(plan, shards)
    if plan.averages_models:
        one = functools.partial(_model_step, local, average, plan.delay > 0)
    else:
        one = functools.partial(_round_step, local, plan, average, send, receive)

    def packed(
        state: WorkerState, batch: Any, event: Any
    ) -> tuple[WorkerState, Metrics]:
        new, metrics = one(plan.pack(state), batch, event)
        return plan.unpack(new), metrics

    return packed


def _gradient_mean_step(
    halves: LocalUpdate,
    plan: GradientMean,
    axis_name: AxisName | None,
    state: WorkerState,
    batch: Any,
    event: Event | Turn,
) -> tuple[WorkerState, Metrics]:
    axis = axis_name or bound_axis()
    state = state._replace(opt_state=common_keys(state.opt_state, axis))
    found = halves.gradient(state, batch)

    def mean(one: Event, given: tuple[Any, Any]) -> tuple[Any, Any]:
        return plan.mean(one, *given, axis)

    grads, extra = _in_turn(event, mean, (found.grads, state.extra))
    found = found._replace(grads=grads, loss=global_mean(found.loss, axis))
    state = state._replace(extra=extra)
    return halves.descend(found, state, state.params)


def _model_step(
    local: Adapt,
    mix: Mix,
    is_early: bool,
    state: WorkerState,
    batch: Any,
    event: Event | Turn,
) -> tuple[WorkerState, Metrics]:
    def mixed(params: Any) -> Any:
        def one(event: Event, params: Any) -> Any:
            assert event.sends is not None
            assert event.sends.exchange is not None
            return mix(params, event.sends.exchange)

        return _in_turn(event, one, params)

    # z of schedule-free optimizers, at its own bytes.
    if is_early:
        opt_state = average_own_models(state.opt_state, mixed)
        params = mixed(state.params)
        return local(state._replace(opt_state=opt_state), batch, params)
    state, metrics = local(state, batch, state.params)
    opt_state = average_own_models(state.opt_state, mixed)
    return state._replace(params=mixed(state.params), opt_state=opt_state), metrics


def _round_step(
    local: Adapt,
    rounds: Rounds,
    average: Mix,
    send: Send,
    receive: Receive,
    state: WorkerState,
    batch: Any,
    event: Event | Turn,
) -> tuple[WorkerState, Metrics]:
    check_carried(state)
    is_late = rounds.delay > 0

    def end(one: Round, state: WorkerState) -> WorkerState:
        assert one.exchange is not None
        mixed = average(travelling(rounds, one.leaves, state), one.exchange)
        return receive(rounds, one, state, mixed)

    def exchange(event: Event, state: WorkerState) -> WorkerState:
        sends, receives = event
        if sends is not None:
            state = send(rounds, sends, state)
        ends = receives if is_late else sends
        if ends is not None:
            state = end(ends, state)
        return without_messages(rounds, state)

    mixed = _in_turn(event, exchange, state) if is_late else state
    # The gradient is that of the model before the round.
    new, metrics = local(state, batch, mixed.params)
    tokens = count_batch(rounds, mixed.extra.tokens, batch)
    new = new._replace(extra=mixed.extra._replace(tokens=tokens))
    new = new if is_late else _in_turn(event, exchange, new)
    return new, metrics


def _in_turn(event: Event | Turn, function: Callable[..., Any], value: Any) -> Any:
    """A function of (event, value), of that of several which is chosen in the step."""
    if isinstance(event, Event):
        return function(event, value)
    branches = [functools.partial(function, one) for one in event.events]
    return lax.switch(event.index, branches, value)
