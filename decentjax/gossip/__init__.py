"""Exchanges beside the step: in a second thread, or peer to peer."""

from decentjax.gossip.all_reduce import AllReduce
from decentjax.gossip.background import Background, BackgroundRounds
from decentjax.gossip.carrier import host_mesh
from decentjax.gossip.elastic import Elastic
from decentjax.gossip.engine import Engine, SharedEngine
from decentjax.gossip.ledger import Read
from decentjax.gossip.means import Butterfly
from decentjax.gossip.peer_rounds import PeerRounds, count_examples
from decentjax.gossip.peers import Peers
from decentjax.gossip.quorum import Guard, Quorum
from decentjax.gossip.record import Record
from decentjax.gossip.replay_run import WorkerSteps, replay
from decentjax.gossip.tuning import fastest_mixes
from decentjax.gossip.wagma import Wagma, averages
from decentjax.gossip.ways import Arrived, LeftOut, Swaps, Taken, Used
from decentjax.links import Addresses, Book, Folder, Party, Store
from decentjax.local import Adapt
from decentjax.patience import AutoPatience

__all__ = [
    "Adapt",
    "Addresses",
    "AllReduce",
    "Arrived",
    "AutoPatience",
    "Background",
    "BackgroundRounds",
    "Book",
    "Butterfly",
    "Elastic",
    "Engine",
    "Folder",
    "Guard",
    "LeftOut",
    "Party",
    "PeerRounds",
    "Peers",
    "Quorum",
    "Read",
    "Record",
    "SharedEngine",
    "Store",
    "Swaps",
    "Taken",
    "Used",
    "Wagma",
    "WorkerSteps",
    "averages",
    "count_examples",
    "fastest_mixes",
    "host_mesh",
    "replay",
]
