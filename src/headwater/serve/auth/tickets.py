"""Short-lived credentials for a URL, because browsers cannot send headers on streams."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from typing import Any

import msgspec

from headwater.errors import Unauthorized
from headwater.model.principal import ANONYMOUS, Principal

_SIGNATURE = hashlib.sha256().digest_size


class Tickets:
    """Creates and verifies tickets. They are signed with the server's secret, so they remain valid after a restart."""

    def __init__(self, credential: bytes | None, *, seconds: float) -> None:
        self._key = hashlib.blake2b(credential or b"", person=b"headwater-ticket").digest()
        self._seconds = seconds

    def create(self, who: Principal) -> dict[str, Any]:
        """Return a `ticket` for `who`, and `expires_at_ms`, the time at which it expires."""
        until = time.time_ns() // 1_000_000 + int(self._seconds * 1000)
        body = msgspec.msgpack.encode((who, until))
        ticket = base64.urlsafe_b64encode(self._sign(body) + body).rstrip(b"=").decode()
        return {"ticket": ticket, "expires_at_ms": until}

    def check(self, ticket: str) -> Principal:
        """Return the caller that the ticket names; Unauthorized if its signature is wrong or it has expired."""
        try:
            raw = base64.b64decode(ticket + "=" * (-len(ticket) % 4), altchars=b"-_", validate=True)
            signature, body = raw[:_SIGNATURE], raw[_SIGNATURE:]
            good = hmac.compare_digest(signature, self._sign(body))
            who, until = msgspec.msgpack.decode(body, type=tuple[Principal, int]) if good else (ANONYMOUS, 0)
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            good, until, who = False, 0, ANONYMOUS
        if not good or time.time_ns() // 1_000_000 >= until:
            raise Unauthorized(
                "the ticket is invalid or has expired", hint="Request a new one with security.ticket.create."
            )
        return who

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")
