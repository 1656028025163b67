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

from decentjax.exchange import (
    MENU,
    Exchange,
    Topology,
    check_topology,
    warn_of_parts,
)
from decentjax.loss import Metrics
from decentjax.placement import (
    axis_of,
    check_mesh,
    check_one_model,
    is_between_processes,
    over_workers,
    rows_sharding,
)
from decentjax.process import phases
from decentjax.schedule import Event, Schedule
from decentjax.state import WorkerState, strong
from decentjax.step import Step, all_reduce_step

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
      plan: argument of each step, its exchange or its rounds.
      jit: function that returns the jitted step for it.
      check: check of the initial params and step of the first call.
    """

    def __init__(
        self,
        plan: Topology | Schedule,
        jit: Callable[[Exchange | Event], jax.stages.Wrapped],
        check: Callable[[Any, int], None] | None = None,
    ):
        self._plan, self._check = plan, check
        # The choices of a policy are places in its menu, in any order.
        self._steps = StepCount() if plan.period > 1 and plan.name != MENU else None
        # Some topologies repeat an exchange within a period, and it compiles once.
        self._jit = functools.cache(jit)

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
        if self._check is not None:
            self._check(state.params, place)
            self._check = None
        found = self._jit(self._plan[place])(state, batch)
        phases.note(phases.BETWEEN)
        return found

    def lower(self, state: Any, batch: Any, step: int) -> jax.stages.Lowered:
        """Lowers this step; arrays may be shapes, as from `jax.eval_shape`."""
        return self._jit(self._plan[step]).lower(state, batch)


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


def simulate(step: Step, topology: Topology | Schedule) -> TrainStep:
    """Runs all workers on one device, as one batched program.

    Args:
      step: `awc_step` or another step, with its keywords bound by `functools.partial`.
      topology: topology whose exchanges are taken in turn, or for `round_step` a
        schedule of rounds.

    Returns:
      `train_step(state, batch, step)`: stacked state (its buffers are donated) and
      batch [N, ...], and the step as a Python int; it returns the new state, and
      metrics of shape [N]. Each distinct exchange is compiled at its first use.

    Examples:
      >>> import functools
      >>> import optax
      >>> from decentjax import awc_step, local_update, simulate, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> train_step = simulate(
      ...     functools.partial(awc_step, adapt=local), topology.hypercube(8)
      ... )
    """
    _check_plan(step, topology)
    return _in_turn(step, topology, mesh=None)


def on_mesh(
    step: Step,
    topology: Topology | Schedule,
    mesh: Mesh,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Runs each worker on its own device, or on its own slice of the mesh.

    The axis of the workers is "workers", or if the mesh has none of this name its first
    axis; its size is N, and consecutive workers share a node. A worker's arrays may be
    sharded over further axes (FSDP), and the new state keeps the sharding. On explicit
    axes, the default of `jax.make_mesh`, the types of arrays state their sharding, the
    loss sees these types, and each device sends its own shards; jax 0.10 gathers them
    around the step. On automatic axes the compiler chooses inside the step, and gathers
    shards for means over groups: bind `shards` to `mix`.

    Args:
      step: `awc_step` or another step, with its keywords bound by `functools.partial`.
      topology: topology whose exchanges are taken in turn, or for `round_step` a
        schedule of rounds.
      mesh: mesh of the workers.
      compiler_options: options of XLA by name, as `jax.jit` takes them.

    Returns:
      As `simulate`; stacked arrays are sharded over that axis in their first dim, and
      as given in the others.

    Raises:
      TypeError: if `topology` is not a `Topology`.
      ValueError: if the size of that axis is not N.

    Examples:
      >>> import functools
      >>> import optax
      >>> from decentjax import awc_step, local_update, on_mesh, topology, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> step = functools.partial(awc_step, adapt=local)
      >>> train_step = on_mesh(step, topology.ring(1), worker_mesh(1))
    """
    _check_plan(step, topology)
    check_mesh(mesh)
    axis = axis_of(mesh)
    if mesh.shape[axis] != topology.num_workers:
        raise ValueError(
            f'on_mesh needs a mesh whose axis "{axis}" has the topology\'s '
            f"{topology.num_workers} workers, got {dict(mesh.shape)}"
        )
    return _in_turn(step, topology, mesh, compiler_options)


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
    plan: Topology | Schedule,
    mesh: Mesh | None,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    def jit(taken: Exchange | Event) -> Any:
        def one(state: WorkerState, batch: Any) -> tuple[WorkerState, Metrics]:
            new, metrics = step(state, batch, taken)
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

    if mesh is None or not is_between_processes(mesh):
        return TrainStep(plan, jit)

    def check(params: Any, at: int) -> None:
        # Decentralized workers that resume from a later step have different models.
        if at == 0 or _is_one_model(step):
            check_one_model(params, mesh)

    return TrainStep(plan, jit, check)


def _check_plan(step: Step, plan: Any) -> None:
    if not isinstance(plan, Schedule):
        check_topology(plan)
    if not _is_one_model(step):
        warn_of_parts(plan.name, plan.exchanges)


def _is_one_model(step: Step) -> bool:
    return getattr(step, "func", step) is all_reduce_step
