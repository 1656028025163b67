"""Low-rank differences by peers: both ends of an edge, however late their messages."""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decentjax import (
    Rounds,
    Topology,
    gossip,
    init_state,
    local_update,
    place,
    simulate,
    topology,
)
from decentjax.codec import int8
from decentjax.compression import error_feedback, low_rank
from decentjax.gossip import Folder, PeerProcess, Peers
from decentjax.gossip.layout import Layout
from decentjax.gossip.low_rank_swaps import Factors, LowRankSwaps
from decentjax.gossip.merging import Swaps
from decentjax.links import Links
from tests.jobs import read_step, spawn, spawned, wait_until
from tests.parties import LONG, at_once, in_threads, party_of, trained

RANK_2 = low_rank(2, min_rate=1.0)
SHAPES = {"bias": (5,), "deep": (2, 3, 7), "matrix": (6, 5), "other": (5, 6)}


def plan_of(graph, how=RANK_2):
    return Rounds(graph, delay=1, compression=how)


def loss_fn(params, model_state, batch, key):
    """Its gradients have more ranks than a message."""
    draws = np.random.default_rng(0)
    loss = jnp.zeros(())
    for _, x in sorted(params.items()):
        one, two = draws.standard_normal((2, *x.shape)).astype("float32")
        loss += ((x - batch * one - batch**2 * two) ** 2).sum()
    return loss, (model_state, {})


LOCAL = local_update(loss_fn, optax.sgd(0.05, momentum=0.5))
STILL = local_update(loss_fn, optax.sgd(0.0))


def params(value=0.0):
    return {name: jnp.full(shape, value) for name, shape in SHAPES.items()}


def peers_of(local, plan, party, **options):
    return Peers(
        local, plan, party, **{"merge": "swaps", "patience": math.inf} | options
    )


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "graph",
    [topology.ring(3), topology.ring(2), topology.one_peer_ring(4)],
    ids=lambda graph: f"{graph.name}-{graph.num_workers}",
)
def test_who_awaits_all_has_the_numbers_of_the_step(graph, tmp_path):
    plan, count, num_steps = plan_of(graph), graph.num_workers, 8
    rows = np.random.default_rng(1).standard_normal((num_steps, count)).astype("f4")
    results = trained(
        lambda i: party_of(tmp_path, [i]),
        lambda party, used: peers_of(LOCAL, plan, party, used=used),
        lambda i: init_state(
            params(), optax.sgd(0.05, momentum=0.5), jax.random.key(0), count, (), [i]
        ),
        rows,
        at_once,
    )
    train_step = simulate(LOCAL, plan)
    state = train_step.init(params(), jax.random.key(0))
    for step, row in enumerate(rows):
        state, _ = train_step(state, row, step)
        for worker, (found, used) in enumerate(results):
            for name, leaf in state.params.items():
                got = found[step][name][0]
                np.testing.assert_allclose(got, leaf[worker], rtol=1e-4, atol=2e-5)
            assert used[step].models
    # More than rounding: without messages they would be far apart.
    apart = [np.abs(found[-1]["matrix"]).max() for found, _ in results]
    assert min(apart) > 0.1


def test_what_is_sent_is_columns_by_turns(tmp_path, monkeypatch):
    sent, publish = [], Links.publish

    def counted(links, worker, peer, channel, arrays, said):
        sent.append((said.number, [(x.shape[1:], x.dtype.name) for x in arrays]))
        publish(links, worker, peer, channel, arrays, said)

    monkeypatch.setattr(Links, "publish", counted)
    plan = plan_of(topology.ring(2), low_rank(2, "bfloat16", min_rate=1.0))
    state = init_state(params(), optax.sgd(0.0), jax.random.key(0), 2)
    party = party_of(tmp_path, [0, 1])
    state, batch = place((state, np.zeros(2, "f4")), party.mesh)
    with peers_of(STILL, plan, party) as step:
        for t in range(2):
            state, _ = step.advance(state, batch, t)
    whole, narrow, check = ((5,), "float32"), "bfloat16", ((), "uint32")
    first = [whole, ((6, 2), narrow), ((6, 2), narrow), ((5, 2), narrow), check]
    second = [whole, ((7, 2), narrow), ((5, 2), narrow), ((6, 2), narrow), check]
    # The messages of the next step are sent a step ahead.
    assert sent == [(0, first)] * 2 + [(1, second)] * 2 + [(2, first)] * 2
    plain = {n: jnp.zeros(shape) for n, shape in enumerate(SHAPES.values())}
    said = sum(plan.compression.num_bytes(*one) for one in plain.items())
    assert said == 4 * 5 + 2 * 2 * ((6 + 6 + 5) + (7 + 5 + 6)) / 2


