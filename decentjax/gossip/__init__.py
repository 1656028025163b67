"""Exchanges beside the step: in a second thread, or from peer to peer."""

from decentjax.gossip.all_reduce import AllReduce
from decentjax.gossip.background import Background
from decentjax.gossip.book import Addresses, Book, Folder, Store
from decentjax.gossip.carrier import host_mesh
from decentjax.gossip.elastic import Elastic
from decentjax.gossip.engine import Engine, SharedEngine
from decentjax.gossip.late import BackgroundRounds
from decentjax.gossip.means import Butterfly
from decentjax.gossip.peer_rounds import PeerRounds
from decentjax.gossip.peers import Peers
from decentjax.gossip.record import Record
from decentjax.gossip.replay import replay, replay_wagma
from decentjax.gossip.tuning import fastest_mixes
from decentjax.gossip.wagma import Averaged, Wagma, averages
from decentjax.gossip.ways import Arrived, PushSum, Swaps, Taken, Used
from decentjax.local import Adapt

__all__ = [
    "Adapt",
    "Addresses",
    "AllReduce",
    "Arrived",
    "Averaged",
    "Background",
    "BackgroundRounds",
    "Book",
    "Butterfly",
    "Elastic",
    "Engine",
    "Folder",
    "PeerRounds",
    "Peers",
    "PushSum",
    "Record",
    "SharedEngine",
    "Store",
    "Swaps",
    "Taken",
    "Used",
    "Wagma",
    "averages",
    "fastest_mixes",
    "host_mesh",
    "replay",
    "replay_wagma",
]
