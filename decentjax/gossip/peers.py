"""Exchanges from peer to peer, without collectives.

Each worker leaves its newest model for the peers of the step, group by group, and takes
what they have left. A peer that is slow, frozen or dead delays the others by at most
the patience that is asked for.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from decentjax.exchange import Permutations, Topology, check_topology
from decentjax.gossip.book import Book
from decentjax.gossip.links import POLL_SECONDS, Links, Message
from decentjax.gossip.record import Record
from decentjax.gossip.rows import Rows, check_workers, rows_of, with_rows
from decentjax.gossip.staged import Arrival, Staged
from decentjax.gossip.stages import Plan
from decentjax.gossip.ways import WAYS, Used, Way, neighbors
from decentjax.mixing import is_mixed
from decentjax.placement import place
from decentjax.step import Adapt, WorkerState


class Peers(Staged):
    """The step of `Background` without collectives: `x_i <- sum_j W_ij x_j + update`.

    A worker mixes what has come from its peers when its gradient is done, and waits
    at most `patience` seconds for the rest, whose weight stays with its own model. What
    this does to the mean of all models depends on `way`. With `patience=math.inf` and
    an exchange in which each receives from those to whom it sends, all models arrive,
    and the numbers are those of `awc_step`: bit for bit, or with "push_sum" up to
    rounding.

    Args:
      adapt: as in `Background`.
      topology: topology whose exchanges are taken in turn, by each worker at its own
        pace; permutations of single workers, such as `ring` or `exponential`.
      book: where the workers' addresses stand, such as `Folder("peers")`.
      workers: numbers of the workers of this process, in the order of the mesh.
      mesh: mesh of this process's devices, with the axis "workers" alone.
      way: how models are used: "arrived" averages with what has come, "swaps" swaps
        models with peers, "push_sum" sends mass along; see `decentjax.gossip.ways`.
      patience: longest time that a step waits for models, in seconds.
      digest: text that all workers must share, such as their config.
      bind: HOST or HOST:PORT where this process listens.
      secret: bytes that all processes share, and prove to know; None for none.
      record: as in `Background`, for "compute" and "wait".
      used: function that is called with what each worker has mixed.

    Raises:
      TypeError: if `topology` is no `Topology`.
      ValueError: if the topology has groups or nodes or does not allow this way, the
        workers do not fit it or the mesh, or the patience is negative; at the first
        step, if the address is not free, or another process answers as one of these
        workers.
    """

    def __init__(
        self,
        adapt: Adapt,
        topology: Topology,
        book: Book,
        workers: Sequence[int],
        mesh: Mesh,
        *,
        way: Literal["arrived", "swaps", "push_sum"] = "arrived",
        patience: float = 0.0,
        digest: str = "",
        bind: str = "127.0.0.1",
        secret: bytes | None = None,
        record: Record | None = None,
        used: Callable[[Used], None] | None = None,
    ):
        check_topology(topology)
        check_workers(workers, topology.num_workers, mesh)
        check_graph(topology)
        if not patience >= 0:
            raise ValueError(f"patience must not be negative, got {patience}")
        if way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
        WAYS[way].check(topology)
        super().__init__(adapt, mesh, record)
        self._topology, self._book, self._workers = topology, book, tuple(workers)
        self._patience, self._digest = patience, digest
        self._bind, self._secret = bind, secret
        self._used = used or (lambda _: None)
        self._make_way = WAYS[way]
        self._links: Links | None = None
        self._way: Way | None = None
        self._deadline = 0.0
        self._num_groups = 0
        self._masses: dict[tuple[int, int], float] = {}

    @property
    def links(self) -> Links:
        """Who is there, and who was refused; after the first step has begun."""
        assert self._links is not None
        return self._links

    @property
    def way(self) -> Way:
        """How models are used, with the masses; after the first step has begun."""
        assert self._way is not None
        return self._way

    def alive(self) -> set[int]:
        """Returns the workers of other processes that are there."""
        return self.links.alive()

    @property
    def refused(self) -> dict[int, str]:
        """Why a worker was left out, for each that was."""
        return dict(self.links.refused)

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
        params = jax.tree.unflatten(structure, with_rows(leaves, rows, self._mesh))
        step = max(message.said.step for groups in found for message in groups)
        return state._replace(params=params), step

    def settle(self) -> None:
        """Returns at once: no other program can wait for an exchange of this one."""

    def _end(self, seconds: float) -> None:
        del seconds
        if self._links is not None:
            self._links.close()

    def _start(self, params: Any, plan: Plan) -> None:
        leaves = jax.tree.leaves(params)
        channels = [
            [
                jax.ShapeDtypeStruct((1, *leaves[i].shape[1:]), leaves[i].dtype)
                for i in stage.leaves
                if is_mixed(leaves[i])
            ]
            for stage in plan.groups
        ]
        devices = dict(zip(self._workers, self._mesh.devices.flat, strict=True))
        num_workers = self._topology.num_workers
        self._num_groups = num_groups = len(channels)
        if self._make_way.answers:
            channels += [[]] * num_groups
        digest = f"{self._make_way.__name__} {self._digest}"
        links = Links(
            self._book,
            num_workers,
            devices,
            channels,
            digest,
            self._bind,
            self._secret,
        )
        self._way = self._make_way(links, self._topology, num_groups)
        self._links = links
        graph = {j for i in self._workers for j in neighbors(self._topology, i)}
        links.meet(graph, time.monotonic() + self._patience)

    def _carry(self, group: int, models: list[jax.Array], step: int) -> Arrival:
        of_workers = rows_of(models)
        # They may still be computing: a peer's pull takes them once they are done.
        for worker, own in zip(self._workers, of_workers, strict=True):
            self.way.send(worker, group, own, step)
            if group + 1 == self._num_groups:
                self.way.ask(worker, step)
        return functools.partial(self._receive, group, models, of_workers, step)

    def _receive(
        self, group: int, models: list[jax.Array], of_workers: list[Rows], step: int
    ) -> list[jax.Array]:
        if group == 0:  # The patience is one step's, and not each group's.
            self._deadline = time.monotonic() + self._patience
        rows = []
        for worker, own in zip(self._workers, of_workers, strict=True):
            used, versions = self.way.take(worker, group, own, step, self._deadline)
            rows.append(self._make_way.combine(self._topology, used, versions))
            self._masses[worker, group] = used.mass
            self._used(used)
        return with_rows(models, rows, self._mesh)

    def _updated(
        self, group: int, mixed: dict[int, jax.Array], new: dict[int, jax.Array]
    ) -> dict[int, jax.Array]:
        masses = [self._masses[worker, group] for worker in self._workers]
        return divide_updates(mixed, new, masses, self._mesh)

    def _first_answer(
        self, worker: int, num_groups: int, deadline: float
    ) -> list[Message]:
        """The model of the first peer that answers, group by group; else nothing."""
        peers = neighbors(self._topology, worker)
        while time.monotonic() < deadline:
            for peer in sorted(peers & self.links.alive()):
                # Left where they are, as a swap may yet be completed by them.
                newest = [self.links.newest(worker, peer, g) for g in range(num_groups)]
                found = [message for message in newest if message is not None]
                if len(found) == num_groups:
                    return found
            time.sleep(POLL_SECONDS)
        return []


def divide_updates(
    mixed: dict[int, jax.Array],
    new: dict[int, jax.Array],
    masses: Sequence[float],
    mesh: Mesh,
) -> dict[int, jax.Array]:
    """`mixed + (new - mixed) / mass` of stacked leaves."""
    if all(mass == 1 for mass in masses):
        return new
    old = {i: mixed.get(i, x) for i, x in new.items()}
    return _divided(old, new, place(np.array(masses, np.float32), mesh))


@jax.jit
def _divided(
    old: dict[int, jax.Array], new: dict[int, jax.Array], masses: jax.Array
) -> dict[int, jax.Array]:
    def divide(x: jax.Array, y: jax.Array) -> jax.Array:
        mass = masses.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
        return x + (y - x) / mass if is_mixed(x) else y

    return jax.tree.map(divide, old, new)


def check_graph(topology: Topology) -> None:
    """Raises a ValueError if an exchange has groups or nodes."""
    for exchange in topology:
        if exchange.workers_per_node > 1 or not isinstance(
            exchange.between, Permutations
        ):
            raise ValueError(
                f"{topology.name} averages over groups or nodes, which takes "
                "collectives; peers need a graph of single workers, such as ring"
            )
