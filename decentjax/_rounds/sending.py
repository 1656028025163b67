"""How rounds send leaves: what all compressions have in common."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from decentjax._core.collectives import AxisName
from decentjax._rounds.schedule import Round, Schedule
from decentjax.codec import exchanged, only_messages
from decentjax.exchange import Exchange
from decentjax.mixing import Lowering

Leaves = dict[int, Any]
"""Leaves of a model, by their number in the order of `jax.tree.leaves`."""


class Coded(NamedTuple):
    """The state of a compression, by number of the leaf.

    Args:
      memory: e, h, or the bases of edges; float32 at least.
      moved: s, of `copies`.
      messages: the last messages sent; empty if a round ends in the step in which it
        begins.
    """

    memory: Leaves
    moved: Leaves
    messages: Leaves


class Compression(abc.ABC):
    """How a worker sends leaves; made by a function of this module.

    Attributes:
      name: name to print.
      form: what is sent, to print.
      sends_changes: whether messages are changes of shared state, none of which may be
        lost.
      sends_alike: whether all peers get the same message.
      is_of_all: whether it averages the messages of all workers.
      turns: number of forms of a message, taken in turn in the rounds of an exchange.
      shards: sharding of each leaf, if each device sends only its shard.
    """

    name: str
    form: str
    sends_changes: bool
    sends_alike: ClassVar[bool] = True
    is_of_all: bool = False
    turns: ClassVar[int] = 1
    shards: Any = None

    @abc.abstractmethod
    def check(self, schedule: Schedule, has_anchor: bool) -> None:
        """Raises a ValueError if rounds cannot be sent so."""

    def check_leaves(self, count: int) -> None:
        """Raises a ValueError if it is for another number of leaves."""
        del count

    @abc.abstractmethod
    def num_bytes(self, number: int, x: Any) -> float:
        """Returns the bytes of a leaf's message, in the mean over turns.

        Args:
          number: number of the leaf.
          x: the leaf, or its shape and dtype.
        """

    @abc.abstractmethod
    def init(self, schedule: Schedule, leaves: Leaves, is_late: bool) -> Coded:
        """Returns the first state of a worker.

        Args:
          schedule: the rounds.
          leaves: the leaves to send.
          is_late: whether messages outlive the step that sends them.
        """

    @abc.abstractmethod
    def encode(
        self, one: Round, leaves: Leaves, anchor: Leaves, key: jax.Array, coded: Coded
    ) -> Coded:
        """Returns the state with the messages of some leaves.

        Args:
          one: the round.
          leaves: the leaves to send.
          anchor: z, of `drift`.
          key: the worker's random key in this step.
          coded: the state before.
        """

    def outgoing(
        self, coded: Leaves, exchange: Exchange, place: int, axis_name: AxisName
    ) -> Leaves:
        """The messages that a worker sends in a permute, by its place."""
        del exchange, place, axis_name
        return only_messages(coded)

    @abc.abstractmethod
    def differences(
        self, coded: Leaves, came: Sequence[Leaves], exchange: Exchange, axis: AxisName
    ) -> Leaves:
        """Weighted differences to the messages that came in each permute, by number.

        Args:
          coded: (leaf, message) by number.
          came: messages by number.
          exchange: the exchange.
          axis: mapped axis of the workers.
        """

    def average(
        self,
        coded: Leaves,
        exchange: Exchange,
        axis_name: AxisName,
        lowering: Lowering = Lowering(),
    ) -> Leaves:
        """Sends messages, and returns the `differences`, or of `drift` the mean."""

        def outgoing(place: int) -> Leaves:
            return self.outgoing(coded, exchange, place, axis_name)

        came = exchanged(outgoing, exchange, axis_name, lowering)
        return self.differences(coded, came, exchange, axis_name)

    @abc.abstractmethod
    def decode(
        self, one: Round, found: Leaves, sent: Leaves, anchor: Leaves, coded: Coded
    ) -> tuple[Coded, Leaves]:
        """Returns the state and the averages of leaves, in float32 at least.

        Args:
          one: the round.
          found: the result of `average`.
          sent: leaves at the time they were sent.
          anchor: z, for `drift`.
          coded: the state, with the messages.
        """


def check_real(number: int, x: Any) -> None:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(
            f"a compression is of real numbers, and leaf {number} of the model is "
            f"{x.dtype.name}: use none, or split it into two real leaves"
        )
