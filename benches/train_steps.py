"""A train step of one worker, hand-written and the library's, and their turns."""

import dataclasses
import functools
import time
from statistics import median
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from rich.console import Console

from benches.runner import Runner, repeat
from decentjax import TrainStep, awc_step, on_mesh, overlap, place, worker_mesh
from decentjax.dispersion import measured
from decentjax.loss import check_loss
from train.config import (
    Config,
    InStepExchange,
    TopologyConfig,
    TopologyName,
    WorkersConfig,
)
from train.run.build import (
    build_in_step,
    build_local,
    build_state,
    step_options,
)
from train.run.method import bind_mix
from train.tasks.task import Task


def for_workers(
    config: Config, num_workers: int, topology: TopologyName, batch: int
) -> Config:
    """Returns the config with the exchange in the step.

    Args:
      config: config of a run.
      num_workers: N.
      topology: name of the topology.
      batch: examples of a step, which the workers share.
    """
    return dataclasses.replace(
        config,
        workers=WorkersConfig(num_workers=num_workers),
        topology=TopologyConfig(name=topology),
        exchange=InStepExchange(),
        step=dataclasses.replace(
            config.step,
            algorithm="awc",
            batch_per_worker=max(1, batch // num_workers),
            num_micro_batches=1,
        ),
    )


def plain_step(
    config: Config, task: Task, optimizer: optax.GradientTransformation, batch: Any
) -> tuple[Runner, float]:
    """Returns a step as written by hand with optax, and the FLOPs of its matmuls.

    Args:
      config: config of one worker.
      task: its task.
      optimizer: local optimizer.
      batch: batch of every step, each leaf [examples, ...].
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, opt_state, model_state, batch, key):
        def loss_fn(params):
            result = task.loss_fn(params, model_state, batch, key)
            (loss, _), (new_state, _) = check_loss(result, model_state)
            return loss, new_state

        grads, model_state = jax.grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state

    worker = build_state(config, task, optimizer, [0])
    # Params, optimizer state and model state, without the axis of workers [1, ...].
    state = jax.tree.map(lambda x: x[0], worker[:3])
    batch, key = jax.device_put((batch, jax.random.key(1)))
    # Compiled to read the FLOPs of its matmuls; the steps themselves go through jit.
    compiled = step.lower(*state, batch, key).compile()
    flops = sum(overlap.read(compiled).work.flops.values())

    return repeat(lambda state, _: step(*state, batch, key), state), flops


def our_step(
    config: Config, task: Task, optimizer: optax.GradientTransformation, batch: Any
) -> Runner:
    """Returns the trainer's compiled step of one worker; see `plain_step`."""
    mesh = worker_mesh(1, jax.local_devices())
    options = step_options(config, mesh)
    train_step = build_in_step(config, task, optimizer, mesh, options)
    return _repeated(train_step, config, task, optimizer, batch, mesh)


def measured_step(
    config: Config, task: Task, optimizer: optax.GradientTransformation, batch: Any
) -> Runner:
    """Returns the same step, which also measures the norm of each tensor."""
    mesh = worker_mesh(1, jax.local_devices())
    local = measured(build_local(config.step, task.loss_fn, optimizer))
    step = functools.partial(awc_step, adapt=local, mix=bind_mix(config.step))
    topology = config.topology.build(config.workers)
    train_step = on_mesh(step, topology, mesh, step_options(config, mesh))
    return _repeated(train_step, config, task, optimizer, batch, mesh)


def _repeated(
    train_step: TrainStep,
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    batch: Any,
    mesh: Mesh,
) -> Runner:
    # A state of its own: each step donates, and so deletes, the state that it is given.
    state = build_state(config, task, optimizer, [0])
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
