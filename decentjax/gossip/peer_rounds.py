"""Peer-to-peer rounds, without collectives."""

import time
from collections.abc import Callable

from decentjax.codec import as_permutations
from decentjax.exchange import Topology
from decentjax.gossip.beside import Beside, check_beside
from decentjax.gossip.messages import check_whole, sends_changes
from decentjax.gossip.peer_port import PeerPort
from decentjax.gossip.record import Record
from decentjax.gossip.ways import Models, Used, check_symmetric, senders
from decentjax.links import Links, Party
from decentjax.local import Adapt
from decentjax.rounds import Rounds


class PeerRounds(Beside):
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

    Args:
      adapt: as in `BackgroundRounds`.
      rounds: the rounds, without tracking; each worker counts its own steps.
      party: this process, its workers, and how it finds its peers.
      patience: longest time that a round waits for models, in seconds.
      record: as in `Background`, for "compute" and "wait".
      used: function called with the models that each worker has mixed; a round has the
        step at which it begins, and `group` is the number of the fragment.

    Raises:
      TypeError: if `rounds` is not `Rounds`, or `party` not a `Party`.
      ValueError: if the rounds have nodes, shards or tracking, the workers do not fit
        them, messages of slices are to be encoded, or the patience is negative or too
        short for these rounds; at the first step as in `Peers`.
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
        patience: float = 0.0,
        record: Record | None = None,
        used: Callable[[Used], None] | None = None,
    ):
        check_beside(rounds)
        self._peers = _RoundPort(party, rounds, patience, used)
        super().__init__(adapt, rounds, party.mesh, self._peers, record)

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


class _RoundPort(PeerPort):
    """The port of `PeerRounds`, whose exchanges are numbered by round."""

    def __init__(
        self,
        party: Party,
        rounds: Rounds,
        patience: float,
        used: Callable[[Used], None] | None,
    ):
        self._schedule, self._needs_all = rounds.schedule, sends_changes(rounds)
        exchanges = tuple(map(as_permutations, rounds.schedule.exchanges))
        topology = Topology(rounds.schedule.name, exchanges)
        super().__init__(
            party, topology, patience, used, compression=rounds.compression
        )
        check_whole(rounds, patience)
        if self._needs_all:
            # Otherwise a fast worker would replace a message that its peer has not yet
            # taken.
            check_symmetric(topology, "rounds that must miss no message")
        self._taken = -1

    def close(self, seconds: float) -> None:
        """Closes the links, once the peers have taken their messages."""
        end = time.monotonic() + min(seconds, self.patience)
        while self._links and self._behind() and time.monotonic() < end:
            self.links.bell.wait(self.links.bell.count)
        super().close(seconds)

    def _behind(self) -> set[int]:
        """The peers that have not yet taken the last round taken here."""
        return self.sources & self.links.alive() - self.links.ahead(self._taken - 1)

    def _number_of(self, step: int) -> int:
        return self._schedule.count(step)

    def _note(self, used: Used, models: Models) -> None:
        """Records a round by the step at which it begins."""
        self._check_whole(used)
        at = self._schedule.step_of
        taken = (
            one._replace(step=at(one.step), sent=at(one.sent)) for one in used.models
        )
        by_step = used._replace(step=at(used.step), models=tuple(taken))
        super()._note(by_step, models)
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
