"""Ways to use the models of peers.

Each way sends the models of a step, one leaf group after another, and mixes them with
the models received once the step's gradient is done. They differ in their effect on the
mean of all models, which each class states.
"""

import abc
import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from decentjax._core.collectives import sum_dtype
from decentjax._core.norms import norm_of, sums_of_squares
from decentjax._rounds.low_rank import LowRank
from decentjax._rounds.sending import Leaves
from decentjax.codec import of_leaf
from decentjax.compression import Encoding
from decentjax.exchange import Exchange, Permutations, Topology, permutes_of
from decentjax.gossip.batches_read import Ledger
from decentjax.gossip.layout import Rows, on_each_device
from decentjax.links import Links, Said
from decentjax.mixing import mix_arrived, mix_swapped
from decentjax.plan import Plan, rounds_of, topology_of
from decentjax.rounds import Rounds


class Graph(Protocol):
    """An exchange for each step, such as a `Topology`."""

    def __getitem__(self, step: int, /) -> Exchange: ...


class Taken(NamedTuple):
    """A model of a peer that a worker has mixed.

    Args:
      peer: number of the peer.
      step: the peer's step for which it sent the model.
      sent: in a swap, the worker's own step whose model the peer received in return;
        otherwise the step in which it is mixed.
      weight: its weight in a mean of a `Quorum`, which then has the own model too; None
        for that of the graph.
    """

    peer: int
    step: int
    sent: int
    weight: float | None = None


class LeftOut(NamedTuple):
    """A model of a peer that a `Guard` has left out, or clipped.

    Args:
      peer: number of the peer.
      step: the peer's step for which it sent the model.
      why: "distance" or "age".
      value: the distance of the model, or its age in rounds.
    """

    peer: int
    step: int
    why: str
    value: float


class MergeRecord(NamedTuple):
    """The peers' models that a worker has mixed, and their versions, for a replay.

    Args:
      step: step of the worker.
      worker: number of the worker.
      group: number of the leaf group; for an average over a group of workers, the step
        whose groups summed the models, later than `step` for a late worker.
      models: the models, in the order in which they were added.
      left_out: models that a guard did not trust.
    """

    step: int
    worker: int
    group: int
    models: tuple[Taken, ...]
    left_out: tuple[LeftOut, ...] = ()

    def versions(self) -> set[tuple[int, int]]:
        """The models needed to repeat this, as (worker, step)."""
        own = {(self.worker, self.step)} | {(self.worker, x.sent) for x in self.models}
        return own | {(one.peer, one.step) for one in self.models}


Models = dict[tuple[int, int], Rows]
"""Leaves of a group before a step, by worker and step."""


class Way(abc.ABC):
    """A way to use the models of peers.

    Args:
      links: links to the peers.
      topology: the exchange of each step.
      ledger: what is known of the data; None where no worker comes or goes.

    Attributes:
      takes_newest: whether a model stands for all that its worker has sent before, so
        that workers may come and go, and patience may adapt.
      gathers: whether it awaits the models of all peers together.
    """

    takes_newest, gathers = False, False

    def __init__(self, links: Links, topology: Graph, ledger: Ledger | None = None):
        self._links, self._topology, self._ledger = links, topology, ledger

    def said(self, step: int, *parts: int) -> Said:
        """What a message says: the step, and parts that end with the ledger."""
        if self._ledger is None:
            return Said(step, parts=parts)
        return Said(step, parts=(*parts, *self._ledger.positions.tolist()))

    def heard(self, said: Said) -> None:
        """Takes over what a merged message says of the data."""
        if self._ledger is not None:
            self._ledger.hear(said.parts)

    @staticmethod
    def check(topology: Topology) -> None:
        """Raises a ValueError if the graph does not allow this way."""
        del topology

    def enough(self, num_peers: int) -> int:
        """The number of peers, of some, without whose models no exchange ends."""
        del num_peers
        return 0

    @abc.abstractmethod
    def send(self, worker: int, group: int, own: Rows, step: int) -> None:
        """Sends a worker's leaves to its peers of the step; returns at once."""

    @abc.abstractmethod
    def take(
        self, worker: int, group: int, own: Rows, step: int, deadline: float
    ) -> tuple[MergeRecord, Models]:
        """Returns what to mix in a step: the record, and its models."""

    @staticmethod
    @abc.abstractmethod
    def combine(topology: Graph, used: MergeRecord, models: Models) -> Rows:
        """Returns the mixed leaves, determined by the record and its models."""