class End:
    """A worker whose swaps a test opens and completes, without a train step."""

    def __init__(self, folder, worker, graph, values, how=RANK_2):
        party = party_of(folder, [worker])
        stacked = [place(np.asarray(x, "f4")[None], party.mesh) for x in values]
        layout = Layout(stacked, party.mesh)
        if how is None:  # Of whole models.
            self.links = Links(party, graph.num_workers, [layout.pieces])
            self.way = Swaps(self.links, graph)
        else:
            factors = Factors(how, layout, range(len(stacked)))
            pieces = [factors.pieces(turn) for turn in range(2)]
            self.links = Links(party, graph.num_workers, pieces)
            self.way = LowRankSwaps(self.links, graph, None, [factors])
        self.worker, self.graph, self.step = worker, graph, -1
        (self.rows,) = layout.rows(stacked)

    def meet(self, *peers):
        self.links.meet(peers, time.monotonic() + LONG)

    def send(self, step=None):
        self.step = self.step + 1 if step is None else step
        self.way.send(self.worker, 0, self.rows, self.step)

    def take(self, seconds=0.0):
        late = time.monotonic() + seconds
        found = self.way.take(self.worker, 0, self.rows, self.step, late)
        self.rows = self.way.combine(self.graph, *found)
        return [one.peer for one in found[0].models]

    def train(self, draws):
        """A step of its own; returns it."""
        moves = [0.1 * draws.standard_normal(x.shape).astype("f4") for x in self.rows]
        self.rows = [x + move for x, move in zip(self.rows, moves, strict=True)]
        return moves

    @property
    def values(self):
        return np.concatenate([np.ravel(x) for x in self.rows])

    def edge(self, peer):
        return self.way._swaps[self.worker, 0][peer]


def ends_of(folder, graph, **options):
    draws = np.random.default_rng(0)
    found = [
        End(
            folder,
            worker,
            graph,
            [draws.standard_normal(shape) for shape in SHAPES.values()],
            **options,
        )
        for worker in range(graph.num_workers)
    ]
    for one in found:
        one.meet(*(x.worker for x in found if x is not one))
    return found


def in_step(ends, num_steps):
    """All complete their swaps, also those of earlier steps."""
    for _ in range(num_steps):
        step = 1 + max(one.step for one in ends)
        for one in ends:
            one.send(step)
        for one in ends:
            one.take(LONG)
        wait_until(lambda: [one.take() for one in ends] and are_even(ends))


def are_even(ends):
    """Whether each swap is complete at both ends, or at none."""
    edges = [
        (one.edge(other.worker), other.edge(one.worker))
        for one in ends
        for other in ends
        if other.worker in one.way._swaps[one.worker, 0]
    ]
    return all(here.number == there.number for here, there in edges)


def total(ends):
    return np.sum([one.values for one in ends], axis=0, dtype="f8")


def far(ends):
    """The greatest distance of a worker from the mean."""
    mean = total(ends) / len(ends)
    return max(np.linalg.norm(one.values - mean) for one in ends)


def check_edges(ends):
    """Both ends have the same bases, bit for bit."""
    for one in ends:
        for other in ends:
            if other.worker in one.way._swaps[one.worker, 0]:
                here, there = one.edge(other.worker), other.edge(one.worker)
                assert here.number == there.number > 0
                jax.tree.map(np.testing.assert_array_equal, here.bases, there.bases)


