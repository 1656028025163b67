"""A worker of the exchange bench. Started by `benches.swaps` on each node."""

import functools
import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benches.swaps import COPY, ENCRYPTED, NARROW, ONE, PEERS, PIECES, SUM, TWO
from decentjax import AXIS, mix, over_workers, place, topology, worker_mesh
from decentjax.gossip import PeerProcess
from decentjax.gossip.lowerings import fastest_mixes
from decentjax.gossip.merging import receivers, senders
from decentjax.links import Links, Piece, Said, Store
from decentjax.mixing import Lowering, global_mean
from train.config import DistributedConfig, WorkersConfig
from train.job.distributed import start


class ExchangeWay(NamedTuple):
    """A way to exchange.

    Args:
      name: name in the table.
      step: function of the step's number that runs one exchange.
      num_bytes: what a worker sends in it, in bytes.
    """

    name: str
    step: Callable[[int], Any]
    num_bytes: float


def main(path: str, rounds: str, steps: str, *sizes: str) -> None:
    workers = WorkersConfig(num_workers=int(os.environ["SLURM_NTASKS"]))
    start(DistributedConfig(enabled=True), workers)
    rows = [
        row for size in sizes for row in _rows(float(size), int(rounds), int(steps))
    ]
    if jax.process_index() == 0:
        Path(path).write_text(json.dumps(rows))


def _rows(megabytes: float, rounds: int, steps: int) -> list[dict[str, Any]]:
    ways = _ways(megabytes)
    found: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    for _ in range(rounds + 1):
        for way in ways:
            found[way.name].append(_cost(way, steps))
    return [
        {
            "way": way.name,
            "megabytes": megabytes,
            "bytes": way.num_bytes,
            # The first turn has compiled.
            "seconds": median(seconds for seconds, _ in found[way.name][1:]),
            "processor": median(used for _, used in found[way.name][1:]),
        }
        for way in ways
    ]


def _cost(way: ExchangeWay, steps: int) -> tuple[float, float]:
    """Seconds and processor seconds of this process, of one exchange."""
    way.step(0)
    way.step(1)
    began, used = time.monotonic(), time.process_time()
    for t in range(steps):
        way.step(t)
    return (time.monotonic() - began) / steps, (time.process_time() - used) / steps


def _ways(megabytes: float) -> list[ExchangeWay]:
    mesh = worker_mesh(jax.process_count())
    graph = topology.one_peer_ring(mesh.size)
    size = round(megabytes * 1e6 / 4)
    model = place([np.ones((1, size), np.float32)], mesh)
    source, target = np.ones(size, np.float32), np.empty(size, np.float32)
    mean = jax.jit(over_workers(functools.partial(global_mean, axis_name=AXIS), mesh))

    def in_one(piece_bytes: int | None) -> Callable[[int], Any]:
        options = {"axis_name": AXIS, "lowering": Lowering(piece_bytes)}
        mixes = [
            jax.jit(over_workers(functools.partial(mix, exchange=one, **options), mesh))
            for one in graph
        ]
        return lambda t: jax.block_until_ready(mixes[t % len(mixes)](model))

    def in_two(dtype: Any) -> Callable[[int], Any]:
        mixes = fastest_mixes(graph, mesh, 4 * size, dtype)
        return lambda t: jax.block_until_ready(mixes[graph[t]](model))

    def by_peers(way: str) -> Callable[[int], Any]:
        worker, count = jax.process_index(), mesh.size
        party = PeerProcess(
            Store(f"{way} of {size}"),
            [worker],
            worker_mesh(1, jax.local_devices()),
            bind=socket.gethostname(),
            secret=b"of this bench alone",
            encrypted=way == ENCRYPTED,
        )
        links = Links(party, count, [[Piece((1, size), jnp.float32)]])
        links.meet(set(range(count)) - {worker}, math.inf)
        own, steps = model[0].addressable_data(0), itertools.count()

        def swap(t: int) -> Any:
            step, exchange = next(steps), graph[t % len(graph)]
            for peer, _ in receivers(exchange, worker):
                links.publish(worker, peer, 0, [own], Said(step))
            for peer, _ in senders(exchange, worker):
                message = links.wait(worker, peer, 0, step, math.inf)
                assert message is not None
                jax.block_until_ready(message.arrays)

        return swap

    return [
        ExchangeWay(COPY, lambda t: np.copyto(target, source), 0),
        ExchangeWay(
            SUM,
            lambda t: jax.block_until_ready(mean(model)),
            8 * size * (1 - 1 / mesh.size),
        ),
        ExchangeWay(ONE, in_one(None), 4 * size),
        ExchangeWay(PIECES, in_one(2**18), 4 * size),
        ExchangeWay(TWO, in_two(None), 4 * size),
        ExchangeWay(NARROW, in_two(jnp.bfloat16), 2 * size),
        ExchangeWay(PEERS, by_peers(PEERS), 4 * size),
        ExchangeWay(ENCRYPTED, by_peers(ENCRYPTED), 4 * size),
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
