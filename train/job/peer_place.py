"""The place of a process among peers, which have no coordinator and no job."""

import fcntl
import socket
import struct
from pathlib import Path
from typing import NamedTuple

import jax

from decentjax.distributed.devices import provide_devices
from decentjax.distributed.watch import watch
from decentjax.process.address import split_address
from train.config import ApartExchange, Config
from train.job.distributed import detect, workers_per_process
from train.job.secret import read_secret

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the address of an interface.


class PeerPlace(NamedTuple):
    """The place of a process.

    Args:
      process: its number.
      num_processes: number of all processes.
      workers: numbers of its workers.
    """

    process: int
    num_processes: int
    workers: range


def peer_place(config: Config) -> PeerPlace:
    """Returns the place of this process, as given or as Slurm or Open MPI have it.

    Raises:
      ValueError: if it has no place, or the workers do not divide among the processes.
    """
    if not config.distributed.enabled:
        raise ValueError(
            'exchange = "peers" is for several processes: start them with '
            "`decentjax launch`, or each with --distributed.enabled"
        )
    place = detect("unused", config.distributed)  # Peers have no coordinator.
    count = workers_per_process(config.workers.num_workers, place.num_processes)
    own = range(place.process_id * count, (place.process_id + 1) * count)
    return PeerPlace(place.process_id, place.num_processes, own)


def process_place(config: Config) -> tuple[int, int]:
    """Returns the number of this process, and the number of all."""
    if config.is_apart:
        return peer_place(config)[:2]
    return jax.process_index(), jax.process_count()


def start_peer(config: Config) -> None:
    """Gives this process the devices of its workers; before anything has used one."""
    place = peer_place(config)
    _check_addresses(config)
    own = place.workers
    count = len(own) * config.workers.devices_per_worker
    provide_devices(detect("unused", config.distributed).local_id, count)
    watch(config.distributed.deadline, place.process)


def _check_addresses(config: Config) -> None:
    """Raises a ValueError for a wrong address or secret, before data is read."""
    exchange = config.exchange
    assert isinstance(exchange, ApartExchange)
    host, _ = split_address(address_of(exchange.bind), port=0)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise ValueError(
            f"exchange.bind must be an address of this machine or one of {known}, got "
            f"{exchange.bind}: {error.strerror}"
        ) from error
    for address in exchange.addresses:
        split_address(address)
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
