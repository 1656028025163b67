"""Rounds from peer to peer, without collectives."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from decentjax.codec import as_permutations
from decentjax.compression import Leaves
from decentjax.exchange import Exchange, Topology
from decentjax.gossip.book import Book
from decentjax.gossip.late import LateRounds
from decentjax.gossip.links import Links
from decentjax.gossip.peers import check_graph
from decentjax.gossip.record import Record
from decentjax.gossip.rows import Rows, check_workers, rows_of, with_rows
from decentjax.gossip.ways import Arrived, Used, neighbors, senders
from decentjax.rounds import Rounds, leaves_of
from decentjax.schedule import Schedule
from decentjax.step import Adapt


class PeerRounds(LateRounds):
    """`round_step` whose models travel from peer to peer, as those of `Peers` do.

    A worker leaves its model for the peers of a round, and merges, `delay` steps later,
    what has come from them; it waits at most `patience` seconds for the rest, whose
    weight stays with its own model. The rows of W sum to one then, but its columns need
    not: the mean of all models moves towards those that others receive more often. With
    `patience=math.inf` the numbers are those of `round_step`, up to rounding. A mean of
    all models is a message from each worker to each.

    Args:
      adapt: as in `BackgroundRounds`.
      rounds: the rounds, without compression; each worker counts its own steps.
      book: where the workers' addresses stand, such as `Folder("peers")`.
      workers: numbers of the workers of this process, in the order of the mesh.
      mesh: mesh of this process's devices, with the axis "workers" alone.
      patience: longest time that a round waits for models, in seconds.
      digest: text that all workers must share, such as their config.
      bind: HOST or HOST:PORT where this process listens.
      secret: bytes that all processes share, and prove to know; None for none.
      record: as in `Background`, for "compute" and "wait".
      used: function that is called with what each worker has mixed; a round has the
        step at which it begins, and `group` is the number of the fragment.

    Raises:
      ValueError: if the rounds have nodes or a compression, the workers do not fit them
        or the mesh, or the patience is negative; at the first step as in `Peers`.

    Examples:
      >>> import functools
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import adapt, gossip, init_rounds, init_state, methods
      >>> from decentjax import topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer, params, key = optax.adam(0.1), jnp.zeros(3), jax.random.key(0)
      >>> local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optimizer)
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
        if rounds.compression is not None:
            raise ValueError("peers send leaves as they are: leave compression at None")
        if not patience >= 0:
            raise ValueError(f"patience must not be negative, got {patience}")
        schedule = rounds.schedule
        check_workers(workers, schedule.num_workers, mesh)
        exchanges = tuple(map(as_permutations, schedule.exchanges))
        topology = Topology(schedule.name, exchanges)
        check_graph(topology)
        connect = functools.partial(
            Links,
            book,
            schedule.num_workers,
            digest=digest,
            bind=bind,
            secret=secret,
        )
        self._peers = _PeerCarrier(
            schedule,
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
      schedule: the rounds.
      topology: their exchanges, by the number of the round.
      workers: numbers of the workers of this process.
      mesh: mesh of its devices.
      patience: longest wait of a round, in seconds.
      connect: function of the workers' devices and the channels that makes the links.
      used: function that is called with what each worker has mixed.
      links: links to the peers, once there are any.
    """

    schedule: Schedule
    topology: Topology
    workers: Sequence[int]
    mesh: Mesh
    patience: float
    connect: Callable[..., Links]
    used: Callable[[Used], None]
    links: Links | None = None

    def start(self, params: Any) -> None:
        channels = [
            [
                jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
                for x in leaves_of(fragment, params).values()
            ]
            for fragment in self.schedule.fragments
        ]
        devices = dict(zip(self.workers, self.mesh.devices.flat, strict=True))
        self.links = self.connect(devices, channels)
        self._way = Arrived(self.links, self.topology, len(channels))
        graph = {j for i in self.workers for j in neighbors(self.topology, i)}
        self.links.meet(graph, time.monotonic() + self.patience)

    def carry(self, models: Leaves, exchange: Exchange, step: int) -> "_Awaited":
        del exchange  # That of the round's number.
        assert self.links is not None
        number = self.schedule.count(step)
        one = self.schedule[step].sends
        assert one is not None
        group = self.schedule.fragments.index(one.leaves)
        of_workers = rows_of(list(models.values()))
        for worker, own in zip(self.workers, of_workers, strict=True):
            self._way.send(worker, group, own, number)
            for peer, _ in senders(self.topology[number], worker):
                self.links.ask(worker, peer, group)
        return _Awaited(self, models, of_workers, group, number)

    def take(
        self, models: Leaves, of_workers: list[Rows], group: int, number: int
    ) -> Leaves:
        deadline = time.monotonic() + self.patience
        rows = []
        for worker, own in zip(self.workers, of_workers, strict=True):
            used, versions = self._way.take(worker, group, own, number, deadline)
            rows.append(Arrived.combine(self.topology, used, versions))
            self.used(self._by_step(used))
        mixed = with_rows(list(models.values()), rows, self.mesh)
        return dict(zip(models, mixed, strict=True))

    def _by_step(self, used: Used) -> Used:
        """A record of rounds by the steps at which they begin."""
        at = self.schedule.step_of
        models = (
            one._replace(step=at(one.step), sent=at(one.sent)) for one in used.models
        )
        return used._replace(step=at(used.step), models=tuple(models))

    def settle(self) -> None:
        """Returns at once: no other program can wait for an exchange of this one."""

    def _end(self, seconds: float) -> None:
        del seconds
        if self.links is not None:
            self.links.close()


class _Awaited(NamedTuple):
    """A round under way."""

    carrier: _PeerCarrier
    models: Leaves
    of_workers: list[Rows]
    group: int
    number: int

    def result(self) -> Leaves:
        """Takes what has come, once it is needed."""
        return self.carrier.take(*self[1:])
