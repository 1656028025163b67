"""What counts in rounds with a quorum: each step of training once, on any graph."""

import collections
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from decentjax import topology
from decentjax._rounds.schedule import Round, Schedule, every
from decentjax.exchange import Topology
from decentjax.gossip import Peers, Quorum
from decentjax.rounds import Rounds
from tests.contributions import Post, means
from tests.parties import LOCAL, party_of

GRAPHS = [
    *[topology.one_peer_exponential(n) for n in (1, 2, 16)],
    *[topology.base_k(n, 1) for n in (3, 5, 6, 7)],
    *[topology.random_matching(n, 5, seed=1) for n in (5, 6)],
    topology.alternating_exponential_ring(8, 1),
    *[topology.ring(n) for n in (2, 7)],
    topology.complete(3),
    topology.damped(topology.one_peer_exponential(6), 0.25),
]
TWO_PERIODS = [0, None, 1, 0, None, None]  # Fragments, by step: one twice as often.


def of_two_periods(graph):
    """Two fragments, and in each round of either the next exchange of the graph."""
    begins = [part for _ in range(2 * len(graph)) for part in TWO_PERIODS]
    exchanges = iter(3 * 2 * list(graph))
    rounds = [
        Round() if part is None else Round(next(exchanges), (part,), delay=1)
        for part in begins
    ]
    return Schedule("two periods", tuple(rounds))


SCHEDULES = [
    functools.partial(every, num_steps=2),
    functools.partial(every, num_steps=1, delay=1),
    functools.partial(every, num_steps=3, delay=1, fragments=[(0,), (1,)]),
    of_two_periods,
]


@pytest.mark.draw(3)
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("weights", ["tokens", "tokens_squared_per_step", "equal"])
def test_in_lockstep_the_mixing_is_that_of_the_graph(make, graph, weights):
    """Workers with as many tokens, in two periods: products of NumPy's W."""
    schedule, post = make(graph), Post()
    n, way = graph.num_workers, means(schedule, post, Quorum(weights=weights))
    models = np.random.default_rng(0).normal(size=(n, len(schedule.fragments), 3))
    wanted, number = models.copy(), 0
    matrices = topology.matrices(graph)
    for step in range(2 * schedule.period):
        for worker in range(n):
            way.tally.count(worker, 7)
        if not (one := schedule[step].sends):
            continue
        group = schedule.fragments.index(one.leaves)
        rows = [[jnp.float32(models[i, group][None])] for i in range(n)]
        for worker in range(n):
            way.send(worker, group, rows[worker], number)
        while post.sent:
            post.deliver(*post.sent.pop())
        for worker in range(n):
            mean = way.combine(None, *way.take(worker, group, rows[worker], number, 0))
            models[worker, group] = mean[0][0]
        place = graph.exchanges.index(one.exchange)
        wanted[:, group] = matrices[place] @ wanted[:, group]
        number += 1
    np.testing.assert_allclose(models, wanted, rtol=2e-6, atol=2e-6)


class Contributed(NamedTuple):
    """A contribution, as sets know it; it travels in place of a model."""

    life: int
    round: int
    base: int
    steps: frozenset


