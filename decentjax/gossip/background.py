"""Exchanges in a second thread, hidden behind the gradient on any network.

On CPU no compiler overlaps a collective with the computation of the same program, nor
with that of the next program of the same thread. Two threads do: one sends the models,
leaf group by leaf group, while the other computes gradients and the optimizer's
direction. Only `params = mixed + update` remains between two exchanges. In a process
with GPUs the models are sent over the host's network in the same way.

While an exchange is in flight, no other thread may run a collective on the same
devices, since all processes must start collectives in the same order. Finish other
collectives before the train step, and call `settle()` before the next ones. All
`Background`s of a process share one thread: they may alternate without `settle()`, in
the same order in all processes. `gossip.engine.SharedEngine` queues other functions
there.
"""

from jax.sharding import Mesh
from jax.typing import DTypeLike

from decentjax.gossip.port import Record
from decentjax.gossip.thread import Beside, check_beside
from decentjax.gossip.thread_port import Carrier
from decentjax.mixing import Lowering
from decentjax.plan import Plan
from decentjax.updates import Adapt


class Background(Beside):
    """`on_mesh` with its exchanges in a second thread; a context manager.

    Over a topology a call waits for the exchange of its step, which the previous call
    started. It updates each group of leaves as soon as the group has arrived, and sends
    it at once in the exchange of the next step. Over rounds with delay d messages are
    in flight while d gradients are computed; with 0 nothing hides them. The numbers are
    those of `on_mesh` with the same lowering: bit for bit, unless XLA fuses a product
    with a sum in one of them.

    The params that a step returns are still being sent: do not donate them before
    `settle()`. Messages in flight are part of the state, so a run can continue from any
    state. At its peak a device holds the old, mixed and new model, and the optimizer's
    direction. Call `settle()` before leaving the context, so that all processes leave
    together.

    Args:
      local: the local update, as `local_update` returns it. It is cut where it uses
        `mixed`; a conditional or a loop that uses it waits as a whole.
      plan: topology or rounds.
      mesh: mesh of the workers, as in `on_mesh`. If a worker is a slice of it, each of
        its devices exchanges its own shards.
      message_dtype: as in `mix`.
      lowering: as in `mix`, in one program; by default as `fastest_mixes` sends.
      exchange_mesh: mesh of the devices that exchange, such as `host_mesh(mesh)`; by
        default `mesh`.
      record: function that is called with each activity of this process.

    Raises:
      TypeError: if `plan` is neither topology nor rounds.
      ValueError: if the mesh has a different number of workers, the devices of
        `exchange_mesh` are in other processes, or the compression of the rounds has
        shards.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, local_update, methods, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.adam(0.1))
      >>> plan, mesh = methods.diloco(num_workers=1, num_steps=5), worker_mesh(1)
      >>> with gossip.Background(local, plan, mesh) as train_step:
      ...     state = train_step.init(jnp.zeros(3), jax.random.key(0))
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
      ...     train_step.settle()
    """

    def __init__(
        self,
        local: Adapt,
        plan: Plan,
        mesh: Mesh,
        message_dtype: DTypeLike | None = None,
        lowering: Lowering | None = None,
        exchange_mesh: Mesh | None = None,
        record: Record | None = None,
    ):
        options = message_dtype, lowering, exchange_mesh, record
        port = Carrier(check_beside(plan), mesh, *options)
        super().__init__(local, plan, mesh, port, record)
