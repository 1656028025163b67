"""The runtime model against published shares of time that DiLoCo spends computing."""

from typing import NamedTuple

import numpy as np

from decentjax import runtime
from decentjax.runtime import Cluster, Job
from train.network import GBIT

MODEL_BYTES = 4 * 30.8e6
NUM_NODES = 4
# Mbit/s, and by H the shares in percent of four L40S over TCP, one in a node. Source:
# the measurements of the diloco-measured project.
RATES = (50, 200, 1000, 5000)
PUBLISHED = {
    8: (0.55, 2.48, 12.35, 40.24),
    32: (2.41, 10.01, 36.01, 68.10),
    128: (11.55, 36.09, 71.52, 87.00),
}
FITTED = (8, 1000)  # The cell from which the seconds of a local step are taken.


class DilocoRow(NamedTuple):
    """A setting of DiLoCo.

    Args:
      num_steps: H, local steps between two rounds.
      rate: Mbit/s of a node's link.
      predicted: share of the time that is spent computing.
      measured: published share.
    """

    num_steps: int
    rate: int
    predicted: float
    measured: float


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


def rows() -> list[DilocoRow]:
    """Returns all cells."""
    compute = fitted()
    return [
        DilocoRow(num_steps, rate, share(num_steps, rate, compute), percent / 100)
        for num_steps, percents in PUBLISHED.items()
        for rate, percent in zip(RATES, percents, strict=True)
    ]
