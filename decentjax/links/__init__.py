"""Links between processes that share no job: liveness and messages."""

from decentjax.links.address_book import Addresses, Book, Folder, Seeds, Store
from decentjax.links.channel import Piece
from decentjax.links.inbox import Edge, Inbox, Message, Said
from decentjax.links.links import Links, Seen
from decentjax.links.peer_process import MIN_SECRET_BYTES, PeerProcess, check_party

__all__ = [
    "MIN_SECRET_BYTES",
    "Addresses",
    "Book",
    "Edge",
    "Folder",
    "Inbox",
    "Links",
    "Message",
    "PeerProcess",
    "Piece",
    "Said",
    "Seeds",
    "Seen",
    "Store",
    "check_party",
]
