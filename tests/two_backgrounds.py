"""One of two processes that train two models in turn, each by a Background of its own.

Started by test_background.py with an address and its number. Prints what became of
models that start at a value plus this number and that no gradient moves.
"""

import sys

import jax
import jax.numpy as jnp
import optax

from decentjax import gossip, init_state, local_update, place, topology, worker_mesh
from decentjax.mixing import Lowering
from decentjax.placement import local_workers

NUM_STEPS = 300
STARTS = {"equal": ([0.0, 9.99], [50, 50]), "unequal": ([1.0, 2.0], [40, 7000])}


def loss_fn(params, model_state, batch, key):
    del batch, key
    return 0.0 * params.sum(), (model_state, {})


def main(address: str, number: int) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=number)
    mesh, graph = worker_mesh(2), topology.ring(2)
    optimizer = optax.sgd(0.0)
    local = local_update(loss_fn=loss_fn, optimizer=optimizer)
    batch = place(jnp.zeros((1, 1)), mesh)
    for name, (values, sizes) in STARTS.items():
        trainers = [
            gossip.Background(local, graph, mesh, lowering=Lowering()) for _ in values
        ]
        states = [
            place(
                init_state(
                    jnp.full(size, value + number),
                    optimizer,
                    jax.random.key(0),
                    2,
                    workers=local_workers(mesh),
                ),
                mesh,
            )
            for value, size in zip(values, sizes, strict=True)
        ]
        # Not from step 0, before which all workers must have one model.
        for t in range(1, NUM_STEPS + 1):
            for i, train_step in enumerate(trainers):
                states[i], _ = train_step(states[i], batch, t)
        for train_step in trainers:
            train_step.settle()
        for train_step in trainers:
            train_step.close()
        rows = [state.params.addressable_data(0) for state in states]
        print(name, *(f"{x.min():.2f} {x.max():.2f}" for x in rows), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
