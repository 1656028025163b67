"""Exchanges from peer to peer: what they compute, and who waits for whom."""

import concurrent.futures
import functools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from decentjax import AXIS, Topology, adapt, gossip, init_state, place, topology
from decentjax.gossip import Folder, Peers
from decentjax.gossip.links import Links

# Longer than any wait here should be, so that a deadlock is a failure.
LONG = 60.0
STEPS = 6
# Products with these numbers are exact, however XLA fuses them with a sum.
OPTIMIZER = optax.sgd(0.125)


def loss_fn(params, model_state, batch, key):
    loss = sum(((x - batch) ** 2).sum() for x in jax.tree.leaves(params))
    return loss, (model_state, {})


LOCAL = functools.partial(adapt, loss_fn=loss_fn, optimizer=OPTIMIZER)


def start(num_workers, worker=None):
    params = {"matrix": jnp.arange(6.0).reshape(2, 3) / 7, "scalar": jnp.ones(())}
    mine = None if worker is None else [worker]
    key = jax.random.key(0)
    return init_state(params, OPTIMIZER, key, num_workers, workers=mine)


def batches(num_workers):
    draws = np.random.default_rng(num_workers).standard_normal((STEPS, num_workers))
    return draws.astype("float32")


def run(
    graph: Topology,
    book: gossip.Book,
    patience=math.inf,
    delays=lambda worker, step: 0.0,
    binds=None,
):
    """Trains each worker in a thread and on a device of its own.

    Returns:
      The params of each worker after each step, and what it has mixed.
    """
    num_workers = graph.num_workers

    def work(worker):
        used, found = [], []
        mesh = Mesh(jax.devices()[worker : worker + 1], (AXIS,))
        state = place(start(num_workers, worker), mesh)
        peers = Peers(
            LOCAL,
            graph,
            book,
            [worker],
            mesh,
            patience=patience,
            bind=binds[worker] if binds else "127.0.0.1",
            used=used.append,
        )
        with peers:
            for step, row in enumerate(batches(num_workers)):
                time.sleep(delays(worker, step))
                state, _ = peers(state, place(row[worker : worker + 1], mesh), step)
                found.append(jax.device_get(state.params))
            # What it has left must be there until all have taken it.
            done.wait(LONG)
        return found, used

    done = threading.Barrier(num_workers)
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(work, range(num_workers), timeout=LONG))


def in_background(graph):
    num_workers = graph.num_workers
    mesh = Mesh(jax.devices()[:num_workers], (AXIS,))
    state, found = place(start(num_workers), mesh), []
    with gossip.Background(LOCAL, graph, mesh) as train_step:
        for step, row in enumerate(batches(num_workers)):
            state, _ = train_step(state, place(row, mesh), step)
            found.append(jax.device_get(state.params))
        train_step.settle()
    return found


@pytest.mark.parametrize(
    "graph",
    [
        topology.alone(2),
        topology.ring(1),
        topology.ring(2),
        topology.ring(3),
        topology.one_peer_ring(4),
        topology.star(3),
        topology.damped(topology.ring(4), 0.5),
        topology.random_matching(5, 3, 0),
    ],
    ids=lambda graph: f"{graph.name}-{graph.num_workers}",
)
def test_who_awaits_all_models_has_the_numbers_of_awc(graph, tmp_path):
    wanted = in_background(graph)
    for worker, (found, used) in enumerate(run(graph, Folder(tmp_path))):
        for got, want in zip(found, wanted, strict=True):
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                # Where weights differ, XLA may fuse a product with a sum, or not.
                atol = 1e-6 if graph.name.startswith(("star", "damped")) else 0
                np.testing.assert_allclose(x[0], y[worker], rtol=0, atol=atol)
        assert all(step == one.step for one in used for _, step in one.models)


@pytest.mark.parametrize(
    "graph", [topology.ring(4), topology.exponential(5)], ids=["ring", "exponential"]
)
def test_what_was_mixed_is_what_was_recorded(graph, tmp_path):
    """The run repeated in float64 from the record of who mixed which version."""

    def delays(worker, step):
        return 0.05 if (worker + step) % graph.num_workers == 0 else 0.002

    results = run(graph, Folder(tmp_path), patience=0.0, delays=delays)
    matrix = topology.matrices(graph)
    rows = batches(graph.num_workers).astype(np.float64)
    first = np.append(np.arange(6.0) / 7, 1)
    versions = {(worker, 0): first for worker in range(graph.num_workers)}
    records = [(one.step, one) for _, used in results for one in used]
    waiting = [one for _, one in sorted(records, key=lambda pair: pair[0])]
    while waiting:
        left = []
        for one in waiting:
            needed = [(one.worker, one.step), *one.models]
            if not all(key in versions for key in needed):
                left.append(one)
                continue
            own = versions[one.worker, one.step]
            weights = matrix[one.step % len(matrix)][one.worker]
            mixed = own + sum(
                weights[j] * (versions[j, s] - own) for j, s in one.models
            )
            gradient = 2 * (own - rows[one.step, one.worker])
            versions[one.worker, one.step + 1] = mixed - 0.125 * gradient
        assert len(left) < len(waiting), "a model was mixed before it was there"
        waiting = left
    for worker, (found, _) in enumerate(results):
        got = found[-1]
        flat = np.append(got["matrix"].ravel(), got["scalar"])
        np.testing.assert_allclose(flat, versions[worker, STEPS], rtol=1e-5, atol=1e-6)


def test_a_list_of_addresses_is_a_book():
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    binds = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    results = run(topology.ring(2), gossip.Addresses(binds), binds=binds)
    for _, used in results:
        assert [len(one.models) for one in used] == [1] * STEPS


