"""The batches and the train step of a run."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import jax
from jax.sharding import Mesh

from decentjax import AXIS, TrainStep, WorkerState, gossip, on_mesh, simulate
from decentjax.dispersion import NORMS, measured
from decentjax.gossip import Record, host_mesh
from decentjax.topology import alone
from decentjax.updates import Metrics
from train.config import StepConfig
from train.data.batches import Batch, deal
from train.run.check_task import check_takes
from train.run.method import InThread
from train.run.policy_choice import Chooser
from train.run.setup import Run
from train.xla import check_options, read_options


class InStep(contextlib.nullcontext):
    """A compiled step with its exchange inside, as a context like `Background`."""

    def __init__(
        self, train_step: TrainStep, chooser: Chooser | None, record: Record | None
    ):
        super().__init__(self)
        self._train_step, self._chooser, self._record = train_step, chooser, record

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        if self._chooser is not None:
            self._chooser.begin(state)
        start = time.monotonic()
        state, metrics = self._train_step(state, batch, step)
        if self._chooser is not None:
            state = self._chooser.learn(state, metrics.pop(NORMS), step)
        result = state, metrics
        if self._record is not None:
            # The call returns before the step is done; only a timeline waits for it.
            jax.block_until_ready(result)
            self._record("step", step, start, time.monotonic())
        return result

    def settle(self) -> None:
        """Does nothing: no message is on its way between two steps."""


LoopStep = InStep | InThread | gossip.Peers


def build_steps(run: Run, workers: Sequence[int]) -> grain.MapDataset[Batch]:
    """The batches of all steps, with the rows of some workers.

    Raises:
      ValueError: if classes are to be dealt, and the task has none, or its steps are
        no grain.MapDataset.
    """
    config, task = run.config, run.task
    count, size = config.workers.num_workers, config.step.batch_per_worker
    parts: dict[str, Any] = {"multiple_of": config.step.num_micro_batches}
    if config.data.skew is not None:
        if task.labels is None:
            raise ValueError(
                "data.skew deals classes unevenly, and the examples of this task have "
                "none: leave it at None"
            )
        _, alpha = config.data.skew
        parts["parts"] = deal(task.labels(), count, alpha, config.seed)
    names = "num_workers", "batch_per_worker", "seed", "workers"
    check_takes(task.steps, "steps", *names, **parts)
    steps = task.steps(count, size, config.seed, workers, **parts)
    if not isinstance(steps, grain.MapDataset):
        raise ValueError(
            "steps must return a grain.MapDataset, as worker_steps does, got a "
            f"{type(steps).__name__}"
        )
    return steps


def build_train_step(run: Run, record: Record | None = None) -> LoopStep:
    """The step of a run, with its exchange inside or in a thread."""
    policy, mesh = run.method.policy, run.mesh
    if not run.is_in_thread:
        step, chooser = build_in_step(run, step_options(run)), None
        if policy is not None and policy.measures:
            chooser = Chooser(policy, run.config.method)
        return InStep(step, chooser, record)
    assert mesh is not None  # As its place has made it.
    return run.method.beside(
        run.local,
        mesh,
        message_dtype=run.config.step.message_dtype,
        # Two programs run at once on CPUs, but one after the other on a GPU: there the
        # models are exchanged through the host's memory.
        exchange_mesh=None if jax.default_backend() == "cpu" else host_mesh(mesh),
        record=record,
    )


def build_in_step(
    run: Run, compiler_options: Mapping[str, Any] | None = None
) -> TrainStep:
    """The compiled step of a run, its exchange inside."""
    local, method = run.local, run.method
    if method.policy is not None and method.policy.measures:
        local = measured(local, before_update=method.is_early)
    how: dict[str, Any] = {"mix": method.mix}
    if run.mesh is None:
        return simulate(local, method.plan, **how)
    how["compiler_options"] = compiler_options
    return on_mesh(local, method.plan, run.mesh, **how)


def build_lone_step(run: Run, mesh: Mesh) -> TrainStep:
    """The compiled step of workers who exchange nothing."""
    options = options_on(mesh, run.config.step)
    return on_mesh(run.local, alone(mesh.shape[AXIS]), mesh, compiler_options=options)


def step_options(run: Run) -> dict[str, str]:
    """The options of XLA for the compiled step; none where there is no such step.

    Raises:
      ValueError: if XLA does not know one, needed or not.
    """
    is_beside = run.place.watch is not None or run.is_in_thread
    return options_on(None if is_beside else run.mesh, run.config.step)


def options_on(mesh: Mesh | None, step: StepConfig) -> dict[str, str]:
    """The options of XLA for a program on a mesh; none where there is no mesh.

    Raises:
      ValueError: if XLA does not know one, needed or not.
    """
    check_options(step.xla_options, jax.default_backend())
    return {} if mesh is None else read_options(step.xla_options, jax.default_backend())
