"""One of several processes that mix models in two threads and in one program.

Started by test_duplex.py with an address, the number of processes and its own. Prints
how many exchanges have the same numbers both ways, bit for bit.
"""

import functools
import itertools
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from decentjax import (
    AXIS,
    Rounds,
    Topology,
    codec,
    mix,
    over_workers,
    place,
    topology,
    worker_mesh,
)
from decentjax.compression import Compression, error_feedback, low_rank
from decentjax.exchange import Exchange, Permutations
from decentjax.gossip.duplex import Duplex
from decentjax.gossip.lowerings import compiled_mix_encoded, fastest_mixes

SHAPES = ((3, 5), (7,), (), (100, 33))
DTYPES = (np.float32, jnp.bfloat16, np.int32)


def exchanges(num_workers: int) -> Iterator[Exchange]:
    graphs = [topology.ring(num_workers), topology.star(num_workers)]
    graphs.append(topology.one_peer_exponential(num_workers))
    if num_workers % 2 == 0:
        graphs.append(topology.damped(topology.one_peer_ring(num_workers), 0.3))
        graphs.append(topology.hierarchical(num_workers, 2, topology.ring))
    for graph in graphs:
        yield from dict.fromkeys(graph)
    if num_workers > 2:
        # Two that share an edge: their permutes have workers without a message.
        workers = range(num_workers)
        sources = tuple(np.roll(workers, -1).tolist()), (1, 0, *workers[2:])
        yield Exchange(Permutations((tuple(workers), *sources), (0.5, 0.25, 0.25)))


def model(number: int, dtypes: tuple) -> list[np.ndarray]:
    """The stacked leaves of one worker."""
    draws = np.random.default_rng(number)
    return [
        (10 * draws.standard_normal((1, *shape))).astype(dtype)
        for shape in SHAPES
        for dtype in dtypes
    ]


def assert_same(got: list[jax.Array], wanted: list[jax.Array]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
        rows = one.addressable_data(0), other.addressable_data(0)
        np.testing.assert_array_equal(np.asarray(rows[0]), np.asarray(rows[1]))


def check(
    exchange: Exchange, mesh: jax.sharding.Mesh, message_dtype: DTypeLike | None
) -> int:
    mixes = fastest_mixes(Topology("one", (exchange,)), mesh, 10**6, message_dtype)
    two_threads = mixes[exchange]
    options = {"axis_name": AXIS, "message_dtype": message_dtype}
    one = functools.partial(mix, exchange=exchange, **options)
    is_wide = jnp.result_type(float) == jnp.float64
    dtypes = (*DTYPES, np.float64) if is_wide else DTYPES
    models = place(model(jax.process_index(), dtypes), mesh)
    assert_same(two_threads(models), jax.jit(over_workers(one, mesh))(models))
    return isinstance(two_threads, Duplex)


def check_encoded(exchange: Exchange, mesh: jax.sharding.Mesh) -> int:
    if exchange.workers_per_node > 1:
        return 0
    int8 = codec.int8()
    encode = over_workers(lambda x: int8.encode(x, jax.random.key(1)), mesh)
    models = place(model(jax.process_index(), (np.float32,)), mesh)
    coded = {number: (x, jax.jit(encode)(x)) for number, x in enumerate(models)}
    return check_average(coded, exchange, error_feedback(int8), mesh)


def check_low_rank(exchange: Exchange, mesh: jax.sharding.Mesh) -> int:
    """Each peer gets another message."""
    compression = low_rank(2, jnp.bfloat16)
    try:
        rounds = Rounds(Topology("one", (exchange,)), compression=compression)
    except ValueError:  # It is directed, or of nodes.
        return 0
    one = rounds.schedule.rounds[0]

    def encode(leaves: dict) -> dict:
        coded = compression.init(rounds.schedule, leaves, is_late=False)
        key = jax.random.key(0)
        messages = compression.encode(one, leaves, {}, key, coded).messages
        return {number: (x, messages[number]) for number, x in leaves.items()}

    models = place(model(jax.process_index(), (np.float32,)), mesh)
    coded = jax.jit(over_workers(encode, mesh))(dict(enumerate(models)))
    return check_average(coded, exchange, compression, mesh)


def check_average(
    coded: dict, exchange: Exchange, compression: Compression, mesh: jax.sharding.Mesh
) -> int:
    one = functools.partial(compression.average, exchange=exchange, axis_name=AXIS)
    two_threads = compiled_mix_encoded(exchange, compression, mesh)
    wanted = jax.jit(over_workers(one, mesh))(coded)
    assert_same(list(two_threads(coded).values()), list(wanted.values()))
    return isinstance(two_threads, Duplex)


def main(address: str, num_workers: int, number: int) -> None:
    jax.distributed.initialize(address, num_workers, number)
    devices = np.roll(jax.devices(), 1).tolist()  # A user may order them in any way.
    meshes = worker_mesh(num_workers), worker_mesh(num_workers, devices)
    count = 0
    # In turn, as each pair is several programs to compile.
    turns = zip(
        exchanges(num_workers),
        itertools.cycle(itertools.product((None, jnp.bfloat16), meshes)),
        strict=False,
    )
    for exchange, (message_dtype, mesh) in turns:
        if exchange.workers_per_node > 1:
            message_dtype = None  # Leaves are sent narrower than the sums of a node.
        count += check(exchange, mesh, message_dtype)
        if message_dtype is None:
            count += check_encoded(exchange, mesh)
            count += check_low_rank(exchange, mesh)
    mesh = meshes[1]
    with jax.enable_x64(True), jax.set_mesh(mesh):
        count += check(topology.ring(num_workers)[0], mesh, None)
    print("same", count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
