"""Exchanges beside the step, in a second thread, on any network."""

from decentjax.gossip.all_reduce import AllReduce
from decentjax.gossip.background import Background, host_mesh
from decentjax.gossip.engine import Engine, SharedEngine
from decentjax.gossip.record import Record
from decentjax.gossip.tuning import fastest_mixes
from decentjax.step import Adapt

__all__ = [
    "Adapt",
    "AllReduce",
    "Background",
    "Engine",
    "Record",
    "SharedEngine",
    "fastest_mixes",
    "host_mesh",
]
