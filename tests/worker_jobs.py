"""Two small matrices, for workers of several processes: compiled in a second.

`decentjax launch -n 8 tests/worker_jobs.py --workers.processes-per-worker 2
--workers.devices-per-worker 2`. The matrices are cut over the devices of a worker, the
vector is whole on each, and every worker's random key enters its gradient.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.changes import changed
from tests.line import Line
from tests.line import config as line
from train.config import CheckpointConfig, EvaluationConfig, LogConfig
from train.data.batches import worker_steps

WIDTH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrices(Line):
    """Fits y = tanh(x U + b) V."""

    def build(self):
        draw = np.random.default_rng(0)
        x = draw.standard_normal((64, WIDTH), dtype=np.float32)
        points = np.concatenate([x, np.sin(x)], axis=1)

        def loss_fn(params, model_state, batch, key):
            x, y = jnp.split(batch, 2, axis=1)
            found = jnp.tanh(x @ params["u"] + params["b"][None]) @ params["v"]
            loss = jnp.mean((found - y) ** 2)
            if key is not None:
                loss += self.noise * jax.random.normal(key) * params["b"].mean()
            return loss, (model_state, {})

        def score_fn(params, model_state, batch):
            loss, _ = loss_fn(params, model_state, batch, None)
            return {"loss": (loss, jnp.ones(()))}

        def init(key):
            u, v = jax.random.normal(key, (2, WIDTH, WIDTH)) / 4
            return {"u": u, "b": jnp.zeros(WIDTH), "v": v}, ()

        return (
            super()
            .build()
            ._replace(
                batch_shape=lambda size: jnp.zeros((size, 2 * WIDTH)),
                steps=lambda *args, **kw: worker_steps(points, *args, **kw),
                init=init,
                loss_fn=loss_fn,
                validation=lambda: [points],
                score_fn=score_fn,
                sample=None,
            )
        )


config = changed(
    line,
    name="worker_jobs",
    num_steps=12,
    task=Matrices(noise=0.5),
    evaluation=EvaluationConfig(every_steps=6),
    checkpoint=CheckpointConfig(every_steps=6),
    log=LogConfig(every_steps=1, consensus_every_steps=5),
)
