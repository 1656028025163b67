"""A whole training in one program, scans in scans: JAX_NUM_CPU_DEVICES=8 python scan.py

As in purejaxrl: updates are scanned, and in each its minibatches. Lines that begin with
`# -` are those of the data-parallel original, lines that end with `# +` replace them.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training.train_state import TrainState

from decentjax import decentralize, mean_model, over_workers, topology, worker_mesh  # +

x = jax.random.normal(jax.random.key(0), (8, 32, 4))  # 8 devices, 32 examples each
y = jnp.sin(x.sum(-1, keepdims=True))
model = linen.Sequential([linen.Dense(16), linen.tanh, linen.Dense(1)])
params = model.init(jax.random.key(1), x[0])
tx = optax.sgd(0.1, momentum=0.9)
tx = decentralize(tx, topology.one_peer_exponential(8), "workers")  # +


def loss_fn(params, x, y):
    return jnp.mean((model.apply(params, x) - y) ** 2)


def train(x, y):
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def minibatch(state, part):
        grads = jax.grad(loss_fn)(state.params, *part)
        # - grads = jax.lax.pmean(grads, "workers")
        return state.apply_gradients(grads=grads), None

    def update(state, _):
        parts = jax.tree.map(lambda a: a.reshape(4, 8, -1), (x, y))
        return jax.lax.scan(minibatch, state, parts)

    state, _ = jax.lax.scan(update, state, length=20)
    return state.params


# - params = jax.tree.map(lambda x: x[0], jax.pmap(train, "workers")(x, y))
params = mean_model(jax.jit(over_workers(train, worker_mesh(8)))(x, y))  # +
loss = loss_fn(params, x, y)
print(f"loss {loss:.4f}")
