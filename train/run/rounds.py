"""The rounds of a config."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from decentjax import Rounds
from decentjax.codec import as_permutations, int2, int4, int8, num_bytes, top_k
from decentjax.compression import Compression
from decentjax.mixing import is_mixed
from decentjax.rounds import blend, leaves_of, replace, shift
from decentjax.schedule import Fragment, Schedule, cut_leaves, every, in_fragments
from decentjax.topology import Topology
from train.cli.tables import counted
from train.config import Config, RoundsConfig
from train.run.log import warn
from train.tasks.task import Task


def check_rounds(config: Config) -> None:
    """Raises a ValueError if a config has rounds that its step does not take."""
    if config.rounds != RoundsConfig() and config.step.algorithm != "rounds":
        raise ValueError(
            'the fields of rounds are for step.algorithm = "rounds", got '
            f'"{config.step.algorithm}": set it, or leave them out'
        )


def warn_of_few(config: Config, task: Task) -> None:
    """Warns if the steps from one round to the next are more than those of the run."""
    steps = config.rounds.every_steps
    if config.step.algorithm == "rounds" and steps > config.num_steps:
        count = build_rounds(config, task).schedule.count(config.num_steps)
        warn(
            f"rounds.every_steps = {steps} is more than num_steps = "
            f"{config.num_steps}: the run has {counted(count, 'round')}"
        )


def build_rounds(config: Config, task: Task) -> Rounds:
    """Returns the rounds of a config, over its topology.

    Raises:
      ValueError: if no leaf of the task's model falls into a fragment.
    """
    sizes = []
    if config.rounds.fragments > 1:
        params, _ = jax.eval_shape(task.init, jax.random.key(0))
        sizes = [x.size if is_mixed(x) else 0 for x in jax.tree.leaves(params)]
    return rounds_of(config.rounds, config.topology.build(config.workers), sizes)


def rounds_of(
    options: RoundsConfig, topology: Topology, sizes: Sequence[int] = ()
) -> Rounds:
    """Returns rounds over a topology.

    Args:
      options: the rounds' options.
      topology: the topology.
      sizes: numbers of each leaf of the model, where it is sent in fragments.

    Raises:
      ValueError: if no leaf falls into a fragment.
    """
    schedule = every(topology, options.every_steps, options.delay)
    if options.fragments > 1:
        fragments = cut_leaves(sizes, options.fragments)
        num_steps, delay = options.every_steps, options.delay
        schedule = in_fragments(topology, num_steps, fragments, delay)
    merges = {"replace": replace, "shift": shift, "blend": blend(options.share)}
    merge = merges[options.merge]
    return Rounds(schedule, _outer(options), merge, _compression(options))


def step_bytes(config: Config, model: Any) -> int:
    """Returns the size of what an exchange in each step sends, in bytes.

    Args:
      config: config of the run.
      model: model as shapes.
    """
    narrow = config.step.message_dtype and np.dtype(config.step.message_dtype).itemsize
    size = sum(
        x.size * min(x.dtype.itemsize, narrow or x.dtype.itemsize)
        for x in jax.tree.leaves(model)
    )
    # Tracking sends an estimate of the gradient beside the model.
    return size * (2 if config.step.algorithm == "tracking" else 1)


def sent_bytes(rounds: Rounds, fragment: Fragment, model: Any) -> float:
    """Returns the size of what a round sends, in bytes.

    Args:
      rounds: the rounds.
      fragment: leaves that travel.
      model: model as shapes.
    """
    leaves = leaves_of(fragment, model).values()
    if rounds.compression is None:
        return sum(x.size * x.dtype.itemsize for x in leaves)
    return sum(num_bytes(rounds.compression.codec, x.shape) for x in leaves)


def sent_schedule(rounds: Rounds) -> Schedule:
    """The schedule as messages travel: encoded ones go from each worker to each.

    Args:
      rounds: the rounds.
    """
    if rounds.compression is None:
        return rounds.schedule
    sent = tuple(
        dataclasses.replace(one, exchange=as_permutations(one.exchange))
        if one.exchange
        else one
        for one in rounds.schedule.rounds
    )
    return dataclasses.replace(rounds.schedule, rounds=sent)


def _compression(options: RoundsConfig) -> Compression | None:
    if options.codec == "none":
        return None
    bits = {32: None, 8: int8(), 4: int4(), 2: int2()}
    largest = top_k(options.sent_share, values=bits[options.sent_bits])
    codecs = {"int8": int8(), "int4": int4(), "int2": int2(), "top_k": largest}
    of = "model" if options.outer == "none" else "drift"
    one = codecs[options.codec]
    if options.copies:
        return Compression(one, "copy", step=options.copy_step)
    return Compression(one, of, keep=options.error_kept)


def _outer(options: RoundsConfig) -> optax.GradientTransformation | None:
    if options.outer == "none":
        return None
    looks_ahead = options.outer == "nesterov"
    return optax.sgd(options.learning_rate, options.momentum, nesterov=looks_ahead)
