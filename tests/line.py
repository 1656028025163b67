"""A straight line through points: compiled in a second, for how runs start and end.

`decentjax train tests/line.py`
"""

import dataclasses
import time
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.changes import changed
from train.config import (
    CheckpointConfig,
    Config,
    DistributedConfig,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    PeerExchange,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.data.batches import worker_steps
from train.tasks.stdlib import StdlibTask
from train.tasks.task import Headline, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(StdlibTask):
    """Fits y = w x + b.

    Args:
      noise: deviation of a term that each worker's key adds to the gradient of b.
      poison_step: step whose batch is not a number for one worker, 0 for none.
      poison_worker: number of that worker.
      poison: what becomes NaN: the "gradient" of one leaf, the "loss" or the "batch".
      step_seconds: seconds that the data of a step takes.
      eval_seconds: seconds that each of ten batches of an evaluation takes.
      eval_fails: whether an evaluation raises an error.
      score_seconds: seconds that the baselines take.
    """

    noise: float = 0.0
    poison_step: int = 0
    poison_worker: int = 2
    poison: Literal["batch", "gradient", "loss"] = "batch"
    step_seconds: float = 0.0
    eval_seconds: float = 0.0
    eval_fails: bool = False
    score_seconds: float = 0.0

    def build(self) -> Task:
        x = np.linspace(-1, 1, 64, dtype=np.float32)
        points = np.stack([x, 2 * x + 1, 0 * x], axis=1)

        def spoil(step, batch):
            time.sleep(self.step_seconds)
            if step + 1 == self.poison_step:
                batch.arrays[self.poison_worker, :, 2] = np.nan
            return batch

        def loss_fn(params, model_state, batch, key):
            x, y, spoilt = batch[:, 0], batch[:, 1], jnp.mean(batch[:, 2])
            loss = jnp.mean((params["w"] * x + params["b"] - y) ** 2)
            more = {
                "batch": spoilt * params["b"],
                "loss": spoilt,
                # Finite itself, but not its derivative.
                "gradient": jnp.sqrt(
                    jnp.abs(jnp.where(spoilt == 0, 1, 0 * params["w"]))
                ),
            }
            loss += more[self.poison]
            if self.noise and key is not None:
                loss += self.noise * jax.random.normal(key) * params["b"]
            return loss, (model_state, {})

        def score_fn(params, model_state, batch):
            loss, _ = loss_fn(params, model_state, batch, None)
            return {"loss": (loss, jnp.ones(()))}

        return Task(
            batch_shape=lambda size: jnp.zeros((size, 3)),
            steps=lambda *args, **kw: worker_steps(points, *args, **kw).map_with_index(
                spoil
            ),
            init=lambda key: ({"b": jnp.zeros(()), "w": jnp.zeros(())}, ()),
            loss_fn=loss_fn,
            validation=lambda: Slowly(points, self.eval_seconds, self.eval_fails),
            score_fn=score_fn,
            headline=Headline("loss", "lower"),
            baselines=lambda: dict(time.sleep(self.score_seconds) or ()),
            sample=lambda params, model_state: str(params),
        )


class Slowly(NamedTuple):
    """Ten batches to evaluate on, that take their time."""

    points: np.ndarray
    seconds: float
    fails: bool

    def __iter__(self):
        for _ in range(10):
            yield self.points  # First, as a task is traced on one batch.
            print("evaluating", flush=True)
            time.sleep(self.seconds)
            if self.fails:
                raise ZeroDivisionError("an evaluation that fails")


config = Config(
    name="line",
    num_steps=20,
    task=Line(),
    workers=WorkersConfig(num_workers=4),
    topology=TopologyConfig(name="ring"),
    step=StepConfig(batch_per_worker=4),
    optimizer=OptimizerConfig(
        name="adam", learning_rate=0.1, warmup_steps=0, weight_decay=0.0
    ),
    evaluation=EvaluationConfig(every_steps=1000),
    checkpoint=CheckpointConfig(every_steps=5),
    log=LogConfig(every_steps=1, consensus_every_steps=10),
)

NOISY = changed(
    config,
    num_steps=24,
    task=Line(noise=0.5),
    checkpoint=CheckpointConfig(every_steps=10),
    # Of a constant rate, as a run that is cut short has another last step.
    optimizer=dict(decay="steps"),
)


class Growing(Line):
    """Its statistics grow tenfold in each step, and no gradient knows of it."""

    def build(self):
        task = super().build()

        def loss_fn(params, model_state, batch, key):
            loss, _ = task.loss_fn(params, (), batch, key)
            return loss, (10 * model_state, {})

        def init(key):
            return task.init(key)[0], jax.numpy.full((), 1e36)

        return task._replace(init=init, loss_fn=loss_fn)


def as_process(number: int, count: int, config: Config = config, **changes):
    """A config of one process of several peers."""
    job = DistributedConfig(enabled=True, num_processes=count, process_id=number)
    exchange = PeerExchange()
    changes = {"distributed": job, "exchange": exchange, **changes}
    return changed(config, **changes)
