"""The address at which a peer listens."""

import fcntl
import socket
import struct
from pathlib import Path

from decentjax.process.address import split_address
from train.config import ApartExchange
from train.job.secret import read_secret

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the address of an interface.


def check_addresses(exchange: ApartExchange) -> None:
    """Raises a ValueError for a wrong address or secret, before data is read."""
    host, _ = split_address(address_of(exchange.bind), port=0)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise ValueError(
            f"exchange.bind must be an address of this machine or one of {known}, got "
            f"{exchange.bind}: {error.strerror}"
        ) from error
    for address in (*exchange.addresses, *exchange.seeds):
        split_address(address)
    if exchange.addresses and exchange.seeds:
        raise ValueError(
            "exchange.addresses list all processes, and exchange.seeds those that tell "
            "where the others are: give one of the two"
        )
    if exchange.secret_file is not None:
        read_secret(Path(exchange.secret_file))


def address_of(bind: str) -> str:
    """Returns the address of a network interface; other texts are addresses already."""
    if bind not in (name for _, name in socket.if_nameindex()):
        return bind
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = struct.pack("256s", bind.encode())
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, name)
        except OSError as error:
            raise ValueError(
                f"cannot listen at the interface {bind}, {error.strerror}: give it an "
                "IPv4 address, or bind to its IPv6 address"
            ) from error
    return socket.inet_ntoa(found[20:24])
