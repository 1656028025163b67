"""Peer-to-peer exchanges, without collectives.

Each worker sends its newest model to the peers of the step, group by group, and takes
theirs. A slow, frozen or dead peer delays the others by at most the patience.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from decentjax._norms import norm_of, sums_of_squares
from decentjax.exchange import Topology
from decentjax.gossip.beside import Beside
from decentjax.gossip.elastic import Elastic, Living, adopted, travels
from decentjax.gossip.peer_port import PeerPort, check_graph
from decentjax.gossip.record import Record
from decentjax.gossip.rows import Layout, Rows, on_each_device
from decentjax.gossip.ways import WAYS, Models, Used
from decentjax.links import Links, Message, Party, Said
from decentjax.local import Adapt
from decentjax.loss import Metrics
from decentjax.rounds import Rounds
from decentjax.schedule import every
from decentjax.state import WorkerState

JOIN_SECONDS = 3.0  # Wait for a peer's state, before the next peer is asked.
MEET_SECONDS = 1.0  # Wait for a peer that is ahead, if others are alive.
APART_STEPS = 10  # Between two measurements of the distance of models.


class Peers(Beside):
    """The step of `Background` without collectives: `x_i <- sum_j W_ij x_j + update`.

    When its gradient is done, a worker mixes the models received so far, and waits at
    most `patience` seconds for the others, whose weight stays with its own model. The
    effect on the mean of all models depends on `way`. With `patience=math.inf` and a
    symmetric exchange all models arrive, and the numbers are those of `awc_step`, bit
    for bit.

    Args:
      adapt: as in `Background`.
      topology: topology whose exchanges are taken in turn, by each worker
        independently; permutations of single workers, such as `ring` or `exponential`.
      party: this process, its workers, and how it finds its peers.
      way: how models are used: "arrived" averages with the models received so far,
        "swaps" swaps models with peers; see `decentjax.gossip.ways`.
      patience: longest time that a step waits for models, in seconds.
      record: as in `Background`, for "compute" and "wait".
      used: function called with the models that each worker has mixed.
      elastic: how to continue when workers join and leave, for "arrived": a step's
        exchange is then that of `elastic.graph` over the live workers, and `topology`,
        that of all workers, gives their largest number.

    Raises:
      TypeError: if `topology` is not a `Topology`, or `party` not a `Party`.
      ValueError: if the topology has groups or nodes or does not allow this way, the
        workers do not fit it, the patience is negative, or `elastic` is used with
        another way, an infinite patience, or without a graph for each number of
        workers; at the first step, if the address is in use, or another process answers
        as one of these workers.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, init_state, local_update, topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer = optax.adam(0.1)
      >>> local = local_update(loss_fn, optimizer)
      >>> state = init_state(jnp.zeros(3), optimizer, jax.random.key(0), 1)
      >>> party = gossip.Party(gossip.Folder("peers"), [0], worker_mesh(1))
      >>> with gossip.Peers(local, topology.ring(1), party) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
    """

    def __init__(
        self,
        adapt: Adapt,
        topology: Topology,
        party: Party,
        *,
        way: Literal["arrived", "swaps"] = "arrived",
        patience: float = 0.0,
        elastic: Elastic | None = None,
        record: Record | None = None,
        used: Callable[[Used], None] | None = None,
    ):
        if way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
        port = _ElasticPort(party, topology, patience, used, WAYS[way], elastic=elastic)
        rounds = Rounds(every(topology, num_steps=1, delay=1))
        super().__init__(adapt, rounds, party.mesh, port, record)
        self._peers, self._elastic = port, elastic
        self._was_away = False

    @property
    def links(self) -> Links:
        """The links, with the live and the refused workers; from the first step on."""
        return self._peers.links

    def alive(self) -> set[int]:
        """Returns the workers of other processes that are alive."""
        return self.links.alive()

    @property
    def refused(self) -> dict[int, str]:
        """Why a worker was refused, for each refused worker."""
        return dict(self.links.refused)

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        """Like that of `Background`; a peer that asks for the state gets a copy."""
        self._open(state, batch, step)
        self._peers.show(state, step)
        return super().__call__(state, batch, step)

    def has_quorum(self) -> bool:
        """Whether the quorum of live workers is met.

        If not, do not take a step, and ask again soon: the others may train without
        this process. True before the first step, and without `elastic`.
        """
        if self._elastic is None or not self._is_open:
            return True
        there = {*self._peers.living(), *self.links.left}
        is_there = len(there) >= self._elastic.quorum
        self._was_away |= not is_there
        return is_there

    def was_away(self) -> bool:
        """Whether the others continued without this process since the last call.

        It was frozen and declared lost, or had no quorum. Then `join` takes it to where
        they are.
        """
        found, self._was_away = self._was_away, False
        return (self._is_open and self.links.was_silent()) or found

    def apart(self) -> float | None:
        """Returns the distance of models, as last measured by this process.

        The root mean square of `|x_j - x_i|`, over its workers i and the models of
        peers j that they have mixed; with `elastic`, in one step out of ten. For models
        at a distance c from their mean, `E |x_j - x_i|^2 = 2 c^2 N / (N - 1)`. None
        before any model was received.
        """
        if not (groups := self._peers.apart.values()):
            return None
        squares = sum(np.mean([_squared(x) for x in one]) for one in groups)
        return math.sqrt(squares / len(self._peers.party.workers))

    def join(
        self,
        state: WorkerState,
        batch: Any,
        seconds: float = 60.0,
        after: int = -1,
        alone: float = 10.0,
    ) -> tuple[WorkerState, int | None]:
        """Returns the state of a peer, to start from.

        For a worker that joins, or returns to, others that are training. It takes the
        model, the optimizer's state and everything else except the random key.

        Args:
          state: state of the workers of this process, as for a step.
          batch: batch of any step, for its shapes.
          seconds: longest time to wait for a peer's state.
          after: step that a peer must be past.
          alone: longest time to wait if no peer is alive.

        Returns:
          The state, and the step to continue with; None if no peer is past `after`, or
          none has answered.
        """
        self._open(state, batch, -1)
        self._compile(state, batch)  # Otherwise the others would be far ahead by then.
        messages, now = [], time.monotonic()
        for worker in self._peers.party.workers:
            message = self._peers.whole(worker, after, now + seconds, now + alone)
            if message is None:
                return state, None
            messages.append(message)
        leaves, structure = jax.tree.flatten(state._replace(key=()))
        rows = [message.arrays for message in messages]
        new = jax.tree.unflatten(structure, self._peers.states.stacked(leaves, rows))
        return new._replace(key=state.key), max(m.said.step for m in messages)

    def _compile(self, state: WorkerState, batch: Any) -> None:
        """Compiles the parts of a step by running them; drops the results."""
        plan = self._plan(state, batch)
        state = jax.tree.map(jnp.copy, state)  # It is donated.
        values = plan.early(state.params, state[1:], batch)
        mixed = dict(enumerate(jax.tree.leaves(state.params)))
        for stage in (*plan.groups, plan.rest):
            stage.compute(mixed, values)


class _ElasticPort(PeerPort):
    """The port of `Peers`: its peers may join and leave, and copy a worker's state."""

    def __init__(self, *arguments: Any, elastic: Elastic | None):
        super().__init__(*arguments)
        self._make_way.check(self.topology)
        self._elastic, num_workers = elastic, self.topology.num_workers
        # Distances to the models mixed last, by worker and leaf group.
        self.apart: dict[tuple[int, int], list[list[jax.Array]]] = {}
        if elastic is None:
            return
        if self._make_way is not WAYS["arrived"] or self.patience == math.inf:
            raise ValueError(
                'elastic needs the way "arrived" and a finite patience, got '
                f"{self._make_way.__name__} and {self.patience}"
            )
        elastic.check(num_workers)
        for n in range(1, num_workers + 1):
            check_graph(elastic.graph(n))
        self.graph = Living(elastic, num_workers, self.living)

    def open(
        self, state: WorkerState, groups: Sequence[Sequence[int]], step: int
    ) -> None:
        """Connects to the peers, with a channel for whole states."""
        self.states = Layout(adopted(state), self.party.mesh, travels)
        silent = None if self._elastic is None else self._elastic.silent_seconds
        super().open(state, groups, step, [self.states.pieces], silent)

    def show(self, state: WorkerState, step: int) -> None:
        """Sets the step that this process reports, and sends the state to guests."""
        if guests := self.links.joining():
            rows = self.states.rows(adopted(state))
            asked = {worker for _, worker in guests}
            # Copies, which no later step donates.
            copies = {
                worker: [jnp.array(x, copy=True) for x in own]
                for worker, own in zip(self.party.workers, rows, strict=True)
                if worker in asked
            }
            for guest, worker in guests:
                whole = len(self._forms)
                self.links.publish(worker, guest, whole, copies[worker], Said(step))
        self.links.at(step)

    def living(self) -> list[int]:
        """The workers that are alive, including those of this process."""
        return sorted(self.links.alive() | set(self.party.workers))

    def whole(
        self, worker: int, after: int, end: float, alone: float
    ) -> Message | None:
        """The whole state of the first peer that sends it, of those that are ahead.

        Waits until `end`, or until `alone` if no peer is alive.
        """
        if self.topology.num_workers == len(self.party.workers):
            return None
        begin, whole = time.monotonic(), len(self._forms)
        each = max(JOIN_SECONDS, (end - begin) / 4)
        while (now := time.monotonic()) < end:
            heard = self.links.bell.count
            ahead = self.links.ahead(after)
            late = begin + MEET_SECONDS if self.links.alive() else alone
            if not ahead and now > late:
                break
            for peer in sorted(ahead):
                self.links.ask_to_join(worker, peer)
                late = min(time.monotonic() + each, end)
                message = self.links.wait(worker, peer, whole, after + 1, late)
                if message is not None and message.said.step > after:
                    return message
            self.links.bell.wait(heard)
        return None

    def _note(self, used: Used, models: Models) -> None:
        super()._note(used, models)
        if self._elastic and used.models and used.step % APART_STEPS == 0:
            own = models[used.worker, used.step]
            self.apart[used.worker, used.group] = [
                _distance(own, models[taken.peer, taken.step]) for taken in used.models
            ]


@on_each_device
@jax.jit
def _distance(models: Rows, others: Rows) -> list[jax.Array]:
    """The distance of the pieces on each device."""
    pairs = zip(models, others, strict=True)
    return [norm_of(sums_of_squares([x.astype(jnp.float32) - y for x, y in pairs]))]


def _squared(distances: list[jax.Array]) -> float:
    return sum(float(x) ** 2 for x in distances)