class Arrived(Way):
    """Averages with the models received so far: `mix_arrived`.

    Rows of W sum to one, columns need not, so the mean of all models shifts towards the
    models that are received more often. Works on any graph.
    """

    takes_newest = True

    def send(self, worker: int, group: int, own: Rows, step: int) -> None:
        said = self.said(step)
        for peer, _ in receivers(self._topology[step], worker):
            self._links.publish(worker, peer, group, own, said)

    def take(
        self, worker: int, group: int, own: Rows, step: int, deadline: float
    ) -> tuple[MergeRecord, Models]:
        taken, models = [], {(worker, step): own}
        for peer, _ in senders(self._topology[step], worker):
            how = worker, peer, group, step, deadline
            if message := self._links.wait(*how, is_model=True):
                taken.append(Taken(peer, message.said.step, step))
                models[peer, message.said.step] = message.arrays
                self.heard(message.said)
        return MergeRecord(step, worker, group, tuple(taken)), models

    @staticmethod
    def combine(topology: Graph, used: MergeRecord, models: Models) -> Rows:
        return _average(topology, used, models)


@dataclasses.dataclass
class Swap:
    """The swaps of a leaf group with one peer, one at a time.

    Args:
      life: life of the peer's process; a new one restarts the count at 0.
      number: number of the open or next swap.
      sent: the arrays that were sent, while the swap is open.
      step: the step for which they were sent.
      bases: bases of the edge, in swaps of low rank.
    """

    life: int = 0
    number: int = 0
    sent: Rows | None = None
    step: int = 0
    bases: Rows | None = None


class Swaps(Way):
    """Swaps models with the peers of the step, one swap at a time: `mix_swapped`.

    Both sides of a swap move by the same difference, with opposite signs, so the mean
    of all models is preserved, however late one of them is. A peer whose last swap is
    still open is left out. The graph must be symmetric; with random pairs this is
    AD-PSGD (Lian et al., 2018) without its atomic averaging.
    """

    def __init__(self, links: Links, topology: Graph, ledger: Ledger | None = None):
        super().__init__(links, topology, ledger)
        self._swaps: dict[tuple[int, int], dict[int, Swap]] = collections.defaultdict(
            lambda: collections.defaultdict(Swap)
        )

    @staticmethod
    def check(topology: Topology) -> None:
        check_symmetric(topology, "swaps")

    def send(self, worker: int, group: int, own: Rows, step: int) -> None:
        of_peers = self._swaps[worker, group]
        for peer, _ in senders(self._topology[step], worker):
            life, swap = self._links.life_of(peer), of_peers[peer]
            if swap.life != life:
                # Swaps with the previous process may be lost.
                swap = of_peers[peer] = Swap(life)
            # Nothing is sent to others, and a swap with them would never close.
            if life and peer in self._links.met and swap.sent is None:
                swap.sent, swap.step = self._message((worker, group), swap, own), step
                said, channel = Said(step, swap.number), self._channel(group, swap)
                self._links.publish(worker, peer, channel, swap.sent, said)

    def take(
        self, worker: int, group: int, own: Rows, step: int, deadline: float
    ) -> tuple[MergeRecord, Models]:
        taken, models = [], {(worker, step): own}
        for peer, swap in self._swaps[worker, group].items():
            if swap.sent is None:
                continue
            # Only the swaps that this step began are waited for.
            late = deadline if swap.step == step else 0.0
            message = self._links.wait_for_number(
                worker, peer, self._channel(group, swap), swap.number, swap.life, late
            )
            if message is not None:
                one = Taken(peer, message.said.step, swap.step)
                found = self._models((worker, group), swap, own, one, message.arrays)
                swap.sent, swap.number = None, swap.number + 1
                if found:
                    taken.append(one)
                    models |= found
        return MergeRecord(step, worker, group, tuple(taken)), models

    def _channel(self, group: int, swap: Swap) -> int:
        """The channel of the messages of a swap."""
        del swap
        return group

    def _message(self, of: tuple[int, int], swap: Swap, own: Rows) -> Rows:
        """What a worker sends in a swap of a group; `of` has both."""
        del of, swap
        return own

    def _models(
        self, of: tuple[int, int], swap: Swap, own: Rows, one: Taken, came: Rows
    ) -> Models:
        """What a complete swap adds to the models of a record; nothing if void."""
        del own
        assert swap.sent is not None
        return {(one.peer, one.step): came, (of[0], one.sent): swap.sent}

    @staticmethod
    def combine(topology: Graph, used: MergeRecord, models: Models) -> Rows:
        of_step = {one for one in used.models if one.step == one.sent == used.step}
        mixed = _average(topology, used._replace(models=tuple(of_step)), models)
        for one in used.models:
            if one not in of_step:
                sent = models[used.worker, one.sent]
                came = models[one.peer, one.step]
                weight = swap_weight(topology, used.worker, one)
                mixed = _mix_swapped(mixed, sent, came, weight)
        return mixed


