"""Simulated runs of peers that wait: what they mix, and when they are done."""

import collections
import math

import numpy as np
import pytest

from benches import goodput
from benches.goodput import WorkerFailures
from decentjax import runtime, topology
from decentjax._rounds.schedule import every
from decentjax.gossip import AutoPatience
from decentjax.runtime import Cluster, Job
from train.study.peer_clock import simulate_peers

LATENCY = 2.0


def cluster_of(num_workers, latency=0.0, rate=math.inf):
    return Cluster(
        num_nodes=num_workers, between_bytes_per_second=rate, between_latency=latency
    )


class SecondBySecond:
    """Workers that compute and wait for whole seconds, one second after the other."""

    def __init__(self, schedule, seconds, count, patience):
        self.schedule, self.seconds, self.patience = schedule, seconds, patience
        self.num_steps, self.num_workers = seconds.shape
        self.count = count
        workers = range(self.num_workers)
        self.until = dict.fromkeys(workers)  # Of those that compute.
        self.step = dict.fromkeys(workers, -1)
        self.enough_at = {}  # Of those that wait; None while too few are there.
        self.flying = []
        self.there = collections.defaultdict(list)
        self.newest = collections.defaultdict(lambda: -1)
        self.mixed, self.steps = [], [[] for _ in workers]
        self.ends = np.zeros(seconds.shape)

    def play(self):
        for worker in range(self.num_workers):
            self.start(worker, 0, 0)
        for now in range(1, 10_000):
            done = [i for i, t in self.until.items() if t == now]
            late = [
                i
                for i, at in self.enough_at.items()
                if at is not None and now >= at + self.patience
            ]
            for worker in sorted({*done, *late}, key=lambda i: (self.step[i], i)):
                if worker in done:
                    del self.until[worker]
                    self.computed(worker, now)
                elif worker in self.enough_at:
                    self.mix(worker, now)
            for at, edge, version in [x for x in self.flying if x[0] == now]:
                self.there[edge] = [*self.there[edge], version][-2:]
                self.newest[edge] = max(self.newest[edge], version)
                self.flying.remove((at, edge, version))
            for worker in sorted(self.enough_at):
                self.look(worker, now)
            if not self.until and not self.enough_at:
                return self
        raise AssertionError("it does not end")

    def sources(self, worker, one):
        weights = topology.matrices(topology.Topology("", (one.exchange,)))[0]
        return [j for j in np.flatnonzero(weights[worker]).tolist() if j != worker]

    def send(self, worker, one, step, now):
        group = self.schedule.fragments.index(one.leaves)
        for peer in range(self.num_workers):
            if worker in self.sources(peer, one):
                edge = worker, peer, group
                self.flying.append((now + LATENCY, edge, step))

    def begun(self, worker):
        step, delay = self.step[worker], self.schedule.delay
        return step - delay + 1 if delay else step

    def round_of(self, worker):
        event = self.schedule[self.step[worker]]
        return event.receives if self.schedule.delay else event.sends

    def start(self, worker, step, now):
        if step < self.num_steps and self.count is not None:
            begins = next(t for t in range(step, 10_000) if self.schedule[t].sends)
            one = self.schedule[begins].sends
            group = self.schedule.fragments.index(one.leaves)
            sources = self.sources(worker, one)
            newer = [j for j in sources if self.newest[j, worker, group] >= begins]
            enough = max(1, min(self.count - 1, len(sources)))
            if begins > step and len(newer) >= enough:
                jump = [t for t in range(step, begins) if self.schedule[t].receives]
                step = min([*jump, begins, self.num_steps - 1])
        if step >= self.num_steps:
            return
        self.step[worker] = step
        self.steps[worker].append(step)
        if self.schedule.delay and self.schedule[step].sends:
            self.send(worker, self.schedule[step].sends, step, now)
        self.until[worker] = now + self.seconds[step, worker]

    def computed(self, worker, now):
        one = self.round_of(worker)
        if not self.schedule.delay and one:
            self.send(worker, one, self.step[worker], now)
        if one is None:
            self.finish(worker, now)
        else:
            self.enough_at[worker] = None
            self.look(worker, now)

    def look(self, worker, now):
        if worker not in self.enough_at:
            return
        one, begun = self.round_of(worker), self.begun(worker)
        group = self.schedule.fragments.index(one.leaves)
        sources = self.sources(worker, one)
        came = [j for j in sources if self.newest[j, worker, group] >= begun]
        alive = [j for j in sources if j in self.until or j in self.enough_at]
        coming = [j for j in alive if j not in came]
        wanted = 0 if self.count is None else min(self.count - 1, len(sources))
        is_enough = len(came) >= wanted or len(came) + len(coming) < wanted
        if is_enough and self.enough_at[worker] is None:
            self.enough_at[worker] = now
        at = self.enough_at[worker]
        if not coming or (at is not None and now >= at + self.patience):
            self.mix(worker, now)

    def mix(self, worker, now):
        del self.enough_at[worker]
        one, begun = self.round_of(worker), self.begun(worker)
        group = self.schedule.fragments.index(one.leaves)
        for j in self.sources(worker, one):
            there = sorted(self.there[j, worker, group])
            taken = [v for v in there if v <= begun] if begun in there else there
            self.there[j, worker, group] = [v for v in there if v not in taken]
            used = taken if self.count is not None else taken[-1:]
            self.mixed += [(begun, worker, j, version) for version in used]
        self.finish(worker, now)

    def finish(self, worker, now):
        self.ends[self.step[worker], worker] = now
        self.start(worker, self.step[worker] + 1, now)
        for other in sorted(self.enough_at):
            # Who is done for good is not awaited.
            if worker not in self.until and worker not in self.enough_at:
                self.look(other, now)


