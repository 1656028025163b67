"""Contributions to rounds with a quorum, in the memory of one process."""

import collections

import jax.numpy as jnp

from decentjax import topology
from decentjax._rounds.schedule import every
from decentjax.exchange import Topology
from decentjax.gossip.peer_port import of_permutations
from decentjax.gossip.quorum import QuorumMeans
from decentjax.links import Message


class Post:
    """Messages between workers, which a test delivers."""

    def __init__(self):
        self.sent, self.taken = [], []
        self.came = collections.defaultdict(list)

    def publish(self, worker, peer, group, own, said):
        self.sent.append((worker, peer, group, said, own))

    def deliver(self, worker, peer, group, said, own):
        self.came[peer, worker, group].append(Message(said, own))

    def take(self, worker, peer, group, step):
        came = self.came.pop((worker, peer, group), [])
        came.sort(key=lambda message: message.said.step)
        self.taken.append((peer, came))
        return came


def means(schedule, post, quorum):
    graph = of_permutations(Topology(schedule.name, schedule.exchanges))
    return QuorumMeans(post, graph, None, quorum, schedule)


class Contributors:
    """Workers of a ring, whose rounds have a quorum each."""

    def __init__(self, *quorums):
        self.post, self.own = Post(), {}
        self.ways = list(map(self.way, quorums))

    def way(self, quorum):
        return means(every(topology.ring(3), 1, delay=1), self.post, quorum)

    def contribute(self, worker, model, tokens, step=0):
        """Sends a model that a worker has trained on tokens; none for 0."""
        if tokens:
            self.ways[worker].tally.count(worker, tokens)
        self.own[worker] = [jnp.array([model], jnp.float32)]
        self.ways[worker].send(worker, 0, self.own[worker], step)
        while self.post.sent:
            self.post.deliver(*self.post.sent.pop())

    def merge(self, worker, step=0):
        """The record of a worker's round, and its mean."""
        way = self.ways[worker]
        used, found = way.take(worker, 0, self.own[worker], step, 0.0)
        (mean,) = way.combine(None, used, found)
        return used, mean[0].tolist()
