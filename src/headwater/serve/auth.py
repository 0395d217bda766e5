"""The gate: who is asking, and may they come in. Decides from headers alone."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import re
from collections.abc import Iterable
from enum import Enum

from headwater.config import ServeConfig
from headwater.errors import ConfigError, Forbidden, Unauthorized
from headwater.model.principal import ADMIN, ANONYMOUS, Principal
from headwater.serve.tickets import Tickets

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@?#]+)(?::\d{1,5})?\Z")
_ORIGIN = re.compile(r"https?://(.+)\Z")


class Access(Enum):
    """What a route asks of a caller."""

    OPEN = "open"  # anybody: health
    LOCKED = "locked"  # a credential, once there is one
    METRICS = "metrics"  # locked, unless configured open


class Gate:
    """Admits callers.

    With a token every locked route needs it. Without one the server listens on loopback only, everybody is
    `anonymous`, and no web page may drive it: Host and Origin must be loopback too.
    """

    def __init__(self, token: bytes | None, *, metrics_open: bool = False, ticket_seconds: float = 60.0) -> None:
        self._token = token
        self._metrics_open = metrics_open
        self.tickets = Tickets(token, seconds=ticket_seconds)

    @classmethod
    def of(cls, config: ServeConfig) -> Gate:
        """The gate that `config` asks for; ConfigError if it would leave the door open or shut for good."""
        host, _ = split_address(config.http)
        if config.token is None and not is_loopback(host):
            raise ConfigError(
                f"{config.http} can be reached from other machines, and no credential is set",
                hint="Set HEADWATER_TOKEN, or listen on 127.0.0.1.",
            )
        if config.token is None and config.auth:
            raise ConfigError("authentication is on and no credential is set", hint="Set HEADWATER_TOKEN as well.")
        token = None if config.token is None else config.token.encode()
        return cls(token, metrics_open=config.metrics_open, ticket_seconds=config.ticket_seconds)

    @property
    def locked(self) -> bool:
        """Whether a credential is asked for."""
        return self._token is not None

    def admit(self, headers: Headers, access: Access, ticket: str | None = None) -> Principal:
        """The caller; Unauthorized or Forbidden if they may not come in. A `ticket` stands in for a header."""
        if access is Access.OPEN:
            return ANONYMOUS
        if self._token is None:
            _from_here(headers)
            return ANONYMOUS if ticket is None else self.tickets.check(ticket)
        if ticket is not None:
            return self.tickets.check(ticket)
        if access is Access.METRICS and self._metrics_open:
            return ANONYMOUS
        if not any(hmac.compare_digest(found, self._token) for found in _credentials(headers)):
            raise Unauthorized("a credential is needed, and none that holds was sent")
        return ADMIN


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; brackets of an IPv6 address are taken off."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether `host` means this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _credentials(headers: Headers) -> list[bytes]:
    found = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value)
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip())
    return found


def _from_here(headers: Headers) -> None:
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 or not _names_loopback(hosts[0].decode("latin-1")):
        raise Forbidden(
            "the Host header does not name this machine",
            hint="Use http://127.0.0.1, or set HEADWATER_TOKEN and send it.",
        )
    for name, value in headers:
        if name == b"origin" and not names_loopback(value):
            raise Forbidden(
                "a page of another origin may not use this server",
                hint="Set HEADWATER_TOKEN and send it.",
            )


def names_loopback(origin: bytes) -> bool:
    """Whether `origin` is a page of this machine."""
    found = _ORIGIN.match(origin.decode("latin-1"))
    return found is not None and _names_loopback(found[1])


@functools.lru_cache(maxsize=256)  # a client sends the same header with every request
def _names_loopback(host: str) -> bool:
    match = _HOST.match(host)
    return match is not None and is_loopback(match[1])
