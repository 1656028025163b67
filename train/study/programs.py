"""The programs of K seeds at once, [K, N, ...]: steps, scores, and their arrays.

The workers are simulated on one device, or lie on a mesh of one device each; the seeds
are batched in each worker.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax import AXIS, WorkerState, consensus_distance, mean_model, over_workers
from decentjax.dispersion import measured, tensor_distances
from decentjax.plan import Event, Plan, worker_step
from decentjax.rounds import Round, Rounds, default_mix, program_of, receive, send
from decentjax.updates import LossFn, Metrics
from train.config import OptimizerConfig, StepConfig
from train.run.build import options_on
from train.run.method import bind_mix
from train.run.nonfinite import build_local
from train.run.optimizers import build_optimizer
from train.run.scores import ratios
from train.run.setup import Run
from train.tasks.task import Task


def put(stacked: Any, mesh: Mesh | None) -> Any:
    """Puts arrays with the rows of this process's workers, [K, n, ...], on the mesh."""
    if mesh is None:
        return stacked
    sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))
    make = functools.partial(jax.make_array_from_process_local_data, sharding)
    return jax.tree.map(make, stacked)


def fetch(arrays: Any) -> Any:
    """The whole arrays, in each process of the job; a collective."""

    def whole(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable:  # jax would take it for a part of each process.
            return np.asarray(x)
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(whole, arrays)


def build_step(
    run: Run,
) -> Callable[[WorkerState, Any, Any], tuple[WorkerState, Metrics]]:
    """The step of the config's method over [K, N, ...], in few programs.

    It takes what begins and ends in it. There is nothing to overlap, so the exchange is
    a separate program, and the local update is compiled once and not once for each
    exchange, nor for each run of a grid.
    """
    config, method, mesh = run.config, run.method, run.mesh
    options = options_on(mesh, config.step)
    key = mesh, config.step, run.task.loss_fn, config.optimizer, config.num_steps
    key = *key, method.is_early
    rounds = method.rounds
    if method.sends_gradients or (rounds is not None and rounds.has_hooks):
        whole = functools.partial(_whole_program, method.plan)
        return lambda state, batch, taken: whole(taken, *key)(state, batch)
    average = bind_mix(config.step)
    if rounds is not None and rounds.compression is not None:
        average = default_mix(rounds)

    @functools.cache
    def program(function: Callable, *static: Any, **named: Any) -> Callable:
        one = functools.partial(function, *static, **named)
        return _over_all(one, mesh, options)

    def of_round(function: Callable) -> Callable:
        def run(rounds: Rounds, one: Round, *arrays: Any) -> Any:
            return program(function, rounds, program_of(rounds, one))(*arrays)

        return run

    return worker_step(
        _adapt_program(*key),
        method.plan,
        lambda sent, exchange: program(average, exchange=exchange)(sent),
        send=of_round(send),
        receive=of_round(receive),
    )


def _over_all(
    function: Callable,
    mesh: Mesh | None,
    options: Mapping[str, str] | None = None,
    **named: Any,
) -> Callable:
    """The compiled function of one worker over [K, N, ...], with options of XLA."""
    # The outer axis has no name: K seeds of N workers each never mix.
    over = jax.vmap(over_workers(function, mesh))
    return jax.jit(over, compiler_options=dict(options or {}) or None, **named)


def _local(
    step: StepConfig,
    loss_fn: LossFn,
    optimizer: OptimizerConfig,
    num_steps: int,
    before: bool,
) -> Callable:
    local = build_local(step, loss_fn, build_optimizer(optimizer, num_steps))
    return measured(local, before_update=before)


@functools.lru_cache(maxsize=8)
def _adapt_program(mesh: Mesh | None, step: StepConfig, *key: Any) -> Callable:
    return _over_all(_local(step, *key), mesh, options_on(mesh, step))


@functools.lru_cache(maxsize=64)
def _whole_program(
    plan: Plan, event: Event, mesh: Mesh | None, step: StepConfig, *key: Any
) -> Callable:
    one_step = worker_step(_local(step, *key), plan)

    def of_worker(state: WorkerState, batch: Any) -> tuple[WorkerState, Metrics]:
        return one_step(state, batch, event)

    return _over_all(of_worker, mesh, options_on(mesh, step), donate_argnums=0)


@functools.lru_cache(maxsize=8)
def _of_params(function: Callable, mesh: Mesh | None) -> Callable:
    return _over_all(function, mesh)


def distances(params: Any, mesh: Mesh | None) -> jax.Array:
    """How far the tensors of the workers are apart, the same for each, [K, N, L]."""
    return _of_params(_TENSOR_DISTANCES, mesh)(params)


def far_apart(state: WorkerState, mesh: Mesh | None = None) -> list[float]:
    """The consensus distance of each seed."""
    found = fetch(_of_params(_DISTANCE, mesh)(state.params))
    return np.mean(found, axis=1).tolist()


_TENSOR_DISTANCES = functools.partial(tensor_distances, axis_name=AXIS)
_DISTANCE = functools.partial(consensus_distance, axis_name=AXIS)
_mean_models = jax.jit(jax.vmap(mean_model))

Scores = Callable[[WorkerState], dict[str, Any]]


def build_scores(task: Task) -> tuple[Scores, Scores]:
    """The scores of the mean models, [K], and of all workers' models, [K, N]."""
    batches = task.validation()

    def over(models: int, mean: bool) -> Scores:
        sums = _score_program(task.score_fn, models)

        def scores(state: WorkerState) -> dict[str, Any]:
            model = state.params, state.model_state
            model = fetch(_mean_models(model)) if mean else model
            parts = [fetch(sums(*model, batch)) for batch in batches]
            return {name: score.tolist() for name, score in ratios(parts).items()}

        return scores

    return over(models=1, mean=True), over(models=2, mean=False)


@functools.lru_cache(maxsize=8)
def _score_program(score_fn: Callable, models: int) -> Callable:
    for _ in range(models):
        score_fn = jax.vmap(score_fn, in_axes=(0, 0, None))
    return jax.jit(score_fn)


def judge(task: Task, state: WorkerState) -> dict[str, list[float]]:
    """The scores of the task's judge for the mean model of each seed."""
    if task.judge is None:
        return {}
    models = fetch(_mean_models((state.params, state.model_state)))
    # The judge takes one model: row k of each leaf [K, ...] is the model of seed k.
    structure = jax.tree.structure(models)
    rows = zip(*jax.tree.leaves(models), strict=True)
    judged = [task.judge(*jax.tree.unflatten(structure, row)) for row in rows]
    return {name: [scores[name] for scores in judged] for name in judged[0]}
