"""Sockets of the server's addresses, bound before the server touches anything else."""

from __future__ import annotations

import errno
import socket

from headwater.errors import ConfigError


def bind(host: str, port: int) -> list[socket.socket]:
    """Return one bound socket per address of `host`, all on the same port; ConfigError if one cannot be bound."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}", hint="Use an IP address.") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        if sockets and port == 0:
            address = (address[0], sockets[0].getsockname()[1], *address[2:])
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
        except OSError as error:
            bound.close()
            if error.errno == errno.EADDRNOTAVAIL and len(found) > 1:
                continue  # the name has an IPv6 address and this machine has no IPv6
            for other in sockets:
                other.close()
            in_use = "Another server uses this port: stop it or choose another."
            hint = in_use if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from None
        bound.setblocking(False)
        sockets.append(bound)
    if not sockets:
        raise ConfigError(
            f"cannot listen on {host}: this machine has none of its addresses", hint="Use an address of this machine."
        )
    return sockets


def joined(host: str, port: int) -> str:
    """Return `host:port` as in a URL, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
