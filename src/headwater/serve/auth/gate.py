"""The gate: who is asking, and may they come in. Decides from headers alone."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import re
import time
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.config import ServeConfig
from headwater.errors import ConfigError, Forbidden, Unauthorized
from headwater.model.principal import ADMIN, ANONYMOUS, JWT, Principal
from headwater.serve.auth.api_keys import Keys
from headwater.serve.auth.open_sessions import Sessions
from headwater.serve.auth.tickets import Tickets

if TYPE_CHECKING:
    from headwater.serve.auth.json_web_tokens import Jwts

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case

SHORTEST = 16  # characters of an admin token that others may try
MAX_CREDENTIALS = 2  # of one request: a proxy may add its own
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@?#]+)(?::\d{1,5})?\Z")
_ORIGIN = re.compile(r"https?://(.+)\Z")
_OTHER_SITES = (b"cross-site", b"same-site")  # of Sec-Fetch-Site; another port of this machine is the same site


class Access(Enum):
    """What a route asks of a caller."""

    OPEN = "open"  # anybody: health
    LOCKED = "locked"  # a credential, once there is one
    METRICS = "metrics"  # locked, unless configured open


class Gate:
    """Admits callers.

    Locked, every route but the open ones needs a credential: the admin's token, an API key, or a JWT of an issuer that
    is trusted. Unlocked, the server listens on loopback only, everybody is `anonymous`, and no web page may drive it:
    Host and Origin must be loopback too, and a browser that names no Origin must not come from another site.
    """

    def __init__(
        self,
        token: bytes | None,
        *,
        keys: Keys | None = None,
        jwts: Jwts | None = None,
        locked: bool | None = None,
        metrics_open: bool = False,
        ticket_seconds: float = 60.0,
        signing: bytes | None = None,
    ) -> None:
        self._token, self._jwts, self.keys = token, jwts, keys
        self._metrics_open = metrics_open
        self.locked = token is not None if locked is None else locked  # whether a credential is asked for
        self.sessions = Sessions(self.holds)
        self.tickets = Tickets(token if signing is None else signing, seconds=ticket_seconds)

    @classmethod
    def of(cls, config: ServeConfig, folder: Path | None = None) -> Gate:
        """The gate that `config` asks for; ConfigError if it would leave the door open or shut for good.

        API keys are kept in `folder`.
        """
        token = None if config.token is None else config.token.encode()
        jwts = _jwts(config)
        locked = token is not None or jwts is not None or config.auth
        for address in (config.http, grpc_address(config)):
            if address is not None and not is_loopback(split_address(address)[0]):
                _check_reached(address, token, locked)
        keys = None if folder is None else Keys(folder, _pepper(config))
        if token is None and jwts is None and config.auth and not keys:
            raise ConfigError(
                "authentication is on and no credential is set",
                hint="Set HEADWATER_TOKEN, or make a key before: headwater token create.",
            )
        return cls(
            token,
            keys=keys,
            jwts=jwts,
            locked=locked,
            metrics_open=config.metrics_open,
            ticket_seconds=config.ticket_seconds,
            signing=keys.signing if keys is not None and locked else None,
        )

    def admit(self, headers: Headers, access: Access, ticket: str | None = None) -> Principal:
        """The caller; Unauthorized or Forbidden if they may not come in. A `ticket` stands in for a header."""
        if access is Access.OPEN:
            return ANONYMOUS
        if not self.locked:
            _from_here(headers)
            return ANONYMOUS if ticket is None else self.tickets.check(ticket)
        if ticket is not None:
            return self.still(self.tickets.check(ticket))
        if access is Access.METRICS and self._metrics_open:
            return ANONYMOUS
        return self._holder(headers)

    def admit_call(self, metadata: Headers) -> Principal:
        """The caller of a gRPC method: no web page can be one, so nothing but the credential is looked at."""
        return self._holder(metadata) if self.locked else ANONYMOUS

    def _holder(self, headers: Headers) -> Principal:
        """Who holds the first credential that is good."""
        why = Unauthorized("a credential is needed, and none that holds was sent")
        sent = _credentials(headers)
        if len(sent) > MAX_CREDENTIALS:  # guesses are limited by the request
            raise Unauthorized(f"{len(sent)} credentials were sent", hint=f"Send at most {MAX_CREDENTIALS}.")
        for found in sent:
            try:
                return self._who(found)
            except Unauthorized as error:
                why = error
        raise why

    def _who(self, credential: bytes) -> Principal:
        """Whose it is. Which kind it is may be seen from outside; whether it is a good one takes the same time."""
        if self._token is not None and hmac.compare_digest(credential, self._token):
            return ADMIN
        if self.keys is not None and (key := self.keys.find(credential)) is not None:
            return self.still(key.principal())
        if self._jwts is not None and credential.count(b".") == 2:  # is written like one
            return self._jwts.check(credential)
        raise Unauthorized("a credential is needed, and none that holds was sent")

    def still(self, who: Principal) -> Principal:
        """Who was admitted before, if the credential holds until now; Unauthorized. Whatever was waited for meanwhile,
        a key may have been revoked, or have expired."""
        if who.until is not None and time.time_ns() // 1_000_000 >= who.until:
            raise Unauthorized("the credential has expired", hint="Ask for another.", expired=True)
        if not self.holds(who):
            raise Unauthorized("the credential was revoked", hint="Ask for another.")
        return who

    def holds(self, who: Principal) -> bool:
        """Whether the key of `who` was not revoked; of those who came with none there is nothing to revoke."""
        if not who.credential or who.credential.startswith(JWT):
            return True
        return self.keys is not None and self.keys.has(who.credential)


def _check_reached(address: str, token: bytes | None, locked: bool) -> None:
    """ConfigError where others reach `address`, and need nothing to come in, or nothing that takes long to guess."""
    if not locked:
        raise ConfigError(
            f"{address} can be reached from other machines, and no credential is set",
            hint="Set HEADWATER_TOKEN, or listen on 127.0.0.1.",
        )
    if token is not None and len(token) < SHORTEST:
        raise ConfigError(
            f"{address} can be reached from other machines, and the admin token is shorter than {SHORTEST} characters",
            hint="Use HEADWATER_TOKEN=$(openssl rand -hex 32), or listen on 127.0.0.1.",
        )


def _pepper(config: ServeConfig) -> bytes | None:
    """What keys are hashed with, if it is given. It signs tickets too: one that can be guessed opens every door."""
    pepper = None if config.key_pepper is None else config.key_pepper.encode()
    if pepper is not None and len(pepper) < 32:
        raise ConfigError(
            "the pepper of keys is shorter than 32 bytes", hint="Use HEADWATER_KEY_PEPPER=$(openssl rand -hex 32)."
        )
    return pepper


def _jwts(config: ServeConfig) -> Jwts | None:
    if config.jwt_secret is None and config.jwt_keys is None:
        return None
    from headwater.serve.auth.json_web_tokens import Jwts  # cryptography is an eighth of what a start loads

    return Jwts.of(config)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; brackets of an IPv6 address are taken off."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def grpc_address(config: ServeConfig) -> str | None:
    """Where gRPC listens, if it does. Where HTTP takes any port, so does it, unless one was asked for."""
    if config.grpc == "off":
        return None
    if config.grpc == ServeConfig().grpc and split_address(config.http)[1] == 0:
        return "127.0.0.1:0"
    return config.grpc


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
    hosts, origins, site = [], [], b""
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"origin":
            origins.append(value)
        elif name == b"sec-fetch-site":
            site = value
    if len(hosts) != 1 or not _names_loopback(hosts[0].decode("latin-1")):
        raise Forbidden(
            "the Host header does not name this machine",
            hint="Use http://127.0.0.1, or set HEADWATER_TOKEN and send it.",
        )
    # A page that loads an image or a script, or links here, sends no Origin: nobody knows whose page it is.
    if not all(map(names_loopback, origins)) or (site in _OTHER_SITES and not origins):
        raise Forbidden(
            "a page of another origin may not use this server",
            hint="Set HEADWATER_TOKEN and send it, or type the address into the browser.",
        )


def names_loopback(origin: bytes) -> bool:
    """Whether `origin` is a page of this machine."""
    found = _ORIGIN.match(origin.decode("latin-1"))
    return found is not None and _names_loopback(found[1])


@functools.lru_cache(maxsize=256)  # a client sends the same header with every request
def _names_loopback(host: str) -> bool:
    match = _HOST.match(host)
    return match is not None and is_loopback(match[1])
