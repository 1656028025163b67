"""What runs beside the messages of a compiled step, read from its schedule."""

from decentjax.overlap.estimate import Accelerator, Estimate, Network, estimate
from decentjax.overlap.reader import read
from decentjax.overlap.step_schedule import Collective, StepSchedule

__all__ = [
    "Accelerator",
    "Collective",
    "Estimate",
    "Network",
    "StepSchedule",
    "estimate",
    "read",
]
