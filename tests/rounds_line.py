"""A line of several parameters in rounds, for jobs of real processes.

`decentjax launch --processes 2 tests/rounds_line.py`: streaming DiLoCo, encoded.
"""

import jax
import jax.numpy as jnp

from tests.changes import changed
from tests.line import NOISY, Line
from train.config import RoundsMethod, TopologyConfig


class Wide(Line):
    """Parameters of four numbers each, with noise of their own: codecs lose some."""

    def build(self):
        task = super().build()

        def loss_fn(params, model_state, batch, key):
            line = jax.tree.map(jnp.sum, params)
            loss, rest = task.loss_fn(line, model_state, batch, None)
            if key is not None:
                noise = self.noise * jax.random.normal(key, (2, 4))
                loss += noise[0] @ params["b"] + noise[1] @ params["w"].ravel()
            return loss, rest

        def score_fn(params, model_state, batch):
            loss, _ = loss_fn(params, model_state, batch, None)
            return {"loss": (loss, jnp.ones(()))}

        params = {"b": jnp.zeros(4), "w": jnp.zeros((2, 2))}
        return task._replace(
            init=lambda key: (params, ()), loss_fn=loss_fn, score_fn=score_fn
        )


config = changed(
    NOISY,
    name="rounds_line",
    num_steps=12,
    task=Wide(noise=0.5),
    topology=TopologyConfig(name="complete"),
    method=RoundsMethod(
        every_steps=4,
        fragments=2,
        delay=3,
        outer="nesterov",
        merge=("blend", 0.5),
        codec="top_k",  # No random rounding, which a last bit could turn.
        sent_share=0.5,
        error_kept=0.9,
    ),
)
