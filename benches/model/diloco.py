"""The shares of time that DiLoCo spends computing: published, predicted, emulated."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benches.race.contestants import WORKER, Contestant, Graph, Scheme
from benches.race.team import Team, measure_in
from benches.race.turns import Load, Turn
from decentjax import runtime
from decentjax.runtime import Cluster, Job
from train.job.namespaces import EmulatedCluster, Nodes
from train.network import GBIT

MODEL_BYTES = 4 * 30.8e6
NUM_NODES = 4
SAME_BYTES = Load(layers=30, width=1013, batch=1)  # A model of that size.
# Mbit/s, and by H the shares in percent of four L40S over TCP, one in a node. Source:
# the measurements of the diloco-measured project.
RATES = (50, 200, 1000, 5000)
PUBLISHED = {
    8: (0.55, 2.48, 12.35, 40.24),
    32: (2.41, 10.01, 36.01, 68.10),
    128: (11.55, 36.09, 71.52, 87.00),
}
FITTED = (8, 1000)  # The cell from which the seconds of a local step are taken.
# Two cores send no 5 Gbit/s for four nodes.
EMULATED = (50, 200, 1000)


class DilocoRow(NamedTuple):
    """A setting of DiLoCo.

    Args:
      num_steps: H, local steps between two rounds.
      rate: Mbit/s of a node's link.
      predicted: share of the time that is spent computing.
      measured: published share.
      emulated: share with the seconds of a round on an emulated cluster, if measured.
    """

    num_steps: int
    rate: int
    predicted: float
    measured: float
    emulated: float | None


def round_seconds(out: Path) -> dict[int, float]:
    """Returns the seconds of a mean of all models on emulated links, by their rate.

    Args:
      out: folder for the workers' output.

    Raises:
      PermissionError: if this process may not create namespaces.
    """
    cluster = EmulatedCluster(nodes=NUM_NODES, rate=f"{max(EMULATED)}mbit")
    mean = Contestant(Scheme.EXCHANGE, Graph.COMPLETE)

    def measure(nodes: Nodes) -> dict[int, float]:
        team = Team(WORKER["jax"], SAME_BYTES, out, cluster, nodes)
        team.take(Turn(mean, warmup=0, steps=1))  # Compiles.
        seconds = {}
        for rate in reversed(EMULATED):
            nodes.set_rate(f"{rate}mbit")
            seconds[rate] = team.take(Turn(mean, warmup=1, steps=3))
            print(f"{rate} Mbit/s: {seconds[rate]:.2f} s for a round", flush=True)
        team.close()
        return seconds

    return measure_in(cluster, measure)


def share(num_steps: int, rate: float, compute: float) -> float:
    """Returns the share of time spent computing, where a round hides behind nothing.

    Args:
      num_steps: H.
      rate: Mbit/s of a node's link.
      compute: seconds of a local step.
    """
    cluster = Cluster(
        num_nodes=NUM_NODES,
        workers_per_node=1,
        between_bytes_per_second=rate / 1e3 * GBIT,
        inside_bytes_per_second=np.inf,
    )
    # H local steps are one that computes longer; nothing is sent before its end.
    local = runtime.trace(np.array([[num_steps * compute] * NUM_NODES]))
    job = Job(model_bytes=MODEL_BYTES, compute=local, forward_share=1.0)
    times = runtime.all_reduce(cluster, job, num_steps=1, num_buckets=1)
    return num_steps * compute / float(times.end.max())


def fitted() -> float:
    """Returns the seconds of a local step that give the cell `FITTED`."""
    num_steps, rate = FITTED
    wanted = PUBLISHED[num_steps][RATES.index(rate)] / 100
    # Of local steps of a second: share = H / (H + R), with the seconds R of a round.
    reduce = num_steps / share(num_steps, rate, 1.0) - num_steps
    return reduce * wanted / (1 - wanted) / num_steps


def rows(seconds: Mapping[int, float]) -> list[DilocoRow]:
    """Returns all cells.

    Args:
      seconds: seconds of a round by Mbit/s, as `round_seconds` returns them.
    """
    compute = fitted()

    def emulated(num_steps: int, rate: int) -> float | None:
        local = num_steps * compute
        return local / (local + seconds[rate]) if rate in seconds else None

    return [
        DilocoRow(
            num_steps,
            rate,
            share(num_steps, rate, compute),
            percent / 100,
            emulated(num_steps, rate),
        )
        for num_steps, percents in PUBLISHED.items()
        for rate, percent in zip(RATES, percents, strict=True)
    ]
