"""The job of a cluster: its model, and the compute times of its workers."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from decentjax import units

Compute = Callable[[int, int, np.random.Generator], np.ndarray]
"""Maps (step, N, random) to the compute time of each worker in seconds, [N]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A model to average, and how long its gradient takes.

    Args:
      model_bytes: number of averaged bytes.
      compute: function that draws the durations of forward and backward pass, or a
        constant one in seconds, 0.065 or "65ms".
      forward_share: share of that duration before the backward pass begins, in [0, 1];
        1 if the whole gradient is available at once.

    Raises:
      ValueError: if a number is out of its range.

    Examples:
      >>> from decentjax import runtime
      >>> job = runtime.Job(model_bytes=4 * 25e6, compute=0.1)
      >>> print(job.draw(step=0, num_workers=3, seed=0))
      [0.1 0.1 0.1]
    """

    model_bytes: float
    compute: Compute | units.Quantity
    forward_share: float = 1 / 3

    def __post_init__(self):
        if not 0 < self.model_bytes < math.inf:
            raise ValueError(
                f"model_bytes must be positive and finite, got {self.model_bytes}"
            )
        if not callable(self.compute):
            object.__setattr__(self, "compute", constant(self.compute))
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


def constant(seconds: units.Quantity) -> Compute:
    """Returns the same time for every worker and step, 0.065 or "65ms".

    Examples:
      >>> import numpy as np
      >>> from decentjax import runtime
      >>> print(runtime.constant(0.1)(0, 3, np.random.default_rng(0)))
      [0.1 0.1 0.1]
    """
    seconds = units.seconds("compute", seconds)
    _check_mean(seconds)
    return lambda step, num_workers, random: np.full(num_workers, seconds)


def gamma(seconds: float, sigma: float) -> Compute:
    """Draws from a gamma of mean `seconds` and deviation `sigma * seconds`.

    Examples:
      >>> import numpy as np
      >>> from decentjax import runtime
      >>> print(runtime.gamma(0.1, sigma=0.2)(0, 3, np.random.default_rng(0)).round(3))
      [0.101 0.112 0.088]
    """
    _check_mean(seconds, sigma)
    if sigma == 0:
        return constant(seconds)  # The shape, 1 / sigma^2, would be infinite.
    # Shape k and scale s have the mean k s and the variance k s^2.
    return lambda step, num_workers, random: random.gamma(
        sigma**-2, seconds * sigma**2, num_workers
    )


def delayed(compute: Compute, count: int, seconds: float) -> Compute:
    """Adds `seconds` to the times of `count` workers, drawn at random in each step.

    Examples:
      >>> import numpy as np
      >>> from decentjax import runtime
      >>> late = runtime.delayed(runtime.constant(0.1), count=1, seconds=0.4)
      >>> print(sorted(late(0, 3, np.random.default_rng(0)).tolist()))
      [0.1, 0.1, 0.5]
    """
    if count < 0 or not 0 <= seconds < math.inf:
        raise ValueError(
            f"count and seconds must not be negative, got {count} and {seconds}"
        )

    def draw(step: int, num_workers: int, random: np.random.Generator) -> np.ndarray:
        times = np.array(compute(step, num_workers, random), float)
        late = random.choice(num_workers, min(count, num_workers), replace=False)
        times[late] += seconds
        return times

    return draw


def trace(seconds: np.ndarray) -> Compute:
    """Repeats measured times in seconds, [T, N], after their last step.

    Examples:
      >>> import numpy as np
      >>> from decentjax import runtime
      >>> compute = runtime.trace(np.array([[0.1, 0.2], [0.3, 0.1]]))
      >>> print(compute(3, 2, np.random.default_rng(0)))
      [0.3 0.1]
    """
    seconds = np.array(seconds, float)
    if seconds.ndim != 2 or not seconds.size or not (seconds >= 0).all():
        raise ValueError(
            f"a trace is [T, N] of times that are not negative, got {seconds.shape}"
        )

    def draw(step: int, num_workers: int, random: np.random.Generator) -> np.ndarray:
        del random
        if num_workers != seconds.shape[1]:
            raise ValueError(
                f"the trace has {seconds.shape[1]} workers, the cluster has "
                f"{num_workers}"
            )
        # A copy, as `delayed` adds to it in place.
        return seconds[step % len(seconds)].copy()

    return draw


def _check_mean(seconds: float, sigma: float = 0.0) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"the compute time must be positive, got {seconds} s")
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma must not be negative, got {sigma}")
