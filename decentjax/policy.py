"""Policies: plans whose graph is chosen for each step, on the host, during the run.

A policy names all its graphs in advance. Each of their exchanges is compiled once, and
then a choice costs nothing:

    train_step = simulate(local, policy.thinning(16, 8, per_epoch=2, epoch_steps=100))
    state, metrics = train_step(state, batch, t)
"""

import math
from collections.abc import Callable, Sequence

from decentjax.exchange import Topology, check_topology
from decentjax.topology import complete, damped, ring_lattice

Choose = Callable[[int, Topology], Topology]
"""Maps (step, current graph) to the graph of the step."""
Learn = Callable[[float, Topology], Topology]
"""Maps (dispersion, current graph) to the next graph."""


class Policy:
    """A plan that chooses among graphs for each step of `simulate` or `on_mesh`.

    It is a plan as a topology is: `Rounds(policy)` averages after the update.

    Args:
      name: name to print.
      graphs: all graphs that it may choose, with the same number of workers; the first
        is the current one before the first step.
      choose: function that chooses one of them for a step.
      learn: function that chooses the current one by the dispersion of the replicas.

    Attributes:
      menu: topology of the exchanges of all graphs, one after the other.
      current: index of the current graph among the graphs.

    Examples:
      >>> from decentjax import policy, topology
      >>> graphs = [topology.ring(8), topology.complete(8)]
      >>> late = policy.Policy("late", graphs, lambda step, now: graphs[step >= 100])
      >>> late.turn(0), late.turn(100), late.menu.period
      (0, 1, 2)
    """

    def __init__(
        self,
        name: str,
        graphs: Sequence[Topology],
        choose: Choose,
        learn: Learn | None = None,
    ):
        for graph in graphs:
            check_topology(graph)
        self.name, self.graphs = name, tuple(dict.fromkeys(graphs))
        self.measures, self._choose, self._learn = learn is not None, choose, learn
        self.current = 0
        of_graphs = tuple(one for graph in self.graphs for one in graph)
        self.menu = Topology(name, of_graphs)

    @property
    def num_workers(self) -> int:
        return self.menu.num_workers

    def turn(self, step: int) -> int:
        """Returns the place of a step's exchange in the menu.

        Raises:
          ValueError: if it chooses a graph that is not among its graphs.
        """
        self._take(self._choose(step, self.graphs[self.current]), f"step {step}")
        before = sum(x.period for x in self.graphs[: self.current])
        return before + step % self.graphs[self.current].period

    def learn(self, dispersion: float) -> None:
        """Chooses the current graph by the dispersion of the replicas.

        Raises:
          ValueError: if it chooses a graph that is not among its graphs.
        """
        if self._learn is not None:
            current = self.graphs[self.current]
            self._take(self._learn(dispersion, current), f"dispersion {dispersion}")

    def _take(self, graph: Topology, what: str) -> None:
        if graph not in self.graphs:
            raise ValueError(
                f"the policy chose {graph.name} for {what}, which is not among its "
                f"graphs: {', '.join(x.name for x in self.graphs)}"
            )
        self.current = self.graphs.index(graph)


