"""A process of a job whose processes make different first models; tries each form.

Started by test_fingerprint.py through `decentjax launch`. Prints a line for each form:
its name, and the error that it raises before step 0, or where it arrives.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decentjax import (
    distributed,
    gossip,
    init_state,
    local_update,
    methods,
    on_mesh,
    place,
    topology,
)
from decentjax.placement import local_workers


def loss_fn(params, model_state, batch, key):
    return jnp.mean((params["w"] - batch) ** 2), (model_state, {})


OPTIMIZER = optax.sgd(0.1)
LOCAL = local_update(loss_fn=loss_fn, optimizer=OPTIMIZER)


def main():
    mesh = distributed.initialize()
    graph, rounds = topology.ring(mesh.size), methods.diloco(mesh.size, 2)
    mean, batch = methods.all_reduce(mesh.size), place(jnp.zeros((1, 3)), mesh)

    def state(seed, plan):
        params = {"b": jnp.zeros(2), "w": jax.random.normal(jax.random.key(seed), 3)}
        key, own = jax.random.key(0), local_workers(mesh)
        return place(init_state(params, OPTIMIZER, key, plan, workers=own), mesh)

    def step_of(plan):
        return on_mesh(LOCAL, plan, mesh)

    def tried(name, train_step, seed, step, plan=graph):
        try:
            new, _ = train_step(state(seed, plan), batch, step)
            model = np.asarray(new.params["w"].addressable_shards[0].data).round(3)
            said = f"trains on from {model.tolist()}"
        except ValueError as error:
            said = f"says: {error}"
        getattr(train_step, "settle", lambda: None)()
        print(f"{name}: {said}", flush=True)

    other = jax.process_index()
    tried("awc", step_of(graph), other, 0)
    tried("awc goes on", step_of(graph), other, 2)
    tried("awc alike", step_of(graph), 7, 0)
    tried("all_reduce", step_of(mean), other, 0)
    tried("all_reduce goes on", step_of(mean), other, 2)
    tried("pieces", gossip.AllReduce(LOCAL, mesh), other, 3)
    tried("background", gossip.Background(LOCAL, graph, mesh), other, 0)
    tried("background alike", gossip.Background(LOCAL, graph, mesh), 7, 0)
    beside = gossip.Background(LOCAL, rounds, mesh)
    tried("rounds", beside, other, 0, plan=rounds)


if __name__ == "__main__":
    main()
