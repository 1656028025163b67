"""A model that moves at a constant rate, so that an old one is far from the others."""

import dataclasses

from tests.job_line import config as line
from tests.line import Line
from train.config import OptimizerConfig


class Drift(Line):
    """A line whose loss falls without end."""

    def build(self):
        task = super().build()

        def loss_fn(params, model_state, batch, key):
            loss, rest = task.loss_fn(params, model_state, batch, key)
            return 0 * loss - params["w"] - params["b"], rest

        return task._replace(loss_fn=loss_fn)


config = dataclasses.replace(
    line,
    name="drift",
    task=Drift(step_seconds=0.05),
    optimizer=OptimizerConfig(
        name="adam", learning_rate=1e-3, warmup_steps=0, weight_decay=0.0, decay="steps"
    ),
)
