"""The rounds of a config."""

import jax
import optax

from decentjax import Rounds
from decentjax.rounds import blend, replace, shift
from decentjax.schedule import cut_leaves, every, in_fragments
from train.config import Config, RoundsConfig
from train.tasks.task import Task


def build_rounds(config: Config, task: Task) -> Rounds:
    """Returns the rounds of a config, over its topology.

    Raises:
      ValueError: if no leaf of the task's model falls into a fragment.
    """
    options, topology = config.rounds, config.topology.build(config.workers)
    schedule = every(topology, options.every_steps, options.delay)
    if options.fragments > 1:
        params, _ = jax.eval_shape(task.init, jax.random.key(0))
        sizes = [x.size for x in jax.tree.leaves(params)]
        fragments = cut_leaves(sizes, options.fragments)
        num_steps, delay = options.every_steps, options.delay
        schedule = in_fragments(topology, num_steps, fragments, delay)
    merges = {"replace": replace, "shift": shift, "blend": blend(options.share)}
    return Rounds(schedule, _outer(options), merges[options.merge])


def _outer(options: RoundsConfig) -> optax.GradientTransformation | None:
    if options.outer == "none":
        return None
    looks_ahead = options.outer == "nesterov"
    return optax.sgd(options.learning_rate, options.momentum, nesterov=looks_ahead)
