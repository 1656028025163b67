"""The runtime model against the step times that paper 1 published."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

from decentjax import Topology, analysis, runtime, topology
from decentjax.runtime import Cluster, Job
from train.network import GBIT, ClusterSpec

MODEL_BYTES = 4 * 63_145_984  # Transformer base in float32, by configs/wmt14_de_*.
ALL_REDUCE, SGP, EXP, AER = "AllReduce", "SGP(Exp)", "Decent(Exp)", "Decent(AER)"
SCHEMES = (ALL_REDUCE, SGP, EXP, AER)
FITTED = (ALL_REDUCE, AER)
FIT_STEPS, STEPS = 60, 400  # A fit simulates each row up to 200 times.
CLOSE = 0.05  # Schemes measured within that share of each other have no order.


class Published(NamedTuple):
    """Milliseconds per step of Transformer base, global batch of 25,000 tokens.

    Source: From Promise to Practice (ICLR 2025), Fig 6. It does not give the rates
    inside nodes, which are those of PCIe 3 and 4 and of NVLink.

    Args:
      name: name of the cluster.
      workers_per_node: number of workers per node, L.
      between: Gbit/s of a node's card.
      inside: Gbit/s of a GPU to the others of its node.
      rows: times of `SCHEMES` by number of workers.
    """

    name: str
    workers_per_node: int
    between: float
    inside: float
    rows: dict[int, tuple[float, float, float, float]]

    def measured(self, num_workers: int) -> dict[str, float]:
        return dict(zip(SCHEMES, self.rows[num_workers], strict=True))

    def cluster(self, num_workers: int, cards: int = 1) -> Cluster:
        return ClusterSpec(
            num_nodes=num_workers // self.workers_per_node,
            workers_per_node=self.workers_per_node,
            links_per_node=cards,
            between=cards * self.between * GBIT,
            inside=self.inside * GBIT,
        ).runtime_cluster()


# Columns as in SCHEMES.
T4 = {
    16: (372.5, 425.5, 314.8, 312.3),
    32: (225.5, 292.4, 178.8, 178.8),
    64: (167.3, 235.5, 123.1, 122.2),
}
A100 = {
    8: (73.0, 69.4, 63.4, 61.7),
    16: (54.8, 53.0, 46.8, 45.8),
    32: (51.5, 50.7, 44.7, 43.7),
}
A40 = {
    8: (166.1, 150.5, 122.8, 122.0),
    16: (195.5, 99.9, 97.4, 78.9),
    32: (188.5, 112.4, 110.8, 67.9),
}
PUBLISHED = (
    Published("8 x T4, 100 Gbit/s", 8, 100, 64, T4),
    Published("4 x A100, 100 Gbit/s", 4, 100, 1600, A100),
    Published("4 x A40, 25 Gbit/s", 4, 25, 128, A40),
)


class Fit(NamedTuple):
    """Compute time fitted to a cluster: fixed + shared / N, and its deviation.

    Args:
      fixed: seconds that do not depend on the number of workers.
      shared: seconds that the workers share, as they share a batch of fixed size.
      sigma: standard deviation over the mean.
    """

    fixed: float
    shared: float
    sigma: float

    def job(self, num_workers: int) -> Job:
        mean = self.fixed + self.shared / num_workers
        compute = runtime.gamma(mean, self.sigma)
        return Job(model_bytes=MODEL_BYTES, compute=compute)


class Line(NamedTuple):
    """A row of Fig 6, all times in ms per step.

    Args:
      cluster: name of the cluster.
      num_workers: number of workers, N.
      fitted: compute time fitted to the cluster.
      measured: published time by scheme.
      predicted: predicted time by scheme; fitted for those in `FITTED`.
      two_cards: predicted time of pairs with two cards per node.
      at_least: bytes over rate by scheme, for those that send in pairs.
    """

    cluster: str
    num_workers: int
    fitted: Fit
    measured: dict[str, float]
    predicted: dict[str, float]
    two_cards: dict[str, float]
    at_least: dict[str, float]

    def speed_ups(self) -> tuple[float, float]:
        """Returns the speed-up of AER over all-reduce, predicted and measured."""
        predicted = self.predicted[ALL_REDUCE] / self.predicted[AER]
        return predicted, self.measured[ALL_REDUCE] / self.measured[AER]

    def wrong(
        self, instead: dict[str, float], schemes: Sequence[str] = SCHEMES
    ) -> list[str]:
        """Returns the pairs of schemes whose predicted order is not the measured one.

        Args:
          instead: times that replace predicted ones, by scheme.
          schemes: schemes to compare.
        """
        times = {**self.predicted, **instead}
        return [
            f"{slow} over {fast}"
            for slow, fast in itertools.permutations(schemes, 2)
            if self.measured[slow] > (1 + CLOSE) * self.measured[fast]
            and times[slow] <= times[fast]
        ]


def fit(published: Published) -> Fit:
    """Fits AER's steps and speed-ups over all-reduce, by least squares of logs."""
    smallest = min(published.rows)
    # The unit of the search is AER's step, so that one start fits all clusters.
    scale = published.measured(smallest)[AER] / 1e3

    def of(point: np.ndarray) -> Fit:
        # The search is unbounded; these three cannot be negative.
        fixed, shared, sigma = map(float, np.abs(point))
        return Fit(fixed * scale, shared * scale * smallest, sigma)

    def error(point: np.ndarray) -> float:
        total = 0.0
        for num_workers in published.rows:
            measured = published.measured(num_workers)
            found = predict(published, of(point), num_workers, FIT_STEPS, FITTED)
            logs = {name: np.log(x / measured[name]) for name, x in found.items()}
            # AER's time, and the speed-up: all-reduce's error relative to AER's.
            total += logs[AER] ** 2 + (logs[ALL_REDUCE] - logs[AER]) ** 2
        return float(total)

    # At the smallest number of workers fixed + shared are AER's whole step at first.
    start = np.array([0.3, 0.7, 0.1])
    corners = [start, [0.1, 0.9, 0.1], [0.3, 0.6, 0.1], [0.3, 0.7, 0.2]]
    options = {"maxfev": 200, "fatol": 1e-5, "initial_simplex": corners}
    return of(optimize.minimize(error, start, method="Nelder-Mead", options=options).x)


