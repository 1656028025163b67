"""The runtime model against closed forms, a scalar simulator, and what cannot be."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentjax import runtime, topology
from decentjax._rounds import schedule
from decentjax.analysis import traffic
from decentjax.runtime import Cluster, Job, Times
from decentjax.runtime.cluster import plans
from decentjax.runtime.sharing import share, slots
from decentjax.topology import matrices

CLUSTER = Cluster(num_nodes=4, workers_per_node=4, between_bytes_per_second=10.0)
JOB = Job(model_bytes=2.0, compute=runtime.gamma(1.0, 0.3))


def topologies(num_workers: int, per_node: int) -> list[topology.Topology]:
    made = [
        topology.ring(num_workers),
        topology.one_peer_exponential(num_workers),
        topology.exponential(num_workers),
        topology.complete(num_workers),
        topology.butterfly_groups(num_workers, 4),
        topology.alternating_exponential_ring(num_workers, per_node),
        topology.hierarchical(num_workers, per_node, topology.ring),
        topology.hierarchical(num_workers, per_node, topology.complete),
    ]
    return [*made, topology.damped(made[0], 0.5)]


EVERY = topologies(16, 4)


def share_one_by_one(starts, seconds, cards):
    """Processor sharing as an event loop over one card after another."""
    ends = [0.0] * len(starts)
    for card in set(cards):
        coming = sorted(
            (i for i in range(len(starts)) if cards[i] == card), key=lambda i: starts[i]
        )
        left, clock = {}, 0.0
        while coming or left:
            if not left:
                clock = max(clock, starts[coming[0]])
            while coming and starts[coming[0]] <= clock:
                i = coming.pop(0)
                left[i] = seconds[i]
            end = clock + min(left.values()) * len(left)
            moment = min(end, starts[coming[0]]) if coming else end
            left = {i: x - (moment - clock) / len(left) for i, x in left.items()}
            clock = moment
            for i in [i for i, x in left.items() if x < 1e-9]:
                ends[i] = clock
                del left[i]
    return ends


MESSAGE = st.tuples(
    st.integers(0, 12).map(lambda x: x / 4),
    st.integers(1, 8).map(lambda x: x / 3),
    st.integers(0, 3),
)


@settings(deadline=None)
@given(st.lists(MESSAGE, min_size=1, max_size=20))
def test_messages_share_their_card_at_each_moment(messages):
    starts, seconds, cards = (np.array(x) for x in zip(*messages, strict=True))
    ends = share(starts, seconds, slots(cards))
    wanted = share_one_by_one(starts, seconds, cards.tolist())
    np.testing.assert_allclose(ends, wanted, atol=1e-7)
    for card in set(cards):  # No card sends faster than it can, nor is it lazy.
        mine = cards == card
        busy = ends[mine].max() - starts[mine].min()
        assert busy >= seconds[mine].sum() - 1e-7
        if np.ptp(starts[mine]) == 0:
            assert busy == pytest.approx(seconds[mine].sum())


def test_nothing_is_through_where_nothing_was_sent():
    assert share(np.zeros(0), np.zeros(0), slots(np.zeros(0, int))).shape == (0,)


def times_of(scheme, cluster=CLUSTER, job=JOB, num_steps=40) -> Times:
    if scheme == "all-reduce":
        return runtime.all_reduce(cluster, job, num_steps)
    if scheme == "wait-avoiding":
        groups = topology.butterfly_groups(cluster.num_workers, 4)
        return runtime.wait_avoiding(cluster, job, groups, num_steps, sync_every=10)
    return runtime.in_step(cluster, job, scheme, num_steps)


SCHEMES = ["all-reduce", "wait-avoiding", *EVERY]


def name_of(scheme) -> str:
    return scheme if isinstance(scheme, str) else scheme.name


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_steps_of_a_worker_follow_without_gap(scheme):
    times = times_of(scheme)
    assert (times.start[0] == 0).all()
    np.testing.assert_allclose(times.start[1:], times.end[:-1], atol=1e-12)
    assert min(x.min() for x in times) >= 0
    assert times.seconds_per_step() >= times.compute.mean() - 1e-9
    assert {x.shape for x in times} == {(40, 16)}


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_without_messages_a_step_is_its_compute_time(scheme):
    cluster = dataclasses.replace(CLUSTER, between_bytes_per_second=math.inf)
    job = dataclasses.replace(JOB, compute=runtime.constant(0.25))
    times = times_of(scheme, cluster, job)
    np.testing.assert_allclose(np.diff(times.start, axis=0), 0.25)
    assert times.seconds_per_step() == pytest.approx(0.25)


@pytest.mark.parametrize("made", EVERY, ids=name_of)
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_slow_links_take_their_bytes_over_their_rate(made, per_node):
    """By `decentjax.analysis.traffic`, which counts the same bytes in another way."""
    cluster = Cluster(
        num_nodes=16 // per_node,
        workers_per_node=per_node,
        between_bytes_per_second=10.0,
    )
    sent = [t.node_bytes.max() / 10.0 for t in traffic(made, 2.0, per_node)]
    if made[0].workers_per_node > per_node:  # A node of the topology is on several.
        assert runtime.exchange_seconds(cluster, made, 2.0) >= np.mean(sent) - 1e-9
        return
    assert runtime.exchange_seconds(cluster, made, 2.0) == pytest.approx(np.mean(sent))
    job = Job(model_bytes=2.0, compute=runtime.constant(1e-6))
    times = runtime.in_step(cluster, job, made, 4 * made.period)
    assert times.seconds_per_step() <= np.mean(sent) + 1e-5


def test_a_step_of_all_reduce_has_its_closed_form():
    for rate in (0.5, 2.0, 40.0):
        cluster = Cluster(num_nodes=5, between_bytes_per_second=rate)
        job = Job(model_bytes=1.0, compute=runtime.constant(2.0), forward_share=0.3)
        whole = 2 * 4 / 5 / rate
        assert runtime.all_reduce_seconds(cluster, 1.0) == pytest.approx(whole)
        for buckets in (1, 3, 10):
            times = runtime.all_reduce(cluster, job, 3, num_buckets=buckets)
            # The last bucket is sent after the whole backward pass, or the network
            # never pauses after the first.
            wanted = max(2 + whole / buckets, 2 * (0.3 + 0.7 / buckets) + whole)
            assert times.seconds_per_step() == pytest.approx(wanted)


def test_all_reduce_spans_first_bucket_to_end_of_step():
    for buckets in (1, 4):
        times = runtime.all_reduce(CLUSTER, JOB, 5, num_buckets=buckets)
        first = 1 / 3 + 2 / 3 / buckets
        np.testing.assert_allclose(times.sent, times.start + first * times.compute)
        np.testing.assert_allclose(times.sent + times.exchange, times.end)


@pytest.mark.parametrize("made", [EVERY[2], EVERY[3], EVERY[6]], ids=name_of)
def test_a_step_with_an_exchange_has_its_closed_form(made):
    """Of topologies whose exchanges take equally long, and for all workers."""
    for rate in (0.5, 5.0, 500.0):
        cluster = dataclasses.replace(CLUSTER, between_bytes_per_second=rate)
        job = dataclasses.replace(JOB, compute=runtime.constant(2.0))
        times = runtime.in_step(cluster, job, made, 3)
        wanted = max(2.0, runtime.exchange_seconds(cluster, made, 2.0))
        assert times.seconds_per_step() == pytest.approx(wanted)


class OneMessageAtATime:
    """The exchanges of a topology of permutations, as loops over workers and cards."""

    def __init__(self, made, num_nodes, per_node):
        self.per_node = per_node
        edges = np.argwhere(matrices(made)[0] * (1 - np.eye(made.num_workers)) > 0)
        self.edges = edges.tolist()
        self.free = [0.0] * num_nodes

    def ends(self, ready, part):
        """When each worker has everything, of a part of a model of one byte."""
        ends = list(ready)
        for inside, rate, latency in ((True, 4.0, 0.01), (False, 2.0, 0.05)):
            nodes = [[worker // self.per_node for worker in e] for e in self.edges]
            mine = [k for k, (i, j) in enumerate(nodes) if (i == j) == inside]
            pairs = [self.edges[k] for k in mine]
            cards = pairs if inside else [nodes[k] for k in mine]
            first = [max(ready[i], ready[j]) for i, j in pairs]
            if not inside:
                before = [max(self.free[i], self.free[j]) for i, j in cards]
                first = [max(both) for both in zip(first, before, strict=True)]
            for side in (0, 1):
                of_side = [card[side] for card in cards]
                alone = [part / rate] * len(pairs)
                through = share_one_by_one(first, alone, of_side)
                for pair, card, end in zip(pairs, cards, through, strict=True):
                    for worker in pair:
                        ends[worker] = max(ends[worker], end + latency)
                    if not inside:
                        for node in card:
                            self.free[node] = max(self.free[node], end)
        return ends


SIZES = [(1, 1), (2, 1), (5, 1), (1, 4), (4, 2), (3, 3)]


def job_of_a_trace(num_nodes, per_node) -> tuple[Cluster, Job, np.ndarray]:
    cluster = Cluster(
        num_nodes=num_nodes,
        workers_per_node=per_node,
        between_bytes_per_second=2.0,
        between_latency=0.05,
        inside_bytes_per_second=4.0,
        inside_latency=0.01,
    )
    seconds = np.random.default_rng(0).gamma(2, 0.5, (30, num_nodes * per_node))
    return cluster, Job(model_bytes=1.0, compute=runtime.trace(seconds)), seconds


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize(("num_nodes", "per_node"), SIZES)
def test_in_step_is_that_of_a_message_by_message_loop(num_nodes, per_node, hidden):
    cluster, job, seconds = job_of_a_trace(num_nodes, per_node)
    made = topology.exponential(num_nodes * per_node)
    times = runtime.in_step(cluster, job, made, 30, hidden=hidden)
    network = OneMessageAtATime(made, num_nodes, per_node)
    starts = [0.0] * made.num_workers
    for step in range(30):
        np.testing.assert_allclose(times.start[step], starts)
        own = [s + c for s, c in zip(starts, seconds[step], strict=True)]
        ends = network.ends(starts if hidden else own, 1.0)
        starts = [max(both) for both in zip(own, ends, strict=True)]
    np.testing.assert_allclose(times.end[-1], starts)


@pytest.mark.parametrize("forward_share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("num_nodes", "per_node"), SIZES)
def test_background_is_that_of_a_message_by_message_loop(
    num_nodes, per_node, forward_share
):
    cluster, job, seconds = job_of_a_trace(num_nodes, per_node)
    job = dataclasses.replace(job, forward_share=forward_share)
    made = topology.exponential(num_nodes * per_node)
    times = runtime.background(cluster, job, made, 30, num_buckets=3)
    network = OneMessageAtATime(made, num_nodes, per_node)
    starts = [0.0] * made.num_workers
    updates = [starts] * 3
    for step in range(30):
        np.testing.assert_allclose(times.start[step], starts)
        np.testing.assert_allclose(times.sent[step], updates[0])
        arrived, before = [], [0.0] * made.num_workers
        for ready in updates:
            before = network.ends(list(map(max, ready, before)), 1 / 3)
            arrived.append(before)
        moments = [
            s + forward_share * c for s, c in zip(starts, seconds[step], strict=True)
        ]
        updates = []
        for there in arrived:
            rest = [(1 - forward_share) / 3 * c for c in seconds[step]]
            both = zip(moments, rest, strict=True)
            moments = list(map(max, [m + r for m, r in both], there))
            updates.append(moments)
        starts = moments
    np.testing.assert_allclose(times.end[-1], starts)


@pytest.mark.parametrize("made", EVERY, ids=name_of)
def test_in_one_bucket_the_background_is_as_in_the_step(made):
    wanted = runtime.in_step(CLUSTER, JOB, made, 20)
    times = runtime.background(CLUSTER, JOB, made, 20, num_buckets=1)
    for x, y in zip(times, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.parametrize("made", EVERY, ids=name_of)
@pytest.mark.parametrize("per_node", [1, 4])
def test_what_is_sent_is_received_and_is_what_traffic_counts(made, per_node):
    cluster = Cluster(
        num_nodes=16 // per_node,
        workers_per_node=per_node,
        between_bytes_per_second=10.0,
    )
    counts = traffic(made, 1.0, per_node)
    for legs, counted in zip(plans(cluster, made), counts, strict=True):
        sent = 0.0
        for leg in legs:
            for kind in leg.kinds:
                for table in (kind.sending, kind.receiving):
                    used = np.sort(table[table >= 0]).tolist()
                    assert used == list(range(len(kind.chosen)))
                sent += leg.transfer.part * len(kind.chosen)
        assert sent == pytest.approx(counted.worker_bytes.sum())


@pytest.mark.parametrize("simulate", [runtime.in_step, runtime.background])
@pytest.mark.parametrize("made", EVERY, ids=name_of)
def test_no_card_carries_more_than_its_rate(made, simulate):
    job = dataclasses.replace(JOB, compute=runtime.gamma(0.2, 0.5))
    times = simulate(CLUSTER, job, made, 40)
    carried = np.sum([t.node_bytes for t in traffic(made, 2.0, 4)], axis=0)
    assert (40 / made.period * carried / 10.0 <= times.end.max() + 1e-9).all()


def test_an_edge_of_weight_0_carries_nothing():
    weights = ((0, 1, 2, 3), 0.5), ((1, 2, 3, 0), 0.5), ((2, 3, 0, 1), 0.0)
    sources, shares = zip(*weights, strict=True)
    cluster = Cluster(num_nodes=4, between_bytes_per_second=1.0)
    exchange = topology.Exchange(topology.Permutations(sources, shares))
    graph = topology.Topology("ring with an idle edge", (exchange,))
    assert runtime.exchange_seconds(cluster, graph, 1.0) == 1.0
    (sent,) = traffic(graph, 1.0)
    np.testing.assert_array_equal(sent.worker_bytes, np.ones(4))
    times = runtime.in_step(
        cluster, Job(model_bytes=1.0, compute=runtime.constant(0.5)), graph, 10
    )
    assert times.seconds_per_step() == 1.0


def test_inside_a_node_a_mean_goes_at_the_rate_of_its_workers():
    cluster = dataclasses.replace(
        CLUSTER, between_bytes_per_second=math.inf, inside_bytes_per_second=5.0
    )
    ring = topology.hierarchical(16, 4, topology.ring)
    wanted = 2 * (1 - 1 / 4) * 2.0 / 5.0
    assert runtime.exchange_seconds(cluster, ring, 2.0) == pytest.approx(wanted)


def test_a_ring_waits_for_its_neighbours_alone():
    seconds = np.ones((6, 8))
    seconds[0, 3] = 6.0
    cluster = Cluster(num_nodes=8, between_bytes_per_second=math.inf)
    job = Job(model_bytes=1.0, compute=runtime.trace(seconds))
    whole = runtime.all_reduce(cluster, job, 6)
    assert whole.seconds_per_step() == pytest.approx(11 / 6)
    assert whole.waiting[0].tolist() == [5.0] * 3 + [0.0] + [5.0] * 4
    ring = runtime.in_step(cluster, job, topology.ring(8), 6)
    # The lateness travels one neighbour a step, from the step after.
    late = np.argwhere(ring.waiting > 0)
    assert late[:, 0].min() == 1
    assert sorted(late[late[:, 0] == 1][:, 1]) == [2, 4]
    assert ring.waiting.sum() < whole.waiting.sum()
    assert ring.exposed.sum() == 0


def test_the_sync_of_groups_takes_an_all_reduce():
    job = dataclasses.replace(JOB, compute=runtime.constant(1.0))
    groups = topology.butterfly_groups(16, 4)
    times = runtime.wait_avoiding(CLUSTER, job, groups, 2, sync_every=2)
    whole = runtime.all_reduce_seconds(CLUSTER, 2.0)
    np.testing.assert_allclose(times.exposed[1], whole)
    one = topology.Topology("first", groups.exchanges[:1])
    first = runtime.exchange_seconds(CLUSTER, one, 2.0)
    np.testing.assert_allclose(times.exposed[0], first)


def test_seconds_per_step_are_those_of_the_mean_worker():
    nothing = np.zeros((2, 2))
    start = np.array([[0.0, 0.0], [1.0, 2.0]])
    compute = np.array([[1.0, 2.0], [3.0, 4.0]])
    times = Times(start, compute, nothing, nothing, nothing, nothing)
    assert times.seconds_per_step() == 2.5
    assert times.seconds_per_step(skipped=1) == 3.5


def test_draws_differ_from_step_to_step_and_from_seed_to_seed():
    first, other = (runtime.all_reduce(CLUSTER, JOB, 2, seed) for seed in (0, 1))
    assert len({*first.compute.ravel(), *other.compute.ravel()}) == 4 * 16
    late = runtime.delayed(runtime.trace(np.ones((1, 16))), count=3, seconds=2.0)
    job = dataclasses.replace(JOB, compute=late)
    for _ in range(2):
        drawn = runtime.all_reduce(CLUSTER, job, 30).compute
        assert sorted(set(drawn.ravel())) == [1.0, 3.0]
        assert ((drawn > 1).sum(1) == 3).all()
        assert ((drawn > 1).sum(0) > 0).sum() > 10


def test_groups_that_avoid_waiting_wait_at_the_sync_alone():
    late = runtime.delayed(runtime.constant(1.0), count=2, seconds=0.5)
    cluster = Cluster(num_nodes=16, between_bytes_per_second=math.inf)
    job = Job(model_bytes=1.0, compute=late)
    groups = topology.butterfly_groups(16, 4)
    times = runtime.wait_avoiding(cluster, job, groups, 20, sync_every=10)
    syncs = [9, 19]
    others = [step for step in range(20) if step not in syncs]
    assert times.waiting[others].sum() == 0
    np.testing.assert_allclose(times.end[9], times.end[9].max())
    assert times.waiting[9].min() == 0
    assert times.waiting[9].max() > 0
    assert (times.compute > 1).sum(1).tolist() == [2] * 20


def test_compute_times_have_their_mean_and_deviation():
    drawn = runtime.gamma(2.0, 0.2)(0, 100_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(2.0, rel=5e-3)
    assert drawn.std() == pytest.approx(0.4, rel=2e-2)
    alike = runtime.gamma(2.0, 0.0)(0, 5, np.random.default_rng(0))
    np.testing.assert_allclose(alike, 2.0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_a_longer_simulation_begins_as_a_shorter_one(scheme):
    short, long = times_of(scheme, num_steps=7), times_of(scheme, num_steps=20)
    for x, y in zip(short, long, strict=True):
        np.testing.assert_array_equal(x, y[:7])


def test_latencies_count_per_message_and_per_round():
    slow = dataclasses.replace(
        CLUSTER,
        between_bytes_per_second=math.inf,
        between_latency=1.0,
        inside_latency=0.1,
    )
    ring = topology.hierarchical(16, 4, topology.ring)
    assert runtime.exchange_seconds(slow, ring, 1.0) == pytest.approx(1 + 2 * 3 * 0.1)
    groups = topology.complete(16)
    assert runtime.exchange_seconds(slow, groups, 1.0) == pytest.approx(2 * 15 * 1.0)
    assert runtime.all_reduce_seconds(slow, 1.0) == pytest.approx(2 * 15 * 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dataclasses.replace(CLUSTER, between_bytes_per_second=0.0),
            "between_bytes_per_second must be positive, got 0.0",
        ),
        (
            lambda: dataclasses.replace(CLUSTER, inside_bytes_per_second=math.nan),
            "inside_bytes_per_second must be positive, got nan",
        ),
        (lambda: dataclasses.replace(CLUSTER, num_nodes=0), "num_nodes must be positi"),
        (
            lambda: dataclasses.replace(CLUSTER, between_latency=-1.0),
            "between_latency must be finite and not negative, got -1.0",
        ),
        (
            lambda: dataclasses.replace(JOB, model_bytes=0.0),
            "model_bytes must be posit",
        ),
        (
            lambda: dataclasses.replace(JOB, forward_share=1.1),
            r"must be in \[0, 1\], got 1.1",
        ),
        (lambda: runtime.constant(0.0), "compute time must be positive, got 0.0 s"),
        (lambda: runtime.gamma(1.0, -0.1), "sigma must not be negative, got -0.1"),
        (lambda: runtime.trace(np.ones(3)), r"a trace is \[T, N\] of .* got \(3,\)"),
        (lambda: runtime.delayed(JOB.compute, -1, 1.0), "must not be negative, got -1"),
        (lambda: times_of(topology.ring(8)), "ring has 8 workers, the cluster has 16"),
        (lambda: times_of(topology.ring), "got ring; call a function"),
        (lambda: times_of("all-reduce", num_steps=0), "num_steps must be positive"),
        (
            lambda: runtime.all_reduce(CLUSTER, JOB, 3, num_buckets=0),
            "num_buckets must be positive, got 0",
        ),
        (
            lambda: times_of(
                EVERY[0],
                job=dataclasses.replace(JOB, compute=runtime.trace(np.ones((2, 3)))),
            ),
            "the trace has 3 workers, the cluster has 16",
        ),
        (
            lambda: runtime.wait_avoiding(CLUSTER, JOB, EVERY[4], 3, sync_every=0),
            "sync_every must be positive, got 0",
        ),
    ],
)
def test_invalid_values_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("made", EVERY, ids=lambda x: x.name)
def test_rounds_of_each_step_are_the_plain_steps(made, hidden):
    # At the end of the step nothing hides them; from its start the gradient does.
    rounds = schedule.every(made, 1, delay=int(hidden))
    found = runtime.rounds(CLUSTER, JOB, rounds, 12)
    wanted = runtime.in_step(CLUSTER, JOB, made, 12, hidden=hidden)
    np.testing.assert_allclose(found.end, wanted.end, rtol=1e-12)
    np.testing.assert_allclose(found.exposed, wanted.exposed, atol=1e-12)


@given(
    num_steps=st.integers(1, 7),
    delay=st.integers(0, 7),
    fragments=st.integers(1, 3),
    seconds=st.floats(0.01, 9.0),
    hidden=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_round_exposes_what_its_delay_does_not_hide(
    num_steps, delay, fragments, seconds, hidden
):
    """Of workers who compute for one second, in pairs."""
    delay = min(delay, num_steps)
    fragments = min(fragments, num_steps)
    cluster = Cluster(num_nodes=4, between_bytes_per_second=1 / seconds)
    job = Job(model_bytes=1.0, compute=runtime.constant(1.0))
    pairs = topology.one_peer_ring(4)
    made = schedule.every(pairs, num_steps, delay)
    if fragments > 1:
        leaves = [(number,) for number in range(fragments)]
        made = schedule.every(pairs, num_steps, delay, leaves)
    times = runtime.rounds(cluster, job, made, 12 * num_steps, hidden=hidden)
    # A card may still carry the round before: what is bounded holds for it too.
    steps_to_hide = 0 if delay == 0 else delay if hidden else delay - 1
    each = seconds / fragments
    exposed = max(0.0, each - steps_to_hide)
    whole = times.seconds_per_step() * 12 * num_steps
    ended = 12 * fragments - (0 if delay == 0 else fragments)
    assert whole >= 12 * num_steps + exposed * ended - 1e-6
    if fragments == 1:  # A round ends before the next begins: it is just that.
        count = sum(made[t].receives is not None for t in range(12 * num_steps))
        count = 12 if delay == 0 else count
        assert whole == pytest.approx(12 * num_steps + exposed * count, rel=1e-9)


def test_rounds_need_the_clusters_workers():
    made = schedule.every(topology.ring(3), 2)
    with pytest.raises(ValueError, match="3 workers, the cluster has 16"):
        runtime.rounds(CLUSTER, JOB, made, 4)


def test_a_delay_changes_no_times_of_anothers():
    kept = np.ones(4, int)
    late = runtime.delayed(lambda *_: kept, count=4, seconds=0.5)
    for _ in range(2):
        assert late(0, 4, np.random.default_rng(0)).tolist() == [1.5] * 4
    assert kept.tolist() == [1] * 4
