"""Compiles exchanges, each in the way that is the fastest on a network."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from decentjax._rounds.sending import Compression
from decentjax.codec import as_permutations
from decentjax.exchange import Exchange, Groups, Permutations, Topology, permutes_of
from decentjax.gossip.duplex import Duplex, is_duplex, sending_encoded, sending_of
from decentjax.mixing import Lowering, mix
from decentjax.placement import (
    AXIS,
    axis_of,
    is_between_cpus,
    is_between_processes,
    over_workers,
)

MEASURED_BYTES = 4 * 2**20  # Enough to measure, and short on a slow network.
# Between processes on CPU the two directions of a swap in one program take turns on a
# longer message.
PIECE_BYTES = 2**18

CompiledMix = Callable[[Any], Any]
Mixes = dict[Exchange, CompiledMix]
Option = tuple[Exchange, Lowering | None]
"""None sends permutations in two threads."""


def fastest_mixes(
    topology: Topology,
    mesh: Mesh,
    num_bytes: int,
    message_dtype: DTypeLike | None = None,
) -> Mixes:
    """Returns the compiled mix of each exchange, with its fastest lowering.

    Each is a function of a list of stacked leaves, not to be called in `jax.jit`.
    Between processes of one CPU device permutations are sent in two threads, one for
    each direction of a link: both hold a model until they are done. For a mean
    over one of several groups the ways that there are are measured, for each exchange,
    as they may use different links: up to 3 compilations and 9 exchanges of 4 MiB.
    Collective, like `fastest`.

    Args:
      topology: topology of the exchanges.
      mesh: mesh of the workers.
      num_bytes: size of one model, in bytes; at most 4 MiB of it are measured.
      message_dtype: as in `mix`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import topology, worker_mesh
      >>> from decentjax.gossip.lowerings import fastest_mixes
      >>> graph = topology.complete(1)
      >>> mixes = fastest_mixes(graph, worker_mesh(1), num_bytes=1000)
      >>> print(mixes[graph[0]]([jnp.ones((1, 3))])[0])
      [[1. 1. 1.]]
    """
    return {
        one: compiled_mix(
            *fastest_way(one, mesh, num_bytes, message_dtype), mesh, message_dtype
        )
        for one in dict.fromkeys(topology)
    }


def fastest_way(
    exchange: Exchange,
    mesh: Mesh,
    num_bytes: int,
    message_dtype: DTypeLike | None,
    agreeing: Mesh | None = None,
) -> Option:
    """Returns the fastest exchange of the same result, with its lowering; collective.

    The arguments are as in `fastest_mixes` and `fastest`.
    """
    measured = min(num_bytes, MEASURED_BYTES)
    options = _options(exchange, mesh, message_dtype)
    return options[fastest(options, mesh, measured, agreeing)]


def fastest(
    options: Sequence[Option],
    mesh: Mesh,
    num_bytes: int,
    agreeing: Mesh | None = None,
) -> int:
    """Returns the index of the option that exchanges fastest on this mesh.

    Each averages a float32 model three times, the first time unmeasured; the time is
    that of the slowest worker, the same for all. Collective: all processes call it,
    with no exchange in flight.

    Args:
      options: exchanges, each with its lowering.
      mesh: mesh of the workers.
      num_bytes: size of the model, in bytes per worker; some megabytes or more.
      agreeing: mesh of all devices whose processes take the same option; by default
        `mesh`.
    """
    if len(options) == 1:
        return 0
    axis = axis_of(mesh)
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    shape = (mesh.shape[axis], max(1, num_bytes // 4))
    models = [jax.jit(lambda: jnp.ones(shape), out_shardings=sharding)()]
    seconds = []
    for option in options:
        mix_models = compiled_mix(*option, mesh)
        # The first call compiles, and opens connections.
        seconds.append(min([_seconds(mix_models, models) for _ in range(3)][1:]))
    # Each process has its own clock, but all must choose the same option, or they would
    # wait for messages of different collectives: so the maximum over devices decides.
    devices = Mesh((agreeing or mesh).devices.ravel(), (AXIS,))
    sharding = NamedSharding(devices, PartitionSpec(AXIS))
    table = np.tile(np.array(seconds, np.float32), (devices.size, 1))
    stacked = jax.make_array_from_callback(table.shape, sharding, table.__getitem__)
    slowest = jax.jit(over_workers(lambda x: lax.pmax(x, AXIS), devices))(stacked)
    return int(np.argmin(slowest.addressable_data(0)))


def compiled_mix(
    exchange: Exchange,
    lowering: Lowering | None,
    mesh: Mesh,
    message_dtype: DTypeLike | None = None,
) -> CompiledMix:
    """Returns `mix` of a list of stacked leaves, [N, ...] in and out."""
    axis = axis_of(mesh)
    if lowering is None:
        return Duplex(sending_of(exchange, axis, message_dtype), mesh)
    of_worker = functools.partial(
        mix,
        exchange=exchange,
        axis_name=axis,
        message_dtype=message_dtype,
        lowering=lowering,
    )
    return jax.jit(over_workers(of_worker, mesh))


def compiled_mix_encoded(
    exchange: Exchange,
    compression: Compression,
    mesh: Mesh,
    lowering: Lowering | None = None,
) -> CompiledMix:
    """Returns the average of stacked encoded leaves, `Compression.average`."""
    axis = axis_of(mesh)
    if lowering is None and _in_two(as_permutations(exchange), mesh):
        return Duplex(sending_encoded(exchange, compression, axis), mesh)
    of_worker = functools.partial(
        compression.average,
        exchange=exchange,
        axis_name=axis,
        lowering=lowering or _of_permutes(mesh),
    )
    return jax.jit(over_workers(of_worker, mesh))


def _in_two(exchange: Exchange, mesh: Mesh) -> bool:
    """Whether permutations are sent in two threads, if there are any."""
    assert isinstance(exchange.between, Permutations)
    return is_duplex(mesh) and bool(permutes_of(exchange.between)[1])


def _of_permutes(mesh: Mesh) -> Lowering:
    has_links = is_between_cpus(mesh) and is_between_processes(mesh)
    return Lowering(PIECE_BYTES if has_links else None)


def _options(
    exchange: Exchange, mesh: Mesh, message_dtype: DTypeLike | None
) -> list[Option]:
    """The ways of an exchange that are worth measuring."""
    between = exchange.between
    if isinstance(between, Permutations):
        return [(exchange, None if _in_two(exchange, mesh) else _of_permutes(mesh))]
    num_groups = len(between.members)
    if num_groups in (1, between.size):
        return [(exchange, Lowering())]
    options: list[Option] = [
        (exchange, Lowering(groups="scatter")),
        (exchange, Lowering(groups="sum")),
    ]
    # With narrow messages a swap rounds once and a mean twice: other numbers.
    if between.size == 2 * num_groups and message_dtype is None:
        swaps = dataclasses.replace(exchange, between=_as_swaps(between))
        options += _options(swaps, mesh, message_dtype)
    return options


def _as_swaps(pairs: Groups) -> Permutations:
    """The same mean, by permutations."""
    itself = tuple(range(pairs.size))
    peers = {a: b for pair in pairs.members for a, b in (pair, pair[::-1])}
    return Permutations((itself, tuple(peers[i] for i in itself)), (0.5, 0.5))


def _seconds(function: CompiledMix, models: Any) -> float:
    start = time.monotonic()
    jax.block_until_ready(function(models))
    return time.monotonic() - start
