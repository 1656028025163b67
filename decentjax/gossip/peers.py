"""Peer-to-peer exchanges, without collectives.

Each worker sends its newest model to the peers of the step, group by group, and takes
theirs. A slow, frozen or dead peer delays the others by at most the patience.
"""

from collections.abc import Callable
from typing import Literal

from decentjax._core.patience import AutoPatience
from decentjax.exchange import Topology
from decentjax.gossip.batches_read import Read
from decentjax.gossip.membership import Elastic
from decentjax.gossip.merging import WAYS, Used
from decentjax.gossip.peer_port import PeerPort
from decentjax.gossip.peer_step import PeerStep
from decentjax.gossip.thread_port import Record
from decentjax.links import Party
from decentjax.rounds import Rounds
from decentjax.schedule import every
from decentjax.updates import Adapt


class Peers(PeerStep):
    """The step of `Background` without collectives: `x_i <- sum_j W_ij x_j + update`.

    When its gradient is done, a worker mixes the models received so far, and waits at
    most `patience` seconds for the others, whose weight stays with its own model. The
    effect on the mean of all models depends on `way`. With `patience=math.inf` and a
    symmetric exchange all models arrive, and the numbers are those of `awc_step`, bit
    for bit.

    Args:
      adapt: as in `Background`.
      topology: topology whose exchanges are taken in turn, by each worker
        independently; permutations of single workers, such as `ring` or `exponential`.
      party: this process, its workers, and how it finds its peers.
      way: how models are used: "arrived" averages with the models received so far,
        "swaps" swaps models with peers; see `decentjax.gossip.merging`.
      patience: longest time that a step waits for models, in seconds, or an
        `AutoPatience`, for "arrived".
      record: as in `Background`, for "compute" and "wait".
      used: function called with the models that each worker has mixed.
      read: function called with the batches that each worker has trained on, where
        these are those of `next_reads`.
      elastic: how to continue when workers join and leave, for "arrived": a step's
        exchange is then that of `elastic.graph` over the live workers, and `topology`,
        that of all workers, gives their largest number.

    Raises:
      TypeError: if `topology` is not a `Topology`, or `party` not a `Party`.
      ValueError: if the topology has groups or nodes or does not allow this way, the
        workers do not fit it, the patience is negative, or `elastic` is used with
        another way, an infinite patience, or without a graph for each number of
        workers; at the first step, if the address is in use, or another process answers
        as one of these workers.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, init_state, local_update, topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer = optax.adam(0.1)
      >>> local = local_update(loss_fn, optimizer)
      >>> state = init_state(jnp.zeros(3), optimizer, jax.random.key(0), 1)
      >>> party = gossip.Party(gossip.Folder("peers"), [0], worker_mesh(1))
      >>> with gossip.Peers(local, topology.ring(1), party) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
    """

    def __init__(
        self,
        adapt: Adapt,
        topology: Topology,
        party: Party,
        *,
        way: Literal["arrived", "swaps"] = "arrived",
        patience: float | AutoPatience = 0.0,
        elastic: Elastic | None = None,
        record: Record | None = None,
        used: Callable[[Used], None] | None = None,
        read: Callable[[Read], None] | None = None,
    ):
        if way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
        how = topology, patience, used, WAYS[way]
        port = PeerPort(party, *how, elastic=elastic, read=read)
        rounds = Rounds(every(topology, num_steps=1, delay=1))
        super().__init__(adapt, rounds, port, record)
