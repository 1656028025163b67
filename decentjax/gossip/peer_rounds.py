"""Rounds from peer to peer, without collectives."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from decentjax._first_model import first_model
from decentjax.codec import as_permutations
from decentjax.compression import Leaves
from decentjax.exchange import Exchange, Topology
from decentjax.gossip.book import Book
from decentjax.gossip.late import LateRounds
from decentjax.gossip.links import Links
from decentjax.gossip.messages import check_whole, form_of, needs_all
from decentjax.gossip.peers import check_graph
from decentjax.gossip.record import Record
from decentjax.gossip.rows import Rows, check_workers, rows_of, with_rows
from decentjax.gossip.ways import (
    Arrived,
    Used,
    check_symmetric,
    neighbors,
    senders,
)
from decentjax.local import Adapt
from decentjax.rounds import Rounds, _check_rounds, leaves_of


class PeerRounds(LateRounds):
    """`round_step` whose models travel from peer to peer, as those of `Peers` do.

    A worker leaves its model for the peers of a round, and merges, `delay` steps later,
    what has come from them; it waits at most `patience` seconds for the rest, whose
    weight stays with its own model. The rows of W sum to one then, but its columns need
    not: the mean of all models moves towards those that others receive more often. With
    `patience=math.inf` and exchanges in which each receives from those to whom it sends
    the numbers are those of `round_step`, up to rounding, and a worker ends once its
    peers have what it has left, or after 10 s. A mean of all models is a message from
    each worker to each.

    With a compression the encoded messages travel. Of "model" a worker averages what
    has come, q the decoded messages: `x_i + sum_j W_ij (q_j - q_i)`. Each message of
    "drift" or "copy" is a change of what workers share, and of tracking a part of a
    sum; one that is missing would be missing for ever: these need
    `patience=math.inf` and a symmetric graph, and end with an error where a peer is
    lost.

    Args:
      adapt: as in `BackgroundRounds`.
      rounds: the rounds; each worker counts its own steps.
      book: where the workers' addresses stand, such as `Folder("peers")`.
      workers: numbers of the workers of this process, in the order of the mesh.
      mesh: mesh of this process's devices, with the axis "workers" alone.
      patience: longest time that a round waits for models, in seconds.
      digest: text that all workers must share, such as their config.
      bind: HOST, HOST:PORT, or [HOST]:PORT for IPv6, where this process listens.
      secret: bytes that all processes share, and prove to know; None for none.
      record: as in `Background`, for "compute" and "wait".
      used: function that is called with what each worker has mixed; a round has the
        step at which it begins, and `group` is the number of the fragment.

    Raises:
      ValueError: if the rounds have nodes or shards, the workers do not fit them or the
        mesh, or the patience is negative or too short for these rounds; at the first
        step as in `Peers`.
      ConnectionError: at a step, if a message of "drift", "copy" or tracking is
        missing.

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
      >>> book, mesh = gossip.Folder("peers"), worker_mesh(1)
      >>> with gossip.PeerRounds(local, rounds, book, [0], mesh) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
    """

    def __init__(
        self,
        adapt: Adapt,
        rounds: Rounds,
        book: Book,
        workers: Sequence[int],
        mesh: Mesh,
        *,
        patience: float = 0.0,
        digest: str = "",
        bind: str = "127.0.0.1",
        secret: bytes | None = None,
        record: Record | None = None,
        used: Callable[[Used], None] | None = None,
    ):
        if not patience >= 0:
            raise ValueError(f"patience must not be negative, got {patience}")
        _check_rounds(rounds)
        check_whole(rounds, patience)
        schedule = rounds.schedule
        check_workers(workers, schedule.num_workers, mesh)
        exchanges = tuple(map(as_permutations, schedule.exchanges))
        topology = Topology(schedule.name, exchanges)
        check_graph(topology)
        if needs_all(rounds):
            # Else a fast worker would replace a message that its peer has not taken.
            check_symmetric(topology, "rounds that must miss no message")
        connect = functools.partial(
            Links,
            book,
            schedule.num_workers,
            digest=digest,
            bind=bind,
            secret=secret,
        )
        self._peers = _PeerCarrier(
            rounds,
            topology,
            workers,
            mesh,
            patience,
            connect,
            used or (lambda _: None),
        )
        super().__init__(adapt, rounds, mesh, self._peers, record)

    @property
    def links(self) -> Links:
        """Who is there, and who was refused; after the first step has begun."""
        assert self._peers.links is not None
        return self._peers.links

    def alive(self) -> set[int]:
        """Returns the workers of other processes that are there."""
        return self.links.alive()

    @property
    def refused(self) -> dict[int, str]:
        """Why a worker was left out, for each that was."""
        return dict(self.links.refused)


@dataclasses.dataclass
class _PeerCarrier:
    """Leaves what rounds send for peers, and takes what they have left.

    Args:
      rounds: the rounds.
      topology: their exchanges, by the number of the round.
      workers: numbers of the workers of this process.
      mesh: mesh of its devices.
      patience: longest wait of a round, in seconds.
      connect: function of the workers' devices and the channels that makes the links.
      used: function that is called with what each worker has mixed.
      links: links to the peers, once there are any.
    """

    rounds: Rounds
    topology: Topology
    workers: Sequence[int]
    mesh: Mesh
    patience: float
    connect: Callable[..., Links]
    used: Callable[[Used], None]
    links: Links | None = None
    _taken: int = -1

    def start(self, params: Any, step: int) -> None:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
        self._forms = [
            form_of(self.rounds.compression, leaves_of(fragment, one))
            for fragment in self.rounds.schedule.fragments
        ]
        devices = dict(zip(self.workers, self.mesh.devices.flat, strict=True))
        self.links = self.connect(
            devices,
            [form.arrays for form in self._forms],
            first_model=first_model(params, step),
        )
        self._way = Arrived(self.links, self.topology, len(self._forms))
        self._graph = {j for i in self.workers for j in neighbors(self.topology, i)}
        self.links.meet(self._graph, time.monotonic() + self.patience)

    def carry(self, models: Any, exchange: Exchange, step: int) -> "_Awaited":
        del exchange  # That of the round's number.
        assert self.links is not None
        schedule = self.rounds.schedule
        number, one = schedule.count(step), schedule[step].sends
        assert one is not None
        group = schedule.fragments.index(one.leaves)
        leaves, arrays = self._forms[group].parts(models)
        of_workers = rows_of(arrays, travels=lambda _: True)
        for worker, own in zip(self.workers, of_workers, strict=True):
            self._way.send(worker, group, own, number)
            for peer, _ in senders(self.topology[number], worker):
                self.links.ask(worker, peer, group)
        return _Awaited(self, leaves, of_workers, group, number)

    def take(
        self, leaves: Leaves, of_workers: list[Rows], group: int, number: int
    ) -> Leaves:
        assert self.links is not None
        deadline = time.monotonic() + self.patience
        rows = []
        for worker, own in zip(self.workers, of_workers, strict=True):
            used, versions = self._way.take(worker, group, own, number, deadline)
            self._check_whole(used)
            rows.append(self._forms[group].average(self.topology, used, versions))
            self.used(self._by_step(used))
        # As in `Peers`, where models are left a step ahead.
        self._taken = number - 1
        self.links.at(self._taken)
        flat, structure = jax.tree.flatten(leaves)
        return jax.tree.unflatten(structure, with_rows(flat, rows, self.mesh))

    def _check_whole(self, used: Used) -> None:
        """Raises a ConnectionError where a change is missing."""
        came = {one.peer for one in used.models if one.step == used.step}
        senders_of = senders(self.topology[used.step], used.worker)
        missing = sorted({peer for peer, _ in senders_of} - came)
        if missing and needs_all(self.rounds):
            raise ConnectionError(
                f"worker {used.worker} has no message of the workers {missing} in "
                f"round {used.step}, and would be off by it for ever: go on with all "
                "workers from a step that all have saved"
            )

    def _by_step(self, used: Used) -> Used:
        """A record of rounds by the steps at which they begin."""
        at = self.rounds.schedule.step_of
        models = (
            one._replace(step=at(one.step), sent=at(one.sent)) for one in used.models
        )
        return used._replace(step=at(used.step), models=tuple(models))

    def settle(self) -> None:
        """Returns at once: no other program can wait for an exchange of this one."""

    def _end(self, seconds: float) -> None:
        if self.links is None:
            return
        end = time.monotonic() + min(seconds, self.patience)
        # What a process has left cannot be taken once it has ended.
        while self._behind(self.links) and time.monotonic() < end:
            self.links.bell.wait(self.links.bell.count)
        self.links.close()

    def _behind(self, links: Links) -> set[int]:
        """The peers that have not yet taken the last round that is taken here."""
        return self._graph & links.alive() - links.ahead(self._taken - 1)


class _Awaited(NamedTuple):
    """A round under way."""

    carrier: _PeerCarrier
    leaves: Leaves
    of_workers: list[Rows]
    group: int
    number: int

    def result(self) -> Leaves:
        """Takes what has come, once it is needed."""
        return self.carrier.take(*self[1:])
