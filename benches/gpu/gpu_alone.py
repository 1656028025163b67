"""All steps of one process on one GPU. Started by `benches.gpu.gpu`."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benches.gpu.gpu import ACCUM, COPY, OURS, PLAIN, UPDATE, GpuBench, GpuTiming
from benches.runner import Runner, repeat
from benches.train_steps import for_workers, in_turns, our_step, plain_step
from decentjax import overlap
from decentjax.optim import accum_adamw
from train.cli.command import command
from train.cli.load import load_config
from train.cli.plain_console import PlainConsole
from train.cli.tables import write_json
from train.config import Config, TopologyName
from train.run.setup import Run, make_run
from train.targets import peak_flops
from train.tasks.task import Task

UPDATES = 10  # Optimizer updates in a program.


@command()
def main(options: str) -> None:
    bench = GpuBench.from_json(options)
    with explained():
        write_json(bench.out / "alone.json", measure(bench))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A context that turns a lack of device memory into advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first, _, _ = str(error).partition("\n")
        raise ValueError(f"take a smaller --batch: {first}") from error


def measure(bench: GpuBench) -> GpuTiming:
    """Measures all steps in turns.

    Raises:
      ValueError: if jax finds no such device.
    """
    device = _device(bench.device)
    config = of_workers(bench, 1, "complete")
    task = config.task.build()
    batch = first_batch(config, task)
    accum_steps = config.optimizer.accum_steps
    optimizers = optax.adamw(1e-4), accum_adamw(1e-4, accum_steps=accum_steps)
    adamw, accum = (make_run(config, None, task, one) for one in optimizers)
    plain, flops = plain_step(adamw, batch)
    update, update_bytes, compiled_bytes = update_step(accum)
    copy, copied_bytes = copy_step(task)
    runners = {
        PLAIN: plain,
        OURS: our_step(adamw, batch),
        ACCUM: our_step(accum, batch),
        UPDATE: update,
        COPY: copy,
    }
    seconds = in_turns(runners, bench.rounds, bench.steps, PlainConsole())
    seconds[UPDATE] /= UPDATES
    # By the driver's name of the device, as `preflight` knows GPUs by it.
    return GpuTiming(
        device=device.device_kind,
        # Windows of text [examples, context + 1]: the last token is only predicted.
        tokens=batch.shape[0] * (batch.shape[1] - 1),
        flops=flops,
        peak=peak_flops(device.device_kind),
        copied_bytes=copied_bytes,
        update_bytes=update_bytes,
        compiled_bytes=compiled_bytes,
        seconds=seconds,
    )


def of_workers(bench: GpuBench, num_workers: int, topology: TopologyName) -> Config:
    """Returns the bench's config for some workers, which share its batch."""
    config = load_config(bench.config)
    batch = bench.batch or config.step.batch_per_worker
    return for_workers(config, num_workers, topology, batch)


def first_batch(config: Config, task: Task) -> Any:
    """Returns the batch of step 0 of one worker, each leaf [examples, ...]."""
    steps = task.steps(1, config.step.batch_per_worker, config.seed, workers=[0])
    batch = steps[0]
    assert batch is not None  # Only data sets that filter have gaps.
    return jax.tree.map(lambda x: x[0], batch.arrays)


def update_step(run: Run) -> tuple[Runner, float, float]:
    """Returns `UPDATES` updates of AccumAdamW, and the bytes of one.

    First the bytes that it must move, then those that it moves as compiled. It reads
    model, gradient, two moments and the sum of gradients, and writes model and sum: 7
    models. Once in `accum_steps` steps it must write the two moments too; the compiled
    program writes them at each step.

    Several updates are one program, as on a GPU the host needs longer to pass the
    hundreds of arrays of a call than the device to update them.
    """
    accum_steps, optimizer = run.config.optimizer.accum_steps, run.optimizer

    def update(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def updates(params, opt_state, grads):
        def once(_, state):
            params, opt_state = state
            return update(params, opt_state, grads)

        return lax.fori_loop(0, UPDATES, once, (params, opt_state))

    step, steps = (jax.jit(f, donate_argnums=(0, 1)) for f in (update, updates))
    worker = run.first_state([0])
    params, opt_state = jax.tree.map(lambda x: x[0], worker[:2])
    grads = jax.tree.map(jnp.ones_like, params)
    model_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    compiled = step.lower(params, opt_state, grads).compile()
    runner = repeat(lambda state, _: steps(*state, grads), (params, opt_state))
    must_move = (7 + 2 / accum_steps) * model_bytes
    return runner, must_move, overlap.read(compiled).work.num_bytes


def copy_step(task: Task) -> tuple[Runner, float]:
    """Returns a copy of four models' size, and the bytes that it moves."""
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    size = 4 * sum(x.size for x in jax.tree.leaves(params))
    array = jnp.zeros(size, jnp.float32)
    # XLA would drop a copy; a negation moves the same bytes, and donation makes it
    # write in place, so that no second array of four models is needed.
    negate = jax.jit(jnp.negative, donate_argnums=0)
    return repeat(lambda array, _: negate(array), array), 2.0 * array.nbytes


def _device(kind: str) -> Any:
    try:
        return jax.local_devices(backend=kind)[0]
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"nothing measured, jax sees no {kind}: {error}") from error


if __name__ == "__main__":
    main(*sys.argv[1:])