def test_an_address_other_than_that_of_the_list_is_refused():
    mesh, book = Mesh(jax.devices()[:1], (AXIS,)), gossip.Addresses(["h:1", "h:2"])
    with pytest.raises(ValueError, match=r"worker 0 listens at .*, and the list says"):
        Peers(LOCAL, topology.ring(2), book, [0], mesh)(start(2, 0), jnp.ones(1), 0)


def test_an_older_message_is_taken_only_when_time_is_up(tmp_path):
    shape = [jax.ShapeDtypeStruct((3,), jnp.float32)]
    reader, writer = (
        Links(Folder(tmp_path), 2, {worker: jax.devices()[0]}, [shape])
        for worker in range(2)
    )
    # Of the first step, and soon of the second.
    publish = functools.partial(writer.publish, 1, 0, 0, [jnp.zeros(3)])
    publish(0)
    later = threading.Timer(0.5, publish, [1])
    later.start()
    message = reader.wait(0, 1, 0, 1, time.monotonic() + LONG)
    later.join()
    assert message is not None
    assert message.step == 1
    publish(2)
    message = reader.wait(0, 1, 0, 3, time.monotonic() + 1)
    assert message is not None
    assert message.step == 2


def test_nobody_waits_for_a_slow_worker(tmp_path):
    """Whose peers do all their steps in less than one of its own."""
    ends = {}

    def delays(worker, step):
        ends[worker, step] = time.monotonic()
        return 2.0 if worker == 0 and step == 2 else 0.0

    run(topology.ring(4), Folder(tmp_path), patience=0.0, delays=delays)
    slow = ends[0, 2] + 2.0
    assert all(ends[worker, STEPS - 1] < slow for worker in (1, 2, 3))


def test_a_peer_of_another_config_is_refused_by_name(tmp_path):
    graph, mesh = topology.ring(2), Mesh(jax.devices()[:1], (AXIS,))
    found = []
    for worker, digest in enumerate(["this", "that"]):
        peers = Peers(LOCAL, graph, Folder(tmp_path), [worker], mesh, digest=digest)
        state = start(2, worker)
        state, _ = peers(state, jnp.ones(1), 0)
        found.append((peers, state))
    peers, state = found[0]
    end = time.monotonic() + LONG
    while not peers.links.refused and time.monotonic() < end:
        state, _ = peers(state, jnp.ones(1), 1)
    assert "its config or its model differs" in peers.links.refused[1]
    assert not peers.links.alive()


def test_a_number_is_one_workers(tmp_path):
    graph, mesh = topology.ring(2), Mesh(jax.devices()[:1], (AXIS,))
    first, second, third = (
        Peers(LOCAL, graph, Folder(tmp_path), [0], mesh) for _ in range(3)
    )
    with first:
        state = start(2, 0)
        for step, other in enumerate((second, third)):
            state, _ = first(state, jnp.ones(1), step)
            with pytest.raises(ValueError, match="worker 0 is running already, at"):
                other(start(2, 0), jnp.ones(1), 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topology": topology.complete(4)}, "groups or nodes"),
        ({"topology": topology.hierarchical(4, 2, topology.ring)}, "groups or nodes"),
        ({"workers": [4]}, "different numbers from 0 to 3"),
        ({"workers": [0, 1]}, "of this process's 2 workers"),
    ],
)
def test_what_peers_cannot_do_is_refused(change, words, tmp_path):
    options = {"topology": topology.ring(4), "workers": [0], **change}
    mesh = Mesh(jax.devices()[:1], (AXIS,))
    with pytest.raises(ValueError, match=words):
        Peers(LOCAL, options["topology"], Folder(tmp_path), options["workers"], mesh)


@pytest.mark.parametrize(
    "bind", ["no.such.host.invalid", "127.0.0.1:x", "127.0.0.1:70000"]
)
def test_an_address_that_is_none_is_refused(bind, tmp_path):
    mesh = Mesh(jax.devices()[:1], (AXIS,))
    peers = Peers(LOCAL, topology.ring(2), Folder(tmp_path), [0], mesh, bind=bind)
    with pytest.raises(ValueError, match=r"bind must be|cannot listen at"):
        peers(start(2, 0), jnp.ones(1), 0)


def spawn(folder, worker, **env):
    script = Path(__file__).with_name("peer_line.py")
    command = [sys.executable, str(script), str(folder), str(worker), "3", "300"]
    own = {name: text for name, text in os.environ.items() if name != "NPROC"}
    return subprocess.Popen(
        command, env={**own, **env}, stdout=subprocess.PIPE, text=True
    )


def read_until(process, step):
    """The last line of a worker that has come to this step."""
    assert process.stdout is not None
    for line in process.stdout:
        if int(line.split()[0]) >= step:
            return line.split()
    raise AssertionError("it has ended")


def test_who_is_killed_delays_nobody_and_comes_back(tmp_path):
    workers = [spawn(tmp_path, worker) for worker in range(3)]
    try:
        for worker in workers:
            read_until(worker, 20)
        workers[0].kill()  # The first: there is nothing special about it.
        workers[2].send_signal(signal.SIGSTOP)
        times = [float(read_until(workers[1], step)[1]) for step in range(40, 100)]
        # It goes on alone, 0.05 s of sleep a step.
        assert np.median(np.diff(times)) < 0.5
        workers[2].send_signal(signal.SIGCONT)
        workers.append(spawn(tmp_path, 0, JOIN="1"))
        step, _, seconds, mean = map(float, read_until(workers[3], 0))
        assert step >= 20  # That of the peer that answered first.
        assert seconds < LONG
        # A model of its own would still be 0.
        assert mean > 0.1
        assert float(read_until(workers[2], 290)[0]) >= 290
    finally:
        for process in workers:
            process.kill()
            process.communicate()
