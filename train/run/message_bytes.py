"""The sizes of messages."""

import dataclasses
from typing import Any

import jax
import numpy as np

from decentjax import Rounds, WorkerState
from decentjax.codec import as_permutations
from decentjax.rounds import Fragment, Schedule, leaves_of


def step_bytes(message_dtype: str | None, model: Any) -> int:
    """Returns the size of what an exchange in each step sends, in bytes.

    Args:
      message_dtype: dtype in which models are sent; None for their own.
      model: model as shapes.
    """
    narrow = message_dtype and np.dtype(message_dtype).itemsize
    return sum(
        x.size * min(x.dtype.itemsize, narrow or x.dtype.itemsize)
        for x in jax.tree.leaves(model)
    )


def sent_bytes(rounds: Rounds, fragment: Fragment, model: Any) -> float:
    """Returns the size of what a round sends, in bytes.

    Args:
      rounds: the rounds.
      fragment: leaves that travel.
      model: model as shapes.
    """

    def packed(params: Any) -> Any:
        state = WorkerState(params, (), (), jax.random.key(0), rounds.init(params))
        return rounds.pack(state).params

    leaves = jax.eval_shape(
        lambda params: leaves_of(rounds, fragment, packed(params)), model
    )
    if rounds.compression is None:
        return sum(x.size * x.dtype.itemsize for x in leaves.values())
    return sum(rounds.compression.num_bytes(*leaf) for leaf in leaves.items())


def sent_schedule(rounds: Rounds) -> Schedule:
    """The schedule as messages travel: encoded ones go from each worker to each.

    Args:
      rounds: the rounds.
    """
    if rounds.compression is None:
        return rounds.schedule
    sent = tuple(
        one._replace(exchange=as_permutations(one.exchange)) if one.exchange else one
        for one in rounds.schedule.rounds
    )
    return dataclasses.replace(rounds.schedule, rounds=sent)
