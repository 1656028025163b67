"""WAGMA-SGD from peer to peer: group averages that wait for no late worker."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from decentjax._first_model import first_model
from decentjax.gossip.book import Book
from decentjax.gossip.links import Links
from decentjax.gossip.means import Butterfly, GroupMeans, Means, Sums, sum_specs
from decentjax.gossip.record import Record
from decentjax.gossip.rows import Rows, check_workers, rows_of, with_rows
from decentjax.gossip.staged import Arrival, Staged
from decentjax.gossip.stages import Plan
from decentjax.local import Adapt
from decentjax.loss import Metrics
from decentjax.mixing import is_mixed
from decentjax.placement import check_not_donated, over_workers
from decentjax.state import WorkerState


class Averaged(NamedTuple):
    """Which versions of whose models a worker's group average has.

    Args:
      step: step of the worker.
      worker: number of the worker.
      groups: step whose groups added them up; later than `step` for a late worker.
      models: (member, its step) of each model in the sum, ascending. A worker whose own
        model of `step` is not among them has folded it in.
    """

    step: int
    worker: int
    groups: int
    models: tuple[tuple[int, int], ...]


class Wagma(Staged):
    """A step with an average over a small group, which waits for no late worker.

    In step t a worker averages with its group, see `Butterfly`; every `period` steps
    with all. The order "atc", the paper's, averages after the update:

        x' = x + update(grad f(x)),    x <- (sum of the group's models) / S

    and with order "awc", that of its code, x <- (sum of the group's models) / S +
    update(grad f(x)), where the exchange runs beside the gradient. The first of a group
    begins its exchange; those who are late take part with the model that they offered
    before, and then fold their own in: (sum + x') / (S + 1). So a model in a sum is at
    most `period` steps old, and after each mean of all the models are equal.

    A group's sum takes log2 S models on each link. A process that has died is left out.

    Args:
      adapt: as in `Background`.
      num_workers: N, a power of two.
      book: where the workers' addresses stand, such as `Folder("peers")`.
      workers: numbers of the workers of this process, in the order of the mesh.
      mesh: mesh of this process's devices, with the axis "workers" alone.
      group_size: S, a power of two.
      period: number of steps from one mean of all workers to the next.
      order: "atc" or "awc".
      patience: longest wait for a worker that is alive and silent, in seconds; in a
        mean of all workers, for the slowest.
      digest: text that all workers must share, such as their config.
      bind: HOST, HOST:PORT, or [HOST]:PORT for IPv6, where this process listens.
      secret: bytes that all processes share, and prove to know; None for none.
      record: as in `Background`, for "compute" and "wait".
      used: function that is called with what each worker has averaged.

    Raises:
      ValueError: if N or S is no power of two, S is more than N, the period is less
        than 1, or the workers do not fit; at the first step as `Peers`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, init_state, local_update, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer = optax.adam(0.1)
      >>> local = local_update(loss_fn, optimizer)
      >>> state = init_state(jnp.zeros(3), optimizer, jax.random.key(0), 1)
      >>> book = gossip.Folder("peers")
      >>> mesh, sizes = worker_mesh(1), {"group_size": 1, "period": 10}
      >>> with gossip.Wagma(local, 1, book, [0], mesh, **sizes) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)

    Source: Li et al., WAGMA-SGD (2020), algorithm 2.
    """

    def __init__(
        self,
        adapt: Adapt,
        num_workers: int,
        book: Book,
        workers: Sequence[int],
        mesh: Mesh,
        *,
        group_size: int,
        period: int,
        order: Literal["atc", "awc"] = "atc",
        patience: float = 60.0,
        digest: str = "",
        bind: str = "127.0.0.1",
        secret: bytes | None = None,
        record: Record | None = None,
        used: Callable[[Averaged], None] | None = None,
    ):
        self._groups = Butterfly(num_workers, group_size, period)
        check_workers(workers, num_workers, mesh)
        if order not in ("atc", "awc"):
            raise ValueError(f'order must be "atc" or "awc", got {order!r}')
        if not patience > 0:
            raise ValueError(f"patience must be positive, got {patience}")
        super().__init__(adapt, mesh, record)
        self._book, self._workers, self._order = book, tuple(workers), order
        self._patience, self._bind, self._secret = patience, bind, secret
        self._digest = f"Wagma {self._groups} {order} {digest}"
        self._used = used or (lambda _: None)
        self._local = _local_step(adapt, mesh)
        self._group_means: GroupMeans | None = None
        self._means: Means | None = None
        self._num_groups = 0
        self._whole: list[jax.Array] = []
        self._own: dict[int, Rows] = {}
        self._mixed: list[jax.Array] = []

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        return self.begin(state, batch, step)()

    def begin(
        self, state: WorkerState, batch: Any, step: int
    ) -> Callable[[], tuple[WorkerState, Metrics]]:
        """Begins a step, as far as it depends on no partner.

        Returns:
          A function that waits for the average, and returns what the step does.
        """
        if self._order == "awc":
            return functools.partial(super().__call__, state, batch, step)
        check_not_donated(state, batch, state[1:])
        self._open(state.params, step)
        start = time.monotonic()
        new, metrics = self._local(state.params, state[1:], batch)
        leaves = jax.tree.leaves(jax.block_until_ready(new.params))
        self._record("compute", step, start, time.monotonic())
        own = self._offer(leaves, step)

        def finish() -> tuple[WorkerState, Metrics]:
            start = time.monotonic()
            averaged = self._averaged(leaves, own, step)
            self._record("wait", step, start, time.monotonic())
            params = jax.tree.unflatten(jax.tree.structure(new.params), averaged)
            return new._replace(params=params), metrics

        return finish

    def alive(self) -> set[int]:
        """Returns the workers of other processes that are there."""
        return self._group_means.alive if self._group_means else set()

    @property
    def refused(self) -> dict[int, str]:
        """Why a worker was left out, for each that was."""
        return self._group_means.refused if self._group_means else {}

    def join(
        self,
        state: WorkerState,
        batch: Any,
        seconds: float = 10.0,
        after: int = -1,
        alone: float = 10.0,
    ) -> tuple[WorkerState, int | None]:
        """Returns the state with a mean of partners', to begin where they are.

        As `Peers.join`, but for the optimizer's state and all else, which stay its own.
        """
        del batch
        leaves, structure = jax.tree.flatten(state.params)
        means, seconds = self._open(state.params, -1), min(seconds, alone)
        own = dict(zip(self._workers, rows_of(leaves), strict=True))
        step, found = means.ask(own, seconds)
        if len(found) < len(own) or step < after:
            return state, None
        rows = [found[worker] for worker in self._workers]
        params = jax.tree.unflatten(structure, with_rows(leaves, rows, self._mesh))
        return state._replace(params=params), step + 1

    def settle(self) -> None:
        """Returns at once: no other program can wait for an exchange of this one."""

    def _end(self, seconds: float) -> None:
        if self._group_means is not None:
            self._group_means._end(seconds)

    def _start(self, state: WorkerState, plan: Plan, step: int) -> None:
        self._num_groups = len(plan.groups)
        self._open(state.params, step)

    def _open(self, params: Any, step: int) -> GroupMeans:
        if self._group_means is not None:
            return self._group_means
        num_workers = self._groups.num_workers
        models = list(filter(is_mixed, jax.tree.leaves(params)))
        shapes = [(x.shape[1:], x.dtype.name) for x in models]
        devices = dict(zip(self._workers, self._mesh.devices.flat, strict=True))
        channels = [sum_specs(models), []]
        links = Links(
            self._book,
            num_workers,
            devices,
            channels,
            f"{self._digest} {shapes}",
            self._bind,
            self._secret,
            num_parts=num_workers,
            first_model=first_model(params, step),
        )
        means = GroupMeans(links, self._groups, self._workers, self._patience)
        self._group_means = self._means = means
        return means

    def _carry(self, group: int, models: list[jax.Array], step: int) -> Arrival:
        # An average is over whole models: it begins with the last group of leaves.
        if group == 0:
            self._whole = []
        first, whole = len(self._whole), self._whole
        whole += models
        if group + 1 == self._num_groups:
            self._own = self._offer(whole, step)
        return functools.partial(self._arrived, group, first, models, step)

    def _arrived(
        self, group: int, first: int, models: list[jax.Array], step: int
    ) -> list[jax.Array]:
        if group == 0:
            self._mixed = self._averaged(self._whole, self._own, step)
        return self._mixed[first : first + len(models)]

    def _offer(self, leaves: list[jax.Array], step: int) -> dict[int, Rows]:
        own = dict(zip(self._workers, rows_of(leaves), strict=True))
        assert self._means is not None
        if self._group_means is not None:
            self._group_means.check_first_models()
        self._means.offer(step, own)
        return own

    def _averaged(
        self, leaves: list[jax.Array], own: dict[int, Rows], step: int
    ) -> list[jax.Array]:
        assert self._means is not None
        means, found = self._means.mean(step, own)
        for worker in self._workers:
            self._used(_averaged(step, worker, found))
        return with_rows(
            leaves, [means[worker] for worker in self._workers], self._mesh
        )


def averages(groups: Butterfly, ready: np.ndarray) -> list[Averaged]:
    """Returns what groups average if workers have their models at these moments.

    For a simulation, by `replay_wagma`: the first worker of a group to be ready begins
    its exchange, which takes no time; in a mean of all the last one does. The others
    take part with the newest model that they had by then.

    Args:
      groups: who averages with whom.
      ready: moment at which each worker has its model of each step, [T, N], seconds,
        such as `start + compute` of `decentjax.runtime.wait_avoiding`.

    Examples:
      >>> import numpy as np
      >>> from decentjax import gossip
      >>> groups = gossip.Butterfly(num_workers=2, group_size=2, period=10)
      >>> ready = np.array([[1.0, 1.0], [2.0, 5.0]])
      >>> gossip.averages(groups, ready)[2].models
      ((0, 1), (1, 0))
    """
    found = []
    for step, row in enumerate(ready):
        for worker in range(groups.num_workers):
            members = {worker}
            for hop in groups.hops(step):
                members |= {member ^ hop for member in members}
            own = sorted(members)
            moment = row[own].max() if groups.is_global(step) else row[own].min()
            newest = (ready[: step + 1, own] <= moment).sum(0) - 1
            models = [
                (i, int(at)) for i, at in zip(own, newest, strict=True) if at >= 0
            ]
            found.append(Averaged(step, worker, step, tuple(models)))
    return found


def _averaged(step: int, worker: int, found: Sums) -> Averaged:
    steps = found.of_workers[worker].steps
    models = tuple((i, int(at)) for i, at in enumerate(steps) if at >= 0)
    return Averaged(step, worker, found.step, models)


# One program for all workers whose steps are repeated in one process.
@functools.lru_cache(maxsize=8)
def _local_step(adapt: Adapt, mesh: Mesh) -> Callable[..., tuple[WorkerState, Metrics]]:
    def local(params: Any, others: Any, batch: Any) -> tuple[WorkerState, Metrics]:
        return adapt(WorkerState(params, *others), batch, params)

    # The params may still be on their way to a partner.
    return jax.jit(over_workers(local, mesh), donate_argnums=1)
