"""Runs the steps of the workers.

`on_mesh` gives each worker a device (or a slice of a mesh), `simulate` runs all workers
on one device; both keep the workers' state stacked, with a leading dim of N workers.
"""

import functools
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from decentjax._rounds.schedule import Event
from decentjax.placement import (
    axis_of,
    check_mesh,
    check_one_model,
    is_between_processes,
    local_workers,
    over_workers,
    rows_sharding,
)
from decentjax.placement import place as place_on
from decentjax.plan import (
    GradientMean,
    Plan,
    Step,
    check_plan,
    first_state,
    schedule_of,
    warn_of_plan,
    worker_step,
)
from decentjax.process import phases
from decentjax.rounds import Mix
from decentjax.state import WorkerState, strong
from decentjax.updates import Adapt, Metrics, init_of

MOST_JUMPS = 3


class StepCount:
    """Warns if the steps that a train step is called with do not advance by one.

    One other step is a run that resumes, or begins again. The third call in a row with
    the same other distance is none.
    """

    def __init__(self):
        self.last, self._jump, self._times = -1, 1, 0

    def note(self, step: int) -> None:
        """Notes the step of a call."""
        jump, self.last = step - self.last, step
        self._times = self._times + 1 if jump == self._jump else 1
        self._jump = jump
        if jump != 1 and self._times == MOST_JUMPS:
            warnings.warn(
                f"a train step was called with the steps {step - 2 * jump}, "
                f"{step - jump} and {step}: they select the exchanges and rounds, of "
                "which others never take place; give the number of the step, which "
                "rises by 1 from call to call",
                stacklevel=2,
            )


class TrainStep:
    """Compiled steps on stacked arrays, one for each exchange, taken in turn.

    Args:
      local: the local update.
      plan: what each step averages.
      jit: function that returns the jitted step of what begins and ends in it.
      mesh: mesh of the workers; None if they are simulated.
    """

    def __init__(
        self,
        local: Adapt,
        plan: Plan,
        jit: Callable[[Event], jax.stages.Wrapped],
        mesh: Mesh | None,
    ):
        self._local, self._plan, self._mesh = local, plan, mesh
        self._schedule = schedule_of(plan)
        self._steps = StepCount() if self._schedule.period > 1 else None
        self._is_checked = mesh is None or not is_between_processes(mesh)
        # Some topologies repeat an exchange within a period, and it compiles once.
        self._jit = functools.cache(jit)

    def init(self, params: Any, key: jax.Array, model_state: Any = ()) -> WorkerState:
        """Returns the first state of all workers, on the mesh if there is one.

        Args:
          params: one model, the same in all processes.
          key: random key, split among the workers.
          model_state: as in `init_state`.

        Raises:
          TypeError: if the local update has no optimizer, as a function of your own.
        """
        begin, mesh = init_of(self._local), self._mesh
        workers = None if mesh is None else local_workers(mesh)
        state = first_state(params, begin, key, self._plan, model_state, workers)
        return state if mesh is None else place_on(state, mesh)

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        """Runs this step; the state's buffers are donated.

        Raises:
          ValueError: if they were donated to an earlier step, or two leaves share one,
            or the workers of several processes begin with different models.
          TypeError: if `step` is not an int.
        """
        check_not_donated(state, batch)
        try:
            place = operator.index(step)
        except TypeError:  # Also of a traced step.
            raise TypeError(
                f"a train step takes the step as a Python int, got {step!r}"
            ) from None
        if self._steps is not None:
            self._steps.note(place)
        phases.note("computing", place)
        if not self._is_checked and not _is_traced(state.params):
            assert self._mesh is not None
            # Decentralized workers that resume from a later step have different models.
            if place == 0 or isinstance(self._plan, GradientMean):
                check_one_model(state.params, self._mesh)
            self._is_checked = True
        found = self._jit(self._schedule[place])(state, batch)
        phases.note(phases.BETWEEN)
        return found

    def lower(self, state: Any, batch: Any, step: int) -> jax.stages.Lowered:
        """Lowers this step; arrays may be shapes, as from `jax.eval_shape`."""
        return self._jit(self._schedule[step]).lower(state, batch)


