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
# Thousands of images per second, summed over N workers, by N: of workers that never
# wait, and of each scheme.
SCHEMES = ("all-reduce", "local SGD", "D-PSGD", "SGP", WAGMA)
PUBLISHED = {
    64: (13.3, (9.1, 9.1, 9.3, 9.1, 11.4)),
    256: (53.2, (32.6, 32.5, 35.8, 36.4, 44.5)),
}


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
    for num_workers, (ideal, throughputs) in PUBLISHED.items():
        predicted = _throughputs(num_workers, ideal)
        measured = dict(zip(SCHEMES, throughputs, strict=True))
        found += [
            ImbalanceRow(
                num_workers,
                scheme,
                predicted[scheme],
                measured[scheme],
                predicted[WAGMA] / predicted[scheme],
                measured[WAGMA] / measured[scheme],
            )
            for scheme in SCHEMES
        ]
    return found


def _throughputs(num_workers: int, ideal: float) -> dict[str, float]:
    images = BATCH * num_workers / 1e3
    compute = runtime.constant(images / ideal)
    job = Job(model_bytes=MODEL_BYTES, compute=runtime.delayed(compute, LATE, LATE_BY))
    cluster = Cluster(num_nodes=num_workers, between_bytes_per_second=BYTES_PER_SECOND)
    ring = topology.ring(num_workers)
    exponential = topology.one_peer_exponential(num_workers)
    groups = topology.butterfly_groups(num_workers)
    # Local SGD with a period of 1 averages the models after the step: one bucket.
    simulated: dict[str, Times] = {
        "all-reduce": runtime.all_reduce(cluster, job, STEPS),
        "local SGD": runtime.all_reduce(cluster, job, STEPS, num_buckets=1),
        # Both send after the step, so nothing hides their messages.
        "D-PSGD": runtime.in_step(cluster, job, ring, STEPS, hidden=False),
        "SGP": runtime.in_step(cluster, job, exponential, STEPS, hidden=False),
        WAGMA: runtime.wait_avoiding(cluster, job, groups, STEPS, SYNC_EVERY),
    }
    return {
        name: images / times.seconds_per_step() for name, times in simulated.items()
    }