def mixed_in(run):
    """Step, worker, peer and version of each model that is mixed, sorted."""
    return sorted(
        (one.step, one.worker, model.peer, model.step)
        for one in run.records
        for model in one.models
    )


def check(run, wanted):
    assert mixed_in(run) == sorted(wanted.mixed)
    assert run.steps == wanted.steps
    for worker, own in enumerate(run.steps):
        np.testing.assert_array_equal(
            run.times.end[own, worker], wanted.ends[own, worker]
        )


SCHEDULES = [
    lambda n: every(topology.complete(n), 3),
    lambda n: every(topology.complete(n), 2, delay=2),
    lambda n: every(topology.ring(n), 4, delay=1),
    lambda n: every(topology.complete(n), 6, 2, [[0], [1, 2]]),
]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("patience", [0, 3])
@pytest.mark.parametrize("make", SCHEDULES)
def test_rounds_with_a_quorum_are_those_of_a_loop_over_seconds(
    make, patience, num_workers
):
    schedule, draw = make(num_workers), np.random.default_rng(num_workers)
    seconds = draw.integers(1, 9, (30, num_workers))
    seconds[:, -1] *= 3  # A straggler.
    cluster = cluster_of(num_workers, LATENCY)
    job = Job(model_bytes=1.0, compute=runtime.trace(seconds))
    for count in {1, num_workers // 2 + 1, num_workers}:
        waits = {"count": count, "patience": patience}
        run = simulate_peers(cluster, job, schedule, 30, **waits)
        check(run, SecondBySecond(schedule, seconds, count, patience).play())


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("patience", [0, 2, 50])
def test_peers_with_patience_are_those_of_a_loop_over_seconds(patience, num_workers):
    seconds = np.random.default_rng(num_workers).integers(1, 6, (40, num_workers))
    job = Job(model_bytes=1.0, compute=runtime.trace(seconds))
    graph = every(topology.ring(num_workers), 1, 1)
    cluster = cluster_of(num_workers, LATENCY)
    run = simulate_peers(cluster, job, graph, 40, patience=patience)
    check(run, SecondBySecond(graph, seconds, None, patience).play())


def test_rounds_of_all_workers_take_the_time_of_rounds():
    schedule = every(topology.complete(5), 4)
    job = Job(model_bytes=1.0, compute=runtime.gamma(1.0, 0.3))
    run = simulate_peers(cluster_of(5), job, schedule, 40, count=5)
    wanted = runtime.rounds(cluster_of(5), job, schedule, 40)
    np.testing.assert_allclose(run.times.end, wanted.end)
    np.testing.assert_allclose(run.times.waiting, wanted.waiting, atol=1e-12)
    assert run.steps == [list(range(40))] * 5


def test_each_contribution_is_mixed_once_and_of_a_peer_the_two_newest():
    schedule = every(topology.complete(4), 6, 2, [[0], [1], [2]])
    late = runtime.delayed(runtime.gamma(1.0, 0.5), 1, 5.0)
    job = Job(model_bytes=1.0, compute=late)
    run = simulate_peers(cluster_of(4, 0.5), job, schedule, 300, count=2, patience=0.5)
    fragments = schedule.fragments
    taken = collections.defaultdict(list)
    for _, worker, peer, version in mixed_in(run):
        group = fragments.index(schedule[version].sends.leaves)
        taken[peer, worker, group].append(version)
    sent = {
        (i, group): [t for t in own if (x := schedule[t].sends) and x.leaves == leaves]
        for i, own in enumerate(run.steps)
        for group, leaves in enumerate(fragments)
    }
    assert len(taken) == 4 * 3 * 3
    for (peer, _, group), versions in taken.items():
        whole = sent[peer, group]
        assert versions == [version for version in whole if version in versions]
        # The straggler misses what two newer ones have replaced.
        assert len(versions) > len(whole) / 2
        assert peer != 1 or len(versions) >= len(whole) - 3


def test_the_goodput_of_a_straggler_is_that_of_the_simulated_rounds():
    speeds = [1.0, 1.0, 1.0, 1 / 3]
    trace = np.tile(1 / np.array(speeds), (600, 1))
    job = Job(model_bytes=1.0, compute=runtime.trace(trace))
    schedule = every(topology.complete(4), 20)
    run = simulate_peers(cluster_of(4), job, schedule, 600, count=3)
    found = sum(map(len, run.steps)) / 4 / run.times.end[-1].mean()
    never = WorkerFailures(seconds_between=math.inf, seconds_back=1, num_seconds=6e3)
    rounds = {"step_seconds": 1.0, "round_steps": 20, "count": 3}
    wanted = goodput.of_quorum(speeds, never, **rounds)
    assert found == pytest.approx(wanted, rel=0.02)


def test_a_patience_that_adapts_waits_for_jitter_and_not_for_a_straggler():
    draw = np.random.default_rng(0)
    seconds = draw.normal(1.0, 0.01, (400, 4))
    schedule = every(topology.complete(4), 5)

    def of(seconds, patience):
        job = Job(model_bytes=1.0, compute=runtime.trace(seconds))
        waits = {"count": 2, "patience": patience}
        run = simulate_peers(cluster_of(4), job, schedule, 400, **waits)
        in_time = sum(step == version for step, _, _, version in mixed_in(run))
        return in_time, run.times.end[-1, :3].mean()

    all_mixed = 80 * 4 * 3
    adapts, hasty = of(seconds, AutoPatience()), of(seconds, 0.0)
    assert adapts[0] > 0.95 * all_mixed > hasty[0]
    assert adapts[1] < 1.02 * hasty[1]
    seconds[:, 3] *= 3
    adapts, patient = of(seconds, AutoPatience()), of(seconds, 60.0)
    assert adapts[1] < 1.03 * of(seconds, 0.0)[1] < 0.6 * patient[1]


class TickByTick:
    """Exchanges that wait for nobody, of whole seconds, one second after the other."""

    def __init__(self, made, per_node, seconds):
        self.per_node, self.seconds, self.made = per_node, seconds, made
        self.edges = [
            np.argwhere(w * (1 - np.eye(len(w))) > 0) for w in topology.matrices(made)
        ]
        self.busy, self.waiting, self.flying = {}, {}, []
        self.there = {(i, j): [] for i, j in np.ndindex((made.num_workers,) * 2)}
        self.mixed = []

    def play(self):
        ends = np.cumsum(self.seconds, 0)
        for now in range(ends.max() + 1):
            for step, worker in np.argwhere(ends == now).tolist():
                self.mix(worker, step)
            for arrival, edge, version in self.flying:
                if arrival == now:
                    self.there[edge] = [*self.there[edge], version][-2:]
            for step, worker in np.argwhere(ends - self.seconds == now).tolist():
                self.waiting |= {e: step for e in self.of_step(step) if e[1] == worker}
            self.send(now)
        return sorted(self.mixed)

    def of_step(self, step):
        return [(int(i), int(j)) for i, j in self.edges[step % self.made.period]]

    def mix(self, worker, step):
        for i, j in self.of_step(step):
            if i == worker and (there := self.there[i, j]):
                one = step if step in there else max(there)
                self.mixed.append((step, i, j, one))
                self.there[i, j] = [v for v in there if v > one]

    def send(self, now):
        """A model takes 2 s and 3 s more between nodes, and 1 s inside one."""
        for i, j in list(self.waiting):
            inside = i // self.per_node == j // self.per_node
            ends = (i, j) if inside else (i // self.per_node, j // self.per_node)
            cards = (inside, "in", ends[0]), (inside, "out", ends[1])
            if all(self.busy.get(card, 0) <= now for card in cards):
                end = now + (1 if inside else 2)
                self.busy |= dict.fromkeys(cards, end)
                late = 0 if inside else 3
                self.flying.append((end + late, (i, j), self.waiting.pop((i, j))))


@pytest.mark.parametrize("make", [topology.ring, topology.one_peer_exponential])
@pytest.mark.parametrize(
    ("num_nodes", "per_node"), [(1, 1), (2, 1), (3, 1), (5, 1), (3, 2), (1, 3)]
)
def test_peers_mix_what_a_tick_by_tick_loop_has(num_nodes, per_node, make):
    num_workers = num_nodes * per_node
    cluster = Cluster(
        num_nodes=num_nodes,
        workers_per_node=per_node,
        between_bytes_per_second=1.0,
        between_latency=3.0,
        inside_bytes_per_second=2.0,
    )
    made = make(num_workers)
    seconds = np.random.default_rng(num_workers).integers(1, 6, (40, num_workers))
    job = Job(model_bytes=2.0, compute=runtime.trace(seconds))
    run = simulate_peers(cluster, job, every(made, 1, 1), 40)
    times, mixed = run.times, mixed_in(run)
    assert run.steps == [list(range(40))] * num_workers
    assert mixed == TickByTick(made, per_node, seconds).play()
    assert bool(mixed) == (num_workers > 1)
    np.testing.assert_array_equal(times.end, np.cumsum(seconds, 0))
    assert not any(x.any() for x in (times.waiting, times.exposed, times.exchange))


def test_a_newer_model_replaces_one_that_waits():
    cluster = Cluster(num_nodes=2, between_bytes_per_second=1.0)
    job = Job(model_bytes=2.5, compute=runtime.constant(1.0))
    mixed = mixed_in(simulate_peers(cluster, job, every(topology.ring(2), 1, 1), 8))
    # Model 0 arrives at 2.5 s, in step 2. Then model 2 is sent, as 1 was replaced, and
    # arrives at 5 s, as step 4 ends, too late for it, and model 5 replaces 4.
    wanted = [(2, 0), (5, 2), (7, 5)]
    assert mixed == [(t, i, 1 - i, v) for t, v in wanted for i in (0, 1)]
