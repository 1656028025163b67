"""Exchanges beside the step: in a second thread, or peer to peer."""

from typing import Any

from decentjax.gossip.all_reduce import AllReduce
from decentjax.gossip.background import Background
from decentjax.gossip.batches_read import Read
from decentjax.gossip.engine import Engine
from decentjax.gossip.group_port import averages
from decentjax.gossip.membership import Elastic
from decentjax.gossip.merging import MergeRecord, Taken
from decentjax.gossip.patience import AutoPatience
from decentjax.gossip.peers import Peers
from decentjax.gossip.port import Port, Record
from decentjax.gossip.quorum import Guard, Quorum
from decentjax.gossip.replaying import replay
from decentjax.gossip.thread import Beside
from decentjax.gossip.thread_port import host_mesh
from decentjax.links import Addresses, Folder, PeerProcess, Seeds
from decentjax.plan import mixing_matrix

__all__ = [
    "Addresses",
    "AllReduce",
    "AutoPatience",
    "Background",
    "Beside",
    "Elastic",
    "Engine",
    "Folder",
    "Guard",
    "MergeRecord",
    "PeerProcess",
    "Peers",
    "Port",
    "Quorum",
    "Read",
    "Record",
    "Seeds",
    "Taken",
    "averages",
    "host_mesh",
    "mixing_matrix",
    "replay",
]

# What to write for names of version 0.3, until the next version.
_GONE = {
    "BackgroundRounds": "gossip.Background(local, rounds, mesh)",
    "Butterfly": "gossip.Peers(local, methods.wagma(n), party, patience=60.0)",
    "Party": "gossip.PeerProcess(book, workers, mesh)",
    "PeerRounds": "gossip.Peers(local, rounds, party)",
    "Used": "gossip.MergeRecord",
    "Wagma": "gossip.Peers(local, methods.wagma(n), party, patience=60.0)",
}


def __getattr__(name: str) -> Any:
    if name in _GONE:
        raise ImportError(f"{__name__}.{name} is gone: write {_GONE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
