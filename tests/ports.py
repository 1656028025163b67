"""Ports: a check of one against `simulate`, and the port of the guide.

As a program, `python -m tests.ports FOLDER PLAN COUNT NUMBER STEPS TIMEOUT` is a worker
over the guide's port; it prints its model after each step.
"""

import functools
import re
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from decentjax import (
    Rounds,
    gossip,
    local_update,
    methods,
    place,
    simulate,
    topology,
    worker_mesh,
)
from tests.checkout import ROOT
from tests.parties import LONG, flat, in_threads

STEPS, SAVED = 7, 3
PARAMS = {"matrix": jnp.arange(6.0).reshape(2, 3) / 7, "scalar": jnp.ones(())}
PLANS = {
    "ring": topology.ring,
    "in_turn": topology.one_peer_exponential,
    "after": lambda n: Rounds(topology.complete(n)),
    "late": lambda n: Rounds(topology.ring(n), 3, delay=2),
    "fragments": lambda n: Rounds(topology.ring(n), 4, 3, [(0,), (1,)]),
    "diloco": lambda n: methods.diloco(n, 3),
}
PortOf = Callable[[Any, Sequence[int], Mesh], gossip.Port]


def loss_fn(params, model_state, batch, key):
    noise = jax.random.uniform(key) - batch  # So the keys of workers matter.
    loss = sum(((x - noise) ** 2).sum() for x in jax.tree.leaves(params))
    return loss, (model_state, {})


LOCAL = local_update(loss_fn, optax.sgd(0.125, momentum=0.5))


def check_port(port_of: PortOf, plan: Any, parts: Sequence[Sequence[int]]) -> None:
    """Fails unless a port gives the numbers of `simulate`, also after a return.

    Args:
      port_of: the port of a process, from the plan, its workers and their mesh.
      plan: topology or rounds.
      parts: the workers of each process, which is here a thread.
    """
    together = threading.Barrier(len(parts))

    def work(number: int) -> list[np.ndarray]:
        own = parts[number]
        mesh = worker_mesh(len(own), [jax.devices()[i] for i in own])
        port = port_of(plan, own, mesh)
        with gossip.Beside(LOCAL, plan, mesh, port, workers=own) as train_step:
            found = trained(train_step, plan, own, mesh)
            train_step.settle()
            together.wait(LONG)
        return found

    found = in_threads(work, len(parts))
    got = [np.concatenate(rows) for rows in zip(*found, strict=True)]
    order = np.concatenate(parts)
    for rows, wanted in zip(got, simulated(plan), strict=True):
        np.testing.assert_allclose(rows, wanted[order], rtol=2e-6, atol=2e-6)


def trained(train_step: Any, plan: Any, own: Sequence[int], mesh: Any = None) -> list:
    """The models [n, d] after each step, and after those that follow a return."""
    found = []

    def run(state: Any, *steps: int) -> Any:
        for t in steps:
            batch = jnp.asarray(batch_of(plan.num_workers, t)[list(own)])
            batch = batch if mesh is None else place(batch, mesh)
            state, _ = train_step(state, batch, t)
            found.append(models_of(state))
        return state

    state = run(train_step.init(PARAMS, jax.random.key(0)), *range(SAVED))
    saved = jax.tree.map(jnp.copy, state)
    run(state, *range(SAVED, STEPS))
    run(saved, *range(SAVED, STEPS))
    return found


@functools.cache
def simulated(plan: Any) -> list[np.ndarray]:
    return trained(simulate(LOCAL, plan), plan, range(plan.num_workers))


def batch_of(num_workers: int, step: int) -> np.ndarray:
    draws = np.random.default_rng(step)
    return draws.standard_normal(num_workers).astype("float32")


def models_of(state: Any) -> np.ndarray:
    params = jax.device_get(state.params)
    rows = range(len(params["scalar"]))
    return np.stack([flat(jax.tree.map(lambda x, i=i: x[i], params)) for i in rows])


@functools.cache
def guide() -> SimpleNamespace:
    """What the code of the guide defines."""
    text = (ROOT / "docs/guides/ports.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {"__name__": "folder_port"}
    exec(compile(code, "ports.md", "exec"), names)
    return SimpleNamespace(**names)


def main(folder: str, name: str, *numbers: str) -> None:
    count, number, num_steps, timeout = map(int, numbers)
    plan, own, mesh = PLANS[name](count), [number], worker_mesh(1)
    port = guide().FolderPort(folder, plan, own, timeout)
    with gossip.Beside(LOCAL, plan, mesh, port, workers=own) as train_step:
        state = train_step.init(PARAMS, jax.random.key(0))
        for t in range(num_steps):
            batch = place(batch_of(count, t)[own], mesh)
            state, _ = train_step(state, batch, t)
            print("models", *models_of(state)[0], flush=True)
        train_step.settle()


if __name__ == "__main__":
    main(*sys.argv[1:])
