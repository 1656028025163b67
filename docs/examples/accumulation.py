"""Gradients that the client accumulates: JAX_NUM_CPU_DEVICES=8 python accumulation.py

`optax.MultiSteps` is the outermost optimizer, so models change in every fourth step: a
round in every fourth step exchanges them then. Lines that begin with `# -` are those of
the data-parallel original, lines that end with `# +` replace them.
"""

import jax
import jax.numpy as jnp
import optax

# - from jax.sharding import NamedSharding, PartitionSpec
from decentjax import mean_model, methods, topology, worker_mesh, wrap  # +

x = jax.random.normal(jax.random.key(0), (8, 32, 4))  # 8 devices, 32 examples each
y = jnp.sin(x.sum(-1, keepdims=True))
# - mesh = jax.make_mesh((8,), ("workers",), (jax.sharding.AxisType.Auto,))
mesh = worker_mesh(8)  # +
a, b = jax.random.split(jax.random.key(1))
params = {"a": jax.random.normal(a, (4, 16)), "b": jax.random.normal(b, (16, 1)) / 4}
tx = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every_k_schedule=4)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def train_step(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


state = params, tx.init(params)
# - train_step = jax.jit(train_step, donate_argnums=0)
plan = methods.local_sgd(topology.one_peer_exponential(8), num_steps=4)  # +
train_step = wrap(train_step, plan, mesh)  # +
state = train_step.init(state)  # +
parts = x.reshape(8, 4, 8, 4), y.reshape(8, 4, 8, 1)  # 4 micro-batches of 8 examples
for t in range(100):
    batch = parts[0][:, t % 4], parts[1][:, t % 4]
    # - batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("workers")))
    # - state, loss = train_step(state, batch)
    state, loss = train_step(state, batch, t)  # +
# - params, opt_state = state
params, opt_state = mean_model(train_step.train_states(state))  # +
loss = loss_fn(params, x, y)
print(f"loss {loss:.4f} after {opt_state.gradient_step} updates")
