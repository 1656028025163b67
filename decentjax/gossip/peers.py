"""Exchanges from peer to peer, which wait for nobody.

Each worker leaves its newest model for the peers of the step, group by group, and takes
what they have left. There is no collective: a peer that is slow, frozen or dead delays
nobody beyond the patience that is asked for.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax.exchange import (
    Exchange,
    Permutations,
    Topology,
    check_topology,
    rounds_of,
)
from decentjax.gossip.book import Book
from decentjax.gossip.links import POLL_SECONDS, Links, Message
from decentjax.gossip.record import Record
from decentjax.gossip.staged import Arrival, Staged
from decentjax.gossip.stages import Plan
from decentjax.mixing import mix_arrived
from decentjax.step import AXIS, Adapt, WorkerState


class Used(NamedTuple):
    """Which version of whose model a worker mixed.

    Args:
      step: step of the worker.
      worker: number of the worker.
      group: number of the leaf group.
      models: (peer, its step) of each model, in the order in which they were added.
    """

    step: int
    worker: int
    group: int
    models: tuple[tuple[int, int], ...]


class Peers(Staged):
    """The step of `Background` without collectives: `x_i <- sum_j W_ij x_j + update`.

    A worker mixes what has come from its peers when its gradient is done, and waits
    at most `patience` seconds for the rest, whose weight stays with its own model. So W
    is row-stochastic, and the mean of all models moves: towards those whose models
    arrive more often than others' arrive at them. With `patience=math.inf` and an
    exchange in which each receives from those to whom it sends, all models arrive, and
    the numbers are those of `awc_step`.

    Args:
      adapt: as in `Background`.
      topology: topology whose exchanges are taken in turn, by each worker at its own
        pace; permutations of single workers, such as `ring` or `exponential`.
      book: where the workers' addresses stand, such as `Folder("peers")`.
      workers: numbers of the workers of this process, in the order of the mesh.
      mesh: mesh of this process's devices, with the axis "workers" alone.
      patience: longest time that a step waits for models, in seconds.
      digest: text that all workers must share, such as their config.
      bind: HOST or HOST:PORT where this process listens.
      record: as in `Background`.
      used: function that is called with what each worker has mixed.

    Raises:
      TypeError: if `topology` is no `Topology`.
      ValueError: if the topology has groups or nodes, or the workers do not fit it or
        the mesh.
    """

    def __init__(
        self,
        adapt: Adapt,
        topology: Topology,
        book: Book,
        workers: Sequence[int],
        mesh: Mesh,
        *,
        patience: float = 0.0,
        digest: str = "",
        bind: str = "127.0.0.1",
        record: Record | None = None,
        used: Callable[[Used], None] | None = None,
    ):
        check_topology(topology)
        _check_workers(workers, topology, mesh)
        super().__init__(adapt, mesh, record)
        self._topology, self._book, self._workers = topology, book, tuple(workers)
        self._patience, self._digest, self._bind = patience, digest, bind
        self._used = used or (lambda _: None)
        self._links: Links | None = None
        self._deadline = 0.0

    @property
    def links(self) -> Links:
        """Who is there, and who was refused; after the first step has begun."""
        assert self._links is not None
        return self._links

    def join(
        self, state: WorkerState, batch: Any, seconds: float = 10.0
    ) -> tuple[WorkerState, int | None]:
        """Returns the state with a peer's newest model, to begin where the peers are.

        For a worker that joins others who are training, or comes back to them. The
        optimizer's state and all else stay its own.

        Args:
          state: state of the workers of this process, as for a step.
          batch: batch of any step, for its shapes.
          seconds: longest time to wait for a model.

        Returns:
          The state, and the step to go on with; None where no peer has answered.
        """
        plan = self._plan(state, batch)
        deadline = time.monotonic() + seconds
        found = [
            self._first_answer(w, len(plan.groups), deadline) for w in self._workers
        ]
        if not all(found):
            return state, None
        rows = [[x for message in groups for x in message.arrays] for groups in found]
        leaves, structure = jax.tree.flatten(state.params)
        params = jax.tree.unflatten(structure, self._stacked(rows, leaves))
        step = max(message.step for groups in found for message in groups)
        return state._replace(params=params), step

    def settle(self) -> None:
        """Returns at once: no other program can wait for an exchange of this one."""

    def _end(self, seconds: float) -> None:
        if self._links is not None:
            self._links.close()

    def _start(self, params: Any, plan: Plan) -> None:
        leaves = jax.tree.leaves(params)
        channels = [
            [
                jax.ShapeDtypeStruct((1, *leaves[i].shape[1:]), leaves[i].dtype)
                for i in stage.leaves
            ]
            for stage in plan.groups
        ]
        devices = dict(zip(self._workers, self._mesh.devices.flat, strict=True))
        num_workers = self._topology.num_workers
        self._links = Links(
            self._book, num_workers, devices, channels, self._digest, self._bind
        )

    def _carry(self, group: int, models: list[jax.Array], step: int) -> Arrival:
        exchange = self._topology[step]
        # Published before they are computed, the peer would wait for them in its pull.
        rows = [_rows(x) for x in models]
        for row, worker in enumerate(self._workers):
            for peer in receivers(exchange, worker):
                self.links.publish(worker, peer, group, [x[row] for x in rows], step)
        return functools.partial(self._receive, group, models, step)

    def _receive(
        self, group: int, models: list[jax.Array], step: int
    ) -> list[jax.Array]:
        if group == 0:  # The patience is one step's, and not each group's.
            self._deadline = time.monotonic() + self._patience
        rows = [_rows(x) for x in models]
        mixed = [
            self._mix(worker, group, [x[row] for x in rows], step)
            for row, worker in enumerate(self._workers)
        ]
        return self._stacked(mixed, models)

    def _stacked(
        self, rows: Sequence[Sequence[jax.Array]], like: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The leaves of all workers of this process, of each worker's leaves."""
        place = NamedSharding(self._mesh, PartitionSpec(AXIS))
        return [
            jax.make_array_from_single_device_arrays(x.shape, place, list(of_leaf))
            for x, of_leaf in zip(like, zip(*rows, strict=True), strict=True)
        ]

    def _first_answer(
        self, worker: int, num_groups: int, deadline: float
    ) -> list[Message]:
        """The model of the first peer that answers, group by group; else nothing."""
        peers = {j for exchange in self._topology for j, _ in senders(exchange, worker)}
        while time.monotonic() < deadline:
            for peer in sorted(peers & self.links.alive()):
                asked = (
                    self.links.wait(worker, peer, group, 0, deadline)
                    for group in range(num_groups)
                )
                found = [message for message in asked if message is not None]
                if len(found) == num_groups:
                    return found
            time.sleep(POLL_SECONDS)
        return []

    def _mix(
        self, worker: int, group: int, own: list[jax.Array], step: int
    ) -> list[jax.Array]:
        models, weights, used = [], [], []
        for peer, weight in senders(self._topology[step], worker):
            message = self.links.wait(worker, peer, group, step, self._deadline)
            weights.append(weight)
            # In place of a model that has not come the worker's own leaves it as it is:
            # one program, and not one for each choice of those that have.
            models.append(own if message is None else message.arrays)
            if message is not None:
                used.append((peer, message.step))
        self._used(Used(step, worker, group, tuple(used)))
        return _mix_leaves(own, models, tuple(weights))


