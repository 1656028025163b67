"""Simulated runs of peers that wait: what they mix, and when they are done."""

import collections
import dataclasses
import math

import numpy as np
import pytest

from decentjax import runtime, topology
from decentjax._rounds.schedule import every
from decentjax.gossip import AutoPatience
from decentjax.runtime import Cluster, Job, peer_rounds, peers

LATENCY = 2.0


def cluster_of(num_workers, latency=0.0, rate=math.inf):
    return Cluster(
        num_nodes=num_workers,
        between_bytes_per_second=rate,
        between_latency=latency,
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
                self.there[edge].append(version)
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


def check(run, wanted):
    assert run.mixed == sorted(wanted.mixed)
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
        run = peer_rounds(cluster, job, schedule, 30, count=count, patience=patience)
        check(run, SecondBySecond(schedule, seconds, count, patience).play())


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("patience", [0, 2, 50])
def test_peers_with_patience_are_those_of_a_loop_over_seconds(patience, num_workers):
    seconds = np.random.default_rng(num_workers).integers(1, 6, (40, num_workers))
    job = Job(model_bytes=1.0, compute=runtime.trace(seconds))
    graph = topology.ring(num_workers)
    run = peers(cluster_of(num_workers, LATENCY), job, graph, 40, patience=patience)
    check(run, SecondBySecond(every(graph, 1, 1), seconds, None, patience).play())


def test_rounds_of_all_workers_take_the_time_of_rounds():
    schedule = every(topology.complete(5), 4)
    job = Job(model_bytes=1.0, compute=runtime.gamma(1.0, 0.3))
    run = peer_rounds(cluster_of(5), job, schedule, 40, count=5)
    wanted = runtime.rounds(cluster_of(5), job, schedule, 40)
    np.testing.assert_allclose(run.times.end, wanted.end)
    np.testing.assert_allclose(run.times.waiting, wanted.waiting, atol=1e-12)
    assert run.steps == [list(range(40))] * 5


def test_each_contribution_is_mixed_once_and_none_is_lost():
    schedule = every(topology.complete(4), 6, 2, [[0], [1], [2]])
    late = runtime.delayed(runtime.gamma(1.0, 0.5), 1, 5.0)
    job = Job(model_bytes=1.0, compute=late)
    run = peer_rounds(cluster_of(4, 0.5), job, schedule, 300, count=2, patience=0.5)
    fragments = schedule.fragments
    taken = collections.defaultdict(list)
    for one in run.mixed:
        group = fragments.index(schedule[one.version].sends.leaves)
        taken[one.peer, one.worker, group].append(one.version)
    sent = {
        (i, group): [t for t in own if (x := schedule[t].sends) and x.leaves == leaves]
        for i, own in enumerate(run.steps)
        for group, leaves in enumerate(fragments)
    }
    assert len(taken) == 4 * 3 * 3
    for (peer, _, group), versions in taken.items():
        whole = sent[peer, group]
        # The last ones may come too late.
        assert versions == whole[: len(versions)]
        assert len(versions) >= len(whole) - 3


def test_the_goodput_of_a_straggler_is_that_of_the_simulated_rounds():
    speeds = [1.0, 1.0, 1.0, 1 / 3]
    trace = np.tile(1 / np.array(speeds), (600, 1))
    job = Job(model_bytes=1.0, compute=runtime.trace(trace))
    schedule = every(topology.complete(4), 20)
    run = peer_rounds(cluster_of(4), job, schedule, 600, count=3)
    found = sum(map(len, run.steps)) / 4 / run.times.end[-1].mean()
    never = runtime.WorkerFailures(seconds_between=math.inf, seconds_back=1.0)
    more = {"step_seconds": 1.0, "round_steps": 20, "count": 3, "speeds": speeds}
    wanted = runtime.goodput_of_quorum(4, never, num_seconds=6e3, **more)
    assert found == pytest.approx(wanted, rel=0.02)


def test_a_patience_that_adapts_waits_for_jitter_and_not_for_a_straggler():
    draw = np.random.default_rng(0)
    seconds = draw.normal(1.0, 0.01, (400, 4))
    schedule = every(topology.complete(4), 5)

    def of(seconds, patience):
        job = Job(model_bytes=1.0, compute=runtime.trace(seconds))
        run = peer_rounds(cluster_of(4), job, schedule, 400, count=2, patience=patience)
        in_time = sum(one.version == one.step for one in run.mixed)
        return in_time, run.times.end[-1, :3].mean()

    all_mixed = 80 * 4 * 3
    adapts, hasty = of(seconds, AutoPatience()), of(seconds, 0.0)
    assert adapts[0] > 0.95 * all_mixed > hasty[0]
    assert adapts[1] < 1.02 * hasty[1]
    seconds[:, 3] *= 3
    adapts, patient = of(seconds, AutoPatience()), of(seconds, 60.0)
    assert adapts[1] < 1.03 * of(seconds, 0.0)[1] < 0.6 * patient[1]


def test_what_no_run_of_peers_can_be_is_refused():
    schedule, job = (
        every(topology.ring(4), 2),
        Job(model_bytes=1.0, compute=runtime.constant(1.0)),
    )
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"count must be from 1 to 4, got {count}"):
            peer_rounds(cluster_of(4), job, schedule, 4, count=count)
    with pytest.raises(ValueError, match="has 4 workers, the cluster has 3"):
        peer_rounds(cluster_of(3), job, schedule, 4, count=1)
    with pytest.raises(ValueError, match="patience must not be negative, got -1"):
        peers(cluster_of(4), job, topology.ring(4), 4, patience=-1.0)
    nodes = every(topology.hierarchical(4, 2, topology.ring), 2)
    with pytest.raises(ValueError, match="exchanges of single workers, got those of n"):
        peer_rounds(cluster_of(4), job, nodes, 4, count=1)
    slow = dataclasses.replace(job, compute=lambda *_: np.full(4, -1.0))
    with pytest.raises(ValueError, match="not negative"):
        peers(cluster_of(4), slow, topology.ring(4), 4)
