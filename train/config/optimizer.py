"""The local optimizer and its schedule."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

from train.config.checks import check_at_least
from train.fields import checked, place_of

WARMUP = 50  # Steps, of a run that is long enough.


@checked
class OptimizerConfig:
    """The local optimizer and its schedule: a linear warm-up, then the decay.

    Your own functions are at the top level of a module, `FILE.py:NAME` as options.

    Args:
      name: "accum_adamw", "adamw", "lion" and "muon" subtract weight decay times
        learning rate times parameters from the parameters; the others add weight decay
        times parameters to the gradient. "muon" is for matrices; parameters of other
        shapes use Adam with Nesterov momentum. "exact_diffusion" and "qg_dsgdm" correct
        for heterogeneous data; the first needs a topology.factor of 0.5, is D² with
        method "atc" and EXTRA with "awc", and accumulates the rounding of exchanges, so
        that method.tracking is better for many steps at a low rate. Your own function
        from the schedule to an optax optimizer has its own options and weight decay.
      learning_rate: peak of the schedule.
      initial_learning_rate: learning rate at the first step of the warm-up.
      warmup_steps: number of steps up to the peak; None takes 50, or half of a short
        run, and ends before `decay_steps`.
      decay: "cosine" down to the final learning rate at the last step; "inverse_sqrt",
        the peak times sqrt(warmup_steps / step); "steps", the peak times 0.1 once for
        each of the `decay_steps` reached. Your own function from `num_steps` to an
        optax schedule replaces the warm-up too.
      final_learning_rate: learning rate at the last step, for "cosine".
      decay_steps: ascending steps, for "steps"; none keeps the peak.
      accum_steps: steps per update of the moments, for accum_adamw and accum_adam.
      b1: decay rate of the first moment, and the momentum: m in `v <- m v + gradient`,
        the direction of a step of "sgd" and "exact_diffusion", the quasi-global one of
        "qg_dsgdm", and the momentum of "muon".
      b2: decay rate of the second moment.
      eps: term added to the root of the second moment.
      weight_decay: coefficient for parameters of two dims or more.
      clip_norm: largest global norm of a worker's gradient, or of its estimate with
        method.tracking; None does not clip.
    """

    name: (
        Literal[
            "accum_adamw",
            "accum_adam",
            "adamw",
            "adam",
            "lion",
            "muon",
            "sgd",
            "exact_diffusion",
            "qg_dsgdm",
        ]
        | Callable[[Callable], Any]
    ) = "accum_adamw"
    learning_rate: float = 1e-3
    initial_learning_rate: float = 0.0
    warmup_steps: int | None = None
    decay: Literal["cosine", "inverse_sqrt", "steps"] | Callable[[int], Callable] = (
        "cosine"
    )
    final_learning_rate: float = 1e-4
    decay_steps: tuple[int, ...] = ()
    accum_steps: int = 4
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self):
        check_at_least(self, 0, "learning_rate", "initial_learning_rate")
        check_at_least(self, 0, "final_learning_rate")
        check_at_least(self, 0, "eps", "weight_decay")
        check_at_least(self, 1, "accum_steps")
        if self.warmup_steps is not None:
            check_at_least(self, int(self.decay == "inverse_sqrt"), "warmup_steps")
        self._check_decay_steps()
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}"
                )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(
                f"optimizer.clip_norm must be positive, got {self.clip_norm}"
            )

    def warmup_over(self, num_steps: int) -> int:
        """The number of steps up to the peak, in a run of this many."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        before = (step - 1 for step in self.decay_steps)
        return max(min(WARMUP, num_steps // 2, *before), self.decay == "inverse_sqrt")

    def _check_decay_steps(self) -> None:
        if self.decay_steps and self.decay != "steps":
            raise ValueError(
                'optimizer.decay_steps need optimizer.decay = "steps", got '
                f"{place_of(self.decay) if callable(self.decay) else self.decay}"
            )
        # The decay begins after the warm-up.
        ascending = (self.warmup_steps or 0, *self.decay_steps)
        if any(a >= b for a, b in itertools.pairwise(ascending)):
            raise ValueError(
                "optimizer.decay_steps must ascend and be greater than warmup_steps = "
                f"{self.warmup_steps or 0}, got {self.decay_steps}"
            )
