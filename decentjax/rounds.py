"""Rounds of communication: one algebra for local SGD, DiLoCo, NoLoCo and their kin.

A worker with the model x has an anchor z, where its last round has left it. A round

    sends     x, which the exchange averages to q = W x
    receives  g  = z - q              the pseudo-gradient
              z' = z + outer(g)       any optax transformation
              x  = merge(x now, x sent, z')

Without an outer optimizer there is no anchor, and z' = q. `send` and `receive` are one
worker's code; `round_step` places them around the local update.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from decentjax._collectives import sum_dtype
from decentjax.mixing import is_mixed
from decentjax.schedule import Event, Round, Schedule
from decentjax.step import Adapt, Metrics, Mix, WorkerState, mix_workers

Merge = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(leaf now, leaf as it was sent, leaf of the round) to the merged leaf."""


def replace(now: jax.Array, sent: jax.Array, new: jax.Array) -> jax.Array:
    """`z'`: what a worker has learned since it sent is lost."""
    del now, sent
    return new


def shift(now: jax.Array, sent: jax.Array, new: jax.Array) -> jax.Array:
    """`z' + x now - x sent`: what a worker has learned since it sent is kept."""
    if (
        now is sent
    ):  # One array: nothing has been learned since, and nothing is rounded.
        return new
    dtype = sum_dtype(new)
    return (new.astype(dtype) + (now.astype(dtype) - sent.astype(dtype))).astype(
        new.dtype
    )


def blend(share: float) -> Merge:
    """`c (x now) + (1 - c) z'`, the merge of streaming DiLoCo.

    Args:
      share: c, the part of the worker's own model, in [0, 1).

    Raises:
      ValueError: if it is another number.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the own model's share must be in [0, 1), got {share}")

    def merge(now: jax.Array, sent: jax.Array, new: jax.Array) -> jax.Array:
        del sent
        dtype = sum_dtype(new)
        mixed = share * now.astype(dtype) + (1 - share) * new.astype(dtype)
        return mixed.astype(new.dtype)

    return merge


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How models are averaged in rounds.

    Args:
      schedule: who averages with whom, which leaves, and when.
      outer: optimizer of the anchor, whose gradient is the pseudo-gradient; None moves
        the anchor to the average.
      merge: how a worker goes on from the anchor: `replace`, `shift` or `blend(c)`.

    Raises:
      ValueError: if there is an outer optimizer, and no local step between two rounds.
    """

    schedule: Schedule
    outer: optax.GradientTransformation | None = None
    merge: Merge = shift

    def __post_init__(self):
        in_each_step = all(one.exchange for one in self.schedule.rounds)
        if self.outer and in_each_step and len(self.schedule.fragments) == 1:
            raise ValueError(
                "an outer optimizer moves models that have trained alone since the "
                "last round, and this schedule averages them in every step: take "
                "every(topology, num_steps) with more steps, or no outer optimizer"
            )


class Leaf(NamedTuple):
    """A leaf of a round under way: as it was sent, and what it was averaged to."""

    sent: jax.Array
    mixed: jax.Array


UnderWay = dict[int, Leaf]
"""The leaves of rounds under way, by their number in the model."""


class RoundState(NamedTuple):
    """What a worker carries from round to round.

    Args:
      anchor: z, by number of the leaf; empty without an outer optimizer.
      outer: state of the outer optimizer, for each fragment of the schedule.
      under_way: the leaves that were sent last; empty where a round ends in the step in
        which it begins.
    """

    anchor: dict[int, jax.Array]
    outer: tuple[Any, ...]
    under_way: UnderWay


def init_rounds(rounds: Rounds, params: Any) -> RoundState:
    """The first state of a worker, the `extra` of `init_state`.

    Args:
      rounds: the rounds.
      params: one model.

    Raises:
      ValueError: if the schedule names a leaf that the model does not have.
    """
    leaves = jax.tree.leaves(params)
    parts = [_part(fragment, leaves) for fragment in rounds.schedule.fragments]
    whole = {number: x for part in parts for number, x in part.items()}

    def copies() -> dict[int, jax.Array]:
        # A step donates each buffer once.
        return {number: jnp.array(x, copy=True) for number, x in whole.items()}

    under_way = {}
    if rounds.schedule.delay > 1:
        under_way = jax.tree.map(Leaf, copies(), copies())
    if rounds.outer is None:
        return RoundState({}, (), under_way)
    states = tuple(rounds.outer.init(part) for part in parts)
    return RoundState(copies(), states, under_way)


