"""Authentication of callers, from request headers or gRPC metadata alone."""

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

SHORTEST = 16  # minimum length in characters of an admin token on an address that other machines reach
MAX_CREDENTIAL = 8 << 10  # bytes: decoding a longer JWT would block the event loop
MAX_CREDENTIALS = 2  # per request: a proxy may add its own to the client's
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@?#]+)(?::\d{1,5})?\Z")
_ORIGIN = re.compile(r"https?://(.+)\Z")
_OTHER_SITES = (b"cross-site", b"same-site")  # values of Sec-Fetch-Site; other ports of this machine are same-site


class Access(Enum):
    """Which callers a route admits."""

    OPEN = "open"  # every caller: the health routes
    LOCKED = "locked"  # callers with a credential, if the server requires one
    METRICS = "metrics"  # as LOCKED, unless serve.metrics_open is set


class Gate:
    """Authenticates callers and rejects those without a valid credential.

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
        self.locked = token is not None if locked is None else locked  # whether callers need a credential
        self.sessions = Sessions(self.holds)
        self.tickets = Tickets(token if signing is None else signing, seconds=ticket_seconds)

    @classmethod
    def of(cls, config: ServeConfig, folder: Path | None = None) -> Gate:
        """Build the gate; ConfigError for a short secret, or if the gate would admit every remote caller or nobody.

        `folder` is where API keys are stored.
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
                "authentication is on, and there is no admin token, API key or JWT issuer",
                hint="Set HEADWATER_TOKEN, or create a key before the start: headwater token create.",
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
        """Return the caller; Unauthorized or Forbidden if the request is rejected. A `ticket` replaces the header."""
        if access is Access.OPEN:
            return ANONYMOUS
        if not self.locked:
            _check_local_page(headers)
            return ANONYMOUS if ticket is None else self.tickets.check(ticket)
        if ticket is not None:
            return self.recheck(self.tickets.check(ticket))
        if access is Access.METRICS and self._metrics_open:
            return ANONYMOUS
        return self._first_valid(headers)

    def admit_call(self, metadata: Headers) -> Principal:
        """Return the caller of a gRPC method; only the credential is checked, because no web page can send gRPC."""
        return self._first_valid(metadata) if self.locked else ANONYMOUS

    def _first_valid(self, headers: Headers) -> Principal:
        """Return the owner of the first valid credential; Unauthorized if none is valid, or too many were sent."""
        why = Unauthorized("a credential is required, and the request has no valid one")
        sent = _credentials(headers)
        if len(sent) > MAX_CREDENTIALS:  # so that one request cannot try many guesses
            raise Unauthorized(f"{len(sent)} credentials were sent", hint=f"Send at most {MAX_CREDENTIALS}.")
        for found in sent:
            try:
                return self._owner_of(found)
            except Unauthorized as error:
                why = error
        raise why

    def _owner_of(self, credential: bytes) -> Principal:
        """Return the owner of `credential`, or raise Unauthorized; the time it takes reveals no part of a secret."""
        if self._token is not None and hmac.compare_digest(credential, self._token):
            return ADMIN
        if len(credential) > MAX_CREDENTIAL:
            raise Unauthorized("the credential is too long", hint=f"Send at most {MAX_CREDENTIAL} bytes.")
        if self.keys is not None and (key := self.keys.find(credential)) is not None:
            return self.recheck(key.principal())
        if self._jwts is not None and credential.count(b".") == 2:  # the form of a JWT
            return self._jwts.check(credential)
        raise Unauthorized("a credential is required, and the request has no valid one")

    def recheck(self, who: Principal) -> Principal:
        """Return `who` if their credential is still valid; Unauthorized if it was revoked or has expired.

        Call this after every wait: the credential may have ended in the meantime.
        """
        if who.until is not None and time.time_ns() // 1_000_000 >= who.until:
            raise Unauthorized("the credential has expired", hint="Request a new one.", expired=True)
        if not self.holds(who):
            raise Unauthorized("the credential was revoked", hint="Request a new one.")
        return who

    def holds(self, who: Principal) -> bool:
        """Return whether the key of `who` was not revoked; callers without a key have nothing to revoke."""
        if not who.credential or who.credential.startswith(JWT):
            return True
        return self.keys is not None and self.keys.has(who.credential)


def _check_reached(address: str, token: bytes | None, locked: bool) -> None:
    """Raise ConfigError if `address`, which other machines reach, needs no credential, or the admin token is short."""
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
    """Return the configured pepper, if any; a short one is rejected, because the pepper also signs tickets."""
    pepper = None if config.key_pepper is None else config.key_pepper.encode()
    if pepper is not None and len(pepper) < 32:
        raise ConfigError(
            "serve.key_pepper (HEADWATER_KEY_PEPPER) is shorter than 32 bytes",
            hint="Use HEADWATER_KEY_PEPPER=$(openssl rand -hex 32).",
        )
    return pepper


def _jwts(config: ServeConfig) -> Jwts | None:
    if config.jwt_secret is None and config.jwt_keys is None:
        return None
    from headwater.serve.auth.json_web_tokens import Jwts  # lazy: cryptography is 1/8 of the start-up time

    return Jwts.of(config)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`, an IPv6 host without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def grpc_address(config: ServeConfig) -> str | None:
    """Return the address of gRPC, None if it is off; its default port becomes 0 (any free port) if HTTP's port is 0."""
    if config.grpc == "off":
        return None
    if config.grpc == ServeConfig().grpc and split_address(config.http)[1] == 0:
        return "127.0.0.1:0"
    return config.grpc


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address of this machine."""
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


def _check_local_page(headers: Headers) -> None:
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
    # A page that loads an image or a script, or links here, sends no Origin, so its site is unknown.
    if not all(map(names_loopback, origins)) or (site in _OTHER_SITES and not origins):
        raise Forbidden(
            "a web page of another origin may not use this server without a credential",
            hint="Set HEADWATER_TOKEN and send it, or type the address into the browser.",
        )


def names_loopback(origin: bytes) -> bool:
    """Return whether `origin` is a page served from this machine."""
    found = _ORIGIN.match(origin.decode("latin-1"))
    return found is not None and _names_loopback(found[1])


@functools.lru_cache(maxsize=256)  # a client sends the same header with every request
def _names_loopback(host: str) -> bool:
    match = _HOST.match(host)
    return match is not None and is_loopback(match[1])
