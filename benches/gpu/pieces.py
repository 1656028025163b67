"""Do a GPU's numbers equal the CPU's, and what does mixing cost there beside a copy?

Command: `python -m decentjax benches.gpu.pieces [PARAMETERS]`, on a machine with a GPU;
elsewhere it compares the CPU with itself. Codecs have a bench of their own, `decentjax
bench codec`.
"""

import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decentjax import (
    AXIS,
    Topology,
    init_state,
    local_update,
    mean_model,
    mix,
    over_workers,
    simulate,
    topology,
)
from decentjax.optim import accum_adamw

GRAPHS = (
    topology.ring(8),
    topology.one_peer_ring(8),
    topology.one_peer_exponential(8),
    topology.complete(8),
    topology.alternating_exponential_ring(8, 4),
    topology.base_k(8, 2),
)


def main(num_parameters: str = "124000000") -> None:
    print(jax.devices()[0].device_kind, "jax", jax.__version__)
    for graph in GRAPHS:
        print(f"{graph.name}: GPU and CPU differ by {difference(graph):.1e}")
    shape = 8, int(num_parameters) // 8
    models = jax.random.normal(jax.random.key(4), shape)
    copy = seconds(jax.jit(jnp.negative), models)
    rate = 2 * models.nbytes / copy / 1e9
    print(f"copy of {models.nbytes / 1e9:.2f} GB: {1e3 * copy:.2f} ms, {rate:.0f} GB/s")
    for graph in GRAPHS:
        one = functools.partial(mix, exchange=graph[0], axis_name=AXIS)
        cost = seconds(jax.jit(over_workers(one)), models) / copy
        print(f"mix over {graph.name}: {cost:.2f} copies")
    cost = seconds(jax.jit(mean_model), models) / copy
    print(f"mean_model: {cost:.2f} copies")


def difference(graph: Topology, num_steps: int = 40) -> float:
    """Returns the largest difference of 8 workers' params between CPU and GPU."""

    def loss_fn(params, model_state, batch, key):
        x, y = batch
        predicted = jnp.tanh(x @ params["a"]) @ params["b"]
        return jnp.mean((predicted - y) ** 2), (model_state, {})

    draw = map(jax.random.key, range(4))
    shapes = (16, 32), (32, 4), (8, 64, 16), (8, 64, 4)
    a, b, *batch = (
        np.asarray(jax.random.normal(*pair)) for pair in zip(draw, shapes, strict=True)
    )
    params, ends = {"a": 0.3 * a, "b": 0.3 * b}, []
    optimizer = accum_adamw(1e-2, accum_steps=4)
    local = local_update(loss_fn, optimizer)
    for device in (jax.local_devices(backend="cpu")[0], jax.devices()[0]):
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            step = simulate(local, graph)
            state = init_state(params, optimizer, jax.random.key(9), 8)
            for t in range(num_steps):
                state, _ = step(state, batch, t)
            ends.append(jax.tree.map(np.asarray, state.params))
    gaps = jax.tree.map(lambda x, y: float(abs(x - y).max()), *ends)
    return max(jax.tree.leaves(gaps))


def seconds(function: Any, argument: Any, times: int = 10, turns: int = 3) -> float:
    """Returns the seconds of a call: the mean of `times` calls, the best of turns."""
    jax.block_until_ready(function(argument))
    found = []
    for _ in range(turns):
        begin = time.perf_counter()
        results = [function(argument) for _ in range(times)]
        jax.block_until_ready(results[-1])
        found.append((time.perf_counter() - begin) / times)
    return min(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
