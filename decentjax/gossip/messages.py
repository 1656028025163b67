"""The messages of a round, plain or encoded, and how received ones are merged."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decentjax.codec import mean_encoded
from decentjax.compression import Compression, Leaves, init_coded
from decentjax.gossip.rows import Rows
from decentjax.gossip.ways import Graph, Models, Used, chosen
from decentjax.rounds import Rounds


class Form(NamedTuple):
    """How the leaves of one worker are sent and averaged.

    Args:
      compression: how they are encoded; None sends them unencoded.
      structure: tree of the arrays sent, by number of the leaf.
      leaves: shapes of the leaves, in the order of their numbers.
    """

    compression: Compression | None
    structure: Any
    leaves: tuple[tuple[int, ...], ...]

    def parts(self, models: Any) -> tuple[Leaves, list[jax.Array]]:
        """The leaves, and the arrays of their messages, from those of `travelling`."""
        if self.compression is None:
            return models, list(models.values())
        messages = {number: message for number, (_, message) in models.items()}
        leaves = {number: leaf for number, (leaf, _) in models.items()}
        return leaves, jax.tree.leaves(messages)

    def average(self, graph: Graph, used: Used, models: Models) -> Rows:
        """The result of `default_mix` for encoded leaves.

        Over the received messages, with q the decoded ones, it is

            by differences   sum_j W_ij (q_j - q_i)
            of drift         the mean of all q_j, and q_i
        """
        assert self.compression is not None  # Else the way averages.
        if self.compression.kind.average is mean_encoded:
            # In the same order on all workers: their anchors stay equal bit for bit.
            return _mean(self, [models[key] for key in sorted(models)])
        return _difference(self, *chosen(graph, used, models))

    def decode(self, rows: Rows) -> Rows:
        """The leaves of a message."""
        assert self.compression is not None
        codec = self.compression.codec
        messages = jax.tree.unflatten(self.structure, [x[0] for x in rows])
        pairs = zip(messages.values(), self.leaves, strict=True)
        return [codec.decode(message, shape)[None] for message, shape in pairs]


def form_of(compression: Compression | None, leaves: Leaves) -> tuple[Form, list[Any]]:
    """The form of stacked leaves, and the arrays of their messages, or their shapes."""
    sent: Any = leaves
    if compression is not None:
        first = jax.vmap(functools.partial(init_coded, compression, is_late=True))
        sent = jax.eval_shape(first, leaves).messages
    arrays, structure = jax.tree.flatten(sent)
    of_leaves = tuple(x.shape[1:] for x in jax.tree.leaves(leaves))
    return Form(compression, structure, of_leaves), arrays


def sends_changes(rounds: Rounds) -> bool:
    """Whether messages are changes of shared state, none of which may be lost."""
    return rounds.compression is not None and rounds.compression.kind.sends_changes


def check_whole(rounds: Rounds, patience: float) -> None:
    """Raises a ValueError if messages that must not be lost would not be waited for."""
    if sends_changes(rounds) and patience < math.inf:
        raise ValueError(
            "drift and copies send changes, and a lost message would "
            "leave the copies of a worker wrong: use patience=math.inf, got "
            f"{patience}"
        )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _difference(
    form: Form, own: Rows, models: list[Rows], weights: tuple[float, ...]
) -> Rows:
    total = [jnp.zeros_like(x) for x in form.decode(own)]
    for model, weight in zip(models, weights, strict=True):
        pairs = zip(form.decode(model), form.decode(own), total, strict=True)
        total = [y + weight * (x - q) for x, q, y in pairs]
    return total


@functools.partial(jax.jit, static_argnums=0)
def _mean(form: Form, models: list[Rows]) -> Rows:
    of_leaves = zip(*map(form.decode, models), strict=True)
    return [functools.reduce(jnp.add, x) / len(models) for x in of_leaves]
