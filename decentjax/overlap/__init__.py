"""What runs while messages fly, as the schedule of a compiled step says."""

from decentjax.overlap.estimate import Accelerator, Estimate, Network, Span, estimate
from decentjax.overlap.schedule import Collective, Link, Op, Schedule, links, read
from decentjax.overlap.work import Work

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
