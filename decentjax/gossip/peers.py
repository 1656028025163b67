"""Peer-to-peer exchanges, without collectives.

Each worker sends its newest model to the peers of the step, group by group, and takes
theirs. A slow, frozen or dead peer delays the others by at most the patience.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from decentjax._core.patience import AutoPatience
from decentjax.exchange import Topology
from decentjax.gossip.batches_read import Read
from decentjax.gossip.membership import Elastic
from decentjax.gossip.merging import WAYS, MergeRecord
from decentjax.gossip.peer_port import PeerPort
from decentjax.gossip.quorum import Quorum
from decentjax.gossip.round_port import RoundPort, from_anchor
from decentjax.gossip.thread import Beside, check_beside
from decentjax.gossip.thread_port import Record
from decentjax.links import Links, PeerProcess
from decentjax.plan import Plan, rounds_of
from decentjax.state import WorkerState
from decentjax.updates import Adapt

MOST_BEHIND = 10  # Steps: a model that is younger hardly moves an average.


class Peers(Beside):
    """The step of `Background` without collectives; a context manager.

    When its gradient is done, a worker mixes the models received so far, and waits at
    most `patience` seconds for the others, whose weight stays with its own model. The
    rows of W then sum to one, but its columns need not: the mean of all models shifts
    towards those that are received more often. With `patience=math.inf` and a symmetric
    exchange all models arrive, and the numbers are those of `on_mesh`, over a topology
    bit for bit. For a mean of all models over rounds each worker sends to every other,
    and a worker closes once its peers have taken its last messages, or after 10 s.

    With a compression the messages are encoded. With `error_feedback` a worker averages
    the messages received so far, q decoded: `x_i + sum_j W_ij (q_j - q_i)`. Each
    message of `drift`, `copies` and gradient tracking is a part of a sum, which a lost
    message would leave wrong: these need `patience=math.inf` and a symmetric graph, and
    raise an error if a peer is lost.

    With a `Quorum` no weight stays with the own model: a round merges the contributions
    that have come, weighted by what they were trained on. A slow worker takes part in
    the rounds of the others with fewer steps: before each step, continue at
    `due(step)`. With `elastic` workers may join and leave.

    Args:
      local: as in `Background`.
      plan: topology of single workers, such as `ring` or `exponential`, whose exchanges
        each worker takes in turn independently; or rounds.
      party: this process, its workers, and how it finds its peers.
      merge: how models are used: "arrived" averages with the models received so far,
        "swaps" over a topology swaps models with peers, see `decentjax.gossip.merging`;
        a `Quorum` merges contributions.
      patience: longest time that a step or round waits for models, in seconds, or an
        `AutoPatience`; with a quorum, once that is there.
      elastic: how to continue when workers join and leave: an exchange is then that of
        `elastic.graph` over the live workers, and the plan's topology, that of all
        workers, gives their largest number.
      record: as in `Background`, for "compute" and "wait".
      used: function called with the models that each worker has mixed; a round has the
        step at which it begins, and `group` is the number of the fragment.
      read: function called with the batches that each worker has trained on, where
        these are those of `next_reads`.

    Raises:
      TypeError: if `plan` is neither topology nor rounds, or `party` no
        `PeerProcess`.
      ValueError: if the plan has nodes or shards, a topology groups, or it
        does not allow this merge, the workers do not fit it, messages of slices are to
        be encoded, the patience is negative or does not fit, the quorum is larger than
        the number of workers, rounds with a quorum or elastic peers are encoded, or
        `elastic` is used with "swaps", an infinite patience, or without a graph for
        each number of workers; at the first step, if the address is in use, or another
        process answers as one of these workers.
      ConnectionError: at a step, if a message that is part of a sum is missing.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, local_update, methods, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.adam(0.1))
      >>> party = gossip.PeerProcess(gossip.Folder("peers"), [0], worker_mesh(1))
      >>> with gossip.Peers(local, methods.diloco(1, num_steps=5), party) as train_step:
      ...     state = train_step.init(jnp.zeros(3), jax.random.key(0))
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
    """

    def __init__(
        self,
        local: Adapt,
        plan: Plan,
        party: PeerProcess,
        *,
        merge: Literal["arrived", "swaps"] | Quorum = "arrived",
        patience: float | AutoPatience = 0.0,
        elastic: Elastic | None = None,
        record: Record | None = None,
        used: Callable[[MergeRecord], None] | None = None,
        read: Callable[[Read], None] | None = None,
    ):
        check_beside(plan)
        if not isinstance(merge, Quorum) and merge not in WAYS:
            names = ", ".join(WAYS)
            raise ValueError(f"merge must be one of {names} or a Quorum, got {merge!r}")
        if isinstance(plan, Topology) and not isinstance(merge, Quorum):
            how = plan, patience, used, WAYS[merge]
            port = PeerPort(party, *how, elastic=elastic, read=read)
        elif merge == "swaps":
            raise ValueError(
                "swaps exchange whole models in every step: pass a topology, got rounds"
            )
        else:
            quorum = merge if isinstance(merge, Quorum) else None
            rounds = rounds_of(plan)
            port = RoundPort(party, rounds, patience, used, quorum, elastic, read)
        super().__init__(local, plan, party.mesh, port, record)
        self._peers, self._was_away = port, False

    def _workers(self) -> Sequence[int]:
        return self._peers.party.workers

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

    def begin(self, state: WorkerState, batch: Any, step: int) -> Iterator[Any]:
        """Like that of `Background`; a peer that asks for the state gets a copy."""
        self._open(state, batch, step)
        self._peers.show(state, step)
        return super().begin(state, batch, step)

    def check_begins(self, state: WorkerState, batch: Any, step: int) -> None:
        """Raises a ValueError for workers that begin again while others train on."""
        self._open(self._rounds.pack(state), batch, step)
        if step > 0:  # A state that was saved.
            return
        ahead = self.links.returns_to(self._peers.sources, step + MOST_BEHIND)
        if ahead:
            raise ValueError(
                f"workers {sorted(self._peers.party.workers)} begin again at step "
                f"{step} while workers {sorted(ahead)} train on, and an untrained "
                "model would enter their averages: resume from a saved state and its "
                "step, end the others and start all of them again, or use local_update "
                "and gossip.Peers, whose join takes the state of a peer"
            )

    def next_reads(self, step: int) -> list[tuple[int, int]]:
        """Returns the shard and the batch that each worker here reads in a step.

        With `elastic`: worker i reads shard i, and in some turns that of a worker that
        is missing, each from where it was read before, as far as that is known from
        messages. The next call of the step counts them as read. So no batch is left out
        because its worker is away or slow, and few are read twice: those of workers
        that disagree for a moment on who is alive. Otherwise worker i reads batch
        `step` of shard i.
        """
        return self._peers.next_reads(step)

    @property
    def joined_from(self) -> list[int]:
        """The peers whose states the workers here have taken last, in `join`."""
        return [self._peers.joined_from[i] for i in self._peers.party.workers]

    @property
    def positions(self) -> list[int]:
        """With `elastic`, the first batch of each shard that is not known to be read.

        Set it to those of an earlier run to resume.
        """
        ledger = self._peers.ledger
        return [] if ledger is None else ledger.positions.tolist()

    @positions.setter
    def positions(self, positions: Sequence[int]) -> None:
        if self._peers.ledger is not None:
            self._peers.ledger.merge(positions)

    def has_quorum(self) -> bool:
        """Whether the quorum of live workers is met.

        If not, do not take a step, and ask again soon: the others may train without
        this process. True before the first step, and without `elastic`.
        """
        elastic = self._peers.elastic
        if elastic is None or not self._is_open:
            return True
        there = {*self._peers.living(), *self.links.left}
        is_there = len(there) >= elastic.quorum
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
        peers j that they have mixed; with `elastic`, in one exchange out of ten. For
        models at a distance c from their mean, `E |x_j - x_i|^2 = 2 c^2 N / (N - 1)`.
        None before any model was received.
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
        own, state = state, self._rounds.pack(state)
        self._open(state, batch, -1)
        # Otherwise the others would be far ahead by then.
        self._compile(state, batch)
        messages, now = [], time.monotonic()
        for worker in self._peers.party.workers:
            message = self._peers.whole(worker, after, now + seconds, now + alone)
            if message is None:
                return own, None
            messages.append(message)
        for worker in self._peers.party.workers:
            if self._peers.ledger is not None:
                self._peers.ledger.forget(worker)
        leaves, structure = jax.tree.flatten(state._replace(key=()))
        rows = [message.arrays for message in messages]
        new = jax.tree.unflatten(structure, self._peers.states.stacked(leaves, rows))
        new, step = new._replace(key=state.key), max(m.said.step for m in messages)
        self._peers.forget(step)
        new = new if self._is_of_models else from_anchor(new)
        return self._rounds.unpack(new), step

    def due(self, step: int) -> int:
        """Returns the step to continue with: `step`, or a later one of the schedule.

        Where a quorum has already sent the next round, this worker is behind, and
        continues at the next step in which a round begins or ends: its contribution has
        fewer steps, and weighs less.

        Args:
          step: the step about to run.
        """
        if not self._is_open or step != self._next:
            return step
        self.skip_to(self._peers.due(step))
        return self._next

    def _trained(self, batch: Any) -> None:
        self._peers.trained(batch)


def _squared(distances: list[jax.Array]) -> float:
    return sum(float(x) ** 2 for x in distances)
