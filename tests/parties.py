"""Parties of tests: workers of this process, each on a device of its own."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decentjax import gossip, init_state, local_update, place, worker_mesh
from decentjax.compression import error_feedback

# Longer than any wait here should be, so that a deadlock is a failure.
LONG = 180.0
STEPS = 6
# Products with these numbers are exact, however XLA fuses them with a sum.
RATE = 0.125
OPTIMIZER = optax.sgd(RATE)
PARTS = [(0,), (1,)]  # Of the two leaves of the models below.


def at_once(worker, step):
    return 0.0


def party_of(
    book: Any,
    workers: Sequence[int],
    devices: Sequence[Any] | None = None,
    **options: Any,
) -> gossip.PeerProcess:
    """A party over a book or its folder; by default on the devices of its workers."""
    if isinstance(book, Path | str):
        book = gossip.Folder(book)
    if devices is None:
        devices = [jax.devices()[worker] for worker in workers]
    mesh = worker_mesh(len(workers), devices)
    return gossip.PeerProcess(book, workers, mesh, **options)


@contextlib.contextmanager
def training(peers: gossip.Peers, state: Any, batch: Any) -> Iterator[dict[int, Any]]:
    """A peer that trains in a thread meanwhile.

    Yields its states by step, each as it was before, without the random key; complete
    once the context has ended.
    """
    ended, seen = threading.Event(), dict[int, Any]()

    def work(state: Any) -> None:
        with peers:
            for step in itertools.count():
                if ended.is_set():
                    return
                seen[step] = jax.device_get(state._replace(key=()))
                state, _ = peers.advance(state, batch, step)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, state)
        try:
            yield seen
        finally:
            ended.set()
        working.result()


def in_threads(work: Callable[[int], Any], num_workers: int) -> list[Any]:
    """What `work(worker)` returns of each worker, each in a thread of its own.

    Raises the error of the worker that failed first: the others may have missed it.
    """
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        working = [pool.submit(work, worker) for worker in range(num_workers)]
        for one in concurrent.futures.as_completed(working, LONG):
            one.result()
        return [one.result() for one in working]


def loss_fn(params, model_state, batch, key):
    loss = sum(((x - batch) ** 2).sum() for x in jax.tree.leaves(params))
    return loss, (model_state, {})


LOCAL = local_update(loss_fn, OPTIMIZER)


def start(num_workers, worker=None, matrix=None):
    matrix = jnp.arange(6.0).reshape(2, 3) / 7 if matrix is None else matrix
    params, key = {"matrix": matrix, "scalar": jnp.ones(())}, jax.random.key(0)
    mine = None if worker is None else [worker]
    return init_state(params, OPTIMIZER, key, num_workers, workers=mine)


def start_of_four(num_workers, worker):
    """Of models with four numbers."""
    return start(num_workers, worker, jnp.arange(3.0))


def batches(num_workers, num_steps=STEPS):
    draws = np.random.default_rng(num_workers)
    return draws.standard_normal((num_steps, num_workers)).astype("float32")


def trained(party_of_worker, make_step, start_of, rows, delays, stays=True):
    """Trains each worker in a thread and on a device of its own.

    Args:
      party_of_worker: the party of a worker.
      make_step: the train step of a party, which tells a function what it has mixed.
      start_of: the first state of a worker.
      rows: a number for each step and worker, [T, N].
      delays: seconds before a worker's step.
      stays: whether a worker stays until all are done.

    Returns:
      The params of each worker after each step, and what it has mixed.
    """
    done = threading.Barrier(rows.shape[1])

    def work(worker):
        party, found, used = party_of_worker(worker), [], []
        state = place(start_of(worker), party.mesh)
        with make_step(party, used.append) as train_step:
            for step, row in enumerate(rows):
                time.sleep(delays(worker, step))
                batch = place(row[worker : worker + 1], party.mesh)
                state, _ = train_step.advance(state, batch, step)
                found.append(jax.device_get(state.params))
            if stays:  # Peers may still pull what this one has left.
                done.wait(LONG)
        return found, used

    return in_threads(work, rows.shape[1])


def peers_run(
    graph, book, patience=math.inf, delays=at_once, binds=None, merge="arrived"
):
    """Trains by `Peers`: the models of each worker by step, and what it has mixed."""
    n, options = graph.num_workers, {"merge": merge, "patience": patience}
    return trained(
        lambda i: party_of(book, [i], **({"bind": binds[i]} if binds else {})),
        lambda party, used: gossip.Peers(LOCAL, graph, party, used=used, **options),
        functools.partial(start, n),
        batches(n),
        delays,
    )


def groups_run(folder, groups, num_steps, delays=at_once, patience=60.0):
    """Trains by WAGMA-SGD: models, [T, 4], and what is averaged, of each worker."""
    n, options = groups.num_workers, {"patience": patience}
    results = trained(
        lambda i: party_of(folder, [i]),
        lambda party, used: gossip.Peers(LOCAL, groups, party, used=used, **options),
        functools.partial(start_of_four, n),
        batches(n, num_steps),
        delays,
        stays=False,
    )
    return [(np.array(list(map(flat, found))), used) for found, used in results]


def rounds_run(how, folder, num_steps):
    """Trains in rounds: models by step, [N, ...], and what is mixed of each."""
    n, key = how.num_workers, jax.random.key(0)
    params = jax.tree.map(lambda x: x[0], start(n).params)
    options = {"patience": math.inf}
    results = trained(
        lambda i: party_of(folder, [i]),
        lambda party, used: gossip.Peers(LOCAL, how, party, used=used, **options),
        lambda i: init_state(params, OPTIMIZER, key, how, workers=[i]),
        batches(n)[np.arange(num_steps) % STEPS],
        at_once,
    )
    found, used = zip(*results, strict=True)
    by_step = zip(*found, strict=True)
    return [jax.tree.map(lambda *x: np.concatenate(x), *one) for one in by_step], used


def in_background(graph):
    """The models of all workers after each step of a `Background`."""
    mesh = worker_mesh(graph.num_workers)
    state, found = place(start(graph.num_workers), mesh), []
    with gossip.Background(LOCAL, graph, mesh) as train_step:
        for step, row in enumerate(batches(graph.num_workers)):
            state, _ = train_step(state, place(row, mesh), step)
            found.append(jax.device_get(state.params))
        train_step.settle()
    return found


def flat(params):
    return np.append(params["matrix"].ravel(), params["scalar"])


def encoded(how, codec, sent=error_feedback, **options):
    return dataclasses.replace(how, compression=sent(codec, **options))


def replayed(*run, **options):
    """The last state of each worker of a run that is repeated, in order."""
    states = {worker: state for worker, _, state, _ in gossip.replay(*run, **options)}
    return [states[worker] for worker in sorted(states)]
