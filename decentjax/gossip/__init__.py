"""Exchanges beside the step: in a second thread, or from peer to peer."""

from decentjax.gossip.all_reduce import AllReduce
from decentjax.gossip.background import Background, host_mesh
from decentjax.gossip.book import Addresses, Book, Folder
from decentjax.gossip.engine import Engine, SharedEngine
from decentjax.gossip.peers import Peers, Used
from decentjax.gossip.record import Record
from decentjax.gossip.tuning import fastest_mixes
from decentjax.step import Adapt

__all__ = [
    "Adapt",
    "Addresses",
    "AllReduce",
    "Background",
    "Book",
    "Engine",
    "Folder",
    "Peers",
    "Record",
    "SharedEngine",
    "Used",
    "fastest_mixes",
    "host_mesh",
]
