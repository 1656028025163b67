"""Rounds in the second thread: messages travel while several steps are computed."""

import collections
import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from decentjax.compression import Leaves
from decentjax.correction import tracked
from decentjax.exchange import Exchange, Topology
from decentjax.gossip.carrier import Carrier
from decentjax.gossip.engine import Closing
from decentjax.gossip.record import Record, ignore
from decentjax.gossip.stages import Plan, plan_of
from decentjax.local import Adapt
from decentjax.loss import Metrics
from decentjax.mixing import Lowering
from decentjax.placement import check_not_donated, over_workers
from decentjax.rounds import (
    Rounds,
    _check_rounds,
    in_pairs,
    receive,
    send,
    take_round,
    travelling,
)
from decentjax.schedule import Fragment
from decentjax.state import WorkerState


class Arriving(Protocol):
    """What is on its way."""

    def result(self) -> Leaves:
        """Waits for the averaged leaves."""
        ...


class Carrying(Protocol):
    """Carries what rounds send, beside the step."""

    def start(self, params: Any, step: int) -> None:
        """Prepares exchanges of models like these; before the first step."""

    def carry(self, models: Any, exchange: Exchange, step: int) -> Arriving:
        """Puts leaves, by number, on their way."""
        ...

    def settle(self) -> None:
        """Waits for the exchanges that other programs would meet."""

    def _end(self, seconds: float) -> None:
        """Ends it, and waits at most this long."""


class LateRounds(Closing):
    """`round_step` whose exchanges are carried beside it; a context that ends them.

    Args:
      adapt: the local update, as `local_update` returns it; cut as for `Background`.
      rounds: the rounds.
      mesh: mesh with the axis "workers" alone, of the workers in the stacked arrays.
      carrier: what carries the exchanges.
      record: function that is called with each activity of this process.
    """

    def __init__(
        self,
        adapt: Adapt,
        rounds: Rounds,
        mesh: Mesh,
        carrier: Carrying,
        record: Record | None,
    ):
        self._rounds, self._mesh, self._record = rounds, mesh, record or ignore
        self._carrier = carrier
        adapt = tracked(adapt) if rounds.tracking else adapt
        self._adapt_whole, self._plans = adapt, {}
        self._is_started, self._next, self._step = False, -1, 0
        self._ahead: tuple[Plan, list[jax.Array]] | None = None
        self._extra: Any = None
        self._pending: tuple[WorkerState, Any] | None = None
        self._arriving: collections.deque[Arriving] = collections.deque()

        def local(params, mixed, others, batch):
            state = WorkerState(params, *others)
            new, metrics = adapt(state, batch, mixed)
            return new.params, new[1:4], metrics

        # The params may still be on their way, and are not donated.
        self._local = jax.jit(over_workers(local, mesh), donate_argnums=2)

        def begin(params, key, extra, fragment):
            return send(rounds, fragment, WorkerState(params, (), (), key, extra)).extra

        def end(params, extra, mixed, fragment):
            state = WorkerState(params, (), (), jax.random.key(0), extra)
            new = receive(rounds, fragment, state, mixed)
            return new.params, new.extra

        def programs(function: Callable) -> dict[Fragment, Callable]:
            return {
                fragment: jax.jit(
                    over_workers(functools.partial(function, fragment=fragment), mesh)
                )
                for fragment in rounds.schedule.fragments
            }

        self._begins, self._ends = programs(begin), programs(end)

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        """Returns the new state and metrics.

        The state's buffers are donated, except those of its params and of the rounds;
        of tracking the last gradient is donated too.

        Raises:
          ValueError: if the state was donated to an earlier step.
          BaseException: any error of an exchange, as itself.
        """
        check_not_donated(state, batch, state[1:4])
        # What is on its way is of the state that the last call returned.
        is_next = step == self._next and state.extra is self._extra
        take = in_pairs(self._rounds, self._take)
        state, metrics = take(state, batch, step, is_next)
        self._extra = state.extra
        return state, metrics

    def _take(
        self, state: WorkerState, batch: Any, step: int, is_next: bool
    ) -> tuple[WorkerState, Metrics]:
        if not self._is_started:
            self._carrier.start(state.params, step)
            self._is_started = True
        if not is_next:
            self._send_again(state, step)
        self._step, self._next = step, step + 1
        self._pending, self._ahead = (state, batch), None
        return take_round(
            state,
            batch,
            self._rounds.schedule[step],
            rounds=self._rounds,
            adapt=self._adapt,
            mix=self._mix,
            send=self._send,
            receive=self._receive,
        )

    def settle(self) -> None:
        """Waits for the exchanges under way; call it before any other collective."""
        self._carrier.settle()

    def _end(self, seconds: float) -> None:
        self._carrier._end(seconds)

    def _send_again(self, state: WorkerState, step: int) -> None:
        """Sends what was under way before this step, from a state of another run."""
        self._arriving.clear()
        for begun in range(max(0, step - self._rounds.schedule.delay + 1), step):
            self._carry(state, begun)

    def _send(
        self, rounds: Rounds, fragment: Fragment, state: WorkerState
    ) -> WorkerState:
        del rounds
        extra = self._begins[fragment](state.params, state.key, state.extra)
        state = state._replace(extra=extra)
        self._carry(state, self._step)
        return state

    def _carry(self, state: WorkerState, step: int) -> None:
        """Puts what the round of a step sends on its way."""
        one = self._rounds.schedule[step].sends
        if one is not None and one.exchange is not None:
            sent = travelling(one.leaves, state)
            self._arriving.append(self._carrier.carry(sent, one.exchange, step))

    def _mix(self, sent: Any, exchange: Exchange) -> Leaves:
        """Waits for the round that was sent first, behind the gradient."""
        del sent, exchange
        if self._pending is not None:
            self._start_step(*self._pending)
        start = time.monotonic()
        mixed = self._arriving.popleft().result()
        self._record("wait", self._step, start, time.monotonic())
        return mixed

    def _start_step(self, state: WorkerState, batch: Any) -> None:
        """Computes what of the local update awaits no message."""
        known = state._replace(extra=())  # What is on its way must not be donated.
        plan = plan_of(self._plans, self._adapt_whole, known, batch, self._mesh)
        start = time.monotonic()
        values = plan.early(known.params, known[1:], batch)
        self._ahead = plan, jax.block_until_ready(values)
        self._record("compute", self._step, start, time.monotonic())

    def _adapt(
        self, state: WorkerState, batch: Any, mixed: Any
    ) -> tuple[WorkerState, Metrics]:
        self._pending = None
        if self._ahead is not None:
            (plan, values), self._ahead = self._ahead, None
            return _completed(plan, values, mixed)
        start = time.monotonic()
        params, others, metrics = jax.block_until_ready(
            self._local(state.params, mixed, state[1:4], batch)
        )
        self._record("compute", self._step, start, time.monotonic())
        return WorkerState(params, *others), metrics

    def _receive(
        self, rounds: Rounds, fragment: Fragment, state: WorkerState, mixed: Leaves
    ) -> WorkerState:
        del rounds
        params, extra = self._ends[fragment](state.params, state.extra, mixed)
        return state._replace(params=params, extra=extra)