def thinning(
    num_workers: int, degree: int, per_epoch: float, epoch_steps: int, least: int = 2
) -> Policy:
    """Ada: a ring lattice that loses neighbours during the run.

    In epoch e a worker averages with

        k(e) = max(k_0 - floor(gamma e), k_min)

    neighbours, rounded to even, half of them on each side; if N - 1 or more, with all.

    Args:
      num_workers: N.
      degree: number of neighbours at the start, k_0.
      per_epoch: number of neighbours lost per epoch, gamma.
      epoch_steps: number of steps of an epoch.
      least: number of neighbours at the end, k_min.

    Examples:
      >>> from decentjax import policy
      >>> ada = policy.thinning(16, degree=6, per_epoch=2, epoch_steps=10)
      >>> [ada.turn(step) for step in (0, 10, 20, 30)]
      [0, 1, 2, 2]

    Source: the rule of Ada from memory; its paper, Xie et al. (2025), describes an
    adaptive graph, and no copy of the rule was found.
    """
    if not 2 <= least <= degree:
        raise ValueError(
            f"Ada needs 2 <= least <= degree neighbours, got {least} and {degree}"
        )
    if not 0 <= per_epoch < math.inf:
        raise ValueError(f"per_epoch must not be negative, got {per_epoch}")
    if epoch_steps < 1:
        raise ValueError(f"an epoch has at least one step, got {epoch_steps}")

    def neighbors(epoch: int) -> int:
        return max(degree - math.floor(per_epoch * epoch), least)

    last = math.ceil((degree - least) / per_epoch) if per_epoch else 0
    reached = [*map(neighbors, range(last + 1)), *[least] * (per_epoch > 0)]
    if 0 < per_epoch < 1:  # Every number, however many epochs that takes.
        reached = range(degree, least - 1, -1)
    graphs = {k: _lattice(num_workers, k) for k in reached}
    return Policy(
        "thinning",
        list(graphs.values()),
        lambda step, _: graphs[neighbors(step // epoch_steps)],
    )


def holding(graphs: Sequence[Topology], target: float, slack: float = 0.2) -> Policy:
    """Ada in a closed loop: the fewest connections that hold a target dispersion.

    It begins with the densest graph. `learn` of a dispersion above `(1 + slack) target`
    selects the next denser graph, of one below `(1 - slack) target` the next sparser.

    Args:
      graphs: graphs from many connections to few, such as `ladder(64)`.
      target: dispersion to hold.
      slack: relative distance from the target that changes nothing.

    Examples:
      >>> from decentjax import policy
      >>> hold = policy.holding(policy.ladder(8), target=0.01)
      >>> hold.learn(0.001)
      >>> hold.learn(0.001)
      >>> hold.current
      2
      >>> hold.learn(0.1)
      >>> hold.current
      1

    Source: our own, after the controlled consensus distance of Kong et al. (2021).
    """
    graphs = list(dict.fromkeys(graphs))
    if not target > 0 or not 0 <= slack < 1:
        raise ValueError(
            "the target must be positive and the slack in [0, 1), got "
            f"{target} and {slack}"
        )

    def learn(dispersion: float, current: Topology) -> Topology:
        place = graphs.index(current)
        if dispersion > (1 + slack) * target:
            place = max(place - 1, 0)
        elif dispersion < (1 - slack) * target:
            place = min(place + 1, len(graphs) - 1)
        return graphs[place]

    return Policy("holding", graphs, lambda _, current: current, learn)


def damping(
    topology: Topology, factor: Callable[[int], float], levels: int = 8
) -> Policy:
    """A mixing factor on a schedule: W becomes `(1 - f_t) I + f_t W`.

    With `f_t = (learning rate / its peak)^p` this is DSGD-AC, which keeps replicas
    apart late in the run. The factor is rounded up to one of a few levels, each a
    program.

    Args:
      topology: graph.
      factor: f_t in [0, 1] by step.
      levels: number of factors, 1/levels to 1.

    Examples:
      >>> from decentjax import policy, topology
      >>> fade = policy.damping(topology.ring(8), lambda step: 1 - step / 100, levels=4)
      >>> [fade.turn(step) for step in (0, 30, 60, 90)]
      [3, 2, 1, 0]

    Source: Wang and Johansson, Decentralized SGD with Controlled Disagreement (2026).
    """
    if levels < 1:
        raise ValueError(f"damping needs at least one level, got {levels}")
    graphs = [damped(topology, level / levels) for level in range(1, levels + 1)]

    def choose(step: int, current: Topology) -> Topology:
        del current
        value = factor(step)
        if not 0 <= value <= 1:
            raise ValueError(f"a mixing factor is in [0, 1], got {value} at {step}")
        # A float32 factor may be slightly above its level.
        return graphs[max(math.ceil(value * levels - 1e-6), 1) - 1]

    return Policy("damping", graphs, choose)


def merged(topology: Topology, num_steps: int) -> Policy:
    """A graph with a single exact mean of all models, at the last step.

    Examples:
      >>> from decentjax import policy, topology
      >>> merge = policy.merged(topology.ring(8), num_steps=100)
      >>> merge.turn(98), merge.turn(99)
      (0, 1)
    """
    check_topology(topology)
    whole = complete(topology.num_workers)
    return Policy(
        "merged",
        [topology, whole],
        lambda step, _: whole if step == num_steps - 1 else topology,
    )


def ladder(num_workers: int) -> list[Topology]:
    """The complete graph, and ring lattices of ..., 8, 4 and 2 neighbours.

    Examples:
      >>> from decentjax import policy
      >>> [graph.name for graph in policy.ladder(8)]
      ['complete', 'ring_lattice', 'ring_lattice']
    """
    degrees = [2]
    while degrees[-1] < num_workers - 1:
        degrees.append(2 * degrees[-1])
    graphs = [_lattice(num_workers, degree) for degree in reversed(degrees)]
    return list(dict.fromkeys(graphs))


def _lattice(num_workers: int, degree: int) -> Topology:
    """The ring lattice of at most `degree` neighbours, half on each side, or all."""
    even = max(degree - degree % 2, 2)
    if max(degree, even) >= num_workers - 1:
        return complete(num_workers)
    return ring_lattice(num_workers, even)
