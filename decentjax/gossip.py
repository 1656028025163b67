"""Exchanges in a second thread, hidden behind the gradient on any network.

On CPU no compiler runs a collective beside the computation of the same program, nor of
the next one that the same thread starts. Two threads do: here one sends the models,
leaf group by leaf group, while the other computes gradients and the optimizer's
direction, so that only `params = mixed + update` stands between two exchanges. In a
process with GPUs the models travel over the host's network in the same way.

While an exchange is on its way no other thread may start a collective of the same
devices: all processes have to start them in one order. `Engine.submit` puts any
function in that order, `Engine.settle` waits until none is left.
"""

import collections
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from decentjax.cut import Cut, Part
from decentjax.exchange import Exchange, Groups, Permutations, Topology, rounds_of
from decentjax.mixing import Lowering, global_mean, mix
from decentjax.step import (
    AXIS,
    LossFn,
    Metrics,
    WorkerState,
    gradient,
    over_workers,
)

# Leaves travel in groups of this size: one by one, small ones would cost more in calls
# than in bytes; all at once, the last would keep the first from being updated.
GROUP_BYTES = 4 * 2**20
PIECE_BYTES = (None, 256 * 2**10, 64 * 2**10)
CLOSING_SECONDS = 10.0
FAILING_SECONDS = 1.0  # After an error: the peers are to learn of it soon.

Leaves = tuple[int, ...]
Mixes = dict[Exchange, Callable[[list[jax.Array]], list[jax.Array]]]


class Record(Protocol):
    """Takes note of what a process did from `start` to `end`, of `time.monotonic()`.

    The activity is "compute" (gradient and direction), "wait" (for mixed leaves) or
    "exchange" (in the second thread, for each group of leaves).
    """

    def __call__(self, activity: str, step: int, start: float, end: float) -> None: ...


class Adapt(Protocol):
    """One worker's step but for the exchange, as `decentjax.adapt` with keywords bound.

    A function of arrays alone, without collectives.
    """

    def __call__(
        self, state: WorkerState, batch: Any, mixed: Any
    ) -> tuple[WorkerState, Metrics]: ...


class Engine:
    """A thread that runs one function after the other; a context that ends it.

    An error in the thread is raised, as itself, by the future of what failed, by the
    futures of all that was to follow, and by the next `submit`.
    """

    def __init__(self):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        # Daemonic: nobody waits at exit for a message that a lost peer does not send.
        self._thread = threading.Thread(
            target=self._run, name="decentjax.gossip", daemon=True
        )
        self._thread.start()

    def submit(self, function: Callable, *args: Any) -> Future:
        """Has the thread call the function, after all that was submitted before.

        Returns:
          The future of its result.

        Raises:
          RuntimeError: if the engine is closed.
        """
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")
        future: Future = Future()
        self._tasks.put((future, function, args))
        return future

    def settle(self) -> None:
        """Waits until all that was submitted is done."""
        self.submit(int).result()

    def close(self) -> None:
        """Ends the thread after what was submitted.

        It waits 10 s at the most: what a lost peer will never send is left behind.
        """
        self._end(CLOSING_SECONDS)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end(CLOSING_SECONDS if kind is None else FAILING_SECONDS)

    def _end(self, seconds: float) -> None:
        self._closed = True
        self._tasks.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, args = task
            if self._error is not None:
                future.set_exception(self._error)
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                self._error = error
                future.set_exception(error)
            # A model must not live on in the variables of a thread that waits.
            del task, future, function, args


