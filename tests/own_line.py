"""A task and a graph of a user's own file, as one had them with version 0.2."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decentjax import topology
from train.data.batches import worker_steps
from train.fields import checked
from train.tasks.stdlib import StdlibTask
from train.tasks.task import Headline, Task


@checked
class Line(StdlibTask):
    """Fits y = w x + b; derived from a task that comes with the program.

    Args:
      noise: deviation of a term of the gradient.
    """

    noise: float = 0.5

    def build(self) -> Task:
        x = np.linspace(-1, 1, 64, dtype=np.float32)
        points: Any = np.stack([x, 2 * x + 1], axis=1)

        def loss_fn(params, model_state, batch, key):
            y = params["w"].sum() * batch[:, 0] + params["b"].sum()
            loss = jnp.mean((y - batch[:, 1]) ** 2)
            if key is not None:
                noise = self.noise * jax.random.normal(key, (2, 4))
                loss += noise[0] @ params["b"] + noise[1] @ params["w"]
            return loss, (model_state, {})

        def score_fn(params, model_state, batch):
            loss, _ = loss_fn(params, model_state, batch, None)
            return {"loss": (loss, jnp.ones(()))}

        return Task(
            batch_shape=lambda size: jnp.zeros((size, 2)),
            steps=lambda *args, **kw: worker_steps(points, *args, **kw),
            init=lambda key: ({"b": jnp.zeros(4), "w": jnp.zeros(4)}, ()),
            loss_fn=loss_fn,
            validation=lambda: [points],
            score_fn=score_fn,
            headline=Headline("loss", "lower"),
            baselines=dict,
        )


def own_ring(num_workers: int) -> topology.Topology:
    return topology.ring(num_workers)
