"""LoRA, whose adapters alone are sent: JAX_NUM_CPU_DEVICES=8 python lora.py

Lines that begin with `# -` are those of the data-parallel original, lines that end with
`# +` replace them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# - from jax.sharding import NamedSharding, PartitionSpec
from decentjax import mean_model, topology, worker_mesh, wrap  # +

x = jax.random.normal(jax.random.key(0), (8, 64, 16))  # 8 devices, 64 examples each
y = jnp.sin(x.sum(-1, keepdims=True) / 4)
# - mesh = jax.make_mesh((8,), ("workers",), (jax.sharding.AxisType.Auto,))
mesh = worker_mesh(8)  # +
a, b, c = jax.random.split(jax.random.key(1), 3)
tx = optax.sgd(0.1, momentum=0.9)


class State(NamedTuple):
    base: Any  # frozen
    adapter: Any
    opt_state: Any


base = jax.random.normal(a, (16, 64)) / 4, jax.random.normal(b, (64, 1)) / 8
adapter = {"down": jax.random.normal(c, (16, 4)) / 4, "up": jnp.zeros((4, 64))}
state = State(base, adapter, tx.init(adapter))


def loss_fn(adapter, base, x, y):
    h = jnp.tanh(x @ base[0] + x @ adapter["down"] @ adapter["up"])
    return jnp.mean((h @ base[1] - y) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.adapter, state.base, *batch)
    updates, opt_state = tx.update(grads, state.opt_state)
    adapter = optax.apply_updates(state.adapter, updates)
    return State(state.base, adapter, opt_state), loss


# - train_step = jax.jit(train_step, donate_argnums=0)
plan = topology.one_peer_exponential(8)  # +
train_step = wrap(train_step, plan, mesh, params=lambda s: s.adapter)  # +
state = train_step.init(state)  # +
# - batch = jax.device_put((x, y), NamedSharding(mesh, PartitionSpec("workers")))
for t in range(100):
    # - state, loss = train_step(state, batch)
    state, loss = train_step(state, (x, y), t)  # +
state = mean_model(train_step.train_states(state))  # +
loss = loss_fn(state.adapter, state.base, x, y)
print(f"loss {loss:.4f}")
