"""Exchanges in a second thread, hidden behind the gradient on any network.

On CPU no compiler overlaps a collective with the computation of the same program, nor
with that of the next program of the same thread. Two threads do: one sends the models,
leaf group by leaf group, while the other computes gradients and the optimizer's
direction. Only `params = mixed + update` is left between two exchanges. In a process
with GPUs the models travel over the host's network in the same way.

While an exchange is under way, no other thread may run a collective of the same
devices, since all processes must start collectives in one order. Finish other
collectives before the train step, and call `settle()` before the next ones. All
`Background`s of a process share one thread: they may alternate without `settle()`, in
the same order in all processes. `SharedEngine.submit` queues any other function there.
"""

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from decentjax.exchange import Topology, check_topology
from decentjax.gossip.carrier import Carrier
from decentjax.gossip.record import Record
from decentjax.gossip.staged import Arrival, Staged
from decentjax.gossip.stages import Plan
from decentjax.local import Adapt
from decentjax.mixing import Lowering
from decentjax.state import WorkerState


class Background(Staged):
    """`on_mesh(awc_step)` with its exchange in a second thread; a context that ends it.

    The call of a step waits for the exchange of this step, which the call before it
    started. It updates each group of leaves as soon as the group has arrived, and sends
    it at once in the exchange of the next step. The numbers are those of `awc_step`
    with the same lowering: bit for bit, unless XLA fuses a product with a sum in one of
    them.

    The params that a step returns are still being sent: do not donate them before
    `settle()`. At its peak a device holds the old, the mixed and the new model, and the
    optimizer's direction. Call `settle()` before you leave the context, so that all
    processes leave together.

    Args:
      adapt: the local update, as `local_update` returns it. It is cut
        where it uses `mixed`; a conditional or a loop that uses it waits as a whole.
      topology: topology whose exchanges are taken in turn.
      mesh: mesh with the axis "workers" alone.
      message_dtype: as in `mix`.
      lowering: as in `mix`; by default that of `fastest_mixes`, measured before the
        first step.
      exchange_mesh: mesh of the devices that exchange, such as `host_mesh(mesh)`; by
        default `mesh`.
      record: function that is called with each activity of this process.

    Raises:
      TypeError: if `topology` is no `Topology`.
      ValueError: if the mesh has other axes or another number of workers, or the
        devices of `exchange_mesh` are in other processes.

    Examples:
      >>> import jax
      >>> import optax
      >>> from decentjax import gossip, init_state, local_update, topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer = optax.adam(0.1)
      >>> local = local_update(loss_fn, optimizer)
      >>> state = init_state(jax.numpy.zeros(3), optimizer, jax.random.key(0), 1)
      >>> with gossip.Background(local, topology.ring(1), worker_mesh(1)) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jax.numpy.ones((1, 3)), t)
    """

    def __init__(
        self,
        adapt: Adapt,
        topology: Topology,
        mesh: Mesh,
        message_dtype: DTypeLike | None = None,
        lowering: Lowering | None = None,
        exchange_mesh: Mesh | None = None,
        record: Record | None = None,
    ):
        check_topology(topology)
        super().__init__(adapt, mesh, record)
        self._carrier = Carrier(
            topology, mesh, message_dtype, lowering, exchange_mesh, self._record
        )
        self._topology = topology

    def settle(self) -> None:
        """Waits for the exchange under way; call it before any other collective."""
        self._carrier.settle()

    def _end(self, seconds: float) -> None:
        self._carrier._end(seconds)

    def _start(self, state: WorkerState, plan: Plan, step: int) -> None:
        del plan
        self._carrier.start(state.params, step)

    def _carry(self, group: int, models: list[jax.Array], step: int) -> Arrival:
        del group
        return self._carrier.carry(models, self._topology[step], step).result
