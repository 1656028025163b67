"""A line of several processes per worker, whose old models are far from the others.

Its height is a number that each process has whole, and its slope a vector that they
share. `python -m benches.chaos tests/wide_drift.py --processes-per-worker 2`.
"""

import jax
import jax.numpy as jnp

from tests.changes import changed
from tests.drift import config as drift
from tests.line import Line


class WideDrift(Line):
    """A loss that falls without end, by a gradient that has noise in each worker."""

    def build(self):
        task = super().build()

        def loss_fn(params, model_state, batch, key):
            whole = params | {"w": jnp.sum(params["w"])}
            loss, rest = task.loss_fn(whole, model_state, batch, key)
            noise = 0.5 * jax.random.normal(key) * params["b"]
            return 0 * loss - whole["w"] - params["b"] + noise, rest

        def init(key):
            return {"w": jnp.zeros(8), "b": jnp.zeros(())}, ()

        def score_fn(params, *more):
            return task.score_fn(params | {"w": jnp.sum(params["w"])}, *more)

        return task._replace(init=init, loss_fn=loss_fn, score_fn=score_fn)


config = changed(
    drift,
    name="wide_drift",
    task=WideDrift(step_seconds=0.05),
    workers=dict(workers_per_node=1, devices_per_worker=2),
    topology=dict(name="ring"),
)
