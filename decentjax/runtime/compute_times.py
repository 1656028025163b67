"""Compute times of workers: distributions, injected delays, traces."""

import math
from collections.abc import Callable

import numpy as np

Compute = Callable[[int, int, np.random.Generator], np.ndarray]
"""Maps (step, N, random) to the compute time of each worker in seconds, [N]."""


def constant(seconds: float) -> Compute:
    """Returns the same time for every worker and step.

    Examples:
      >>> import numpy as np
      >>> from decentjax import runtime
      >>> print(runtime.constant(0.1)(0, 3, np.random.default_rng(0)))
      [0.1 0.1 0.1]
    """
    _check_mean(seconds)
    return lambda step, num_workers, random: np.full(num_workers, seconds)


def normal(seconds: float, sigma: float) -> Compute:
    """Draws from a normal of mean `seconds`, deviation `sigma * seconds`, clipped.

    Examples:
      >>> import numpy as np
      >>> from decentjax import runtime
      >>> print(runtime.normal(0.1, sigma=0.2)(0, 3, np.random.default_rng(0)).round(3))
      [0.103 0.097 0.113]
    """
    _check_mean(seconds, sigma)
    return lambda step, num_workers, random: np.maximum(
        random.normal(seconds, sigma * seconds, num_workers), 0
    )


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


def log_normal(seconds: float, sigma: float) -> Compute:
    """Draws from a log-normal of mean `seconds`, deviation `sigma * seconds`.

    Examples:
      >>> import numpy as np
      >>> from decentjax import runtime
      >>> compute = runtime.log_normal(0.1, sigma=0.2)
      >>> print(compute(0, 3, np.random.default_rng(0)).round(3))
      [0.101 0.096 0.111]
    """
    _check_mean(seconds, sigma)
    # If the logarithm has the mean m and the variance v, the mean is exp(m + v / 2) and
    # the squared relative deviation exp(v) - 1.
    variance = math.log1p(sigma**2)
    middle = math.log(seconds) - variance / 2
    return lambda step, num_workers, random: random.lognormal(
        middle, math.sqrt(variance), num_workers
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
