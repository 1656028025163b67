"""The ways in which a config trains: the loop, seeds, and peers by a clock."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests import line
from tests.changes import changed
from train.config import Config, LogConfig, PeerExchange, StepConfig, WorkersConfig
from train.run.loop import train
from train.run.run_place import build_place
from train.run.setup import make_run
from train.study.clock import Clock
from train.study.replayed import train_by_clock
from train.study.seeds import train_seeds


def ignore(step: int, words: str) -> None:
    """Shows no progress."""


PLAIN = changed(
    line.NOISY,
    num_steps=3,
    step=StepConfig(),
    workers=WorkersConfig(num_workers=3),
    log=LogConfig(every_steps=3),
)
# At a step a number of a worker is not finite.
SPOILT = changed(
    PLAIN, task=line.Line(poison="gradient", poison_step=2, poison_worker=0)
)


class Overflows(line.Line):
    """At the poisoned step the gradient of b is infinite, and the loss is not."""

    def build(self):
        task = super().build()

        def loss_fn(params, model_state, batch, key):
            spoilt = jnp.isnan(batch[:, 2]).any()
            plain = batch.at[:, 2].set(0)
            loss, rest = task.loss_fn(params, model_state, plain, key)
            nothing = params["b"] - jax.lax.stop_gradient(params["b"])
            return loss + 10 * (jnp.where(spoilt, 3e38, 0) * nothing), rest

        return task._replace(loss_fn=loss_fn)


def of_loop(config: Config, folder: Path) -> object:
    return train(config, folder / "run").state.params


def of_seeds(config: Config, folder: Path) -> object:
    del folder
    return train_seeds(make_run(config, build_place(config)), range(1), ignore).workers


def of_the_clock(config: Config, folder: Path) -> object:
    del folder
    peers = changed(config, exchange=PeerExchange())
    return train_by_clock(
        make_run(peers), range(1), ignore, Clock(compute="10ms")
    ).workers


def effect(train_it, config: Config, folder: Path) -> object:
    """What a run comes to, or why it does not."""
    try:
        numbers = jax.tree.leaves(train_it(config, folder))
    except (FloatingPointError, ValueError) as error:
        return str(error)
    return np.concatenate([np.ravel(x) for x in numbers]).tolist()


WAYS = [of_loop, of_seeds, of_the_clock]
