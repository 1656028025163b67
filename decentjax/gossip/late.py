"""Rounds in the second thread: messages take several steps, and no step waits."""

import collections
import functools
import time
from concurrent.futures import Future
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from decentjax.exchange import Exchange, Topology
from decentjax.gossip.carrier import Carrier
from decentjax.gossip.engine import Closing
from decentjax.gossip.record import Record, ignore
from decentjax.mixing import Lowering
from decentjax.placement import check_not_donated, over_workers
from decentjax.rounds import Leaves, Rounds, leaves_of, receive, round_step
from decentjax.schedule import Fragment, Round
from decentjax.step import Adapt, Metrics, WorkerState


class BackgroundRounds(Closing):
    """`on_mesh(round_step)` with its exchanges in a second thread.

    A context that ends the thread. What a round sends travels while the steps of its
    delay are computed; the step that merges it waits for the rest. The numbers are
    those of `round_step`. What is under way is in the state too, so a run goes on from
    any state; call `settle()` before any other collective. Rounds with delay 0 wait for
    their messages.

    Args:
      adapt: the local update, `decentjax.adapt` with its keywords bound.
      rounds: the rounds.
      mesh: mesh with the axis "workers" alone.
      message_dtype: as in `mix`.
      lowering: as in `Background`.
      exchange_mesh: as in `Background`.
      record: function that is called with each activity of this process.

    Raises:
      ValueError: as in `Background`.
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
        self._rounds, self._mesh, self._record = rounds, mesh, record or ignore
        sends = (one.exchange for one in rounds.schedule.rounds)
        exchanges = tuple(dict.fromkeys(x for x in sends if x is not None))
        topology = Topology(rounds.schedule.name, exchanges)
        self._carrier = Carrier(
            topology, mesh, message_dtype, lowering, exchange_mesh, self._record
        )
        self._is_started, self._next, self._step = False, -1, 0
        self._arriving: collections.deque[Future[list[jax.Array]]] = collections.deque()

        def local(params, mixed, others, batch):
            state = WorkerState(params, *others)
            new, metrics = adapt(state, batch, mixed)
            return new.params, new[1:4], metrics

        self._ends = {
            fragment: jax.jit(
                over_workers(functools.partial(receive, rounds, fragment), mesh)
            )
            for fragment in rounds.schedule.fragments
        }
        # The params may still be on their way, and are not donated.
        self._local = jax.jit(over_workers(local, mesh), donate_argnums=2)

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        """Returns the new state and metrics.

        The state's buffers are donated, except those of its params and of the rounds.

        Raises:
          ValueError: if the state was donated to an earlier step.
          BaseException: any error of an exchange, as itself.
        """
        check_not_donated(state)
        if not self._is_started:
            self._carrier.start(state.params)
            self._is_started = True
        if step != self._next:
            self._send_again(state, step)
        self._step, self._next = step, step + 1
        event = self._rounds.schedule[step]
        if event.sends is not None and event.sends.delay > 0:
            self._send(event.sends, leaves_of(event.sends.leaves, state.params))
        return round_step(
            state,
            batch,
            event,
            rounds=self._rounds,
            adapt=self._adapt,
            mix=self._mix,
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
        schedule = self._rounds.schedule
        for begun in range(max(0, step - schedule.delay + 1), step):
            one = schedule[begun].sends
            if one is not None:
                numbers = leaves_of(one.leaves, state.params)
                self._send(
                    one, {number: state.extra.sent[number] for number in numbers}
                )

    def _send(self, one: Round, sent: Leaves) -> None:
        assert one.exchange is not None
        models = list(sent.values())
        self._arriving.append(self._carrier.carry(models, one.exchange, self._step))

    def _mix(self, sent: Leaves, exchange: Exchange) -> Leaves:
        """Waits for the round that was sent first."""
        if self._rounds.schedule.delay == 0:  # It is sent now.
            self._send(Round(exchange), sent)
        start = time.monotonic()
        mixed = self._arriving.popleft().result()
        self._record("wait", self._step, start, time.monotonic())
        return dict(zip(sent, mixed, strict=True))

    def _adapt(
        self, state: WorkerState, batch: Any, mixed: Any
    ) -> tuple[WorkerState, Metrics]:
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
        # Only what a round changes passes through its program.
        part = WorkerState(state.params, (), (), state.key, state.extra)
        part = self._ends[fragment](part, mixed)
        return state._replace(params=part.params, extra=part.extra)
