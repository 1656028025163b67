"""A worker of the quality race: this library's methods. Started by a `Team`."""

import dataclasses
import functools
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from benches.quality.compared import ComparedMethod
from benches.race.jax_worker import rest
from benches.race.turns import serve
from benches.runner import Runner, repeat
from decentjax import place, worker_mesh
from decentjax.placement import local_workers
from train.cli.load import load_config
from train.config import DistributedConfig
from train.data.batches import feed
from train.job.distributed import fail_stop, start
from train.job.namespaces import INTERFACE
from train.run.build import (
    build_local,
    build_state,
    build_steps,
    build_train_step,
)
from train.run.method import build_method
from train.run.optimizers import build_optimizer
from train.run.peer_run import build_peers
from train.tasks.task import Task

JOB = DistributedConfig(enabled=True, step_deadline=120.0)


def main() -> None:
    with fail_stop():
        start(JOB, int(os.environ["WORLD_SIZE"]))
        serve(Connection(0), _runner)


@functools.cache  # The methods train one task.
def _build(task: Any) -> Task:
    return task.build()


def _runner(configs: Path, method: ComparedMethod) -> Runner:
    config = load_config(method.path(configs))
    config = dataclasses.replace(config, distributed=JOB)
    task = _build(config.task)
    optimizer = build_optimizer(config.optimizer, config.num_steps)
    if config.is_apart:
        exchange = dataclasses.replace(config.exchange, bind=INTERFACE)
        config = dataclasses.replace(config, exchange=exchange)
        mesh, workers = worker_mesh(1, jax.local_devices()), [jax.process_index()]
        folder = Path(os.environ["BOOKS"]) / config.name / f"process-{workers[0]}"
        local = build_local(config.step, task.loss_fn, optimizer)
        train_step = build_peers(config, task, local, mesh, folder, lambda _: None)
        finish = rest
    else:
        mesh = worker_mesh(config.workers.num_workers)
        workers = local_workers(mesh)
        train_step = build_train_step(config, task, optimizer, mesh)
        finish = train_step.settle
    state = place(build_state(config, task, optimizer, workers), mesh)
    batches = feed(build_steps(config, task, workers))

    def step(state: Any, t: int) -> Any:
        batch = place(next(batches).arrays, mesh)
        # The time of a step ends with its result, not with its dispatch.
        return jax.block_until_ready(train_step(state, batch, t)[0])

    runner = repeat(step, state, finish)
    # Compiles a program for each exchange.
    for _ in range(build_method(config, task).schedule.period):
        runner.step()
    return runner


if __name__ == "__main__":
    main()