class Background:
    """`on_mesh(awc_step)` with its exchange in a second thread; a context that ends it.

    A call of step t waits for the exchange of step t, which the call before has
    started, updates each group of leaves as soon as it has come, and at once sends it
    on in the exchange of step t + 1. The numbers are those of `awc_step` with the same
    lowering.

    Args:
      adapt: `decentjax.adapt`, with its keywords bound by `functools.partial`, or
        another function of its kind.
      topology: whose exchanges take turns.
      mesh: with the axis "workers" alone.
      message_dtype: as in `mix`.
      lowering: as in `mix`; by default that of `fastest_mixes`, measured before the
        first step.
      exchange_mesh: the devices that exchange, such as `host_mesh(mesh)`; by default
        those of `mesh`.
      record: told what this process did and when; by default nobody is.

    Raises:
      ValueError: if the mesh has other axes, or another number of workers.

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
        if dict(mesh.shape) != {AXIS: topology.num_workers}:
            raise ValueError(
                f'Background needs a mesh with the axis "{AXIS}" alone, of the '
                f"topology's {topology.num_workers} workers, got {dict(mesh.shape)}"
            )
        self._engine = Engine()
        self._adapt = adapt
        self._topology = topology
        self._mesh = mesh
        self._exchange_mesh = exchange_mesh or mesh
        self._message_dtype = message_dtype
        self._lowering = lowering
        self._record = record or _nobody
        self._plan: _Plan | None = None
        self._mixes: Mixes = {}
        self._sent: list[jax.Array] = []
        self._sent_for = -1
        self._arriving: collections.deque[tuple[Leaves, Future]] = collections.deque()

    def __call__(
        self, state: WorkerState, batch: Any, t: int
    ) -> tuple[WorkerState, Metrics]:
        """Returns the new state and metrics; the buffers of the state are given up."""
        if self._plan is None:
            self._plan = _make_plan(self._adapt, state, batch, self._mesh)
            self._mixes = self._engine.submit(self._lower, state.params).result()
        plan = self._plan
        models = jax.tree.leaves(state.params)
        if self._sent_for != t or list(map(id, models)) != list(map(id, self._sent)):
            self._arriving.clear()
            self._sent = []
            models = jax.device_put(
                models, NamedSharding(self._mesh, PartitionSpec(AXIS))
            )
            for stage in plan.groups:
                self._send(stage.leaves, [models[i] for i in stage.leaves], t)
        self._sent, self._sent_for = [], t + 1
        arriving, self._arriving = self._arriving, collections.deque()

        start = time.monotonic()
        values = plan.early(state.params, state[1:], batch)
        jax.block_until_ready(values)
        self._record("compute", t, start, time.monotonic())
        outputs = dict(zip(plan.finished, values, strict=False))
        mixed: dict[int, jax.Array] = {}
        for stage in plan.groups:
            self._await(stage, arriving, mixed, t)
            outputs.update(stage.compute(mixed, values))
            self._send(stage.leaves, [outputs[i] for i in stage.leaves], t + 1)
        if plan.rest.outputs:
            self._await(plan.rest, arriving, mixed, t)
            outputs.update(plan.rest.compute(mixed, values))
        leaves = [outputs[i] for i in range(plan.structure.num_leaves)]
        return jax.tree.unflatten(plan.structure, leaves)

    def settle(self) -> None:
        """Waits for the exchange on its way: before any other collective."""
        self._engine.settle()

    def close(self) -> None:
        """Ends the thread; see `Engine.close`."""
        self._engine.close()

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, *error: Any) -> None:
        self._engine.__exit__(*error)

    def _send(self, leaves: Leaves, models: list[jax.Array], t: int) -> None:
        """Has the thread exchange some leaves, for step t."""
        self._sent += models
        future = self._engine.submit(self._exchange, models, t)
        self._arriving.append((leaves, future))

    def _lower(self, params: Any) -> Mixes:
        mesh, dtype = self._exchange_mesh, self._message_dtype
        if self._lowering is not None:
            return {
                exchange: _compiled_mix(exchange, self._lowering, mesh, dtype)
                for exchange in self._topology
            }
        num_bytes = sum(x.nbytes // len(x) for x in jax.tree.leaves(params))
        return fastest_mixes(self._topology, mesh, num_bytes, dtype)

    def _exchange(self, models: list[jax.Array], t: int) -> list[jax.Array]:
        """In the thread: sends, receives, averages."""
        models = [_moved(x, self._mesh, self._exchange_mesh) for x in models]
        jax.block_until_ready(models)
        start = time.monotonic()
        mixed = self._mixes[self._topology[t]](models)
        jax.block_until_ready(mixed)
        self._record("exchange", t, start, time.monotonic())
        return [_moved(x, self._exchange_mesh, self._mesh) for x in mixed]

    def _await(
        self,
        stage: "_Stage",
        arriving: collections.deque[tuple[Leaves, Future]],
        mixed: dict[int, jax.Array],
        t: int,
    ) -> None:
        """Waits for mixed leaves, which come in the order in which they were sent."""
        start = time.monotonic()
        while not mixed.keys() >= set(stage.part.awaits):
            leaves, future = arriving.popleft()
            mixed.update(zip(leaves, future.result(), strict=True))
        self._record("wait", t, start, time.monotonic())


class AllReduce:
    """`on_mesh(all_reduce_step)` with the mean in a second thread; a context.

    The baseline in the same pieces as `Background`, for a record of what it computes
    and when it waits. It hides nothing: the mean needs the gradient, and the update
    needs the mean.

    Args:
      loss_fn: see `decentjax.LossFn`.
      optimizer: any optax optimizer.
      mesh: with the axis "workers" alone.
      num_micro_batches: as in `all_reduce_step`.
      record: told what this process did and when; by default nobody is.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        num_micro_batches: int = 1,
        record: Record | None = None,
    ):
        def gradients(params, others, batch):
            state = WorkerState(params, (), *others)
            return gradient(loss_fn, state, batch, num_micro_batches)

        def update(params, opt_state, grads):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        mean = functools.partial(global_mean, axis_name=AXIS)
        self._engine = Engine()
        self._record = record or _nobody
        self._gradients = jax.jit(over_workers(gradients, mesh), donate_argnums=1)
        self._mean = jax.jit(over_workers(mean, mesh), donate_argnums=0)
        self._update = jax.jit(over_workers(update, mesh), donate_argnums=(0, 1))

    def __call__(
        self, state: WorkerState, batch: Any, t: int
    ) -> tuple[WorkerState, Metrics]:
        """Returns the new state and metrics; the buffers of the state are given up."""
        start = time.monotonic()
        grads, *others, metrics = jax.block_until_ready(
            self._gradients(state.params, state[2:], batch)
        )
        computed = time.monotonic()
        self._record("compute", t, start, computed)
        grads = self._engine.submit(self._exchange, grads, t).result()
        self._record("wait", t, computed, time.monotonic())
        params, opt_state = self._update(state.params, state.opt_state, grads)
        return WorkerState(params, opt_state, *others), metrics

    def settle(self) -> None:
        """Returns at once: between two steps nothing is on its way."""

    def close(self) -> None:
        """Ends the thread; see `Engine.close`."""
        self._engine.close()

    def __enter__(self) -> "AllReduce":
        return self

    def __exit__(self, *error: Any) -> None:
        self._engine.__exit__(*error)

    def _exchange(self, grads: Any, t: int) -> Any:
        start = time.monotonic()
        mean = jax.block_until_ready(self._mean(grads))
        self._record("exchange", t, start, time.monotonic())
        return mean


