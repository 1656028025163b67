"""flax NNX, modules that a step changes: JAX_NUM_CPU_DEVICES=8 python nnx_optimizer.py

Lines that begin with `# -` are those of the data-parallel original, lines that end with
`# +` replace them.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

# - from jax.sharding import NamedSharding, PartitionSpec
from decentjax import mean_model, topology, worker_mesh, wrap  # +

x = jax.random.normal(jax.random.key(0), (8, 32, 4))  # 8 devices, 32 examples each
y = jnp.sin(x.sum(-1, keepdims=True))
# - mesh = jax.make_mesh((8,), ("workers",), (jax.sharding.AxisType.Auto,))
mesh = worker_mesh(8)  # +
rngs = nnx.Rngs(0)
layers = nnx.Linear(4, 16, rngs=rngs), nnx.tanh, nnx.Linear(16, 1, rngs=rngs)
model = nnx.Sequential(*layers)
optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def step(state, batch):  # +
    return state, train_step(*state, *batch)  # +


plan = topology.one_peer_exponential(8)  # +
step = wrap(step, plan, mesh)  # +
state = step.init((model, optimizer))  # +
# - batch = jax.device_put((x, y), NamedSharding(mesh, PartitionSpec("workers")))
for t in range(50):
    # - loss = train_step(model, optimizer, *batch)
    state, loss = step(state, (x, y), t)  # +
model, optimizer = mean_model(step.train_states(state))  # +
loss = jnp.mean((model(x) - y) ** 2)
print(f"loss {loss:.4f} after {optimizer.step[...]} steps")
