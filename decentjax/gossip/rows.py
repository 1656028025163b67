"""The leaves to send: from stacked arrays on a mesh to rows of one worker, and back."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax.mixing import is_mixed
from decentjax.state import AXIS

Rows = list[jax.Array]
"""Leaves of one worker, [1, ...] each."""


def rows_of(
    leaves: Sequence[jax.Array], travels: Callable[[jax.Array], bool] = is_mixed
) -> list[Rows]:
    """The leaves to send, of each worker of this process, on its device."""
    of_leaves = []
    for leaf in filter(travels, leaves):
        shards = sorted(leaf.addressable_shards, key=lambda s: s.index[0].start or 0)
        of_leaves.append([shard.data for shard in shards])
    return [list(rows) for rows in zip(*of_leaves, strict=True)]


def with_rows(
    leaves: Sequence[jax.Array],
    rows: Sequence[Rows],
    mesh: Mesh,
    travels: Callable[[jax.Array], bool] = is_mixed,
) -> list[jax.Array]:
    """The leaves, with those sent taken from the rows of all workers."""
    of_leaves = iter(list(zip(*rows, strict=True)))
    place = NamedSharding(mesh, PartitionSpec(AXIS))
    return [
        jax.make_array_from_single_device_arrays(x.shape, place, next(of_leaves))
        if travels(x)
        else x
        for x in leaves
    ]