def close(ends):
    for one in ends:
        one.links.close()


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "how", [RANK_2, low_rank(2, "bfloat16", min_rate=1.0)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(
    "graph", [topology.ring(3), topology.one_peer_ring(4)], ids=["ring", "pairs"]
)
def test_the_mean_stays_however_late_messages_are(graph, how, tmp_path):
    """Workers step at times of their own, and swaps overlap."""
    ends, draws = ends_of(tmp_path, graph, how=how), np.random.default_rng(1)
    wanted, late = total(ends), 0
    for _ in range(150):
        one = ends[draws.integers(len(ends))]
        one.send()
        wanted += np.concatenate([np.ravel(x) for x in one.train(draws)])
        # Mostly nothing has come yet.
        late += not one.take(0.01 * draws.integers(2))
    assert late > 20
    in_step(ends, 2 * graph.period)
    np.testing.assert_allclose(total(ends), wanted, atol=2e-5)
    check_edges(ends)
    apart = far(ends)
    in_step(ends, 60)
    assert far(ends) < apart / 4
    np.testing.assert_allclose(total(ends), wanted, atol=5e-5)
    close(ends)


def test_an_edge_of_a_new_process_begins_again(tmp_path):
    """The others have their edges as before, and keep their mean."""
    ends = ends_of(tmp_path, topology.ring(3))
    in_step(ends, 3)
    ends[1].send()
    ends[2].send()  # Its last message, which is lost.
    first, second, gone = ends
    close([gone])
    for one in (first, second):
        wait_until(lambda one=one: not one.links.life_of(2))
    before = total([first, second])
    in_step([first, second], 4)
    np.testing.assert_allclose(total([first, second]), before, atol=1e-5)
    new = End(tmp_path, 2, topology.ring(3), params(1.0).values())
    new.meet(0, 1)
    for one in (first, second):
        wait_until(lambda one=one: one.links.life_of(2))
    ends = [first, second, new]
    before = total(ends)
    in_step(ends, 2)
    np.testing.assert_allclose(total(ends), before, atol=1e-5)
    assert [one.edge(2).number for one in (first, second)] == [2, 2]
    assert first.edge(1).number > 6
    check_edges(ends)
    close(ends)


def test_bases_that_differ_move_nothing_and_begin_again(tmp_path):
    """As of a processor that rounds differently."""
    ends = ends_of(tmp_path, topology.ring(2))
    in_step(ends, 3)
    edge = ends[0].edge(1)
    edge.bases = [jnp.nextafter(x, jnp.full_like(x, 9.0)) for x in edge.bases]
    before = [one.values for one in ends]
    with pytest.warns(UserWarning, match="had different bases of low-rank mes") as all_:
        in_step(ends, 1)
    assert len(all_) == 2
    for one, values in zip(ends, before, strict=True):
        np.testing.assert_array_equal(one.values, values)
    in_step(ends, 5)
    check_edges(ends)
    np.testing.assert_allclose(total(ends), np.sum(before, 0), atol=1e-5)
    assert np.abs(ends[0].values - before[0]).max() > 0.1
    close(ends)


@pytest.mark.parametrize("how", [None, RANK_2], ids=["whole", "low rank"])
def test_both_ends_take_the_weight_of_the_later_step(how, tmp_path):
    """One has its swap from a step with W_ij = 1/2, the other from one with 1/8."""
    (half,), (less,) = topology.ring(2), topology.damped(topology.ring(2), 0.25)
    ends = ends_of(tmp_path, Topology("uneven", (half, less)), how=how)
    before = total(ends)
    for step, one in enumerate(ends):
        one.send(step)
    assert [one.take(LONG) for one in ends] == [[1], [0]]
    np.testing.assert_allclose(total(ends), before, atol=1e-5)
    close(ends)


def slice_of(folder, worker):
    devices = jax.devices()[2 * worker : 2 * worker + 2]
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((1, 2), ("replica", "fsdp"), kinds, devices=devices)
    return PeerProcess(Folder(folder), [worker], mesh)


def test_slices_swap_factors_of_their_shards(tmp_path):
    """Each device sends columns of its shard, and what both have once."""
    draws = np.random.default_rng(0)
    rows = {
        "cut": draws.standard_normal((2, 6, 10)).astype("f4"),
        "whole": draws.standard_normal((2, 6, 5)).astype("f4"),
    }
    specs, channels = {"cut": (None, "fsdp"), "whole": ()}, []

    def still(params, model_state, batch, key):
        return batch * params["cut"].sum(), (model_state, {})

    def work(worker):
        party, key = slice_of(tmp_path, worker), jax.random.key(0)
        one = {name: jnp.asarray(x[worker]) for name, x in rows.items()}
        state = init_state(one, optax.sgd(0.0), key, 2, workers=[worker])

        def put(path, x):
            given = [getattr(key, "key", None) for key in path]
            spec = next((specs[name] for name in given if name in specs), ())
            lies = NamedSharding(party.mesh, PartitionSpec("replica", *spec))
            return jax.device_put(x, lies)

        state = jax.tree.map_with_path(put, state)
        local = local_update(still, optax.sgd(0.0))
        with peers_of(local, plan_of(topology.ring(2)), party) as step:
            # Not from step 0, before which all workers must have one model.
            for t in range(1, 25):
                batch = place(np.zeros(1, "f4"), party.mesh)
                state, _ = step.advance(state, batch, t)
            channels.append([repr(one) for one in step.links._channels[:2]])
        return state.params

    found = in_threads(work, 2)
    for name, both in rows.items():
        for one in found:
            lies = PartitionSpec("replica", *specs[name])
            assert one[name].sharding.is_equivalent_to(
                NamedSharding(one[name].sharding.mesh, lies), 3
            )
            np.testing.assert_allclose(one[name][0], both.mean(0), atol=1e-3)
            first = {}
            for shard in one[name].addressable_shards:
                same = first.setdefault(repr(shard.index), shard.data)
                np.testing.assert_array_equal(shard.data, same)
    cut, check = "((1, {}, 2), 'float32', {})", "((1,), 'uint32', {})"
    for turn, (size, other) in enumerate(((6, 6), (5, 5))):
        wanted = [cut.format(size, 0), cut.format(other, 0), check.format(0)]
        wanted += [cut.format(size, 1), check.format(1)]
        assert {one[turn] for one in channels} == {f"[{', '.join(wanted)}]"}


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        (plan_of(topology.ring(2)), {"merge": "arrived"}, 'use merge="swaps"'),
        (plan_of(topology.ring(2)), {"merge": gossip.Quorum(2)}, 'use merge="swaps"'),
        (
            Rounds(topology.ring(2), 2, delay=1, compression=RANK_2),
            {},
            "of every 2 steps with a delay of 1 and the compression low_rank",
        ),
        (Rounds(topology.ring(2), compression=RANK_2), {}, "a delay of 0 and"),
        (Rounds(topology.ring(2), delay=1), {}, "and the compression None"),
        (
            Rounds(topology.ring(2), delay=1, compression=error_feedback(int8())),
            {},
            "compression=low_rank.*and the compression error_feedback",
        ),
        (
            plan_of(topology.ring(2)),
            {"elastic": gossip.Elastic(topology.ring), "patience": 1.0},
            'elastic needs merge="arrived"',
        ),
        (plan_of(topology.ring(2)), {"patience": gossip.AutoPatience()}, "use seconds"),
    ],
)
def test_what_swaps_cannot_be_gets_a_sentence(plan, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        peers_of(LOCAL, plan, party_of(tmp_path, [0]), **options)


def test_complex_leaves_are_refused(tmp_path):
    party = party_of(tmp_path, [0])
    stacked = [place(jnp.zeros((1, 6, 5), "complex64"), party.mesh)]
    with pytest.raises(TypeError, match="leaf 3 of the model is complex64"):
        Factors(RANK_2, Layout(stacked, party.mesh), [3])


@pytest.mark.slow
def test_a_killed_worker_comes_back_to_new_edges(tmp_path):
    how = {"MERGE": "swaps", "RANK": "2"}
    with spawned(tmp_path, 3, **how) as workers:
        for worker in workers:
            read_step(worker, 20)
        workers[0].kill()
        workers[0].communicate()
        for worker in workers[1:]:  # They train on without it.
            step = int(read_step(worker, 0)[0])
            read_step(worker, step + 40)
        workers[0] = spawn(tmp_path, 0, 3, JOIN="1", **how)
        step = int(read_step(workers[0], 0)[0])
        assert step >= 20
        for worker in workers:
            before = int(read_step(worker, step)[-1])
            assert int(read_step(worker, step + 200)[-1]) > before + 10
