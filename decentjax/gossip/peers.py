"""Exchanges from peer to peer, without collectives.

Each worker leaves its newest model for the peers of the step, group by group, and takes
what they have left. A peer that is slow, frozen or dead delays the others by at most
the patience that is asked for.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from decentjax._first_model import first_model
from decentjax._norms import norm_of, sums_of_squares
from decentjax.exchange import Permutations, Topology, check_topology
from decentjax.gossip.book import Book
from decentjax.gossip.elastic import Elastic, Living, adopted, copies, travels
from decentjax.gossip.links import Links, Message, Said
from decentjax.gossip.record import Record
from decentjax.gossip.rows import Rows, check_workers, rows_of, with_rows
from decentjax.gossip.staged import Arrival, Staged
from decentjax.gossip.stages import Plan
from decentjax.gossip.ways import WAYS, Graph, Used, Way, neighbors
from decentjax.local import Adapt
from decentjax.loss import Metrics
from decentjax.mixing import is_mixed
from decentjax.placement import place
from decentjax.state import WorkerState

JOIN_SECONDS = 3.0  # For a peer's state, before the next peer is asked.
MEET_SECONDS = 1.0  # For a peer that is ahead, where others are there.
APART_STEPS = 10  # Between two measurements of how far models are apart.


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
      bind: HOST, HOST:PORT, or [HOST]:PORT for IPv6, where this process listens.
      secret: bytes that all processes share, and prove to know; None for none.
      record: as in `Background`, for "compute" and "wait".
      used: function that is called with what each worker has mixed.
      elastic: how to go on when workers come and go, for "arrived": then a step's
        exchange is that of `elastic.graph` over the workers that are there, and
        `topology`, that of all of them, tells their greatest number.

    Raises:
      TypeError: if `topology` is no `Topology`.
      ValueError: if the topology has groups or nodes or does not allow this way, the
        workers do not fit it or the mesh, the patience is negative, or `elastic` comes
        with another way, without an end of the patience, or without a graph for each
        number of workers; at the first step, if the address is not free, or another
        process answers as one of these workers.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, init_state, local_update, topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer = optax.adam(0.1)
      >>> local = local_update(loss_fn, optimizer)
      >>> state = init_state(jnp.zeros(3), optimizer, jax.random.key(0), 1)
      >>> book = gossip.Folder("peers")
      >>> graph, mesh = topology.ring(1), worker_mesh(1)
      >>> with gossip.Peers(local, graph, book, [0], mesh) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
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
        elastic: Elastic | None = None,
    ):
        check_topology(topology)
        check_workers(workers, topology.num_workers, mesh)
        check_graph(topology)
        if not patience >= 0:
            raise ValueError(f"patience must not be negative, got {patience}")
        if way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
        WAYS[way].check(topology)
        if elastic is not None:
            if way != "arrived" or patience == math.inf:
                raise ValueError(
                    'elastic needs the way "arrived", and a patience that ends: got '
                    f"{way!r} and {patience}"
                )
            elastic.check(topology.num_workers)
            for n in range(1, topology.num_workers + 1):
                check_graph(elastic.graph(n))
        super().__init__(adapt, mesh, record)
        self._topology, self._book, self._workers = topology, book, tuple(workers)
        self._patience, self._digest = patience, digest
        self._bind, self._secret = bind, secret
        self._used = used or (lambda _: None)
        self._make_way, self._elastic = WAYS[way], elastic
        self._graph: Graph = topology
        self._links: Links | None = None
        self._way: Way | None = None
        self._deadline = 0.0
        self._num_groups = 0
        self._num_channels = 0  # Of models; the next one is for whole states.
        self._was_away = False
        self._masses: dict[tuple[int, int], float] = {}
        # Squared distances to the models mixed last, by worker and leaf group.
        self._apart: dict[tuple[int, int], list[jax.Array]] = {}

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

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        """As that of `Background`; a peer that asks for the state gets a copy."""
        self._plan(state, batch, step)
        guests = self.links.joining()
        own = {w: copies(state, self._workers.index(w)) for w in {w for _, w in guests}}
        for guest, worker in guests:
            whole = self._num_channels
            self.links.publish(worker, guest, whole, own[worker], Said(step))
        self.links.at(step)
        return super().__call__(state, batch, step)

    def has_quorum(self) -> bool:
        """Whether as many workers live as the quorum asks for.

        Where not, take no step, and ask again soon: the others may train without this
        process. True before the first step, and without `elastic`.
        """
        if self._elastic is None or self._links is None:
            return True
        there = {*self._living(), *self.links.left}
        is_there = len(there) >= self._elastic.quorum
        self._was_away |= not is_there
        return is_there

    def was_away(self) -> bool:
        """Whether the others went on without this process since the last call.

        It was frozen and given up, or had no quorum. Then `join` takes it to where they
        are.
        """
        found, self._was_away = self._was_away, False
        return (self._links is not None and self._links.was_silent()) or found

    def apart(self) -> float | None:
        """Returns how far models are apart, as this process has seen it last.

        The root mean square of `|x_j - x_i|`, over its workers i and the models of
        peers j that they have mixed; with `elastic`, of one step in ten. For models at
        a distance c from their mean, `E |x_j - x_i|^2 = 2 c^2 N / (N - 1)`. None
        before any has come.
        """
        if not self._apart:
            return None
        groups = self._apart.values()
        squares = sum(np.mean([float(x) ** 2 for x in one]) for one in groups)
        return math.sqrt(squares / len(self._workers))

    def join(
        self,
        state: WorkerState,
        batch: Any,
        seconds: float = 60.0,
        after: int = -1,
        alone: float = 10.0,
    ) -> tuple[WorkerState, int | None]:
        """Returns the state of a peer, to begin where it is.

        For a worker that joins others who are training, or comes back to them. It takes
        the model, the optimizer's state and all else but the random key.

        Args:
          state: state of the workers of this process, as for a step.
          batch: batch of any step, for its shapes.
          seconds: longest time to wait for a peer's state.
          after: step that a peer must be past.
          alone: longest time to wait where no peer is there.

        Returns:
          The state, and the step to go on with; None where no peer is past `after`, or
          none has answered.
        """
        self._compile(state, batch)  # Else the others would be far ahead by then.
        messages, now = [], time.monotonic()
        for worker in self._workers:
            message = self._whole(worker, after, now + seconds, now + alone)
            if message is None:
                return state, None
            messages.append(message)
        leaves, structure = jax.tree.flatten(state._replace(key=()))
        rows = [message.arrays for message in messages]
        new = jax.tree.unflatten(
            structure, with_rows(leaves, rows, self._mesh, travels)
        )
        return new._replace(key=state.key), max(m.said.step for m in messages)

    def _compile(self, state: WorkerState, batch: Any) -> None:
        """Compiles the parts of a step, whose results are dropped."""
        plan = self._plan(state, batch)
        state = jax.tree.map(jnp.copy, state)  # It is donated.
        values = plan.early(state.params, state[1:], batch)
        mixed = dict(enumerate(jax.tree.leaves(state.params)))
        for stage in (*plan.groups, plan.rest):
            stage.compute(mixed, values)

    def settle(self) -> None:
        """Returns at once: no other program can wait for an exchange of this one."""

    def _end(self, seconds: float) -> None:
        del seconds
        if self._links is not None:
            self._links.close()

    def _start(self, state: WorkerState, plan: Plan, step: int) -> None:
        leaves = jax.tree.leaves(state.params)
        channels = [
            [_row(leaves[i]) for i in stage.leaves if is_mixed(leaves[i])]
            for stage in plan.groups
        ]
        devices = dict(zip(self._workers, self._mesh.devices.flat, strict=True))
        num_workers = self._topology.num_workers
        self._num_groups = num_groups = len(channels)
        if self._make_way.answers:
            channels += [[]] * num_groups
        self._num_channels = len(channels)
        channels.append([_row(x) for x in adopted(state) if travels(x)])
        digest = f"{self._make_way.__name__} {self._digest}"
        links = Links(
            self._book,
            num_workers,
            devices,
            channels,
            digest,
            self._bind,
            self._secret,
            None if self._elastic is None else self._elastic.silent_seconds,
            first_model=first_model(state.params, step),
        )
        if self._elastic is not None:
            self._graph = Living(self._elastic, num_workers, self._living)
        self._way = self._make_way(links, self._graph, num_groups)
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
            rows.append(self._make_way.combine(self._graph, used, versions))
            self._masses[worker, group] = used.mass
            if self._elastic and used.models and step % APART_STEPS == 0:
                self._apart[worker, group] = [
                    _distance(own, versions[taken.peer, taken.step])
                    for taken in used.models
                ]
            self._used(used)
        return with_rows(models, rows, self._mesh)

    def _updated(
        self, group: int, mixed: dict[int, jax.Array], new: dict[int, jax.Array]
    ) -> dict[int, jax.Array]:
        masses = [self._masses[worker, group] for worker in self._workers]
        return divide_updates(mixed, new, masses, self._mesh)

    def _living(self) -> list[int]:
        """The workers that are there, those of this process included."""
        return sorted(self.alive() | set(self._workers))

    def _whole(
        self, worker: int, after: int, end: float, alone: float
    ) -> Message | None:
        """The whole state of the first peer that leaves it, of those that are ahead.

        Waits until `end`, and where no peer is there until `alone`.
        """
        if self._topology.num_workers == len(self._workers):
            return None
        begin, whole = time.monotonic(), self._num_channels
        each = max(JOIN_SECONDS, (end - begin) / 4)
        while (now := time.monotonic()) < end:
            heard = self.links.bell.count
            ahead = self.links.ahead(after)
            if not ahead and now > (begin + MEET_SECONDS if self.alive() else alone):
                break
            for peer in sorted(ahead):
                self.links.ask_to_join(worker, peer)
                late = min(time.monotonic() + each, end)
                message = self.links.wait(worker, peer, whole, after + 1, late)
                if message is not None and message.said.step > after:
                    return message
            self.links.bell.wait(heard)
        return None


@jax.jit
def _distance(models: Rows, others: Rows) -> jax.Array:
    pairs = zip(models, others, strict=True)
    return norm_of(sums_of_squares([x.astype(jnp.float32) - y for x, y in pairs]))


def _row(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)


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
