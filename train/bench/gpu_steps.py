"""What `train.bench.gpu` measures: the steps, how they take turns, and their limits."""

import dataclasses
import functools
import time
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from decentjax import (
    WorkerState,
    accum_adamw,
    awc_step,
    init_state,
    on_mesh,
    overlap,
    place,
    topology,
    worker_mesh,
)
from train.__main__ import load_config
from train.bench.gpu import ACCUM, COPY, OURS, PLAIN, UPDATE, GpuBench, Result
from train.bench.work import Contestant
from train.config import Config
from train.preflight.targets import GPUS
from train.tasks.task import Task
from train.xla import read_options


def measure(bench: GpuBench, console: Console) -> Result:
    """Has all contestants of one process take turns on the device."""
    device = check_device(bench.device)
    config = load(bench)
    task = config.task.build()
    batch = first_batch(config, task)
    adamw = optax.adamw(1e-4)
    accum = accum_adamw(1e-4, accum_steps=config.optimizer.accum_steps)
    plain, flops = _plain_step(task, adamw, batch, device)
    update, update_bytes = _update(config, task, device)
    copy, copied_bytes = _copy(task, device)
    contestants = {
        PLAIN: plain,
        OURS: our_step(task, adamw, batch, device),
        ACCUM: our_step(task, accum, batch, device),
        UPDATE: update,
        COPY: copy,
    }
    known = {gpu.name: gpu.flops_per_second["bf16"] for gpu in GPUS.values()}
    return Result(
        device=device.device_kind,
        tokens=batch.shape[0] * (batch.shape[1] - 1),
        flops=flops,
        peak=known.get(device.device_kind),
        copied_bytes=copied_bytes,
        update_bytes=update_bytes,
        seconds=in_turns(contestants, bench.rounds, bench.steps, console),
    )


def load(bench: GpuBench) -> Config:
    """The config, with the batch of this bench."""
    config = load_config(bench.config)
    if bench.batch is None:
        return config
    step = dataclasses.replace(
        config.step, batch_per_worker=bench.batch, num_micro_batches=1
    )
    return dataclasses.replace(config, step=step)


def first_batch(config: Config, task: Task) -> np.ndarray:
    """The first examples of the task, [examples, tokens + 1]."""
    size = config.step.batch_per_worker
    return np.stack([np.asarray(task.source[i]) for i in range(size)])


def our_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    batch: np.ndarray,
    device: Any,
) -> Contestant:
    """A decentralized step of one worker alone, compiled as the trainer would."""
    mesh = worker_mesh(1, [device])
    options = read_options(("recommended",), device.platform)
    step = functools.partial(awc_step, loss_fn=task.loss_fn, optimizer=optimizer)
    train_step = on_mesh(step, topology.complete(1), mesh, options)
    state = initial_state(task, optimizer, num_workers=1, worker=0)
    state, stacked = place((state, batch[None]), mesh)

    def run():
        nonlocal state
        state, _ = train_step(state, stacked, 0)
        return state

    return Contestant(run)


def initial_state(
    task: Task,
    optimizer: optax.GradientTransformation,
    num_workers: int,
    worker: int,
) -> WorkerState:
    """The row of one worker."""

    @jax.jit
    def make(key):
        model_key, workers_key = jax.random.split(key)
        params, model_state = task.init(model_key)
        return init_state(
            params, optimizer, workers_key, num_workers, model_state, [worker]
        )

    return make(jax.random.key(0))


def in_turns(
    contestants: dict[str, Contestant], rounds: int, steps: int, console: Console
) -> dict[str, float]:
    """Median seconds of a step, of rounds in which each has its turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for name, contestant in contestants.items():
        with console.status(f"compiling: {name}"):
            jax.block_until_ready(contestant.step())
            contestant.rest()
    for number in range(rounds):
        with console.status(f"round {number + 1} of {rounds}"):
            for name, contestant in contestants.items():
                seconds[name].append(_turn(contestant, steps))
    return {name: median(values) for name, values in seconds.items()}


def _turn(contestant: Contestant, steps: int) -> float:
    # One step more: processes meet in it, and its exchange hides behind the next.
    jax.block_until_ready(contestant.step())
    start = time.monotonic()
    for _ in range(steps - 1):
        contestant.step()
    jax.block_until_ready(contestant.step())
    seconds = (time.monotonic() - start) / steps
    contestant.rest()
    return seconds


def check_device(kind: str) -> Any:
    """Returns the first device of a kind.

    Raises:
      ValueError: if there is none.
    """
    try:
        return jax.local_devices(backend=kind)[0]
    except RuntimeError as error:
        raise ValueError(
            f"nothing measured: jax sees no {kind} here, but "
            f"{jax.devices()[0].device_kind}"
        ) from error


def _plain_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    batch: np.ndarray,
    device: Any,
) -> tuple[Contestant, float]:
    """A step as anybody writes it with optax."""

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, opt_state, model_state, batch, key):
        grads, (model_state, _) = jax.grad(task.loss_fn, has_aux=True)(
            params, model_state, batch, key
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state

    worker = initial_state(task, optimizer, num_workers=1, worker=0)
    state = jax.tree.map(lambda x: x[0], worker[:3])
    state, batch, key = jax.device_put((state, batch, jax.random.key(1)), device)
    compiled = step.lower(*state, batch, key).compile()
    flops = sum(overlap.read(compiled).work.flops.values())

    def run():
        nonlocal state
        state = step(*state, batch, key)
        return state

    return Contestant(run), flops


def _update(config: Config, task: Task, device: Any) -> tuple[Contestant, float]:
    """AccumAdamW alone, and the bytes that it must move in the mean.

    It reads model, gradient, two moments and the sum of gradients, and writes model and
    sum; once in `accum_steps` steps it writes the moments too.
    """
    accum_steps = config.optimizer.accum_steps
    optimizer = accum_adamw(1e-4, accum_steps=accum_steps)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = initial_state(task, optimizer, num_workers=1, worker=0)
    params, opt_state = jax.tree.map(lambda x: jax.device_put(x[0], device), state[:2])
    grads = jax.tree.map(jnp.ones_like, params)
    model_bytes = sum(x.nbytes for x in jax.tree.leaves(params))

    def run():
        nonlocal params, opt_state
        params, opt_state = step(params, opt_state, grads)
        return params

    return Contestant(run), (7 + 2 / accum_steps) * model_bytes


def _copy(task: Task, device: Any) -> tuple[Contestant, float]:
    """A copy of as much as model and moments, and the bytes that it moves."""
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    size = 4 * sum(x.size for x in jax.tree.leaves(params))
    array = jax.device_put(jnp.zeros(size, jnp.float32), device)
    negate = jax.jit(jnp.negative, donate_argnums=0)

    def run():
        nonlocal array
        array = negate(array)
        return array

    return Contestant(run), 2.0 * array.nbytes