def predict(
    published: Published,
    fitted: Fit,
    num_workers: int,
    num_steps: int,
    schemes: tuple[str, ...] = SCHEMES,
    cards: int = 1,
) -> dict[str, float]:
    """Returns milliseconds per step of each scheme.

    Decent-DP sends bucket by bucket. Its "Exp" is the hypercube, pairs that differ in
    one bit of their numbers; SGP sends to the worker 1, 2, 4, ... places further.
    """
    cluster, job = published.cluster(num_workers, cards), fitted.job(num_workers)
    graphs = _pairs(num_workers)
    graphs[AER] = topology.alternating_exponential_ring(
        num_workers, published.workers_per_node
    )
    times = {
        name: runtime.background(cluster, job, graphs[name], num_steps)
        if name in graphs
        else runtime.all_reduce(cluster, job, num_steps)
        for name in schemes
    }
    return {name: 1e3 * x.seconds_per_step() for name, x in times.items()}


def lines(published: Published) -> list[Line]:
    """Returns the rows of a cluster, fitted and predicted."""
    fitted = fit(published)
    return [_line(published, fitted, num_workers) for num_workers in published.rows]


def _line(published: Published, fitted: Fit, num_workers: int) -> Line:
    at_least = {}
    for name, graph in _pairs(num_workers).items():
        sent = analysis.traffic(graph, MODEL_BYTES, published.workers_per_node)
        # Over a period, as each node's card is idle in steps of its own.
        busiest = np.mean([x.node_bytes for x in sent], axis=0).max()
        at_least[name] = 1e3 * float(busiest) / (published.between * GBIT)
    return Line(
        cluster=published.name,
        num_workers=num_workers,
        fitted=fitted,
        measured=published.measured(num_workers),
        predicted=predict(published, fitted, num_workers, STEPS),
        two_cards=predict(published, fitted, num_workers, STEPS, (EXP,), 2),
        at_least=at_least,
    )


def _pairs(num_workers: int) -> dict[str, Topology]:
    """Returns the graphs of the schemes that send in pairs."""
    return {
        SGP: topology.one_peer_exponential(num_workers),
        EXP: topology.hypercube(num_workers),
    }
