"""A line whose parameters are vectors, which the devices of a worker share.

`decentjax launch --workers 2 --processes-per-worker 2 tests/wide_line.py`.
"""

import jax
import jax.numpy as jnp

from tests.changes import changed
from tests.line import NOISY, Line
from train.config import EvaluationConfig, PeerExchange, TopologyConfig, WorkersConfig


class WideLine(Line):
    """Its slope is the sum of one vector, and its height the mean of another."""

    def build(self):
        task = super().build()

        def narrow(params):
            return {"w": jnp.sum(params["w"]), "b": jnp.mean(params["b"])}

        def init(key):
            return {"w": jax.random.normal(key, (8,)), "b": jnp.zeros(4)}, ()

        return task._replace(
            init=init,
            loss_fn=lambda params, *more: task.loss_fn(narrow(params), *more),
            score_fn=lambda params, *more: task.score_fn(narrow(params), *more),
        )


config = changed(
    NOISY,
    name="wide_line",
    num_steps=12,
    task=WideLine(noise=0.5),
    workers=WorkersConfig(num_workers=2, devices_per_worker=2),
    topology=TopologyConfig(name="ring"),
    exchange=PeerExchange(patience=None),
    evaluation=EvaluationConfig(every_steps=6),
)
