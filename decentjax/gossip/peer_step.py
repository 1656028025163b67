"""What the steps of peers have in common: who lives, who joins, and what is known."""

import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from decentjax.gossip.peer_port import PeerPort
from decentjax.gossip.thread import Beside
from decentjax.gossip.thread_port import Record
from decentjax.links import Links
from decentjax.loss import Metrics
from decentjax.rounds import Rounds
from decentjax.state import WorkerState
from decentjax.updates import Adapt

MOST_BEHIND = 10  # Steps: a model that is younger hardly moves an average.


class PeerStep(Beside):
    """A step whose messages go from peer to peer: the base of `Peers` and `PeerRounds`.

    Args:
      adapt: the local update.
      rounds: its rounds.
      port: what carries them.
      record: function that is called with each activity of this process.
    """

    def __init__(
        self, adapt: Adapt, rounds: Rounds, port: PeerPort, record: Record | None
    ):
        super().__init__(adapt, rounds, port.party.mesh, port, record)
        self._peers, self._was_away = port, False

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

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        """Like that of `Background`; a peer that asks for the state gets a copy."""
        self._open(state, batch, step)
        self._peers.show(state, step)
        return super().__call__(state, batch, step)

    def check_begins(self, state: WorkerState, batch: Any, step: int) -> None:
        """Raises a ValueError for workers that begin again while others train on."""
        self._open(state, batch, step)
        if step > 0:  # A state that was saved.
            return
        ahead = self.links.returns_to(self._peers.sources, step + MOST_BEHIND)
        if ahead:
            raise ValueError(
                f"workers {sorted(self._peers.party.workers)} begin again at step "
                f"{step} while workers {sorted(ahead)} train on, and an untrained "
                "model would enter their averages: resume from a saved state and its "
                "step, end the others and start all of them again, or use local_update "
                "and gossip.Peers, whose join takes the state of a peer"
            )

    def next_reads(self, step: int) -> list[tuple[int, int]]:
        """Returns the shard and the batch that each worker here reads in a step.

        With `elastic`: worker i reads shard i, and in some turns that of a worker that
        is missing, each from where it was read before, as far as that is known from
        messages. The next call of the step counts them as
        read. So no batch is left out because its worker is away or slow, and few are
        read twice: those of workers that disagree for a moment on who is alive.
        Otherwise worker i reads batch `step` of shard i.
        """
        return self._peers.next_reads(step)

    @property
    def joined_from(self) -> list[int]:
        """The peers whose states the workers here have taken last, in `join`."""
        return [self._peers.joined_from[i] for i in self._peers.party.workers]

    @property
    def positions(self) -> list[int]:
        """With `elastic`, the first batch of each shard that is not known to be read.

        Set it to those of an earlier run to resume.
        """
        ledger = self._peers.ledger
        return [] if ledger is None else ledger.positions.tolist()

    @positions.setter
    def positions(self, positions: Sequence[int]) -> None:
        if self._peers.ledger is not None:
            self._peers.ledger.merge(positions)

    def has_quorum(self) -> bool:
        """Whether the quorum of live workers is met.

        If not, do not take a step, and ask again soon: the others may train without
        this process. True before the first step, and without `elastic`.
        """
        elastic = self._peers.elastic
        if elastic is None or not self._is_open:
            return True
        there = {*self._peers.living(), *self.links.left}
        is_there = len(there) >= elastic.quorum
        self._was_away |= not is_there
        return is_there

    def was_away(self) -> bool:
        """Whether the others continued without this process since the last call.

        It was frozen and declared lost, or had no quorum. Then `join` takes it to where
        they are.
        """
        found, self._was_away = self._was_away, False
        return (self._is_open and self.links.was_silent()) or found

    def apart(self) -> float | None:
        """Returns the distance of models, as last measured by this process.

        The root mean square of `|x_j - x_i|`, over its workers i and the models of
        peers j that they have mixed; with `elastic`, in one exchange out of ten. For
        models at a distance c from their mean, `E |x_j - x_i|^2 = 2 c^2 N / (N - 1)`.
        None before any model was received.
        """
        if not (groups := self._peers.apart.values()):
            return None
        squares = sum(np.mean([_squared(x) for x in one]) for one in groups)
        return math.sqrt(squares / len(self._peers.party.workers))

    def join(
        self,
        state: WorkerState,
        batch: Any,
        seconds: float = 60.0,
        after: int = -1,
        alone: float = 10.0,
    ) -> tuple[WorkerState, int | None]:
        """Returns the state of a peer, to start from.

        For a worker that joins, or returns to, others that are training. It takes the
        model, the optimizer's state and everything else except the random key.

        Args:
          state: state of the workers of this process, as for a step.
          batch: batch of any step, for its shapes.
          seconds: longest time to wait for a peer's state.
          after: step that a peer must be past.
          alone: longest time to wait if no peer is alive.

        Returns:
          The state, and the step to continue with; None if no peer is past `after`, or
          none has answered.
        """
        self._open(state, batch, -1)
        # Otherwise the others would be far ahead by then.
        self._compile(state, batch)
        messages, now = [], time.monotonic()
        for worker in self._peers.party.workers:
            message = self._peers.whole(worker, after, now + seconds, now + alone)
            if message is None:
                return state, None
            messages.append(message)
        for worker in self._peers.party.workers:
            if self._peers.ledger is not None:
                self._peers.ledger.forget(worker)
        leaves, structure = jax.tree.flatten(state._replace(key=()))
        rows = [message.arrays for message in messages]
        new = jax.tree.unflatten(structure, self._peers.states.stacked(leaves, rows))
        return new._replace(key=state.key), max(m.said.step for m in messages)

    def _trained(self, batch: Any) -> None:
        del batch
        self._peers.trained()


def _squared(distances: list[jax.Array]) -> float:
    return sum(float(x) ** 2 for x in distances)