def swap_weight(topology: Graph, worker: int, one: Taken) -> float:
    """The weight of a swap at both ends, from the later of their steps."""
    return dict(senders(topology[max(one.step, one.sent)], worker))[one.peer]


def swaps_of(plan: Plan) -> tuple[Topology, LowRank | None]:
    """Returns the graph of swaps, and how their messages are encoded.

    Raises:
      ValueError: unless a plan exchanges whole models in every step.
    """
    if isinstance(plan, Topology):
        return plan, None
    rounds = rounds_of(plan)
    coded = rounds.compression
    of_models = dataclasses.replace(rounds, compression=None).averages_models
    is_early = of_models and rounds.delay == 1 and not rounds.has_hooks
    if is_early and isinstance(coded, LowRank):
        return topology_of(rounds), coded
    raise ValueError(
        "swaps exchange models in every step, a step ahead: pass a topology, or "
        "Rounds(topology, delay=1, compression=low_rank(rank)), got "
        f"{type(rounds).__name__} of every {rounds.every} steps with a delay of "
        f"{rounds.delay} and the compression {coded and coded.name}"
    )


WAYS: dict[str, type[Way]] = {
    "arrived": Arrived,
    "swaps": Swaps,
}


@functools.lru_cache(maxsize=4096)
def senders(exchange: Exchange, worker: int) -> tuple[tuple[int, float], ...]:
    """Returns the peers from which a worker receives, and their weights."""
    assert isinstance(exchange.between, Permutations)
    _, permutes = permutes_of(exchange.between)
    return tuple(
        (one.sources[worker], exchange.factor * one.weights[worker])
        for one in permutes
        if one.sources[worker] >= 0
    )


@functools.lru_cache(maxsize=4096)
def receivers(exchange: Exchange, worker: int) -> tuple[tuple[int, float], ...]:
    """Returns the peers to which a worker sends, and its weight at each of them."""
    everyone = range(exchange.num_workers)
    return tuple(
        (i, weight)
        for i in everyone
        for j, weight in senders(exchange, i)
        if j == worker
    )


def neighbors(topology: Topology, worker: int) -> set[int]:
    """Returns the peers with which a worker exchanges models in any step."""
    return {
        j
        for exchange in topology
        for peers in (senders, receivers)
        for j, _ in peers(exchange, worker)
    }


def chosen(
    topology: Graph, used: MergeRecord, models: Models
) -> tuple[Rows, list[Rows], tuple[float, ...]]:
    """Returns a worker's own model, one for each peer of the step, and their weights.

    A missing model is replaced by its own, which has no effect: one program for all
    cases, instead of one for each set of received models.
    """
    own = models[used.worker, used.step]
    came = {
        one.peer: models[one.peer, one.step]
        for one in used.models
        if one.sent == used.step
    }
    exchange = senders(topology[used.step], used.worker)
    found = [came.get(peer, own) for peer, _ in exchange]
    return own, found, tuple(weight for _, weight in exchange)


def _average(topology: Graph, used: MergeRecord, models: Models) -> Rows:
    """The mean with the peers of the step, by the weights of its exchange."""
    return _mix_arrived(*chosen(topology, used, models))


@on_each_device
@jax.jit
def distances(models: Rows, others: Rows) -> list[jax.Array]:
    """The distance of two workers' leaves, of the pieces on each device."""
    pairs = zip(models, others, strict=True)
    apart = [x.astype(sum_dtype(x)) - y.astype(sum_dtype(y)) for x, y in pairs]
    return [norm_of(sums_of_squares(apart))]


@on_each_device
@functools.partial(jax.jit, static_argnums=2)
def _mix_arrived(own: Rows, models: list[Rows], weights: tuple[float, ...]) -> Rows:
    leaves = zip(own, *models, strict=True)
    return [mix_arrived(x, came, weights) for x, *came in leaves]


@on_each_device
@functools.partial(jax.jit, static_argnums=3)
def _mix_swapped(own: Rows, sent: Rows, came: Rows, weight: float) -> Rows:
    return [
        mix_swapped(*leaves, weight) for leaves in zip(own, sent, came, strict=True)
    ]