def fastest_mixes(
    topology: Topology,
    mesh: Mesh,
    num_bytes: int,
    message_dtype: DTypeLike | None = None,
) -> Mixes:
    """Returns the compiled mix of each exchange, lowered as is fastest on this mesh.

    Functions of a list of stacked leaves. Each exchange is measured: those of one
    topology may use different links. Collective, as `fastest`.

    Args:
      topology: whose exchanges.
      mesh: with the axis "workers".
      num_bytes: of one model; of a larger one than 4 MiB only so much is measured.
      message_dtype: as in `mix`.
    """
    mixes = {}
    for exchange in dict.fromkeys(topology):
        options = _candidates(exchange)
        chosen = options[fastest(options, mesh, min(num_bytes, GROUP_BYTES))]
        mixes[exchange] = _compiled_mix(*chosen, mesh, message_dtype)
    return mixes


Option = tuple[Exchange, Lowering]


def fastest(options: Sequence[Option], mesh: Mesh, num_bytes: int) -> int:
    """Returns the number of the option that exchanges fastest on this mesh.

    Each averages a float32 model of `num_bytes` three times, of which the first does
    not count; the slowest worker decides, the same for all. Collective: all processes
    call it at once, while no exchange is on its way.

    Args:
      options: exchanges, each with its lowering.
      mesh: with the axis "workers".
      num_bytes: per worker; some megabytes tell more than a few.
    """
    if len(options) == 1:
        return 0
    num_workers = mesh.shape[AXIS]
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    shape = (num_workers, max(1, num_bytes // 4))
    models = [jax.jit(lambda: jnp.ones(shape), out_shardings=sharding)()]
    seconds = []
    for option in options:
        mix_models = _compiled_mix(*option, mesh)
        seconds.append(min([_seconds(mix_models, models) for _ in range(3)][1:]))
    table = np.tile(np.array(seconds, np.float32), (num_workers, 1))
    stacked = jax.make_array_from_callback(table.shape, sharding, table.__getitem__)
    slowest = jax.jit(over_workers(lambda x: lax.pmax(x, AXIS), mesh))(stacked)
    return int(np.argmin(slowest.addressable_data(0)))


def host_mesh(mesh: Mesh) -> Mesh:
    """A mesh of CPU devices, one for each device of the mesh, in the same process.

    Exchanges on it use the host's memory and network, not the accelerators'.

    Raises:
      ValueError: if a process has fewer CPU devices than it has workers.
    """
    cpus: dict[int, list] = collections.defaultdict(list)
    for device in jax.devices("cpu"):
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


class _Stage(NamedTuple):
    """Leaves of the new state that are computed together.

    Args:
      leaves: their numbers.
      outputs: those of them that await mixed leaves.
      part: what these need.
      run: the part compiled, over stacked arrays.
    """

    leaves: Leaves
    outputs: Leaves
    part: Part
    run: Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]

    def compute(
        self, mixed: dict[int, jax.Array], values: list[jax.Array]
    ) -> Iterable[tuple[int, jax.Array]]:
        if not self.outputs:
            return ()
        awaited = [mixed[i] for i in self.part.awaits]
        used = [values[i] for i in self.part.uses]
        return zip(self.outputs, self.run(awaited, used), strict=True)


class _Plan(NamedTuple):
    """A step in pieces.

    Args:
      early: (params, the rest of the state, batch), stacked, to the values of the cut.
      finished: the outputs that these values begin with.
      groups: the stages of the params, each sent on at once.
      rest: the stage of all other outputs.
      structure: of all outputs.
    """

    early: Callable[..., list[jax.Array]]
    finished: Leaves
    groups: list[_Stage]
    rest: _Stage
    structure: Any


def _make_plan(adapt: Adapt, state: WorkerState, batch: Any, mesh: Mesh) -> _Plan:
    of_worker = jax.eval_shape(_first_rows, (state, batch))
    cut = Cut(adapt, of_worker, of_worker[0].params)

    def early(params: Any, others: Any, batch: Any) -> list[jax.Array]:
        return cut.early(WorkerState(params, *others), batch)

    def stage(leaves: Leaves) -> _Stage:
        outputs = tuple(number for number in leaves if number not in cut.finished)
        part = cut.part(outputs)
        return _Stage(leaves, outputs, part, jax.jit(over_workers(part.compute, mesh)))

    sizes = [x.nbytes // len(x) for x in jax.tree.leaves(state.params)]
    return _Plan(
        early=jax.jit(over_workers(early, mesh), donate_argnums=1),
        finished=cut.finished,
        groups=[stage(leaves) for leaves in _groups(sizes)],
        rest=stage(tuple(range(len(sizes), cut.structure.num_leaves))),
        structure=cut.structure,
    )


def _groups(sizes: Sequence[int]) -> Iterator[Leaves]:
    """Cuts leaves of these sizes, in bytes, into runs of `GROUP_BYTES` or just more."""
    group, total = [], 0
    for number, size in enumerate(sizes):
        group.append(number)
        total += size
        if total >= GROUP_BYTES:
            yield tuple(group)
            group, total = [], 0
    if group:
        yield tuple(group)


def _candidates(exchange: Exchange) -> list[Option]:
    """The ways to carry out an exchange that are worth a measurement."""
    between = exchange.between
    if isinstance(between, Permutations):
        if not rounds_of(between)[1]:
            return [(exchange, Lowering())]
        return [(exchange, Lowering(piece_bytes)) for piece_bytes in PIECE_BYTES]
    groups = len(between.members)
    if groups in (1, between.size):
        return [(exchange, Lowering())]
    options = [(exchange, Lowering(groups=way)) for way in ("scatter", "sum")]
    if between.size == 2 * groups:
        swaps = dataclasses.replace(exchange, between=_as_swaps(between))
        options += _candidates(swaps)
    return options


def _as_swaps(pairs: Groups) -> Permutations:
    """The same mean, by permutations."""
    itself = tuple(range(pairs.size))
    peers = {a: b for pair in pairs.members for a, b in (pair, pair[::-1])}
    return Permutations((itself, tuple(peers[i] for i in itself)), (0.5, 0.5))


def _compiled_mix(
    exchange: Exchange,
    lowering: Lowering,
    mesh: Mesh,
    message_dtype: DTypeLike | None = None,
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The mix of stacked leaves."""
    of_worker = functools.partial(
        mix,
        exchange=exchange,
        axis_name=AXIS,
        message_dtype=message_dtype,
        lowering=lowering,
    )
    return jax.jit(over_workers(of_worker, mesh))


def _seconds(function: Callable, argument: Any) -> float:
    start = time.monotonic()
    jax.block_until_ready(function(argument))
    return time.monotonic() - start


def _moved(x: jax.Array, source: Mesh, target: Mesh) -> jax.Array:
    """A stacked array on the devices of another mesh, worker by worker."""
    if source == target:
        return x
    devices = target.devices.ravel()
    parts = [
        jax.device_put(_pinned(shard.data), devices[shard.index[0].start or 0])
        for shard in x.addressable_shards
    ]
    sharding = NamedSharding(target, PartitionSpec(AXIS))
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def _pinned(x: jax.Array) -> jax.Array:
    """In pinned memory of the host, where an accelerator copies without waiting."""
    (device,) = x.devices()
    if device.platform == "cpu":
        return x
    return jax.device_put(x, SingleDeviceSharding(device, memory_kind="pinned_host"))


def _first_rows(stacked: Any) -> Any:
    return jax.tree.map(lambda x: x[0], stacked)


def _nobody(activity: str, step: int, start: float, end: float) -> None:
    del activity, step, start, end
