"""One of several processes that share a GPU. Started by `benches.gpu.gpu`."""

import contextlib
import dataclasses
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
from train.config import DistributedConfig, WorkersConfig
from train.job.distributed import fail_stop, start
from train.run.setup import Run, make_run


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
        start(job, WorkersConfig(num_workers=bench.processes))
        seconds = measure(bench)
        write_json(bench.out / f"shared.{rank}.json", seconds)


def measure(bench: GpuBench) -> dict[str, float]:
    """Measures what the processes do, in turns, in all processes at once."""
    config = of_workers(bench, bench.processes, "one_peer_exponential")
    task = config.task.build()
    with contextlib.ExitStack() as stack:
        run = make_run(config, task=task, optimizer=optax.adamw(1e-4))
        shared = runners(run, stack)
        # Quiet, as the lines of all processes go to one terminal.
        return in_turns(shared, bench.rounds, bench.steps, PlainConsole(quiet=True))


def runners(run: Run, stack: contextlib.ExitStack) -> dict[str, Runner]:
    """Returns the step without messages, messages without the step, and both.

    Args:
      run: a run of all workers.
      stack: stack of contexts that closes the threads of the exchanges.
    """
    batch, config = first_batch(run.config, run.task), run.config
    alone = worker_mesh(1, jax.local_devices())
    all_workers = worker_mesh(config.workers.num_workers)
    graph, no_peers = config.topology.build(config.workers), topology.complete(1)

    def runner(run: Run, local: Adapt, graph: Topology) -> Runner:
        mesh = alone if graph is no_peers else all_workers
        workers = local_workers(mesh)
        rows = run.first_state(workers)
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

    step = local_update(loss_fn=run.task.loss_fn, optimizer=run.optimizer)
    without = dataclasses.replace(run, optimizer=optax.identity())
    return {
        COMPUTE: runner(run, step, no_peers),
        # Without moments: they are not exchanged, and the memory holds three states.
        EXCHANGE: runner(without, _nothing, graph),
        BOTH: runner(run, step, graph),
    }


def _nothing(state: WorkerState, batch: Any, mixed: Any) -> tuple[WorkerState, dict]:
    """A step that only exchanges."""
    del batch
    return state._replace(params=mixed), {}


if __name__ == "__main__":
    main(*sys.argv[1:])
