"""Addresses of processes: HOST:PORT, and [HOST]:PORT where the host is IPv6."""

import ipaddress
import socket

MOST_SHOWN = 100  # Characters of a text that an error shows: it may be any file.


def to_address(host: str, port: int | str) -> str:
    """Returns the address of a host, whose brackets may be missing, and a port."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str, port: int | None = None) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of an address.

    Args:
      address: HOST:PORT; an IPv6 host without brackets ends at the last colon.
      port: default port of an address without one; None to require a port.

    Raises:
      ValueError: if it is not an address.
    """
    whole, least = address.strip("[]"), 1 if port is None else 0
    if port is not None and (":" not in whole or _is_ipv6(whole)):
        host, end = whole, str(port)
    else:
        host, _, end = address.rpartition(":")
        host = host.strip("[]")
    is_port = end.isdecimal() and len(end) <= 5 and least <= int(end) < 2**16
    if not (_is_host(host) and is_port):
        raise ValueError(
            "an address is HOST:PORT, or [HOST]:PORT for IPv6, with a port from "
            f"{least} to {2**16 - 1}, got {address[:MOST_SHOWN]!r}"
        )
    # An IPv6 address can be written in several ways.
    return str(ipaddress.ip_address(host)) if ":" in host else host, int(end)


def listening_at(listener: socket.socket) -> tuple[str, int]:
    """Returns host and port of this side of a socket."""
    # Unlike `getsockname`, includes the interface of a link-local address:
    # fe80::1%eth0.
    flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host, port = socket.getnameinfo(listener.getsockname(), flags)
    # A socket of IPv6 may have been reached by IPv4.
    return host.removeprefix("::ffff:") if "." in host else host, int(port)


def is_loopback(host: str) -> bool:
    """Whether a host can be reached only from this machine."""
    if _is_ipv6(host):
        return ipaddress.ip_address(host).is_loopback
    return host.startswith("127.") or host == "localhost"


def _is_host(host: str) -> bool:
    """Whether a host can be looked up; whether it exists is not known."""
    try:
        # As the look-up does, which raises for an empty label, or one above 63 letters.
        host.encode("idna")
    except UnicodeError:
        return False
    if not host.isprintable() or " " in host:
        return False
    return _is_ipv6(host) if ":" in host else bool(host)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