@functools.lru_cache(maxsize=4096)
def senders(exchange: Exchange, worker: int) -> tuple[tuple[int, float], ...]:
    """Returns the peers from which a worker receives, and their weights."""
    assert isinstance(exchange.between, Permutations)
    _, rounds = rounds_of(exchange.between)
    return tuple(
        (one.sources[worker], exchange.factor * one.weights[worker])
        for one in rounds
        if one.sources[worker] >= 0
    )


@functools.lru_cache(maxsize=4096)
def receivers(exchange: Exchange, worker: int) -> tuple[int, ...]:
    """Returns the peers to which a worker sends."""
    everyone = range(exchange.num_workers)
    return tuple(
        i for i in everyone if any(j == worker for j, _ in senders(exchange, i))
    )


@functools.partial(jax.jit, static_argnums=2)
def _mix_leaves(
    own: list[jax.Array], models: list[list[jax.Array]], weights: tuple[float, ...]
) -> list[jax.Array]:
    of_leaves = zip(*models, strict=True) if models else ([] for _ in own)
    return [
        mix_arrived(x, list(of_leaf), weights)
        for x, of_leaf in zip(own, of_leaves, strict=True)
    ]


def _rows(stacked: jax.Array) -> list[jax.Array]:
    """The row of each worker of this process, [1, ...], on its device."""
    shards = sorted(
        stacked.addressable_shards, key=lambda shard: shard.index[0].start or 0
    )
    return [shard.data for shard in shards]


def _check_workers(workers: Sequence[int], topology: Topology, mesh: Mesh) -> None:
    if dict(mesh.shape) != {AXIS: len(workers)}:
        raise ValueError(
            f'Peers needs a mesh with the axis "{AXIS}" alone, of this process\'s '
            f"{len(workers)} workers, got {dict(mesh.shape)}"
        )
    strangers = [i for i in workers if not 0 <= i < topology.num_workers]
    if strangers or len(set(workers)) < len(workers):
        raise ValueError(
            f"workers must be different numbers from 0 to {topology.num_workers - 1}, "
            f"got {list(workers)}"
        )
    for exchange in topology:
        if exchange.workers_per_node > 1 or not isinstance(
            exchange.between, Permutations
        ):
            raise ValueError(
                f"{topology.name} averages over groups or nodes, which takes "
                "collectives; peers need a graph of single workers, such as ring"
            )
