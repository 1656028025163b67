"""Ports of your own: what the engine asks of them, and the one of the guide."""

import contextlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import Rounds, gossip, local_update, methods, topology, worker_mesh
from decentjax.codec import int8
from decentjax.compression import error_feedback
from decentjax.gossip import pipeline
from decentjax.gossip.thread_port import Carrier
from decentjax.plan import rounds_of
from tests import oracles
from tests.jobs import ended, read_until, started
from tests.parties import LONG, in_threads
from tests.ports import LOCAL, PARAMS, PLANS, STEPS, check_port, guide, simulated

# Workers of each process, by their number of workers.
PARTS = {
    1: [[0]],
    2: [[0], [1]],
    3: [[0, 2], [1]],
    5: [[0], [1, 2], [4, 3]],
    8: [[0, 1, 2], [3, 4, 5, 6], [7]],
}
EACH_PLAN = pytest.mark.parametrize("plan_of", PLANS.values(), ids=PLANS)
EACH_N = pytest.mark.parametrize("n", PARTS)


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    """Each leaf is a group."""
    monkeypatch.setattr(pipeline, "GROUP_BYTES", 1)


@EACH_PLAN
@EACH_N
@pytest.mark.draw(10)
def test_a_port_through_a_folder_has_the_numbers_of_the_simulation(
    plan_of, n, tmp_path
):
    check_port(lambda *own: folder_port(tmp_path, *own[:2]), plan_of(n), PARTS[n])
    assert not list(tmp_path.iterdir())


def test_a_folder_takes_leaves_of_any_dtype_and_shape(tmp_path):
    port = folder_port(tmp_path, topology.ring(2), [0])
    model = {0: np.arange(6, dtype=jnp.bfloat16).reshape(2, 3), 2: np.float32(0.5)}
    port.send("x", 1, 0, model)
    found = port.take("x", 1, 0, {n: 0 * x for n, x in model.items()})
    for n, x in model.items():
        assert found[n].dtype == x.dtype
        np.testing.assert_array_equal(found[n], x)


@EACH_PLAN
@EACH_N
@pytest.mark.draw(5)
def test_the_port_of_a_thread_has_the_numbers_of_the_simulation(plan_of, n):
    def port_of(plan, workers, mesh):
        return Carrier(rounds_of(plan), mesh)

    check_port(port_of, plan_of(n), [list(range(n))])


def folder_port(folder, plan, workers, timeout=LONG):
    return guide().FolderPort(folder, plan, workers, timeout)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_its_averages_are_those_of_numpy(n, tmp_path):
    """The equation, by an oracle that shares no code; one worker a process."""
    graph, start = topology.ring(n), np.arange(3.0) / 7
    local = local_update(_squares, optax.sgd(0.125))

    def work(worker):
        port, found = folder_port(tmp_path, graph, [worker]), []
        mesh = worker_mesh(1, [jax.devices()[worker]])
        with gossip.Beside(local, graph, mesh, port, workers=[worker]) as train_step:
            state = train_step.init(jnp.asarray(start, "float32"), jax.random.key(0))
            for t in range(STEPS):
                state, _ = train_step(state, jnp.full(1, float(worker)), t)
                found.append(np.asarray(state.params))
            train_step.settle()
        return np.concatenate(found)

    got = np.stack(in_threads(work, n), axis=1)
    targets = np.arange(float(n))[:, None]
    of = oracles.ring(n), np.tile(start, (n, 1))
    wanted = oracles.awc(*of, lambda x: 2 * (x - targets), 0.125, STEPS)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


