"""`jax.jit` with FSDP, explicit axes: JAX_NUM_CPU_DEVICES=8 python fsdp_explicit.py

Lines that begin with `# -` are those of the data-parallel original, lines that end with
`# +` replace them. FSDP stays inside a worker of two devices.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decentjax import mean_model, topology, worker_mesh, wrap  # +

# - mesh = jax.make_mesh((4, 2), ("data", "fsdp"))
mesh = worker_mesh(4, None, 2).update(axis_types=(AxisType.Explicit,) * 2)  # +
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
    # - whole = PartitionSpec(("data", "fsdp"))
    whole = PartitionSpec("fsdp")  # +
    h = jnp.tanh(jnp.matmul(x, params["a"], out_sharding=whole))
    return jnp.mean((jnp.matmul(h, params["b"], out_sharding=whole) - y) ** 2)


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
with jax.set_mesh(mesh):
    for t in range(50):
        # - state, loss = train_step(state, batch)
        state, loss = train_step(state, batch, t)  # +
# - params, opt_state = state
params, opt_state = mean_model(train_step.train_states(state))  # +
with jax.set_mesh(mesh):
    loss = jax.jit(loss_fn)(params, x.reshape(-1, 4), y.reshape(-1, 1))
print(f"loss {loss:.4f}, a lies on {params['a'].sharding.spec}")