class _Keeping:
    """A jitted step whose new state lies as the given one.

    On automatic axes the compiler would choose, and reshard small arrays.

    Args:
      jit: function of `out_shardings` that returns the jitted step.
      mesh: mesh of the workers.
    """

    def __init__(self, jit: Callable[..., jax.stages.Wrapped], mesh: Mesh):
        self._jit, self._mesh = jit, mesh
        self._steps: dict[Any, jax.stages.Wrapped] = {}

    def __call__(self, state: WorkerState, batch: Any) -> tuple[WorkerState, Metrics]:
        return self._like(state)(state, batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        return self._like(state).lower(state, batch)

    def _like(self, state: Any) -> jax.stages.Wrapped:
        leaves, structure = jax.tree.flatten(state)
        # As its results lie like its arguments, there is one step for most runs.
        kind = structure, tuple(getattr(x, "sharding", None) for x in leaves)
        if kind not in self._steps:
            lies = [
                # Shapes need not say where their arrays lie.
                rows_sharding(x, self._mesh) if place is not None else None
                for x, place in zip(leaves, kind[1], strict=True)
            ]
            out = structure.unflatten(lies), None
            self._steps[kind] = self._jit(out_shardings=out)
        return self._steps[kind]


def simulate(local: Adapt, plan: Plan, *, mix: Mix | None = None) -> TrainStep:
    """Runs all workers on one device, as one batched program.

    Args:
      local: the local update, as `local_update` returns it.
      plan: who averages what, and when: a topology, whose exchanges are taken in turn,
        a policy, `Rounds`, or what a function of `decentjax.methods` returns.
      mix: the averaging, `decentjax.mix` with its keywords bound.

    Returns:
      `train_step(state, batch, step)`: stacked state (its buffers are donated) and
      batch [N, ...], and the step as a Python int; it returns the new state, and
      metrics of shape [N]. Each distinct exchange is compiled at its first use.
      `train_step.init(params, key)` makes the first state.

    Raises:
      TypeError: if the plan is none, or changes gradients that the local update does
        not show.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import local_update, simulate, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return jnp.sum((params - batch) ** 2), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> train_step = simulate(local, topology.complete(2))
      >>> state = train_step.init(jnp.zeros(()), jax.random.key(0))
      >>> state, metrics = train_step(state, jnp.array([1.0, 3.0]), 0)
      >>> print(state.params, metrics["loss"])
      [0.2 0.6] [1. 9.]

    Source: From Promise to Practice (ICLR 2025), equation 1.
    """
    return _in_turn(worker_step(local, plan, mix), local, plan, None)


def on_mesh(
    local: Adapt,
    plan: Plan,
    mesh: Mesh,
    *,
    mix: Mix | None = None,
    shards: Any = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Runs each worker on its own device, or on its own slice of the mesh.

    The gradient waits for no message, and no message for the gradient. A GPU or TPU
    compiler therefore runs the exchange beside the forward and the backward pass. On
    CPU no compiler does: use `decentjax.gossip` there. Weight decay uses the mixed
    model.

    The axis of the workers is "workers", or if the mesh has none of this name its first
    axis (`name_workers` takes another); its size is N, and consecutive workers share a
    node. A worker's arrays may be
    sharded over further axes (FSDP), and the new state keeps the sharding. On explicit
    axes, the default of `jax.make_mesh`, the types of arrays state their sharding, the
    loss sees these types, and each device sends its own shards; jax 0.10 gathers them
    around the step. On automatic axes the compiler chooses inside the step, and gathers
    shards for means over groups: name them by `shards`.

    Args:
      local: as in `simulate`.
      plan: as in `simulate`.
      mesh: mesh of the workers.
      mix: as in `simulate`.
      shards: partition specs of one worker's params over the axes of its slice, as in
        `decentjax.mix`; encoded messages take theirs from the compression.
      compiler_options: options of XLA by name, as `jax.jit` takes them.

    Returns:
      As `simulate`; stacked arrays are sharded over that axis in their first dim, and
      as given in the others.

    Raises:
      TypeError: as `simulate`.
      ValueError: if the size of that axis is not N.

    Examples:
      >>> import optax
      >>> from decentjax import local_update, on_mesh, topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> train_step = on_mesh(local, topology.ring(1), worker_mesh(1))
    """
    check_plan(plan)
    check_mesh(mesh)
    axis = axis_of(mesh)
    if mesh.shape[axis] != plan.num_workers:
        raise ValueError(
            f'on_mesh needs a mesh whose axis "{axis}" has the plan\'s '
            f"{plan.num_workers} workers, got {dict(mesh.shape)}"
        )
    step = worker_step(local, plan, mix, shards=shards)
    return _in_turn(step, local, plan, mesh, compiler_options)


def check_not_donated(state: WorkerState, batch: Any, donated: Any = None) -> None:
    """Rejects arrays whose buffers were donated, or would be both donated and read.

    On a mesh jax 0.10 would abort the process. The check takes 0.3 us per leaf, the
    dispatch some 5.

    Args:
      state: state of a step.
      batch: its batch.
      donated: the part of the state that the step donates; None for all.

    Raises:
      TypeError: if the state is not a `WorkerState`.
      ValueError: if there is such an array; names it.
    """
    if not isinstance(state, WorkerState):
        raise TypeError(
            "a train step takes a WorkerState, as from init_state or, of wrap, "
            f"step.init, got {type(state).__name__}"
        )
    arrays = list(filter(_has_buffer, jax.tree.leaves((state, batch))))
    is_gone = any(x.is_deleted() for x in arrays)
    if is_gone or len(set(map(id, arrays))) < len(arrays):
        _check_each(state, batch, state if donated is None else donated)


def _is_traced(tree: Any) -> bool:  # As in a scan over steps.
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def _has_buffer(x: Any) -> bool:
    return hasattr(x, "is_deleted") and not isinstance(x, Tracer)


def _check_each(state: WorkerState, batch: Any, donated: Any) -> None:
    own, seen = set(map(id, jax.tree.leaves(donated))), dict[int, str]()
    for what, tree in (("state", state), ("batch", batch)):
        for path, x in jax.tree.leaves_with_path(tree):
            name = what + jax.tree_util.keystr(path)
            if not _has_buffer(x):
                continue
            if x.is_deleted():
                raise ValueError(
                    f"a step donates the buffers of its state, and {name} was donated "
                    "to an earlier step: use the state that it returned, or keep a "
                    "copy, jax.tree.map(jax.numpy.copy, state)"
                )
            if id(x) in own and id(x) in seen:
                raise ValueError(
                    f"a step donates each buffer of its state once, and {seen[id(x)]} "
                    f"and {name} are the same array: copy one of them, "
                    "jax.tree.map(jax.numpy.copy, ...)"
                )
            seen[id(x)] = name


def _in_turn(
    step: Step,
    local: Adapt,
    plan: Plan,
    mesh: Mesh | None,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    warn_of_plan(plan)

    def jit(event: Event) -> Any:
        def one(state: WorkerState, batch: Any) -> tuple[WorkerState, Metrics]:
            new, metrics = step(state, batch, event)
            return jax.tree.map(strong, new), metrics

        options = dict(compiler_options or {})
        compiled = functools.partial(
            jax.jit,
            over_workers(one, mesh),
            donate_argnums=0,
            compiler_options=options,
        )
        if mesh is None or len(mesh.shape) == 1 or mesh.explicit_axes:
            return compiled()
        return _Keeping(compiled, mesh)

    return TrainStep(local, plan, jit, mesh)
