"""The runtime model against paper 2's throughputs with injected imbalance.

ResNet-50, batch 128 per worker, one GPU per node, two random workers late by 320 ms in
each step. Source: WAGMA-SGD (2020), section 5 and Fig 4, whose bars were read by eye.
"""

from typing import NamedTuple

from decentjax import runtime, topology
from decentjax.runtime import Cluster, Job, Times

MODEL_BYTES = 4 * 25_559_081
BATCH = 128
LATE, LATE_BY = 2, 0.32
SYNC_EVERY = 10
# Rate of a node on the Aries network, from other sources; half of it changes 3 % here.
BYTES_PER_SECOND = 10e9
STEPS = 400
WAGMA = "WAGMA"


class Throughputs(NamedTuple):
    """Published thousands of images per second, summed over the workers.

    Args:
      num_workers: number of workers, N.
      ideal: throughput of workers that never wait.
      measured: throughput by scheme.
    """

    num_workers: int
    ideal: float
    measured: dict[str, float]


PUBLISHED = (
    Throughputs(
        64,
        13.3,
        {"all-reduce": 9.1, "local SGD": 9.1, "D-PSGD": 9.3, "SGP": 9.1, WAGMA: 11.4},
    ),
    Throughputs(
        256,
        53.2,
        {
            "all-reduce": 32.6,
            "local SGD": 32.5,
            "D-PSGD": 35.8,
            "SGP": 36.4,
            WAGMA: 44.5,
        },
    ),
)


class ImbalanceRow(NamedTuple):
    """A scheme with a number of workers, in thousands of images per second.

    Args:
      num_workers: number of workers, N.
      scheme: name of the scheme.
      predicted: predicted throughput.
      measured: published throughput.
      predicted_ratio: WAGMA's predicted throughput over the scheme's.
      measured_ratio: WAGMA's published throughput over the scheme's.
    """

    num_workers: int
    scheme: str
    predicted: float
    measured: float
    predicted_ratio: float
    measured_ratio: float


def lines() -> list[ImbalanceRow]:
    """Returns all rows; compute times follow from the published ideal."""
    found = []
    for published in PUBLISHED:
        predicted = _throughputs(published)
        for scheme, measured in published.measured.items():
            found.append(
                ImbalanceRow(
                    published.num_workers,
                    scheme,
                    predicted[scheme],
                    measured,
                    predicted[WAGMA] / predicted[scheme],
                    published.measured[WAGMA] / measured,
                )
            )
    return found


def _throughputs(published: Throughputs) -> dict[str, float]:
    num_workers = published.num_workers
    images = BATCH * num_workers / 1e3
    compute = runtime.constant(images / published.ideal)
    job = Job(model_bytes=MODEL_BYTES, compute=runtime.delayed(compute, LATE, LATE_BY))
    cluster = Cluster(num_nodes=num_workers, between_bytes_per_second=BYTES_PER_SECOND)
    ring = topology.ring(num_workers)
    exponential = topology.one_peer_exponential(num_workers)
    groups = topology.butterfly_groups(num_workers, round(num_workers**0.5))
    # Local SGD with a period of 1 averages the models after the step: one bucket.
    simulated: dict[str, Times] = {
        "all-reduce": runtime.all_reduce(cluster, job, STEPS),
        "local SGD": runtime.all_reduce(cluster, job, STEPS, num_buckets=1),
        "D-PSGD": runtime.in_step(cluster, job, ring, STEPS, hidden=False),
        "SGP": runtime.in_step(cluster, job, exponential, STEPS, hidden=False),
        WAGMA: runtime.wait_avoiding(cluster, job, groups, STEPS, SYNC_EVERY),
    }
    return {
        name: images / times.seconds_per_step() for name, times in simulated.items()
    }
