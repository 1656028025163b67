"""Whether the learning rate of a run that resumes with changes jumps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from train.cli.config_json import make, sources
from train.config import OptimizerConfig
from train.run.optimizers import build_schedule
from train.run.setup import Run
from train.store.log import warn

JUMP = 1.25  # Factor by which a rate changes without a word.
Scheduled = tuple[OptimizerConfig, int]
"""The config of a schedule, and its number of steps."""


def say_jump(
    saved: dict[str, Any], run: Run, step: int, changed: Sequence[str]
) -> dict[str, Any]:
    """Warns if the learning rate jumps where a run resumes; returns that for the log.

    Args:
      saved: fields of the config up to here.
      run: the run from here on.
      step: number of steps done.
      changed: phrases for what differs, for the warning.
    """
    config = run.config
    if step == config.num_steps:
        return {}
    try:
        # The optimizer itself is not made, and its module may be elsewhere by now.
        fields = {**saved["optimizer"], "make": None}
        before = make(OptimizerConfig, fields, sources(config)), saved["num_steps"]
    except (KeyError, TypeError, ValueError):
        return {}  # Of another version, or a function whose module is not trusted now.
    now = config.optimizer, config.num_steps
    if (rates := rates_at(before, now, step)) is None:
        return {}
    last, found = (f"{rate:.3g}" for rate in rates)
    if jax.process_index() == 0:
        warn(
            f"the learning rate jumps from {last}, where the run stopped, to {found} "
            f"at step {step}: {', '.join(changed)}; {_how_to_keep(before, now, step)}"
        )
    return {"rate_jump": rates}


def rates_at(
    before: Scheduled, now: Scheduled, step: int
) -> tuple[float, float] | None:
    """Returns the learning rate where a run stopped, and where it resumes, if it jumps.

    It jumps where it differs by more than a quarter from both: the rate of the last
    step, and that of the next step had the schedule stayed.

    Args:
      before: schedule up to here.
      now: schedule from here on.
      step: number of steps done.
    """
    last, next_ = _rate(before, step - 1), _rate(before, step)
    found = _rate(now, step)
    jumps = not (_is_near(last, found) or _is_near(next_, found))
    return (last, found) if jumps else None


def _how_to_keep(before: Scheduled, now: Scheduled, step: int) -> str:
    """How the rate stays as it was at the last step."""
    last = float(f"{_rate(before, step - 1):.3g}")
    optimizer = dataclasses.replace(
        now[0], learning_rate=last, final_learning_rate=last
    )
    if before[1] == now[1] or rates_at(before, (optimizer, now[1]), step) is not None:
        return "without the change it stays"
    return (
        f"to keep it, add --optimizer.learning-rate {last:g} "
        f"--optimizer.final-learning-rate {last:g}"
    )


def _rate(of: Scheduled, step: int) -> float:
    return float(jax.numpy.asarray(build_schedule(*of)(step)))


def _is_near(a: float, b: float) -> bool:
    return max(abs(a), abs(b)) <= JUMP * min(abs(a), abs(b))