class BackgroundRounds(LateRounds):
    """`on_mesh(round_step)` with its exchanges in a second thread.

    A context that ends the thread. With delay d messages travel while d gradients are
    computed; with 0 nothing hides them. Models that are not encoded, in an exchange in
    every step, are better off with `Background`, which updates and sends them group by
    group. The numbers are those of `round_step`. What is under way is in the state too,
    so a run goes on from any state; call `settle()` before any other collective.

    Args:
      adapt: the local update, as `local_update` returns it; cut as for
        `Background`.
      rounds: the rounds.
      mesh: mesh with the axis "workers" alone.
      message_dtype: as in `mix`.
      lowering: as in `Background`.
      exchange_mesh: as in `Background`.
      record: function that is called with each activity of this process.

    Raises:
      ValueError: as in `Background`, or if the compression has shards.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import Rounds, gossip, init_rounds, init_state, local_update
      >>> from decentjax import schedule, topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer, params = optax.adam(0.1), jnp.zeros(3)
      >>> local = local_update(loss_fn, optimizer)
      >>> rounds = Rounds(schedule.every(topology.ring(1), 5, delay=3))
      >>> extra = init_rounds(rounds, params)
      >>> state = init_state(params, optimizer, jax.random.key(0), 1, extra=extra)
      >>> with gossip.BackgroundRounds(local, rounds, worker_mesh(1)) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
      ...     train_step.settle()
    """

    def __init__(
        self,
        adapt: Adapt,
        rounds: Rounds,
        mesh: Mesh,
        message_dtype: DTypeLike | None = None,
        lowering: Lowering | None = None,
        exchange_mesh: Mesh | None = None,
        record: Record | None = None,
    ):
        _check_rounds(rounds)
        if rounds.compression is not None and rounds.compression.shards is not None:
            raise ValueError(
                "in a second thread a worker is one device: leave the compression's "
                "shards at None, or take on_mesh"
            )
        exchanges = tuple(dict.fromkeys(rounds.schedule.exchanges))
        topology = Topology(rounds.schedule.name, exchanges)
        options = message_dtype, lowering, exchange_mesh, record or ignore
        carrier = Carrier(topology, mesh, *options, rounds.compression)
        super().__init__(adapt, rounds, mesh, carrier, record)


def _completed(
    plan: Plan, values: list[jax.Array], mixed: Any
) -> tuple[WorkerState, Metrics]:
    """The state and the metrics of a step whose mixed params have arrived."""
    leaves = dict(enumerate(jax.tree.leaves(mixed)))
    outputs = dict(zip(plan.finished, values, strict=False))
    for stage in (*plan.groups, plan.rest):
        outputs.update(stage.compute(leaves, values))
    ordered = [outputs[i] for i in range(plan.structure.num_leaves)]
    return jax.tree.unflatten(plan.structure, ordered)
