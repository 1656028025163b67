"""The port of groups: averages of WAGMA-SGD that do not wait for late workers."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from decentjax._core.collectives import is_mixed
from decentjax._core.fingerprint import first_model
from decentjax._core.patience import AutoPatience
from decentjax.compression import Leaves
from decentjax.gossip.layout import Layout, Rows
from decentjax.gossip.means import GroupMeans, sum_pieces
from decentjax.gossip.merging import MergeRecord, Taken
from decentjax.gossip.peer_port import PartyPort
from decentjax.gossip.port import Arrival
from decentjax.links import Links, PeerProcess
from decentjax.methods import Wagma
from decentjax.state import WorkerState

JOIN_SECONDS = 10.0  # Wait for a mean of partners that are ahead.


class GroupPort(PartyPort):
    """The port of `Peers` over the groups of WAGMA-SGD.

    The first worker of a group begins its exchange; late workers take part with the
    model that they offered before, and then add their own. A thread serves the groups,
    so that the step itself does not look at the links again.
    """

    takes_groups, rejoins = False, False

    def __init__(
        self,
        party: PeerProcess,
        groups: Wagma,
        patience: float | AutoPatience,
        used: Callable[[MergeRecord], None] | None,
    ):
        super().__init__(party, groups.num_workers)
        if isinstance(patience, AutoPatience) or not patience > 0:
            raise ValueError(
                "groups wait for live but silent workers for a while, and in a mean of "
                f"all for the slowest: give a patience such as 60.0, got {patience}"
            )
        self._groups, self._patience = groups, patience
        self._used = used or (lambda _: None)
        self._means: GroupMeans | None = None

    @property
    def means(self) -> GroupMeans:
        """The means over groups; once it is open."""
        assert self._means is not None
        return self._means

    def alive(self) -> set[int]:
        return self.means.alive

    def join(
        self, state: WorkerState, after: int, ended: Callable[[], bool]
    ) -> tuple[WorkerState, int] | None:
        """A mean of the partners' models; all else stays the worker's own."""
        del after
        leaves, structure = jax.tree.flatten(state.params)
        own = self.rows(leaves)
        step, found = self.means.ask(own, JOIN_SECONDS, ended)
        if len(found) < len(own):
            return None
        rows = self.layout.stacked(leaves, [found[worker] for worker in own])
        params = jax.tree.unflatten(structure, rows)
        return state._replace(params=params), step + 1

    def open(
        self, state: WorkerState, groups: Sequence[Sequence[int]], step: int
    ) -> None:
        del groups  # There is only one.
        plan, models = self._groups, jax.tree.leaves(state.params)
        self.layout = Layout(models, self.party.mesh)
        how = plan.group_size, plan.period, plan.delay
        shapes = [(x.shape[1:], x.dtype.name) for x in filter(is_mixed, models)]
        first, *_ = Layout(models, self.party.mesh, lambda _: True).rows(models)
        self._links = Links(
            self.party,
            plan.num_workers,
            [sum_pieces(self.layout.pieces), []],
            f"Wagma {how} {shapes}",
            num_parts=plan.num_workers,
            first_model=first_model(first, step),
        )
        workers = self.party.workers
        self._means = GroupMeans(self._links, plan, workers, self._patience)

    def carry(self, group: int, leaves: Leaves, step: int) -> Arrival:
        """Offers the models of a step, which may still be computing."""
        del group
        own = self.rows(list(leaves.values()))
        self.means.check_first_models()
        self.means.offer(step, own)
        return functools.partial(self._averaged, leaves, own, step)

    def rows(self, leaves: Sequence[jax.Array]) -> dict[int, Rows]:
        """The leaves of each worker of this process."""
        return dict(zip(self.party.workers, self.layout.rows(leaves), strict=True))

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


def averages(groups: Wagma, ready: np.ndarray) -> list[MergeRecord]:
    """Returns what groups average if workers finish their models at these times.

    For a simulation by `replay`: the first worker of a group to be ready begins its
    exchange, which takes no time; in a mean of all, the last one does. The others take
    part with the newest model that they have by then.

    Args:
      groups: who averages with whom, as of `methods.wagma`.
      ready: time at which each worker has its model of each step, [T, N], seconds,
        such as `start + compute` of `decentjax.runtime.wait_avoiding`.

    Examples:
      >>> import numpy as np
      >>> from decentjax import gossip, methods
      >>> groups = methods.wagma(num_workers=2, group_size=2, period=10)
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
