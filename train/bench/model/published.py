"""The runtime model beside what the papers measured."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

from decentjax import analysis, runtime, topology
from decentjax.runtime import Cluster, Job

MODEL_BYTES = 4 * 63_145_984  # Transformer base in float32, by configs/wmt14_de_*.
ALL_REDUCE, SGP, EXP, AER = "AllReduce", "SGP(Exp)", "Decent(Exp)", "Decent(AER)"
SCHEMES = (ALL_REDUCE, SGP, EXP, AER)
FITTED = (ALL_REDUCE, AER)
FIT_STEPS, STEPS = 60, 400
CLOSE = 0.05  # Schemes that were measured within that of each other have no order.


class Published(NamedTuple):
    """Milliseconds per step of Transformer base, batch 25,000 tokens in all.

    Source: From Promise to Practice (ICLR 2025), Fig 6; the rates inside nodes are not
    in it, but those of PCIe 3 and 4 and of NVLink.

    Args:
      name: of the cluster.
      workers_per_node: L.
      between: Gbit/s of a node's card.
      inside: Gbit/s of a GPU to the others of its node.
      rows: by N, a time for each of `SCHEMES`.
    """

    name: str
    workers_per_node: int
    between: float
    inside: float
    rows: dict[int, tuple[float, float, float, float]]

    def cluster(self, num_workers: int, cards: int = 1) -> Cluster:
        return Cluster(
            num_nodes=num_workers // self.workers_per_node,
            workers_per_node=self.workers_per_node,
            between_bytes_per_second=cards * self.between * 1e9 / 8,
            inside_bytes_per_second=self.inside * 1e9 / 8,
        )


PUBLISHED = (
    Published(
        "8 x T4, 100 Gbit/s",
        8,
        100,
        64,
        {
            16: (372.5, 425.5, 314.8, 312.3),
            32: (225.5, 292.4, 178.8, 178.8),
            64: (167.3, 235.5, 123.1, 122.2),
        },
    ),
    Published(
        "4 x A100, 100 Gbit/s",
        4,
        100,
        1600,
        {
            8: (73.0, 69.4, 63.4, 61.7),
            16: (54.8, 53.0, 46.8, 45.8),
            32: (51.5, 50.7, 44.7, 43.7),
        },
    ),
    Published(
        "4 x A40, 25 Gbit/s",
        4,
        25,
        128,
        {
            8: (166.1, 150.5, 122.8, 122.0),
            16: (195.5, 99.9, 97.4, 78.9),
            32: (188.5, 112.4, 110.8, 67.9),
        },
    ),
)


class Fit(NamedTuple):
    """What was fitted to a cluster: compute time = fixed + shared / N, and its spread.

    Args:
      fixed: seconds.
      shared: seconds of one worker alone, as all share a batch of fixed size.
      sigma: standard deviation over mean.
    """

    fixed: float
    shared: float
    sigma: float

    def job(self, num_workers: int) -> Job:
        mean = self.fixed + self.shared / num_workers
        compute = runtime.gamma(mean, self.sigma)
        return Job(model_bytes=MODEL_BYTES, compute=compute)


class Line(NamedTuple):
    """A row of Fig 6, all times in ms.

    Args:
      cluster: its name.
      num_workers: N.
      fitted: to its cluster.
      measured: of each scheme, as published.
      predicted: of each scheme; of those in `FITTED`, as fitted.
      two_cards: of pairs, if they had two such cards in each node.
      at_least: bytes over rate, of those that send in pairs.
    """

    cluster: str
    num_workers: int
    fitted: Fit
    measured: dict[str, float]
    predicted: dict[str, float]
    two_cards: dict[str, float]
    at_least: dict[str, float]

    def speed_ups(self) -> tuple[float, float]:
        """All-reduce over AER, predicted and measured."""
        predicted = self.predicted[ALL_REDUCE] / self.predicted[AER]
        return predicted, self.measured[ALL_REDUCE] / self.measured[AER]

    def wrong(
        self, instead: dict[str, float], schemes: Sequence[str] = SCHEMES
    ) -> list[str]:
        """Returns the pairs of schemes that are in another order than measured.

        Args:
          instead: times in place of those predicted.
          schemes: that are looked at.
        """
        times = {**self.predicted, **instead}
        return [
            f"{slow} over {fast}"
            for slow in schemes
            for fast in schemes
            if self.measured[slow] > (1 + CLOSE) * self.measured[fast]
            and times[slow] <= times[fast]
        ]


def fit(published: Published) -> Fit:
    """Fits AER's steps and speed-ups over all-reduce, by least squares of logs."""
    smallest = min(published.rows)
    scale = published.rows[smallest][SCHEMES.index(AER)] / 1e3

    def of(point: np.ndarray) -> Fit:
        fixed, shared, sigma = map(float, np.abs(point))
        return Fit(fixed * scale, shared * scale * smallest, sigma)

    def error(point: np.ndarray) -> float:
        total = 0.0
        for num_workers, times in published.rows.items():
            measured: dict[str, float] = dict(zip(SCHEMES, times, strict=True))
            found = predict(published, of(point), num_workers, FIT_STEPS, FITTED)
            logs = {name: np.log(x / measured[name]) for name, x in found.items()}
            total += logs[AER] ** 2 + (logs[ALL_REDUCE] - logs[AER]) ** 2
        return float(total)

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

    Decent-DP sends bucket by bucket; its "Exp" are pairs by bits of the workers'
    numbers. SGP sends to the worker 1, 2, 4, ... places on.
    """
    cluster, job = published.cluster(num_workers, cards), fitted.job(num_workers)
    aer = topology.alternating_exponential_ring(num_workers, published.workers_per_node)
    simulate = {
        ALL_REDUCE: lambda: runtime.all_reduce(cluster, job, num_steps),
        SGP: lambda: runtime.background(
            cluster, job, topology.one_peer_exponential(num_workers), num_steps
        ),
        EXP: lambda: runtime.background(
            cluster, job, topology.hypercube(num_workers), num_steps
        ),
        AER: lambda: runtime.background(cluster, job, aer, num_steps),
    }
    return {name: 1e3 * simulate[name]().seconds_per_step() for name in schemes}


def lines(published: Published) -> list[Line]:
    """Returns the rows of a cluster, fitted and predicted."""
    fitted = fit(published)
    return [_line(published, fitted, num_workers) for num_workers in published.rows]


def _line(published: Published, fitted: Fit, num_workers: int) -> Line:
    pairs = {
        SGP: topology.one_peer_exponential(num_workers),
        EXP: topology.hypercube(num_workers),
    }
    rate = published.between * 1e9 / 8
    at_least = {}
    for name, graph in pairs.items():
        sent = analysis.traffic(graph, MODEL_BYTES, published.workers_per_node)
        busiest = np.mean([x.node_bytes for x in sent], axis=0).max()
        at_least[name] = 1e3 * float(busiest) / rate
    return Line(
        cluster=published.name,
        num_workers=num_workers,
        fitted=fitted,
        measured=dict(zip(SCHEMES, published.rows[num_workers], strict=True)),
        predicted=predict(published, fitted, num_workers, STEPS),
        two_cards=predict(published, fitted, num_workers, STEPS, (EXP,), 2),
        at_least=at_least,
    )