def _squares(params, model_state, batch, key):
    return ((params - batch) ** 2).sum(), (model_state, {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_leaves_keep_their_dtypes_and_what_is_no_float_its_value(dtype, tmp_path):
    graph = topology.ring(4)
    ports = [folder_port(tmp_path, graph, own) for own in ([0, 1], [2, 3])]
    models = np.array([[1.0, 2], [3, 4], [5, 6], [8, 9]])
    arrivals = []
    for port, rows in zip(ports, (models[:2], models[2:]), strict=True):
        leaves = {3: rows.astype(dtype), 4: rows[:, 0].astype(dtype), 7: np.arange(2)}
        arrivals.append(port.carry(1, jax.device_put(leaves), step=5))
    got = [arrival() for arrival in arrivals]
    wanted = (oracles.ring(4)[0] @ models).astype(dtype)
    for one, rows in zip(got, (wanted[:2], wanted[2:]), strict=True):
        assert one[3].dtype == one[4].dtype == dtype
        assert np.array_equal(one[3], rows)
        assert np.array_equal(one[4], rows[:, 0])
        assert np.array_equal(one[7], [0, 1])
    for port in ports:
        port.close(1.0)
        port.close(1.0)


def test_a_worker_that_sends_nothing_is_named_with_its_step(tmp_path):
    port = folder_port(tmp_path, topology.ring(2), [0], timeout=0.1)
    arrival = port.carry(0, {0: jnp.ones((1, 2))}, step=7)  # It does not wait.
    words = r"worker 1 has not sent step 7 group 0 to 0 in 0\.1 s: is its process alive"
    with pytest.raises(TimeoutError, match=words):
        arrival()
    again = folder_port(tmp_path, topology.ring(2), [0], timeout=0.1)
    words = "worker 1 has not taken step 7 group 0 of 0"
    with pytest.raises(TimeoutError, match=words):
        again.carry(0, {0: jnp.ones((1, 2))}, step=7)()


def test_a_folder_takes_no_encoded_leaves(tmp_path):
    how = Rounds(topology.ring(2), 2, compression=error_feedback(int8()))
    with pytest.raises(ValueError, match="encodes nothing: drop the compression"):
        folder_port(tmp_path, how, [0])


def _process(folder, name, count, number, num_steps=STEPS, timeout=60):
    words = map(str, (folder, name, count, number, num_steps, timeout))
    return started(sys.executable, "-m", "tests.ports", *words)


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(
    ("name", "n"), [("in_turn", 1), ("ring", 2), ("diloco", 2), ("ring", 3)]
)
def test_processes_have_the_numbers_of_the_simulation(name, n, tmp_path):
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(_process(tmp_path, name, n, i)) for i in range(n)]
        printed = [re.findall(r"^models (.*)$", ended(one), re.M) for one in own]
    got = [[line.split() for line in lines] for lines in printed]
    wanted = np.stack(simulated(PLANS[name](n))[:STEPS], axis=1)
    np.testing.assert_allclose(np.array(got, float), wanted, rtol=2e-6, atol=2e-6)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_neighbours_of_a_killed_process_end_within_the_timeout(tmp_path):
    timeout = 20  # Longer than one process may start after another.
    how = 10**6, timeout
    with (
        _process(tmp_path, "ring", 3, 0, *how) as lost,
        _process(tmp_path, "ring", 3, 1, *how) as one,
        _process(tmp_path, "ring", 3, 2, *how) as other,
    ):
        read_until(lost, "models")
        lost.kill()
        done = [x.communicate(timeout=timeout + 30)[0] for x in (one, other)]
        assert one.returncode == other.returncode == 1
    late = rf"TimeoutError: worker (\d) has not .*step \d+ group .* in {timeout} s: is"
    named = [re.search(late, text) for text in done]
    assert all(named), done
    assert "0" in [found[1] for found in named]


def test_what_is_no_port_is_refused_before_anything_is_sent():
    mesh, graph = worker_mesh(2), topology.ring(2)
    for wrong in (gossip.Port, folder_port, None):
        with pytest.raises(TypeError, match="wanted a port, such as an instance of"):
            gossip.Beside(LOCAL, graph, mesh, wrong)
    with pytest.raises(TypeError, match="abstract"):
        type("Silent", (gossip.Port,), {})()


def test_workers_are_those_of_the_mesh():
    class Alone(gossip.Port):
        def carry(self, group, leaves, step):
            return lambda: leaves

    graph, one = topology.ring(3), worker_mesh(1)
    with pytest.raises(ValueError, match="numbers of the 1 workers of the mesh, got"):
        gossip.Beside(LOCAL, graph, one, Alone(), workers=[0, 1])
    with pytest.raises(ValueError, match="of the 2 workers of the mesh, got \\[1, 1"):
        gossip.Beside(LOCAL, graph, worker_mesh(2), Alone(), workers=[1, 1])
    train_step = gossip.Beside(LOCAL, graph, one, Alone())
    with pytest.raises(ValueError, match="has 1 of the plan's 3 workers: pass"):
        train_step.init(PARAMS, jax.random.key(0))
    with pytest.raises(TypeError, match="wanted a topology or Rounds"):
        gossip.Beside(LOCAL, methods.all_reduce(1), one, Alone())


@pytest.mark.parametrize("n", PARTS)
def test_the_mixing_matrix_is_that_of_the_oracle(n):
    matrices = oracles.one_peer_exponential(n)
    graph = topology.one_peer_exponential(n)
    every, late = Rounds(graph, 3), Rounds(graph, 3, 2, [(0,), (1,)])
    for step in range(12):
        turn = matrices[step % len(matrices)]
        of_round = matrices[step // 3 % len(matrices)]
        wanted = of_round if step % 3 == 2 else np.eye(n)
        parts = of_round if step % 3 < 2 else np.eye(n)
        assert np.array_equal(gossip.mixing_matrix(graph, step), turn)
        assert np.array_equal(gossip.mixing_matrix(every, step), wanted)
        assert np.array_equal(gossip.mixing_matrix(late, step), parts)
        mean = gossip.mixing_matrix(methods.all_reduce(n), step)
        np.testing.assert_allclose(mean, np.full((n, n), 1 / n))
