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

import collections
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from decentjax.exchange import Topology, check_topology
from decentjax.gossip.engine import SharedEngine
from decentjax.gossip.record import Record
from decentjax.gossip.staged import Arrival, Staged
from decentjax.gossip.stages import Plan
from decentjax.gossip.tuning import Mix, Mixes, compiled_mix, fastest_mixes
from decentjax.mixing import Lowering
from decentjax.step import AXIS, Adapt


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
      adapt: the local update, `decentjax.adapt` with its keywords bound. It is cut
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
      >>> import functools
      >>> import jax
      >>> import optax
      >>> from decentjax import adapt, gossip, init_state, topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer = optax.adam(0.1)
      >>> local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optimizer)
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
        if dict(mesh.shape) != {AXIS: topology.num_workers}:
            raise ValueError(
                f'Background needs a mesh with the axis "{AXIS}" alone, of the '
                f"topology's {topology.num_workers} workers, got {dict(mesh.shape)}"
            )
        if exchange_mesh is not None:
            _check_same_places(exchange_mesh, mesh)
        super().__init__(adapt, mesh, record)
        self._engine = SharedEngine()
        self._topology = topology
        self._exchange_mesh = exchange_mesh or mesh
        self._message_dtype = message_dtype
        self._lowering = lowering
        self._mixes: Mixes = {}

    def settle(self) -> None:
        """Waits for the exchange under way; call it before any other collective."""
        self._engine.settle()

    def _end(self, seconds: float) -> None:
        self._engine._end(seconds)

    def _start(self, params: Any, plan: Plan) -> None:
        # In the thread, as the measurement is collective: after the exchanges of other
        # users, and in all processes in the same place.
        self._mixes = self._submit(self._lower, params).result()

    def _carry(self, group: int, models: list[jax.Array], step: int) -> Arrival:
        if self._exchange_mesh != self._mesh:
            # The copy to the host starts now, while the thread sends earlier groups.
            for shard in (shard for x in models for shard in x.addressable_shards):
                shard.data.copy_to_host_async()
        return self._submit(self._exchange, models, step).result

    def _submit(self, function: Callable, *args: Any) -> Future:
        """Queues a call in the thread, with the precision of the calling thread.

        `jax.enable_x64`, as a context, holds for one thread only.
        """
        enabled = jnp.result_type(float) == jnp.float64

        def call() -> Any:
            with jax.enable_x64(enabled):
                return function(*args)

        return self._engine.submit(call)

    def _lower(self, params: Any) -> Mixes:
        mesh, dtype = self._exchange_mesh, self._message_dtype
        if self._lowering is not None:
            return {
                exchange: compiled_mix(exchange, self._lowering, mesh, dtype)
                for exchange in self._topology
            }
        num_bytes = sum(x.nbytes // len(x) for x in jax.tree.leaves(params))
        return fastest_mixes(self._topology, mesh, num_bytes, dtype)

    def _exchange(self, models: list[jax.Array], step: int) -> list[jax.Array]:
        """Runs in the thread: sends, receives and averages."""
        # The update that returns these models may still be computing: the record says
        # how long messages take, not how long the thread waits for the update.
        jax.block_until_ready(models)
        start = time.monotonic()
        mix_models = self._mixes[self._topology[step]]
        mixed = mix_elsewhere(mix_models, models, self._mesh, self._exchange_mesh)
        self._record("exchange", step, start, time.monotonic())
        return mixed


def host_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh of CPU devices, one per device of the mesh, in the same process.

    Exchanges on it use the memory and the network of the host.

    Raises:
      ValueError: if a process has fewer CPU devices than it has workers, or none.
    """
    cpus: dict[int, list] = collections.defaultdict(list)
    try:
        devices = jax.devices("cpu")
    except RuntimeError as error:
        raise ValueError(
            f"exchanges over the host need its CPU beside the accelerator: {error}; "
            "where JAX_PLATFORMS is set, add cpu to it"
        ) from error
    for device in devices:
        cpus[device.process_index].append(device)
    workers = [device.process_index for device in mesh.devices.flat]
    for process, count in collections.Counter(workers).items():
        if len(cpus[process]) < count:
            raise ValueError(
                f"process {process} has {count} workers and {len(cpus[process])} CPU "
                "devices: before jax starts, set "
                f'jax.config.update("jax_num_cpu_devices", {count})'
            )
    return Mesh([cpus[process].pop(0) for process in workers], (AXIS,))


def mix_elsewhere(
    mix_models: Mix, models: list[jax.Array], mesh: Mesh, exchange_mesh: Mesh
) -> list[jax.Array]:
    """Returns the models of `mesh`, mixed on the devices of `exchange_mesh`."""
    models = [_moved(x, mesh, exchange_mesh) for x in models]
    mixed = jax.block_until_ready(mix_models(models))
    return [_moved(x, exchange_mesh, mesh) for x in mixed]


def _check_same_places(exchange_mesh: Mesh, mesh: Mesh) -> None:
    got, wanted = (
        (dict(m.shape), [device.process_index for device in m.devices.flat])
        for m in (exchange_mesh, mesh)
    )
    if got != wanted:
        raise ValueError(
            "exchange_mesh needs a device for each worker, in the worker's process: "
            f"wanted {wanted[0]} in processes {wanted[1]}, got {got[0]} in {got[1]}"
        )


def _moved(x: jax.Array, source: Mesh, target: Mesh) -> jax.Array:
    """Returns a stacked array on the devices of another mesh, worker by worker."""
    if source == target:
        return x
    devices = target.devices.ravel()
    parts = [
        # Through NumPy: between the clients of GPU and CPU there is no direct copy.
        # A shard is one row; the slice of a single worker has no start.
        jax.device_put(np.asarray(shard.data), devices[shard.index[0].start or 0])
        for shard in x.addressable_shards
    ]
    sharding = NamedSharding(target, PartitionSpec(AXIS))
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)
