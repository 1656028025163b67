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
from decentjax import worker_mesh
from train.cli.load import load_config
from train.config import DistributedConfig, WorkersConfig
from train.data.batches import feed
from train.job.distributed import fail_stop, start
from train.job.namespaces import INTERFACE
from train.run.build import build_steps, build_train_step
from train.run.peer_run import build_peers
from train.run.run_place import Apart, Given
from train.run.setup import make_run
from train.tasks.task import Task

JOB = DistributedConfig(enabled=True, step_deadline=120.0)


def main() -> None:
    with fail_stop():
        start(JOB, WorkersConfig(num_workers=int(os.environ["WORLD_SIZE"])))
        serve(Connection(0), _runner)


@functools.cache  # The methods train one task.
def _build(task: Any) -> Task:
    return task.build()


def _runner(configs: Path, method: ComparedMethod) -> Runner:
    config = load_config(method.path(configs))
    config = dataclasses.replace(config, distributed=JOB)
    if config.is_apart:
        exchange = dataclasses.replace(config.exchange, bind=INTERFACE)
        config = dataclasses.replace(config, exchange=exchange)
        where = Apart(config, Path(os.environ["BOOKS"]) / config.name)
    else:
        where = Given(config, worker_mesh(config.workers.num_workers))
    run = make_run(config, where, _build(config.task))
    if isinstance(where, Apart):
        train_step, finish = build_peers(run, used=lambda _: None), rest
    else:
        train_step = build_train_step(run)
        finish = train_step.settle
    state, batches = run.state(), feed(build_steps(run, where.workers))

    def step(state: Any, t: int) -> Any:
        batch = run.put_batch(next(batches).arrays)
        # The time of a step ends with its result, not with its dispatch.
        return jax.block_until_ready(train_step(state, batch, t)[0])

    runner = repeat(step, state, finish)
    # Compiles a program for each exchange.
    for _ in range(run.method.schedule.period):
        runner.step()
    return runner


if __name__ == "__main__":
    main()
