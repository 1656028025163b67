"""What runs beside the messages of a compiled step, read from its schedule."""

from decentjax.overlap.estimate import Accelerator, Estimate, Network, Span, estimate
from decentjax.overlap.flops import Work
from decentjax.overlap.reader import read
from decentjax.overlap.step_schedule import Collective, Link, Op, Schedule, links

__all__ = [
    "Accelerator",
    "Collective",
    "Estimate",
    "Link",
    "Network",
    "Op",
    "Schedule",
    "Span",
    "Work",
    "estimate",
    "links",
    "read",
]
