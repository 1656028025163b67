"""What each worker of a cluster computes in a step."""

import dataclasses
import math

import numpy as np

from decentjax.runtime.compute_times import Compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A model to average, and how long its gradient takes.

    Args:
      model_bytes: number of averaged bytes.
      compute: function that draws the durations of forward and backward pass.
      forward_share: share of that duration before the backward pass begins, in [0, 1];
        1 if the whole gradient is available at once.

    Raises:
      ValueError: if a number is out of its range.

    Examples:
      >>> from decentjax import runtime
      >>> job = runtime.Job(model_bytes=4 * 25e6, compute=runtime.constant(0.1))
      >>> print(job.draw(step=0, num_workers=3, seed=0))
      [0.1 0.1 0.1]
    """

    model_bytes: float
    compute: Compute
    forward_share: float = 1 / 3

    def __post_init__(self):
        if not 0 < self.model_bytes < math.inf:
            raise ValueError(
                f"model_bytes must be positive and finite, got {self.model_bytes}"
            )
        if not 0 <= self.forward_share <= 1:
            raise ValueError(
                f"forward_share must be in [0, 1], got {self.forward_share}"
            )

    def draw(self, step: int, num_workers: int, seed: int) -> np.ndarray:
        """Returns the compute times of a step in seconds, [N]; the same at each call.

        Raises:
          ValueError: if `compute` returns another shape, or negative times.
        """
        # A generator per step: step t has the same times in a simulation of any length,
        # and in every scheme.
        times = self.compute(step, num_workers, np.random.default_rng((seed, step)))
        if times.shape != (num_workers,) or not (times >= 0).all():
            raise ValueError(f"compute times must be [N] and not negative, got {times}")
        return times