class Run:
    """A random run, whose messages are late, overtaken and lost, and its oracle."""

    def __init__(self, seed, weights="tokens"):
        self.draw = np.random.default_rng(seed)
        graphs = [graph for graph in GRAPHS if 1 < graph.num_workers < 8]
        graph = graphs[self.draw.integers(len(graphs))]
        self.schedule = SCHEDULES[self.draw.integers(len(SCHEDULES))](graph)
        self.matrices = topology.matrices(Topology("all", self.schedule.exchanges))
        fragments, rounds = self.schedule.fragments, self.schedule.rounds
        self.groups = [fragments.index(x.leaves) for x in rounds if x.exchange]
        self.n, self.post, self.now = graph.num_workers, Post(), 0.0
        self.quorum = Quorum(weights=weights, discount=0.5)
        self.ways = [
            means(self.schedule, self.post, self.quorum) for _ in range(self.n)
        ]
        self.first, self.life = [0] * self.n, [0] * self.n
        self.tokens, self.coming = [], []
        # By worker and group: the steps since its contribution before, and its base.
        self.new, self.base = collections.defaultdict(set), {}
        # By worker, peer and group: what was sent, counted, and merged last.
        self.log, self.counted, self.newest = collections.defaultdict(list), {}, {}

    def play(self, number):
        """Workers at rounds of their own; some join again, or end."""
        at = self.draw.integers(0, 3, self.n)
        ends = self.draw.integers(number // 2, number, self.n)
        while len(living := np.flatnonzero(at < ends)):
            i = self.draw.choice(living)
            if self.draw.random() < 0.05:
                at[i] = max(0, at[i] + self.draw.integers(-3, 5))
                self.joins(i, at[i] - self.draw.integers(3))
            self.round(i, int(at[i]))
            at[i] += 1 + self.draw.integers(3) * (self.draw.random() < 0.2)

    def process(self):
        return means(self.schedule, self.post, self.quorum)

    def joins(self, i, first):
        """It takes a peer's state; every other time in a new process."""
        self.life[i], self.first[i] = self.life[i] + 1, first
        if self.life[i] % 2:
            self.ways[i] = self.process()
            self.coming = [one for one in self.coming if one[1][1] != i]
        self.ways[i].tally.forget(i, first)
        for known in self.new, self.base, self.newest, self.counted:
            for key in [key for key in known if key[0] == i]:
                del known[key]

    def round(self, i, number):
        group, matrix = self.groups[number % len(self.groups)], self.matrices
        matrix, self.now = matrix[number % len(matrix)], self.now + 1
        for _ in range(self.draw.integers(1, 4)):
            self.tokens.append(int(self.draw.integers(1, 10)))
            self.ways[i].tally.count(i, self.tokens[-1])
            for part in set(self.groups):
                self.new[i, part].add(len(self.tokens) - 1)
        turn = sum(self.groups[k % len(self.groups)] == group for k in range(number))
        base, new = self.base.get((i, group), turn), self.new.pop((i, group))
        own = Contributed(self.life[i], number, base, frozenset(new))
        for j in set(np.flatnonzero(matrix[:, i])) - {i}:
            self.log[i, j, group].append(own)
        for _ in range(self.draw.integers(1, 3)):  # Some are sent again.
            self.ways[i].send(i, group, own, number)
        self.coming += [
            (self.now + self.draw.exponential(5), x) for x in self.post.sent
        ]
        self.post.sent.clear()
        for due, message in [one for one in self.coming if one[0] <= self.now]:
            self.coming.remove((due, message))
            if self.draw.random() < 0.8:
                self.post.deliver(*message)
        used, _ = self.ways[i].take(i, group, own, number, 0.0)
        self.base[i, group] = turn + 1
        self.check(i, group, matrix, own, used)

    def check(self, i, group, matrix, own, used):
        """Weights over that of the own model, which has always trained."""
        found = {(x.peer, x.step): x.weight for x in used.models}
        unit = found.pop((i, own.round)) / (matrix[i, i] * self.worth(own.steps))
        for peer, messages in self.post.taken:
            for one in (message.arrays for message in messages):
                wanted = self.worth(self.unmerged((i, peer, group), one))
                scale = unit * matrix[i, peer] * 0.5 ** max(0, own.base - one.base)
                got = found.pop((peer, one.round)) if wanted else 0.0
                np.testing.assert_allclose(got, wanted * scale, rtol=1e-9)
        self.post.taken.clear()
        assert not found

    def unmerged(self, edge, one):
        """The steps for which a contribution counts."""
        i, j, group = edge
        newest, life = self.newest.get(edge, (self.first[i] - 1, None))
        if one.round <= newest:
            return set()
        log, counted = self.log[j, i, group], self.counted.setdefault(edge, set())
        of_life = [x for x in log if x.life == one.life and x.round <= one.round]
        if life != one.life:  # What was sent before they met is not missed.
            counted.update(*[x.steps - one.steps for x in of_life])
        steps = one.steps.union(*[x.steps for x in of_life]) - counted
        self.newest[edge] = one.round, one.life
        counted |= steps
        return steps

    def worth(self, steps):
        tokens = sum(self.tokens[one] for one in steps)
        if not steps or self.quorum.weights == "equal":
            return float(bool(steps))
        return tokens * (1 if self.quorum.weights == "tokens" else tokens / len(steps))


@pytest.mark.parametrize("seed", range(30))
def test_each_step_counts_once_whatever_happens_to_its_message(seed):
    weights = "tokens", "tokens_squared_per_step", "equal"
    Run(seed, weights[seed % 3]).play(60)


@pytest.mark.parametrize("delay", range(4))
@pytest.mark.parametrize("step", [3, 5, 6, 7])
def test_who_joins_counts_what_its_peer_had_not_merged(delay, step, tmp_path):
    how = Rounds(topology.complete(2), 3, delay=delay)
    at = [how.schedule[t] for t in range(step)]
    merged = sum((x.receives if delay else x.sends) is not None for x in at)
    party, post = party_of(tmp_path, [0]), Post()
    peers = Peers(LOCAL, how, party, merge=Quorum(), patience=1.0)
    own, other = (means(how.schedule, post, Quorum(discount=1.0)) for _ in range(2))
    peers._peers._way = own
    peers._peers.forget(step)
    for number in range(merged + 1):
        other.tally.count(1, 7)
        other.send(1, 0, None, number)
        post.deliver(*post.sent.pop())
    own.tally.count(0, 7)
    own.send(0, 0, None, merged)
    used, _ = own.take(0, 0, None, merged, 0.0)
    assert [(x.peer, x.weight) for x in used.models] == [(0, 0.5), (1, 0.5)]


def test_each_group_of_leaves_has_its_age():
    """Rounds in every step travel in groups, each of which may be late."""
    schedule, post = every(topology.complete(2), 1, delay=1), Post()
    ways = [means(schedule, post, Quorum(discount=0.5)) for _ in range(2)]
    for worker, step in ((1, 0), (0, 0), (0, 1), (0, 2)):
        ways[worker].tally.count(worker, 3)
        ways[worker].send(worker, 1, None, step)
        if (worker, step) == (1, 0):
            late = post.sent.pop()
            continue
        if step == 2:
            post.deliver(*late)
        used, _ = ways[worker].take(worker, 1, None, step, 0.0)
    np.testing.assert_allclose([x.weight for x in used.models], [0.8, 0.2], rtol=1e-6)
