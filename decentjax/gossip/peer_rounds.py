"""Peer-to-peer rounds, without collectives."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decentjax._core.patience import AutoPatience
from decentjax.codec import as_permutations
from decentjax.exchange import Exchange, Topology
from decentjax.gossip.batches_read import Read
from decentjax.gossip.membership import Elastic
from decentjax.gossip.merging import (
    Arrived,
    Models,
    Used,
    Way,
    check_symmetric,
    check_whole,
    senders,
    sends_changes,
)
from decentjax.gossip.peer_port import PeerPort
from decentjax.gossip.peer_step import PeerStep
from decentjax.gossip.quorum import NUM_PARTS, Quorum, QuorumMeans
from decentjax.gossip.thread import check_beside
from decentjax.gossip.thread_port import Record
from decentjax.links import Party
from decentjax.rounds import Rounds
from decentjax.state import WorkerState
from decentjax.updates import Adapt

Count = Callable[[Any], Sequence[int]]
"""Maps a batch, [workers, B, ...], to the number of tokens of each worker."""


def count_examples(batch: Any) -> list[int]:
    """The number of examples of each worker in a stacked batch.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax.gossip import count_examples
      >>> count_examples({"x": jnp.zeros((2, 8, 28, 28)), "y": jnp.zeros((2, 8))})
      [8, 8]
    """
    num_workers, *sizes = np.shape(jax.tree.leaves(batch)[0])
    return [sizes[0] if sizes else 1] * num_workers


class PeerRounds(PeerStep):
    """`round_step` with peer-to-peer messages, as in `Peers`.

    A worker sends its model to the peers of a round, and `delay` steps later merges the
    models received so far; it waits at most `patience` seconds for the others, whose
    weight stays with its own model. The rows of W then sum to one, but its columns need
    not: the mean of all models shifts towards those that are received more often. With
    `patience=math.inf` and symmetric exchanges the numbers are those of `round_step`,
    up to rounding, and a worker closes once its peers have taken its last messages, or
    after 10 s. For a mean of all models each worker sends to every other.

    With a compression the messages are encoded. With `error_feedback` a worker averages
    the messages received so far, q decoded: `x_i + sum_j W_ij (q_j - q_i)`. Each
    message of `drift` or `copies` is a change of shared state; a lost message would
    leave its copies wrong: these need `patience=math.inf` and a symmetric graph, and
    raise an error if a peer is lost.

    With a `quorum` no weight stays with the own model: a round merges the contributions
    that have come, weighted by what they were trained on, see `Quorum`. A slow worker
    takes part in the rounds of the others with fewer steps: before each step, continue
    at `due(step)`. With `elastic` workers may join and leave.

    Args:
      adapt: as in `BackgroundRounds`.
      rounds: the rounds, without tracking; each worker counts its own steps.
      party: this process, its workers, and how it finds its peers.
      patience: longest time that a round waits for models, in seconds, or an
        `AutoPatience`; with a `quorum`, once that is there.
      record: as in `Background`, for "compute" and "wait".
      used: function called with the models that each worker has mixed; a round has the
        step at which it begins, and `group` is the number of the fragment.
      quorum: how a round merges contributions; None as above.
      elastic: as in `Peers`; its graphs may be means of all workers.
      read: as in `Peers`.
      count: function that counts the tokens of a batch, for the weights of a quorum.

    Raises:
      TypeError: if `rounds` is not `Rounds`, or `party` not a `Party`.
      ValueError: if the rounds have nodes, shards or tracking, the workers do not fit
        them, messages of slices are to be encoded, the patience is negative or does not
        fit these rounds, the quorum is larger than the number of workers, or rounds
        with a quorum or elastic peers are encoded; at the first step as in `Peers`.
      ConnectionError: at a step, if a message of `drift` or `copies` is missing.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, init_rounds, init_state, local_update, methods
      >>> from decentjax import topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer, params, key = optax.adam(0.1), jnp.zeros(3), jax.random.key(0)
      >>> local = local_update(loss_fn, optimizer)
      >>> rounds = methods.local_sgd(topology.ring(1), num_steps=5)
      >>> extra = init_rounds(rounds, params)
      >>> state = init_state(params, optimizer, key, 1, extra=extra)
      >>> party = gossip.Party(gossip.Folder("peers"), [0], worker_mesh(1))
      >>> with gossip.PeerRounds(local, rounds, party) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
    """

    def __init__(
        self,
        adapt: Adapt,
        rounds: Rounds,
        party: Party,
        *,
        patience: float | AutoPatience = 0.0,
        record: Record | None = None,
        used: Callable[[Used], None] | None = None,
        quorum: Quorum | None = None,
        elastic: Elastic | None = None,
        read: Callable[[Read], None] | None = None,
        count: Count = count_examples,
    ):
        check_beside(rounds)
        port = _RoundPort(party, rounds, patience, used, quorum, elastic, read)
        super().__init__(adapt, rounds, port, record)
        self._round_port, self._count = port, count

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
        self.skip_to(self._round_port.due(step))
        return self._next

    def _trained(self, batch: Any) -> None:
        super()._trained(batch)
        self._round_port.count(self._count, batch)

    def join(
        self, state: WorkerState, *arguments: Any, **options: Any
    ) -> tuple[WorkerState, int | None]:
        new, step = super().join(state, *arguments, **options)
        if step is None:
            return new, None
        self._round_port.forget(step)
        return from_anchor(new), step


class _RoundPort(PeerPort):
    """The port of `PeerRounds`, whose exchanges are numbered by round."""

    def __init__(
        self,
        party: Party,
        rounds: Rounds,
        patience: float | AutoPatience,
        used: Callable[[Used], None] | None,
        quorum: Quorum | None,
        elastic: Elastic | None,
        read: Callable[[Read], None] | None,
    ):
        self._schedule, self._needs_all = rounds.schedule, sends_changes(rounds)
        self._quorum = quorum
        topology = of_permutations(rounds.schedule.name, rounds.schedule.exchanges)
        if elastic is not None:
            graph = elastic.graph
            elastic = elastic._replace(
                graph=lambda n: of_permutations(graph(n).name, graph(n))
            )
        if rounds.compression is not None and (quorum or elastic):
            raise ValueError(
                "a quorum and elastic peers merge whole models, got rounds with "
                f"{rounds.compression.kind.name}: leave the compression out"
            )
        if quorum is not None:
            quorum.check(topology.num_workers)
        super().__init__(
            party,
            topology,
            patience,
            used,
            Arrived if quorum is None else QuorumMeans,
            rounds.compression,
            elastic,
            0 if quorum is None else NUM_PARTS,
            len(rounds.schedule.fragments),
            read,
        )
        check_whole(rounds, self.waits.longest)
        if quorum is not None and self.waits.longest == math.inf:
            raise ValueError(
                "a quorum waits for the others only for a while: give a patience in "
                "seconds, or an AutoPatience, got inf"
            )
        if self._needs_all:
            # Otherwise a fast worker would replace a message that its peer has not yet
            # taken.
            check_symmetric(topology, "rounds that must miss no message")
        self._taken = -1
        self._awaited = 0  # The first round whose messages this process can expect.

    def count(self, count: Count, batch: Any) -> None:
        """Counts a step of each worker, and its tokens, for the weights of a quorum."""
        if isinstance(way := self._way, QuorumMeans):
            tokens = count(batch)
            for worker, number in zip(self.party.workers, tokens, strict=True):
                way.count(worker, int(number))

    def forget(self, step: int) -> None:
        """Begins from the anchors of a peer, at a step."""
        self._awaited = self._schedule.count(step)
        # Those that the peer had not merged by then were in flight.
        first = self._schedule.count(step - max(0, self._schedule.delay - 1))
        if isinstance(way := self._way, QuorumMeans):
            for worker in self.party.workers:
                way.forget(worker, first)

    def due(self, step: int) -> int:
        """The step to continue with; see `PeerRounds.due`."""
        number = self._schedule.count(step)
        begins = self._schedule.step_of(number)
        if self._quorum is None or begins == step or not self._is_behind(number):
            return step
        steps = range(step, begins)
        return next((t for t in steps if self._schedule[t].receives), begins)

    def _is_behind(self, number: int) -> bool:
        """Whether a quorum of peers has sent a round."""
        one = self._schedule[self._schedule.step_of(number)].sends
        assert self._quorum is not None
        assert one is not None
        group = self._schedule.fragments.index(one.leaves)
        for worker in self.party.workers:
            peers = [peer for peer, _ in senders(self.graph[number], worker)]
            sent = [self.links.has_sent(worker, x, group, number) for x in peers]
            if sum(sent) < max(1, min(self._quorum.count - 1, len(peers))):
                return False
        return True

    def close(self, seconds: float) -> None:
        """Closes the links, once the peers have taken their messages."""
        end = time.monotonic() + min(seconds, self.waits.longest)
        while self._links and self._behind() and time.monotonic() < end:
            self.links.bell.wait(self.links.bell.count)
        super().close(seconds)

    def _behind(self) -> set[int]:
        """The peers that have not yet taken the last round taken here."""
        return self.sources & self.links.alive() - self.links.ahead(self._taken - 1)

    def _enough(self, num_peers: int, number: int) -> int:
        return super()._enough(num_peers, number) if number >= self._awaited else 0

    def _build_way(self) -> Way:
        if self._quorum is None:
            return super()._build_way()
        how = self._quorum, self._schedule, self.ledger
        return QuorumMeans(self.links, self.graph, *how)

    def _number_of(self, step: int) -> int:
        return self._schedule.count(step)

    def _report(self, step: int) -> None:
        # Rounds report those that they have taken, as peers wait for that at the end;
        # elastic peers their steps, as who joins continues there.
        if self.elastic is not None:
            super()._report(step)

    def _by_step(self, used: Used) -> Used:
        """The record of a round by the step at which it begins."""
        at = self._schedule.step_of
        taken = (x._replace(step=at(x.step), sent=at(x.sent)) for x in used.models)
        left_out = (x._replace(step=at(x.step)) for x in used.left_out)
        return Used(at(used.step), *used[1:3], tuple(taken), tuple(left_out))

    def _note(self, used: Used, models: Models) -> None:
        self._check_whole(used)
        super()._note(used, models)
        if self.elastic is None:
            # As in `Peers`, where models are sent a step ahead.
            self._taken = used.step - 1
            self.links.at(self._taken)

    def _check_whole(self, used: Used) -> None:
        """Raises a ConnectionError if a change is missing."""
        came = {one.peer for one in used.models if one.step == used.step}
        sources = senders(self.topology[used.step], used.worker)
        missing = sorted({peer for peer, _ in sources} - came)
        if missing and self._needs_all:
            raise ConnectionError(
                f"worker {used.worker} has no message of the workers {missing} in "
                f"round {used.step}, and without it its copies are wrong: resume "
                "all workers from a step that all have saved"
            )


def of_permutations(name: str, exchanges: Iterable[Exchange]) -> Topology:
    """The exchanges, with messages between all members for a mean of a group."""
    return Topology(name, tuple(map(as_permutations, exchanges)))


def from_anchor(state: WorkerState) -> WorkerState:
    """The state of a worker that has learned nothing since its last round."""
    leaves, structure = jax.tree.flatten(state.params)
    for number, z in state.extra.anchor.items():
        leaves[number] = jnp.array(z, leaves[number].dtype, copy=True)
    # What the peer has sent counts as its own.
    sent = {number: jnp.copy(leaves[number]) for number in state.extra.sent}
    return state._replace(
        params=jax.tree.unflatten(structure, leaves),
        extra=state.extra._replace(sent=sent),
    )