def check_symmetric(topology: Topology, what: str) -> None:
    """Raises a ValueError if a sender to a worker does not receive from it."""
    for exchange in topology:
        for worker in range(exchange.num_workers):
            if set(senders(exchange, worker)) != set(receivers(exchange, worker)):
                raise ValueError(
                    f"{topology.name} is not symmetric: {what} need a graph in which "
                    "each worker receives from those to which it sends, with the same "
                    "weight, such as ring or random_matching"
                )


class Form(NamedTuple):
    """How the leaves of one worker are sent and averaged.

    Args:
      compression: how they are encoded; None sends them unencoded.
      structure: tree of the arrays sent, by number of the leaf.
      leaves: shapes of the leaves, in the order of their numbers.
    """

    compression: Encoding | None
    structure: Any
    leaves: tuple[tuple[int, ...], ...]

    def parts(self, models: Any) -> tuple[Leaves, list[jax.Array]]:
        """The leaves, and the arrays of their messages, from those of `travelling`."""
        if self.compression is None:
            return models, list(models.values())
        messages = {number: message for number, (_, message) in models.items()}
        leaves = {number: leaf for number, (leaf, _) in models.items()}
        return leaves, jax.tree.leaves(messages)

    def average(self, graph: Graph, used: MergeRecord, models: Models) -> Rows:
        """The result of `default_mix` for encoded leaves.

        Over the received messages, with q the decoded ones, it is

            by differences   sum_j W_ij (q_j - q_i)
            of drift         the mean of all q_j, and q_i
        """
        assert self.compression is not None  # Else the way averages.
        if self.compression.is_of_all:
            # In the same order on all workers: their anchors stay equal bit for bit.
            return _mean(self, [models[key] for key in sorted(models)])
        return _difference(self, *chosen(graph, used, models))

    def decode(self, rows: Rows) -> Rows:
        """The leaves of a message."""
        assert self.compression is not None
        codec = self.compression.codec
        messages = jax.tree.unflatten(self.structure, [x[0] for x in rows])
        pairs = zip(messages.items(), self.leaves, strict=True)
        return [
            of_leaf(codec, number).decode(message, shape)[None]
            for (number, message), shape in pairs
        ]


def form_of(rounds: Rounds, leaves: Leaves) -> tuple[Form, list[Any]]:
    """The form of stacked leaves, and the arrays of their messages, or their shapes."""
    sent: Any = leaves
    compression: Any = rounds.compression
    if compression is not None:
        first = functools.partial(compression.init, rounds.schedule, is_late=True)
        first = jax.vmap(first)
        sent = jax.eval_shape(first, leaves).messages
    arrays, structure = jax.tree.flatten(sent)
    of_leaves = tuple(x.shape[1:] for x in jax.tree.leaves(leaves))
    return Form(compression, structure, of_leaves), arrays


def sends_changes(rounds: Rounds) -> bool:
    """Whether messages are parts of a sum, none of which may be lost."""
    one = rounds.compression
    return rounds.keeps_sums or (one is not None and one.sends_changes)


def sends_by_edge(rounds: Rounds) -> bool:
    """Whether the messages to two neighbors differ."""
    return rounds.compression is not None and not rounds.compression.sends_alike


def check_whole(rounds: Rounds, patience: float) -> None:
    """Raises a ValueError for rounds that peers cannot have.

    Those whose messages must not be lost, and would not be waited for, whose means are
    weighted, but not by a quorum, or with stacked leaves.
    """
    if rounds.stacked:
        raise ValueError(
            "peers send whole leaves: leave out stacked of the rounds, or use on_mesh "
            "or gossip.Background"
        )
    if rounds.count_tokens is not None:
        raise ValueError(
            "between peers a quorum weighs means by tokens: use "
            'merge=gossip.Quorum(weights="tokens", count_tokens=...), and leave out '
            "count_tokens of the rounds"
        )
    if sends_changes(rounds) and patience < math.inf:
        raise ValueError(
            "drift, copies and gradient tracking sum what is sent, and a lost message "
            f"would leave a sum wrong for good: use patience=math.inf, got {patience}"
        )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _difference(
    form: Form, own: Rows, models: list[Rows], weights: tuple[float, ...]
) -> Rows:
    total = [jnp.zeros_like(x) for x in form.decode(own)]
    for model, weight in zip(models, weights, strict=True):
        pairs = zip(form.decode(model), form.decode(own), total, strict=True)
        total = [y + weight * (x - q) for x, q, y in pairs]
    return total


@functools.partial(jax.jit, static_argnums=0)
def _mean(form: Form, models: list[Rows]) -> Rows:
    of_leaves = zip(*map(form.decode, models), strict=True)
    return [functools.reduce(jnp.add, x) / len(models) for x in of_leaves]
