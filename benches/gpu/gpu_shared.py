"""One of several processes that share a GPU. Started by `benches.gpu.gpu`."""

import contextlib
import sys
from typing import Any

import jax
import numpy as np
import optax

from benches.gpu.gpu import BOTH, COMPUTE, EXCHANGE, GpuBench
from benches.gpu.gpu_alone import explained, first_batch, of_workers
from benches.runner import Runner, repeat
from benches.train_steps import in_turns
from decentjax import Topology, WorkerState, local_update, place, topology, worker_mesh
from decentjax.gossip import Background, host_mesh
from decentjax.mixing import Lowering
from decentjax.placement import local_workers
from decentjax.updates import Adapt
from train.cli.plain_console import PlainConsole
from train.cli.tables import write_json
from train.config import Config, DistributedConfig
from train.job.distributed import fail_stop, start
from train.run.build import build_state
from train.tasks.task import Task


def main(options: str, port: str, rank: str) -> None:
    bench = GpuBench.from_json(options)
    job = DistributedConfig(
        enabled=True,
        coordinator=f"127.0.0.1:{port}",
        num_processes=bench.processes,
        process_id=int(rank),
        step_deadline=120.0,
    )
    # fail_stop outside: its peers would wait in a collective for one that has failed.
    with fail_stop(), explained():
        start(job, bench.processes)
        seconds = measure(bench)
        write_json(bench.out / f"shared.{rank}.json", seconds)


def measure(bench: GpuBench) -> dict[str, float]:
    """Measures what the processes do, in turns, in all processes at once."""
    config = of_workers(bench, bench.processes, "one_peer_exponential")
    task = config.task.build()
    with contextlib.ExitStack() as stack:
        shared = runners(config, task, optax.adamw(1e-4), stack)
        # Quiet, as the lines of all processes go to one terminal.
        return in_turns(shared, bench.rounds, bench.steps, PlainConsole(quiet=True))


def runners(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    stack: contextlib.ExitStack,
) -> dict[str, Runner]:
    """Returns the step without messages, messages without the step, and both.

    Args:
      config: config of all workers.
      task: its task.
      optimizer: local optimizer.
      stack: stack of contexts that closes the threads of the exchanges.
    """
    batch = first_batch(config, task)
    alone = worker_mesh(1, jax.local_devices())
    all_workers = worker_mesh(config.workers.num_workers)
    graph, no_peers = config.topology.build(config.workers), topology.complete(1)

    def runner(
        optimizer: optax.GradientTransformation, local: Adapt, graph: Topology
    ) -> Runner:
        mesh = alone if graph is no_peers else all_workers
        workers = local_workers(mesh)
        rows = build_state(config, task, optimizer, workers)
        stacked = jax.tree.map(lambda x: np.stack([x] * len(workers)), batch)
        state, stacked = place((rows, stacked), mesh)
        host = None if graph is no_peers else host_mesh(mesh)
        # One lowering for all three, as measuring could choose different ones.
        train_step = stack.enter_context(
            Background(local, graph, mesh, lowering=Lowering(), exchange_mesh=host)
        )
        return repeat(
            lambda state, t: train_step(state, stacked, t)[0], state, train_step.settle
        )

    step = local_update(loss_fn=task.loss_fn, optimizer=optimizer)
    return {
        COMPUTE: runner(optimizer, step, no_peers),
        # Without moments: they are not exchanged, and the memory holds three states.
        EXCHANGE: runner(optax.identity(), _nothing, graph),
        BOTH: runner(optimizer, step, graph),
    }


def _nothing(state: WorkerState, batch: Any, mixed: Any) -> tuple[WorkerState, dict]:
    """A step that only exchanges."""
    del batch
    return state._replace(params=mixed), {}


if __name__ == "__main__":
    main(*sys.argv[1:])
