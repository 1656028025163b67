"""Peer-to-peer WAGMA-SGD: group averages that do not wait for late workers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from decentjax._core.collectives import is_mixed
from decentjax._core.fingerprint import first_model
from decentjax.compression import Leaves
from decentjax.gossip.layout import Layout, Rows
from decentjax.gossip.means import Butterfly, GroupMeans, sum_pieces
from decentjax.gossip.merging import MergeRecord, Taken
from decentjax.gossip.peers import MOST_BEHIND, Admitted, PeerStep
from decentjax.gossip.port import Arrival, Port, Record
from decentjax.links import Links, PeerProcess, check_party
from decentjax.rounds import Rounds
from decentjax.state import WorkerState
from decentjax.topology import complete
from decentjax.updates import Adapt

JOIN_SECONDS = 10.0  # Wait for a mean of partners that are ahead.


class Wagma(PeerStep):
    """A step with an average over a small group, which does not wait for late workers.

    In step t a worker averages with its group, see `Butterfly`; every `period` steps
    with all workers. The order "atc", the paper's, averages after the update:

        x' = x + update(grad f(x)),    x <- (sum of the group's models) / S

    and with order "awc", that of its code, x <- (sum of the group's models) / S +
    update(grad f(x)), where the exchange runs beside the gradient. The first worker of
    a group begins its exchange; late workers take part with the model that they offered
    before, and then add their own: (sum + x') / (S + 1). So a model in a sum is at most
    `period` steps old, and after each mean of all the models are equal.

    A group's sum takes log2 S models on each link. Dead processes are left out.

    Args:
      local: as in `Background`.
      groups: the groups: N, S and the period.
      party: this process, its workers, and how it finds its peers.
      order: "atc" or "awc".
      patience: longest wait for a live but silent worker, in seconds; in a mean of all
        workers, for the slowest.
      record: as in `Background`, for "compute" and "wait".
      used: function called with the models that each worker has averaged.

    Raises:
      TypeError: if `groups` is not a `Butterfly`, or `party` not a `PeerProcess`.
      ValueError: if the workers do not fit, or the order or the patience is invalid; at
        the first step as in `Peers`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, local_update, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.adam(0.1))
      >>> party = gossip.PeerProcess(gossip.Folder("peers"), [0], worker_mesh(1))
      >>> groups = gossip.Butterfly(num_workers=1, group_size=1, period=10)
      >>> with gossip.Wagma(local, groups, party) as train_step:
      ...     state, t = train_step.init(jnp.zeros(3), jax.random.key(0)), 0
      ...     while t < 10:
      ...         read = lambda shard, number: jnp.ones(3)
      ...         state, t, metrics = train_step(state, read, t)

    Source: Li et al., WAGMA-SGD (2020), algorithm 2.
    """

    def __init__(
        self,
        local: Adapt,
        groups: Butterfly,
        party: PeerProcess,
        *,
        order: Literal["atc", "awc"] = "atc",
        patience: float = 60.0,
        record: Record | None = None,
        used: Callable[[MergeRecord], None] | None = None,
    ):
        if not isinstance(groups, Butterfly):
            raise TypeError(
                "wanted a gossip.Butterfly(num_workers, group_size, period), got "
                f"{type(groups).__name__}"
            )
        rounds = group_rounds(groups, order)
        self._averaging = _GroupPort(groups, party, order, patience, used)
        mesh, own = party.mesh, party.workers
        super().__init__(local, rounds, mesh, self._averaging, record, own)

    def alive(self) -> set[int]:
        return self._averaging.means.alive if self._is_open else set()

    @property
    def refused(self) -> dict[int, str]:
        return self._averaging.means.refused if self._is_open else {}

    def admit(
        self,
        state: WorkerState,
        batch: Any,
        step: int,
        ended: Callable[[], bool] = lambda: False,
    ) -> Admitted:
        """Returns the state and the step with which this process continues.

        If partners are ahead at its first call, it takes a mean of their models, and
        keeps its own optimizer state and everything else.
        """
        if self._is_open:
            return Admitted(state, step)
        self._open(state, batch, step)
        leaves, structure = jax.tree.flatten(state.params)
        own, after = self._averaging.rows(leaves), step + MOST_BEHIND
        at, found = self._averaging.means.ask(own, after, JOIN_SECONDS, ended)
        if len(found) < len(own) or at < step:
            return Admitted(state, step, "alone")
        layout = self._averaging.layout
        rows = [found[worker] for worker in own]
        params = jax.tree.unflatten(structure, layout.stacked(leaves, rows))
        return Admitted(state._replace(params=params), at + 1, "joined")


class _GroupPort(Port):
    """The port of `Wagma`: averages are over whole models."""

    takes_groups = False

    def __init__(
        self,
        groups: Butterfly,
        party: PeerProcess,
        order: str,
        patience: float,
        used: Callable[[MergeRecord], None] | None,
    ):
        check_party(party)
        party.check(groups.num_workers)
        if not patience > 0:
            raise ValueError(f"patience must be positive, got {patience}")
        self._groups, self._party, self._order = groups, party, order
        self._patience, self._used = patience, used or (lambda _: None)
        self._means: GroupMeans | None = None

    @property
    def means(self) -> GroupMeans:
        """The means over groups; once it is open."""
        assert self._means is not None
        return self._means

    def open(
        self, state: WorkerState, groups: Sequence[Sequence[int]], step: int
    ) -> None:
        del groups  # There is only one.
        num_workers = self._groups.num_workers
        models = jax.tree.leaves(state.params)
        self.layout = Layout(models, self._party.mesh)
        shapes = [(x.shape[1:], x.dtype.name) for x in filter(is_mixed, models)]
        first, *_ = Layout(models, self._party.mesh, lambda _: True).rows(models)
        links = Links(
            self._party,
            num_workers,
            [sum_pieces(self.layout.pieces), []],
            f"Wagma {self._groups} {self._order} {shapes}",
            num_parts=num_workers,
            first_model=first_model(first, step),
        )
        workers = self._party.workers
        self._means = GroupMeans(links, self._groups, workers, self._patience)

    def carry(self, group: int, leaves: Leaves, step: int) -> Arrival:
        """Offers the models of a step, which may still be computing."""
        del group
        own = self.rows(list(leaves.values()))
        self.means.check_first_models()
        self.means.offer(step, own)
        return functools.partial(self._averaged, leaves, own, step)

    def rows(self, leaves: Sequence[jax.Array]) -> dict[int, Rows]:
        """The leaves of each worker of this process."""
        return dict(zip(self._party.workers, self.layout.rows(leaves), strict=True))

    def close(self, seconds: float) -> None:
        """Closes the means, and waits at most this long for partners that need them."""
        if self._means is not None:
            self._means.close(seconds)

    def _averaged(self, leaves: Leaves, own: dict[int, Rows], step: int) -> Leaves:
        means, found = self.means.mean(step, own)
        for worker in own:
            self._used(found.used(step, worker))
        rows = [means[worker] for worker in own]
        whole = self.layout.stacked(list(leaves.values()), rows)
        return dict(zip(leaves, whole, strict=True))


def group_rounds(groups: Butterfly, order: str) -> Rounds:
    """Rounds of every step in an order; the port decides whose models are averaged.

    Raises:
      ValueError: if the order is neither "atc" nor "awc".
    """
    if order not in ("atc", "awc"):
        raise ValueError(f'order must be "atc" or "awc", got {order!r}')
    delay = 1 if order == "awc" else 0
    return Rounds(complete(groups.num_workers), delay=delay)


def averages(groups: Butterfly, ready: np.ndarray) -> list[MergeRecord]:
    """Returns what groups average if workers finish their models at these times.

    For a simulation by `replay`: the first worker of a group to be ready begins its
    exchange, which takes no time; in a mean of all, the last one does. The others take
    part with the newest model that they have by then.

    Args:
      groups: who averages with whom.
      ready: time at which each worker has its model of each step, [T, N], seconds,
        such as `start + compute` of `decentjax.runtime.wait_avoiding`.

    Examples:
      >>> import numpy as np
      >>> from decentjax import gossip
      >>> groups = gossip.Butterfly(num_workers=2, group_size=2, period=10)
      >>> ready = np.array([[1.0, 1.0], [2.0, 5.0]])
      >>> [(one.peer, one.step) for one in gossip.averages(groups, ready)[2].models]
      [(0, 1), (1, 0)]
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
            models = (
                Taken(i, int(at), step)
                for i, at in zip(own, newest, strict=True)
                if at >= 0
            )
            found.append(MergeRecord(step, worker, step, tuple(models)))
    return found
