"""CORS headers of responses and preflights: which web pages may read them."""

from __future__ import annotations

from headwater.serve.auth.gate import names_loopback

Headers = list[tuple[bytes, bytes]]

METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
ALLOWED = (
    b"authorization, x-api-key, content-type, last-event-id, if-none-match, if-match, accept, a-im,"
    b" x-headwater-causality"
)
EXPOSED = (
    b"etag, im, retry-after, x-headwater-offset, x-headwater-causality, x-headwater-truncated, cache-status, location"
)
MAX_AGE = b"600"
MAX_ORIGIN = 300  # bytes: a scheme, a host name of 253 and a port; responses repeat the origin


class Cors:
    """Admits the configured origins on a server that requires credentials, else only pages of this machine."""

    def __init__(self, origins: tuple[str, ...], *, locked: bool) -> None:
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)
        self._locked = locked

    def admits(self, origin: bytes) -> bool:
        """Return whether a page of `origin` may read responses."""
        if len(origin) > MAX_ORIGIN:
            return False
        if not self._locked:
            return names_loopback(origin)
        return b"*" in self._origins or origin in self._origins

    def headers(self, origin: bytes) -> Headers:
        """Return the CORS headers of a response to a page of `origin`."""
        if not self.admits(origin):
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"origin"),
        ]

    def preflight(self, origin: bytes) -> Headers:
        """Return the further headers of a preflight, without those of `headers`: browsers reject repeated ones."""
        if not self.admits(origin):
            return []
        return [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", ALLOWED),
            (b"access-control-max-age", MAX_AGE),
        ]
