"""`jax.pmap` and flax's `TrainState`: JAX_NUM_CPU_DEVICES=8 python pmap_train_state.py

Lines that begin with `# -` are those of the data-parallel original, lines that end with
`# +` replace them.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training.train_state import TrainState

# - from flax import jax_utils
from decentjax import mean_model, topology, worker_mesh, wrap  # +

x = jax.random.normal(jax.random.key(0), (8, 32, 4))  # 8 devices, 32 examples each
y = jnp.sin(x.sum(-1, keepdims=True))
model = linen.Sequential([linen.Dense(16), linen.tanh, linen.Dense(1)])
params = model.init(jax.random.key(1), x[0])
tx = optax.sgd(0.1, momentum=0.9)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((state.apply_fn(params, batch[0]) - batch[1]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    # - grads = jax.lax.pmean(grads, "batch")
    return state.apply_gradients(grads=grads), loss


# - train_step = jax.pmap(train_step, "batch")
# - state = jax_utils.replicate(state)
plan = topology.one_peer_exponential(8)  # +
train_step = wrap(train_step, plan, worker_mesh(8))  # +
state = train_step.init(state)  # +
for t in range(50):
    # - state, loss = train_step(state, (x, y))
    state, loss = train_step(state, (x, y), t)  # +
# - state = jax_utils.unreplicate(state)
state = mean_model(train_step.train_states(state))  # +
loss = jnp.mean((model.apply(state.params, x) - y) ** 2)
print(f"loss {loss:.4f} after {state.step} steps")
