"""Whether encoded exchanges bring models together: each codec, kind and graph."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decentjax import AXIS, Rounds, codec, decentralize_rounds, over_workers, topology
from decentjax.compression import Compression
from decentjax.schedule import every


def test_what_a_worker_keeps_is_what_it_has_sent():
    """Else the mean of all models is moved for ever by what copies are wrong.

    A level that is computed twice has two values about once in a million times.
    """
    graph, compression = topology.ring(4), Compression(codec.int8(), "copy")
    rounds = Rounds(every(graph, 1), compression=compression)
    optimizer, shape = decentralize_rounds(optax.sgd(0.1), rounds, AXIS), (64,)

    def worker(key):
        def step(carry, t):
            x, state = carry
            noise = jax.random.normal(jax.random.fold_in(key, t), shape)
            updates, state = optimizer.update(x + noise, state, x, step=0)
            return (optax.apply_updates(x, updates), state), None

        x = jnp.zeros(shape)
        carry = jax.lax.scan(step, (x, optimizer.init(x)), jnp.arange(20_000))[0]
        coded = carry[1].extra.coded
        return coded.memory[0], coded.moved[0]

    keys = jax.random.split(jax.random.key(0), 4)
    known, moved = (np.float64(x) for x in jax.jit(over_workers(worker))(keys))
    wanted = topology.matrices(graph)[0] @ known - known
    np.testing.assert_allclose(moved, wanted, atol=5e-5)
