"""A train step of one worker, hand-written and the library's, and their turns."""

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import optax
from rich.console import Console

from benches.runner import Runner, repeat
from decentjax import (
    TrainStep,
    on_mesh,
    overlap,
    place,
    topology,
    worker_mesh,
    wrap,
)
from decentjax.dispersion import measured
from decentjax.updates import check_loss
from train.config import (
    AwcMethod,
    Config,
    InStepExchange,
    TopologyConfig,
    TopologyName,
    WorkersConfig,
)
from train.run.build import build_in_step, step_options
from train.run.run_place import Given
from train.run.setup import Run


def for_workers(
    config: Config, num_workers: int, graph: TopologyName, batch: int
) -> Config:
    """Returns the config with the exchange in the step.

    Args:
      config: config of a run.
      num_workers: N.
      graph: name of the topology.
      batch: examples of a step, which the workers share.
    """
    return dataclasses.replace(
        config,
        workers=WorkersConfig(num_workers=num_workers),
        topology=TopologyConfig(name=graph),
        method=AwcMethod(),
        exchange=InStepExchange(),
        step=dataclasses.replace(
            config.step,
            batch_per_worker=max(1, batch // num_workers),
            num_micro_batches=1,
        ),
    )


def plain_step(run: Run, batch: Any) -> tuple[Runner, float]:
    """Returns a step as written by hand with optax, and the FLOPs of its matmuls.

    Args:
      run: a run of one worker.
      batch: batch of every step, each leaf [examples, ...].
    """

    step, state = jax.jit(hand_written(run), donate_argnums=0), one_state(run)
    batch = jax.device_put(batch)
    # Compiled to read the FLOPs of its matmuls; the steps themselves go through jit.
    compiled = step.lower(state, batch).compile()
    flops = sum(overlap.read(compiled).work.flops.values())

    return repeat(lambda state, _: step(state, batch)[0], state), flops


def hand_written(run: Run) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns a train step as it is written without this library."""
    key, task, optimizer = jax.random.key(1), run.task, run.optimizer

    def step(state, batch):
        params, opt_state, model_state = state

        def loss_fn(params):
            result = task.loss_fn(params, model_state, batch, key)
            (loss, _), (new_state, _) = check_loss(result, model_state)
            return loss, new_state

        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, model_state), grads = grad(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state), loss

    return step


def one_state(run: Run) -> Any:
    """Params, optimizer state and model state, without the axis of workers [1, ...]."""
    return jax.tree.map(lambda x: x[0], tuple(run.first_state([0])[:3]))


def wrapped_step(run: Run, batch: Any) -> Runner:
    """Returns the hand-written step, wrapped for one worker; see `plain_step`."""
    mesh, graph = worker_mesh(1, jax.local_devices()), topology.complete(1)
    train_step = wrap(hand_written(run), graph, mesh)
    state = train_step.init(one_state(run))
    stacked = place(jax.tree.map(lambda x: x[None], batch), mesh)
    return repeat(lambda state, t: train_step(state, stacked, t)[0], state)


def our_step(run: Run, batch: Any) -> Runner:
    """Returns the trainer's compiled step of one worker; see `plain_step`."""
    run = _on_a_device(run)
    return _repeated(build_in_step(run, step_options(run)), run, batch)


def measured_step(run: Run, batch: Any) -> Runner:
    """Returns the same step, which also measures the norm of each tensor."""
    run, mesh = _on_a_device(run), worker_mesh(1, jax.local_devices())
    local, method = measured(run.local), run.method
    how: Any = {"mix": method.mix, "compiler_options": step_options(run)}
    return _repeated(on_mesh(local, method.plan, mesh, **how), run, batch)


def _on_a_device(run: Run) -> Run:
    mesh = worker_mesh(1, jax.local_devices())
    return dataclasses.replace(run, place=Given(run.config, mesh))


def _repeated(train_step: TrainStep, run: Run, batch: Any) -> Runner:
    # A state of its own: each step donates, and so deletes, the state that it is given.
    state, mesh = run.first_state([0]), run.mesh
    assert mesh is not None
    state, stacked = place((state, jax.tree.map(lambda x: x[None], batch)), mesh)
    return repeat(lambda state, t: train_step(state, stacked, t)[0], state)


def in_turns(
    runners: dict[str, Runner], rounds: int, steps: int, console: Console
) -> dict[str, float]:
    """Returns the median seconds of a step of each runner.

    Args:
      runners: runner of each step, by name.
      rounds: number of turns of each runner.
      steps: steps measured in a turn.
      console: shows the progress.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for name, runner in runners.items():
        with console.status(f"compiling: {name}"):
            jax.block_until_ready(runner.step())
            runner.finish()
    # In turns, so that a slow drift of the machine's speed reaches all alike.
    for number in range(rounds):
        with console.status(f"round {number + 1} of {rounds}"):
            for name, runner in runners.items():
                seconds[name].append(_turn(runner, steps))
    return {name: median(values) for name, values in seconds.items()}


def _turn(runner: Runner, steps: int) -> float:
    # One step more: processes meet in it, and its exchange hides behind the next.
    jax.block_until_ready(runner.step())
    start = time.monotonic()
    for _ in range(steps - 1):
        runner.step()
    jax.block_until_ready(runner.step())
    seconds = (time.monotonic() - start) / steps
    runner.finish()
    return seconds
