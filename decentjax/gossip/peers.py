"""Peer-to-peer exchanges, without collectives.

Each worker sends its newest model to the peers of the step, group by group, and takes
theirs. A slow, frozen or dead peer delays the others by at most the patience.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decentjax.gossip.group_port import GroupPort
from decentjax.gossip.membership import Elastic
from decentjax.gossip.merging import WAYS, MergeRecord, swaps_of
from decentjax.gossip.patience import AutoPatience
from decentjax.gossip.peer_port import PeerPort
from decentjax.gossip.port import Record
from decentjax.gossip.quorum import Quorum
from decentjax.gossip.thread import Beside, check_beside
from decentjax.links import Links, PeerProcess, Seen
from decentjax.methods import Wagma
from decentjax.placement import place
from decentjax.plan import Plan
from decentjax.state import WorkerState
from decentjax.updates import Adapt, Metrics

MOST_BEHIND = 10  # Steps: a model that is younger hardly moves an average.
QUORUM_SECONDS = 0.05  # Between two looks for a quorum.

ReadBatch = Callable[[int, int], Any]
"""Maps a shard and the number of a batch in it to the batch of one worker."""


class Admitted(NamedTuple):
    """The state and the step with which a process of peers continues.

    Args:
      state: the state.
      step: the step.
      how: "own": with its own state, at its own step; "joined": with the state and the
        step of a peer; "behind": with its own state, at the next round of a quorum;
        "alone": like "own", but it is new or was away, and found no peer ahead.
    """

    state: WorkerState
    step: int
    how: Literal["own", "joined", "behind", "alone"] = "own"


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

    With `merge="swaps"` and the compression `low_rank` of rounds with `every=1` and
    `delay=1`, each edge has one open swap of factors at a time, and both ends move by
    the same difference once it is complete. So with any patience the mean of all models
    is kept, and nothing is lost but the open swaps of a process that dies: its edges
    begin again. The bases belong to the edges, and not to the state. Slices send the
    factors of their shards.

    With a `Quorum` no weight stays with the own model: a round merges the contributions
    that have come, weighted by what they were trained on. A slow worker takes part in
    the rounds of the others with fewer steps.

    Over `methods.wagma` no group waits for a late member, whose earlier model counts.

    Before it sends anything, a process that finds peers ahead of it takes the model,
    the optimizer's state and everything else except the random key of one of them, and
    continues at its step: one that is new or was started again, if its patience is
    finite and the plan may miss messages. With `elastic` workers may join and leave,
    and a process that was frozen, cut off, or without its quorum, does the same.

    Args:
      local: as in `Background`.
      plan: topology of single workers, such as `ring` or `exponential`, whose exchanges
        each worker takes in turn independently; or rounds, such as `methods.wagma`.
      party: this process, its workers, and how it finds its peers.
      merge: how models are used: "arrived" averages with the models received so far,
        "swaps" over a topology, or rounds with `low_rank`, swaps models with peers, see
        `decentjax.gossip.merging`; a `Quorum` merges contributions.
      patience: longest time that a step or round waits for models, in seconds, or an
        `AutoPatience`; with a quorum, once that is there; over `methods.wagma` for
        live but silent workers, and the slowest in a mean of all.
      elastic: how to continue when workers join and leave: an exchange is then that of
        `elastic.graph` over the live workers, and the plan's topology, that of all
        workers, gives their largest number.
      record: as in `Background`, for "compute" and "wait".
      used: function called with the models that each worker has mixed; a round has the
        step at which it begins, and `group` is the number of the fragment.

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
      ...     state, t = train_step.init(jnp.zeros(3), jax.random.key(0)), 0
      ...     while t < 10:
      ...         read = lambda shard, number: jnp.ones(3)
      ...         state, t, metrics = train_step(state, read, t)
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
    ):
        check_beside(plan)
        if not isinstance(merge, Quorum) and merge not in WAYS:
            names = ", ".join(WAYS)
            raise ValueError(f"merge must be one of {names} or a Quorum, got {merge!r}")
        if isinstance(plan, Wagma):
            if merge != "arrived" or elastic is not None:
                raise ValueError(
                    "WAGMA-SGD says itself how models are merged, and its workers "
                    "neither join nor leave: leave out merge and elastic"
                )
            port = GroupPort(party, plan, patience, used)
        else:
            low_rank = None
            if merge == "swaps":
                plan, low_rank = swaps_of(plan)  # A state needs the graph alone.
            port = PeerPort(party, plan, merge, patience, elastic, used, low_rank)
        super().__init__(local, plan, party.mesh, port, record, party.workers)
        self._peers, self._is_away, self._is_lone = port, True, True
        self._lives: dict[int, int] = {}  # Of the peers that it has met.
        self._silences = 0

    @property
    def links(self) -> Links:
        """The links, with the live and the refused workers; from the first step on."""
        return self._peers.links

    def alive(self) -> set[int]:
        """Returns the workers of other processes that are alive."""
        return self._peers.alive()

    @property
    def refused(self) -> dict[int, str]:
        """Why a worker was refused, for each refused worker."""
        return dict(self.links.refused)

    @property
    def unreached(self) -> list[str]:
        """Which seeds do not answer, and which peers are reached in one direction."""
        return list(self.links.unreached.values())

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state: WorkerState, read: ReadBatch, step: int
    ) -> tuple[WorkerState, int, Metrics]:
        """Trains one step: returns the state, the step that follows, and the metrics.

        A process that is new, or was away, begins with the state of a peer.

        Args:
          state: state of the workers of this process, whose buffers are donated as in
            `advance`.
          read: function of a shard and of the number of a batch in it that returns the
            batch of one worker, not stacked; the same whenever it is asked. Worker i
            reads batch `step` of shard i, but where workers join and leave.
          step: the step about to run.

        Raises:
          TypeError: if `read` is no function.
          ValueError: if it returns batches of different shapes; and as `advance`.
        """
        if not callable(read):
            raise TypeError(
                "read must be a function (shard, number) -> batch of one worker, got "
                f"{type(read).__name__}: pass lambda shard, number: data[shard, number]"
                ", or call advance(state, batch, step) with a stacked batch"
            )
        batch = None if self._is_open else self._read(read, step)
        state, at, _ = self.admit(state, batch, step)
        if batch is None or at != step:
            batch = self._read(read, at)
        state, metrics = self.advance(state, batch, at)
        return state, at + 1, metrics

    def _read(self, read: ReadBatch, step: int) -> Any:
        rows = [read(*one) for one in self.next_reads(step)]
        shapes = [str(jax.tree.map(np.shape, row)) for row in rows]
        if len(set(shapes)) > 1:
            raise ValueError(
                "read must return batches of the same shapes for all workers, got "
                + " and ".join(sorted(set(shapes)))
            )
        return place(jax.tree.map(_stacked, *rows), self._mesh)

    def begin(self, state: WorkerState, batch: Any, step: int) -> Iterator[Any]:
        """As in `Beside`; a peer that asks for the state gets a copy."""
        self._open(state, batch, step)
        self._peers.show(state, step)
        return super().begin(state, batch, step)

    def admit(
        self,
        state: WorkerState,
        batch: Any,
        step: int,
        ended: Callable[[], bool] = lambda: False,
    ) -> Admitted:
        """Returns the state and the step with which this process continues.

        The first part of a call, for programs with a loop of their own: admit, read the
        batch, and `advance`.

        Args:
          state: state of the workers of this process.
          batch: stacked batch of any step, for its shapes; only the first call uses it.
          step: the step about to run.
          ended: function that is asked while this process waits; once it returns True,
            the wait ends.

        Returns:
          The state, the step, and how they were found.
        """
        found, is_first = Admitted(state, step), not self._is_open
        peers, elastic = self._peers, self._peers.elastic
        if is_first:
            self._open(self._rounds.pack(state), batch, step if elastic is None else -1)
        ended = functools.partial(self.links.agree, "ended", ended)
        if is_first:
            self._check_begins(step, ended)
        elif not peers.rejoins:
            return found
        while True:
            seen = peers.look()
            if self._must_join(found.step, seen):
                new = self._joined(found, batch if is_first else None, ended)
                found = new if found.how == "own" or new.how == "joined" else found
                seen = peers.look()
            if self._is_quorum(seen) or ended():
                break
            self._is_away = True  # The others may train without this process.
            time.sleep(QUORUM_SECONDS)
        if peers.rejoins:
            self.links.met = {*seen.lives, *peers.party.workers}
        continues = found.step == self._next
        if continues and (due := peers.due(found.step)) > found.step:
            self.skip_to(due)
            found = found._replace(step=due, how="behind")
        if elastic is not None:
            self.links.at(found.step)
        return found

    def _check_begins(self, step: int, ended: Callable[[], bool]) -> None:
        """Raises a ValueError for workers that begin again and cannot join."""
        if step > 0 or self._peers.may_join:
            return
        if ahead := self.links.find_ahead(step + MOST_BEHIND, 0, ended):
            raise ValueError(
                f"workers {sorted(self._peers.party.workers)} begin again at step "
                f"{step} while workers {sorted(ahead)} train on, and an untrained "
                "model would enter their averages: resume from a saved state and its "
                "step, end the others and start all of them again, or give a finite "
                "patience and a plan that may miss messages, to join them"
            )

    def _must_join(self, step: int, seen: Seen) -> bool:
        """Whether peers may have a state that this process must take."""
        new = {j for j, life in seen.lives.items() if self._lives.get(j) != life}
        self._lives |= seen.lives
        was_silent = self._peers.elastic is not None and seen.silences > self._silences
        is_away, self._is_away = self._is_away or was_silent, False
        self._silences = seen.silences
        # It has trained without the others, as it did not find them in time.
        is_lone = self._is_lone and new & seen.ahead(step + MOST_BEHIND)
        return self._peers.may_join and bool(is_away or is_lone)

    def has_quorum(self) -> bool:
        """Whether as many workers are alive as `elastic` wants; a call waits for it."""
        if self._peers.elastic is None or not self._is_open:
            return True
        return self._is_quorum(self._peers.look())

    def _is_quorum(self, seen: Seen) -> bool:
        elastic = self._peers.elastic
        # A process that has finished counts, so that the last ones can finish too.
        there = {*seen.lives, *self._peers.party.workers, *seen.left}
        return elastic is None or len(there) >= elastic.quorum

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
        """The peers whose states the workers here have taken last."""
        return list(self._peers.joined_from.values())

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

    def apart(self) -> float | None:
        """Returns the distance of models, as last measured by this process.

        The root mean square of `|x_j - x_i|`, over its workers i and the models of
        peers j that they have mixed; with `elastic`, in one exchange out of ten. For
        models at a distance c from their mean, `E |x_j - x_i|^2 = 2 c^2 N / (N - 1)`.
        None before any model was received.
        """
        if not (groups := self._peers.apart.values()):
            return None
        squares = sum(float(np.mean([_squared(x) for x in one])) for one in groups)
        return math.sqrt(self.links.total(squares) / len(self._peers.party.workers))

    def _joined(self, own: Admitted, batch: Any, ended: Callable[[], bool]) -> Admitted:
        """The state and the step of a peer that is ahead, once it has sent them.

        Waits as long as one is ahead: an old model would move all others.
        """
        peers, elastic = self._peers, self._peers.elastic
        alone = 0.0 if elastic is None else elastic.alone_seconds
        after = own.step if elastic else own.step + MOST_BEHIND
        packed = self._rounds.pack(own.state)
        self.links.at(-1)  # It takes no part meanwhile.
        if self.links.find_ahead(after, alone, ended) and batch is not None:
            # Otherwise the others would be far ahead by then.
            self._compile(packed, batch)
        found = peers.join(packed, after, ended)
        if found is None:
            return own._replace(how="alone")
        self._is_lone = False
        new, step = found
        return Admitted(self._rounds.unpack(new), step, "joined")

    def _trained(self, batch: Any) -> None:
        self._peers.trained(batch)


def _stacked(*rows: Any) -> Any:
    is_on_device = any(isinstance(row, jax.Array) for row in rows)
    return (jnp if is_on_device else np).stack(rows)


def _squared(distances: list[jax.Array]) -> float:
    return sum(float(x) ** 2 for x in distances)