def round_step(
    state: WorkerState,
    batch: Any,
    event: Event,
    *,
    rounds: Rounds,
    adapt: Adapt,
    mix: Mix = mix_workers,
) -> tuple[WorkerState, Metrics]:
    """A local update, with the round that begins in this step, and the one that ends.

    With delay 1 and an exchange in every step this is `awc_step`, and with delay 0
    `atc_step`, bit for bit.

    Args:
      state: this worker's state, with `init_rounds` as its `extra`.
      batch: this worker's batch.
      event: what this step does, as in `rounds.schedule[step]`.
      rounds: the rounds.
      adapt: the local update, `decentjax.adapt` with its keywords bound.
      mix: the averaging, `decentjax.mix` with its keywords bound.

    Returns:
      As `awc_step`.
    """
    sends, receives = event
    params, carried = state.params, state.extra
    under_way = dict(carried.under_way)
    if sends is not None and sends.delay > 0:
        under_way |= send(sends, params, mix)
    if receives is not None:
        params, carried = receive(rounds, receives, under_way, params, carried)
        params = lax.optimization_barrier(params)  # As in `awc_step`.
    state, metrics = adapt(state, batch, params)
    params = state.params
    if sends is not None and sends.delay == 0:
        under_way |= send(sends, params, mix)
        params, carried = receive(rounds, sends, under_way, params, carried)
    kept = {number: under_way[number] for number in carried.under_way}
    carried = carried._replace(under_way=kept)
    return state._replace(params=params, extra=carried), metrics


def send(one: Round, params: Any, mix: Mix) -> UnderWay:
    """Sends the leaves of a round, and averages them with those of peers.

    Args:
      one: the round, with an exchange.
      params: this worker's model.
      mix: the averaging.
    """
    assert one.exchange is not None
    sent = _part(one.leaves, jax.tree.leaves(params))
    return jax.tree.map(Leaf, sent, mix(sent, one.exchange))


def receive(
    rounds: Rounds, one: Round, under_way: UnderWay, params: Any, carried: RoundState
) -> tuple[Any, RoundState]:
    """Ends a round: `z' = z + outer(z - W q)`, then `x = merge(x now, x sent, z')`.

    Args:
      rounds: the rounds.
      one: the round that ends.
      under_way: its leaves, and perhaps others.
      params: this worker's model now.
      carried: anchor and outer state.

    Returns:
      The model after the round, and the new anchor and outer state.
    """
    leaves, structure = jax.tree.flatten(params)
    numbers = list(_part(one.leaves, leaves))
    new = {number: under_way[number].mixed for number in numbers}
    if rounds.outer is not None:
        place = rounds.schedule.fragments.index(one.leaves)
        new, carried = _move_anchor(rounds.outer, place, new, carried)
    for number in numbers:
        now, sent = leaves[number], under_way[number].sent
        leaves[number] = rounds.merge(now, sent, new[number])
    return jax.tree.unflatten(structure, leaves), carried


def _move_anchor(
    outer: optax.GradientTransformation,
    place: int,
    mixed: dict[int, jax.Array],
    carried: RoundState,
) -> tuple[dict[int, jax.Array], RoundState]:
    """The anchor of one fragment after a step of its outer optimizer."""
    anchor = {number: carried.anchor[number] for number in mixed}
    gradient: Any = jax.tree.map(jnp.subtract, anchor, mixed)
    updates, state = outer.update(gradient, carried.outer[place], anchor)
    new: Any = optax.apply_updates(anchor, updates)
    states = (*carried.outer[:place], state, *carried.outer[place + 1 :])
    return new, carried._replace(anchor=carried.anchor | new, outer=states)


def _part(fragment: tuple[int, ...] | None, leaves: list[Any]) -> dict[int, Any]:
    """The leaves of a fragment that exchanges change, by number."""
    numbers = range(len(leaves)) if fragment is None else fragment
    if max(numbers, default=-1) >= len(leaves):
        raise ValueError(
            f"the schedule sends leaf {max(numbers)}, and the model has {len(leaves)}"
        )
    return {n: leaves[n] for n in numbers if is_mixed(jnp.asarray(leaves[n]))}
