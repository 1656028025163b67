"""`jax.jit` with FSDP, automatic axes: JAX_NUM_CPU_DEVICES=8 python fsdp_auto.py

Lines that begin with `# -` are those of the data-parallel original, lines that end with
`# +` replace them. FSDP stays inside a worker of two devices.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

# - from jax.sharding import AxisType
from decentjax import mean_model, topology, worker_mesh, wrap  # +

# - mesh = jax.make_mesh((4, 2), ("data", "fsdp"), (AxisType.Auto,) * 2)
mesh = worker_mesh(4, devices_per_worker=2)  # +
# - rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
rows = NamedSharding(mesh, PartitionSpec("workers", "fsdp"))  # +
x = jax.random.normal(jax.random.key(0), (4, 64, 4))  # 4 workers, 64 examples each
y = jnp.sin(x.sum(-1, keepdims=True))
tx = optax.sgd(0.1, momentum=0.9)


def init(key):
    a, b = jax.random.split(key)
    params = {
        "a": jax.random.normal(a, (4, 16)),
        "b": jax.random.normal(b, (16, 1)) / 4,
    }
    return params, tx.init(params)


def sharding(x):  # The longest dim of each matrix.
    spec = [None] * x.ndim
    if x.ndim:
        spec[x.shape.index(max(x.shape))] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*spec))


def loss_fn(params, x, y):
    h = jnp.tanh(x @ params["a"])
    return jnp.mean((h @ params["b"] - y) ** 2)


def train_step(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


shardings = jax.tree.map(sharding, jax.eval_shape(init, jax.random.key(1)))
state = jax.jit(init, out_shardings=shardings)(jax.random.key(1))
# - train_step = jax.jit(train_step, donate_argnums=0)
train_step = wrap(train_step, topology.one_peer_exponential(4), mesh)  # +
state = train_step.init(state)  # +
# - batch = jax.device_put((x.reshape(-1, 4), y.reshape(-1, 1)), rows)
batch = jax.device_put((x, y), rows)  # +
for t in range(50):
    # - state, loss = train_step(state, batch)
    state, loss = train_step(state, batch, t)  # +
# - params, opt_state = state
params, opt_state = mean_model(train_step.train_states(state))  # +
loss = loss_fn(params, x, y)
print(f"loss {loss:.4f}, a lies on {params['a'].sharding.spec}")
