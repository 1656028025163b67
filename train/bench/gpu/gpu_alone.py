"""All contestants of one process on one GPU. Started by `train.bench.gpu.gpu`."""

import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from decentjax import accum_adamw, overlap, place, worker_mesh
from train.bench.gpu.gpu import ACCUM, COPY, OURS, PLAIN, UPDATE, GpuBench, Result
from train.bench.work import Contestant
from train.cli import load_config
from train.config import Config, ExchangeConfig, TopologyConfig, WorkersConfig
from train.preflight.targets import GPUS
from train.run.build import build_in_step, build_state, step_options
from train.tasks.task import Task


def main(options: str) -> None:
    bench = GpuBench.from_json(options)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    try:
        with explained():
            result = measure(bench, console)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    (bench.out / "alone.json").write_text(json.dumps(dataclasses.asdict(result)))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Says what to do where the device's memory does not suffice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first, _, _ = str(error).partition("\n")
        raise ValueError(f"take a smaller --batch: {first}") from error


def measure(bench: GpuBench, console: Console) -> Result:
    """Has the contestants take turns.

    Raises:
      ValueError: if there is no such device.
    """
    device = _device(bench.device)
    config = of_workers(bench, 1, "complete")
    task = config.task.build()
    batch = first_batch(config, task)
    adamw = optax.adamw(1e-4)
    accum = accum_adamw(1e-4, accum_steps=config.optimizer.accum_steps)
    plain, flops = plain_step(config, task, adamw, batch)
    update, update_bytes, compiled_bytes = update_step(config, task)
    copy, copied_bytes = copy_step(task)
    contestants = {
        PLAIN: plain,
        OURS: our_step(config, task, adamw, batch),
        ACCUM: our_step(config, task, accum, batch),
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
        compiled_bytes=compiled_bytes,
        seconds=in_turns(contestants, bench.rounds, bench.steps, console),
    )


def of_workers(bench: GpuBench, num_workers: int, topology: Any) -> Config:
    """The bench's config for so many workers, which share its batch."""
    config = load_config(bench.config)
    batch = bench.batch or config.step.batch_per_worker
    return dataclasses.replace(
        config,
        workers=WorkersConfig(num_workers=num_workers),
        topology=TopologyConfig(name=topology),
        exchange=ExchangeConfig(where="in_step"),
        step=dataclasses.replace(
            config.step,
            algorithm="awc",
            batch_per_worker=max(1, batch // num_workers),
            num_micro_batches=1,
        ),
    )


def first_batch(config: Config, task: Task) -> Any:
    """The batch of step 0 of one worker, each leaf [examples, ...]."""
    steps = task.steps(1, config.step.batch_per_worker, config.seed, workers=[0])
    batch = steps[0]
    assert batch is not None  # As it is where a data set filters.
    return jax.tree.map(lambda x: x[0], batch.arrays)


def plain_step(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    batch: Any,
) -> tuple[Contestant, float]:
    """A step as anybody writes it with optax, and its FLOPs."""

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, opt_state, model_state, batch, key):
        grads, (model_state, _) = jax.grad(task.loss_fn, has_aux=True)(
            params, model_state, batch, key
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state

    worker = build_state(config, task, optimizer, [0])
    state = jax.tree.map(lambda x: x[0], worker[:3])
    batch, key = jax.device_put((batch, jax.random.key(1)))
    compiled = step.lower(*state, batch, key).compile()
    flops = sum(overlap.read(compiled).work.flops.values())

    def run():
        nonlocal state
        state = step(*state, batch, key)
        return state

    return Contestant(run), flops


def our_step(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    batch: Any,
) -> Contestant:
    """The trainer's compiled step, of one worker alone."""
    mesh = worker_mesh(1, jax.local_devices())
    train_step = build_in_step(
        config, task, optimizer, mesh, step_options(config, mesh)
    )
    state = build_state(config, task, optimizer, [0])
    stacked = jax.tree.map(lambda x: x[None], batch)
    state, stacked = place((state, stacked), mesh)

    def run():
        nonlocal state
        state, _ = train_step(state, stacked, 0)
        return state

    return Contestant(run)


def update_step(config: Config, task: Task) -> tuple[Contestant, float, float]:
    """AccumAdamW alone, the bytes that it must move in the mean, and as compiled.

    It reads model, gradient, two moments and the sum of gradients, and writes model and
    sum; once in `accum_steps` steps it writes the moments too, as compiled always.
    """
    accum_steps = config.optimizer.accum_steps
    optimizer = accum_adamw(1e-4, accum_steps=accum_steps)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    worker = build_state(config, task, optimizer, [0])
    params, opt_state = jax.tree.map(lambda x: x[0], worker[:2])
    grads = jax.tree.map(jnp.ones_like, params)
    model_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    compiled = step.lower(params, opt_state, grads).compile()

    def run():
        nonlocal params, opt_state
        params, opt_state = step(params, opt_state, grads)
        return params

    must_move = (7 + 2 / accum_steps) * model_bytes
    return Contestant(run), must_move, overlap.read(compiled).work.num_bytes


def copy_step(task: Task) -> tuple[Contestant, float]:
    """A copy of as much as model, two moments and sum, and the bytes that it moves."""
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    size = 4 * sum(x.size for x in jax.tree.leaves(params))
    array = jnp.zeros(size, jnp.float32)
    negate = jax.jit(jnp.negative, donate_argnums=0)

    def run():
        nonlocal array
        array = negate(array)
        return array

    return Contestant(run), 2.0 * array.nbytes


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


def _device(kind: str) -> Any:
    try:
        return jax.local_devices(backend=kind)[0]
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"nothing measured, jax sees no {kind}: {error}") from error


if __name__ == "__main__":
    main(*sys.argv[1:])
